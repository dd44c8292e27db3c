"""Text and tokens: the tokenizer that travels with the run's versions, and answers that are spelled as they come."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deltad.errors import DeltadError, UsageError

Files = Callable[[], Mapping[str, bytes]]
"""The non-weight files of the run's newest version, by name."""

_NO_TOKENIZER = "send token ids (`prompt`: [1, 2, …] or `prompt_token_ids`), or publish tokenizer.json with the weights"


class Words:
    """A run's tokenizer. Methods may be called from any thread."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, with those that the tokenizer adds in front."""
        return list(self._tokenizer.encode(text))

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens of a conversation, up to where the answer begins. Raises UsageError."""
        try:
            ids = self._tokenizer.apply_chat_template(
                list(messages), tokenize=True, add_generation_prompt=True, return_dict=False
            )
        except Exception as error:  # a template is a program, and fails as it likes
            raise UsageError("messages", expected="what the chat template takes", found=str(error)[:400]) from None
        return list(ids)

    def token(self, token: int) -> str:
        """One token as text."""
        return str(self._tokenizer.decode([token]))

    def spelling(self, stops: Sequence[str]) -> Spelling:
        """Begin to spell an answer that ends before the first of these texts."""
        return Spelling(self._tokenizer, stops)


class Spelling:
    """An answer as text while its tokens come. Whole characters only, and nothing of what may become a stop text."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer._tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.stopped = False

    def push(self, token_ids: Sequence[int]) -> str:
        """What can be said for sure after these tokens as well."""
        if self.stopped:
            return ""
        for token in token_ids:
            self._held += self._stream.step(self._tokenizer, token) or ""
        if not self._stops:
            said, self._held = self._held, ""
            return said
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            said, self._held = self._held[: min(found)], ""
            return said
        keep = max(_overlap(self._held, stop) for stop in self._stops)
        said = self._held[: len(self._held) - keep]
        self._held = self._held[len(said) :]
        return said

    def end(self) -> str:
        """What is left when no token follows."""
        said, self._held = self._held, ""
        return said


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` may be the beginning of `stop`."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)


def load_words(files: Files, directory: Path | None = None) -> Words:
    """The tokenizer of a directory, or of the run's files. Raises UsageError where there is none. Takes a second."""
    try:
        if directory is not None:
            return Words(_from_directory(directory))
        found = files()
        with tempfile.TemporaryDirectory(prefix="deltad-tokenizer-") as home:
            for name, data in found.items():
                (Path(home) / name).write_bytes(data)
            return Words(_from_directory(Path(home)))
    except DeltadError:
        raise
    except Exception as error:  # transformers raises whatever it likes
        raise UsageError(
            "tokenizer", expected="one that transformers loads", found=str(error)[:400], hint=_NO_TOKENIZER
        ) from None


def _from_directory(directory: Path) -> Any:
    from transformers import AutoTokenizer

    if not (directory / "tokenizer.json").is_file():
        raise UsageError("tokenizer", expected="tokenizer.json", found="none", hint=_NO_TOKENIZER)
    return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
