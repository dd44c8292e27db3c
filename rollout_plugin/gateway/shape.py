"""Answers as OpenAI's clients read them, whole or in chunks; deltad/docs/GATEWAY.md describes what is added.

`token_ids` and versions are in every choice: RL trains on tokens, not on text.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from rollout_plugin.gateway.course import Piece, Track, began_and_ended
from rollout_plugin.gateway.openai import Ask
from rollout_plugin.gateway.text import Spelling, Words

DONE = b"data: [DONE]\n\n"


class Choice:
    """One choice while it grows: its text, and where in it the next token begins."""

    def __init__(self, index: int, words: Words | None, stops: Sequence[str]) -> None:
        self.index = index
        self._words = words
        self._stops = stops
        self._offset = 0
        self.begin()

    def begin(self) -> None:
        """Nothing came yet, or what came is void."""
        self.text: list[str] = []
        self.tokens = 0
        self.ended = False
        self._spelling: Spelling | None = self._words.spelling(self._stops) if self._words else None

    @property
    def stopped(self) -> bool:
        """Whether a stop text was found."""
        return self._spelling is not None and self._spelling.stopped

    def push(self, piece: Piece) -> str:
        """The text that a piece adds."""
        self.tokens += len(piece.token_ids)
        if self._spelling is None:
            return ""
        said = self._spelling.push(piece.token_ids)
        if piece.finish:
            said += self._spelling.end()
        if said:
            self.text.append(said)
        return said

    def logprobs(self, token_ids: Sequence[int], logprobs: Sequence[float], *, chat: bool) -> dict[str, Any]:
        """Log-probs of tokens, as either API has them."""
        spelled = [self._words.token(token) if self._words else f"token_id:{token}" for token in token_ids]
        if chat:
            content = (
                {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
                for text, logprob in zip(spelled, logprobs, strict=True)
            )
            return {"content": list(content), "refusal": None}
        offsets = []
        for text in spelled:
            offsets.append(self._offset)
            self._offset += len(text)
        return {"tokens": spelled, "token_logprobs": list(logprobs), "top_logprobs": None, "text_offset": offsets}


class Shape:
    """The answer to one request. `model` is the run."""

    def __init__(self, ask: Ask, model: str) -> None:
        self._ask = ask
        self._head = {
            "id": f"{'chatcmpl' if ask.chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": "chat.completion" if ask.chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        chunk_head = {**self._head, "object": "chat.completion.chunk" if ask.chat else "text_completion"}
        # The same in every chunk, and encoded once: `{…,` without the end.
        self._chunk_head = b"data: " + msgspec.json.encode(chunk_head)[:-1] + b","

    @property
    def id(self) -> str:
        return str(self._head["id"])

    def opening(self, choices: Sequence[Choice]) -> bytes:
        """What comes before the first token of a streamed chat: whose turn it is."""
        if not self._ask.chat:
            return b""
        delta = {"role": "assistant", "content": ""}
        return b"".join(self._event([{"index": c.index, "delta": delta, "finish_reason": None}]) for c in choices)

    def chunk(self, choice: Choice, piece: Piece, text: str, track: Track) -> bytes:
        """A piece of a choice. The last one tells of all its versions."""
        body: dict[str, Any] = {"index": choice.index}
        if self._ask.chat:
            body["delta"] = {"content": text} if text or not piece.finish else {}
        else:
            body["text"] = text
        logprobs = self._ask.logprobs and bool(piece.token_ids)
        body["logprobs"] = choice.logprobs(piece.token_ids, piece.logprobs, chat=self._ask.chat) if logprobs else None
        body["finish_reason"] = piece.finish or None
        body["token_ids"] = piece.token_ids
        body["weight_version"] = piece.version
        if piece.finish:
            body["weight_versions"] = _segments(track)
        return self._event([body])

    def closing(self, tracks: Sequence[Track]) -> bytes:
        """The last chunk: no choices, the versions of all, the usage if it was asked for."""
        more: dict[str, Any] = {"weight_version": _span(tracks)}
        if self._ask.usage:
            more["usage"] = self._usage(tracks)
        return self._event([], **more) + DONE

    def whole(self, choices: Sequence[Choice], tracks: Sequence[Track]) -> bytes:
        """The answer in one piece."""
        bodies = []
        for choice, track in zip(choices, tracks, strict=True):
            text = "".join(choice.text)
            body: dict[str, Any] = {"index": choice.index}
            if self._ask.chat:
                body["message"] = {"role": "assistant", "content": text}
            else:
                body["text"] = text
            body["logprobs"] = (
                choice.logprobs(track.token_ids, track.logprobs, chat=self._ask.chat) if self._ask.logprobs else None
            )
            body["finish_reason"] = track.finish
            body["token_ids"] = track.token_ids
            body["weight_versions"] = _segments(track)
            bodies.append(body)
        return msgspec.json.encode(
            {**self._head, "choices": bodies, "usage": self._usage(tracks), "weight_version": _span(tracks)}
        )

    def _usage(self, tracks: Sequence[Track]) -> dict[str, int]:
        prompt = sum(map(len, self._ask.prompts))
        completion = sum(len(track.token_ids) for track in tracks)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _event(self, choices: Sequence[object], **more: object) -> bytes:
        return self._chunk_head + msgspec.json.encode({"choices": choices, **more})[1:] + b"\n\n"


def _segments(track: Track) -> list[dict[str, Any]]:
    return [{"version": s.version, "start": s.start, "end": s.end} for s in track.segments]


def _span(tracks: Sequence[Track]) -> dict[str, str]:
    began, ended = began_and_ended(tracks)
    return {"began": began, "ended": ended}
