"""The embedded engine: a causal language model of transformers, sampled by a loop of our own.

The loop keeps a KV cache per request and takes the gate for every step, so a swap waits for one step
and not for an answer: requests in flight go on with the new weights over the cache that they have.
May not alias the files that it was loaded from, and runs no code that came with a checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from deltad.delta.layout import Layout
from deltad.errors import ReplicaError, UnavailableError
from deltad.types import Version
from rollout_plugin.apply.export import check_whole
from rollout_plugin.apply.live import DTYPE_NAMES, LiveWeights
from rollout_plugin.engines import Listener, Sample, Sampling, Scored
from rollout_plugin.engines.checks import check_sampling, check_tokens, diverged
from rollout_plugin.engines.gate import Gate

_FLOATS = {name: dtype for dtype, name in DTYPE_NAMES.items() if dtype.is_floating_point and dtype.itemsize > 1}


_LOADING = threading.Lock()
"""Held while a model loads: transformers changes process-wide state meanwhile, and two loads at once lose ties."""


def load(directory: Path, layout: Layout, version: Version) -> TransformersEngine:
    """Implements `rollout_plugin.engines.Loader`."""
    dtypes = {_FLOATS[spec.dtype] for spec in layout.tensors if spec.dtype in _FLOATS}
    try:
        with _LOADING:
            model: Any = AutoModelForCausalLM.from_pretrained(
                directory,
                dtype=dtypes.pop() if len(dtypes) == 1 else "auto",
                attn_implementation="sdpa",
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
            )
    except (OSError, SafetensorError) as error:
        raise UnavailableError(f"checkpoint {directory}", expected="files that can be read", found=str(error)) from None
    except (ValueError, KeyError, ImportError) as error:
        check_whole(directory, layout)  # a file that went away is taken for a model that is not known
        raise ReplicaError(
            f"checkpoint {directory}", expected="one that transformers loads", found=str(error)
        ) from None
    check_whole(directory, layout)  # transformers goes on without what it can do without: generation_config.json
    own_storages(model)
    return TransformersEngine(model.eval(), layout, version)


def own_storages(model: torch.nn.Module) -> None:
    """Move every parameter and buffer to memory of its own, ties kept.

    On the CPU, safetensors maps the file: a model that is loaded from it would be written through to the
    export by a patch, and would change by itself with the file.
    """
    copies: dict[tuple[int, torch.Size], torch.Tensor] = {}
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            key = (tensor.data_ptr(), tensor.shape)
            if key not in copies or not tensor.numel():
                copies[key] = tensor.detach().clone(memory_format=torch.contiguous_format)
            tensor.data = copies[key]


class TransformersEngine:
    """Implements `rollout_plugin.engines.Engine` over a model in host memory."""

    def __init__(self, model: Any, layout: Layout, version: Version) -> None:
        self.live = LiveWeights(layout, model)
        self.version = version
        self.model = model.train(False).requires_grad_(False)
        self._gate = Gate()
        self.resets = 0
        """Commits after which no step may read keys and values from before."""
        self._vocabulary = int(model.config.vocab_size)
        self._longest = int(getattr(model.config, "max_position_embeddings", 1 << 20))
        self._ends = _end_tokens(model)

    def pause(self) -> AbstractContextManager[None]:
        return self._gate.hold()

    def flip(self, version: Version, cache: str = "") -> None:
        self.version = version
        if cache == "reset":
            self.resets += 1

    def fence(self, reason: str) -> None:
        self._gate.fence(reason)

    def unfence(self) -> None:
        self._gate.unfence()

    def close(self) -> None:
        """Nothing: the model's memory is this process's."""

    def logprobs(self, token_ids: Sequence[int]) -> Scored:
        self._check(token_ids, at_least=2)
        ids = torch.tensor([list(token_ids)])
        with self._gate.step(), torch.inference_mode():
            scores = torch.log_softmax(self.model(input_ids=ids, use_cache=False).logits[0, :-1].float(), dim=-1)
            version = self.version
        _check_numbers(scores, version)
        return Scored(tuple(scores.gather(-1, ids[0, 1:, None])[:, 0].tolist()), version)

    def generate(self, prompt_ids: Sequence[int], sampling: Sampling, listener: Listener | None = None) -> list[Sample]:
        self._check(prompt_ids, at_least=1)
        check_sampling(len(prompt_ids), sampling, longest=self._longest)
        drawn = _Draw(sampling, self._ends, listener)
        inputs = so_far = torch.tensor([list(prompt_ids)])
        cache, resets = None, self.resets
        while not drawn.over:
            with self._gate.step(), torch.inference_mode():
                if resets != self.resets:
                    inputs, cache, resets = so_far, None, self.resets
                output = self.model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
                version = self.version
                logits = output.logits[:, -1].float()
                if cache is None:
                    cache = output.past_key_values
                    if len(inputs) < sampling.n:  # the prompt was read once, for all samples
                        cache.batch_repeat_interleave(sampling.n)
                        logits = logits.expand(sampling.n, -1)
                inputs = drawn.next(logits, version)
                so_far = torch.cat([so_far.expand(sampling.n, -1), inputs], dim=1)
        return drawn.samples()

    def _check(self, token_ids: Sequence[int], *, at_least: int) -> None:
        check_tokens(token_ids, at_least=at_least, longest=self._longest, vocabulary=self._vocabulary)


class _Draw:
    """The samples of one request as they grow: one row of logits each per step."""

    def __init__(self, sampling: Sampling, ends: frozenset[int], listener: Listener | None) -> None:
        self._sampling = sampling
        self._ends = ends
        self._listener = listener
        self._rng = torch.Generator().manual_seed(sampling.seed & (2**63 - 1))
        self._tokens: list[list[int]] = [[] for _ in range(sampling.n)]
        self._logprobs: list[list[float]] = [[] for _ in range(sampling.n)]
        self._versions: list[Version] = []

    @property
    def over(self) -> bool:
        if self._listener is not None and self._listener.gone:
            return True
        return len(self._versions) == self._sampling.max_new_tokens or all(map(self._ended, self._tokens))

    def next(self, logits: torch.Tensor, version: Version) -> torch.Tensor:
        """Draw one token for each row of `logits` [n, vocabulary], float32; returns them as [n, 1].

        Rows that have ended are drawn too, so that what the others draw does not depend on them.
        """
        scores = torch.log_softmax(logits, dim=-1)
        _check_numbers(scores, version)
        temperature = self._sampling.temperature
        if temperature > 0:
            tempered = torch.softmax(logits / temperature, dim=-1)
            drawn = torch.multinomial(tempered, 1, generator=self._rng)
        else:
            drawn = logits.argmax(dim=-1, keepdim=True)
        self._versions.append(version)
        chosen = scores.gather(-1, drawn)[:, 0].tolist()
        for row, token in enumerate(drawn[:, 0].tolist()):
            if not self._ended(self._tokens[row]):
                self._tokens[row].append(token)
                self._logprobs[row].append(chosen[row])
                if self._listener is not None:
                    self._listener.took(row, (token,), (chosen[row],), version)
        return drawn

    def samples(self) -> list[Sample]:
        return [
            Sample(tuple(tokens), tuple(logprobs), tuple(self._versions[: len(tokens)]), self._ended(tokens))
            for tokens, logprobs in zip(self._tokens, self._logprobs, strict=True)
        ]

    def _ended(self, tokens: list[int]) -> bool:
        return bool(tokens) and tokens[-1] in self._ends


def _check_numbers(scores: torch.Tensor, version: Version) -> None:
    if bool(scores.isnan().any()):
        raise diverged(version)


def _end_tokens(model: Any) -> frozenset[int]:
    ends = model.generation_config.eos_token_id
    return frozenset() if ends is None else frozenset([ends] if isinstance(ends, int) else ends)
