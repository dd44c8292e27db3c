"""Requests as OpenAI's clients write them, parsed once into `Ask`. What cannot be honoured is refused by name."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from deltad.errors import FormatError, LimitError, UsageError
from rollout_plugin.gateway.text import Words
from rollout_plugin.gateway.wanted import Wanted, WeightVersion, parse_wanted

_ANY = object()
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "min_p": (None, 0),
    "parallel_tool_calls": (_ANY,),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "return_token_ids": (_ANY,),
    "skip_special_tokens": (None, True),
    "store": (None, False),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "top_k": (None, 0, -1),
    "top_logprobs": (None, 0),
    "top_p": (None, 1),
    "user": (_ANY,),
}
"""Fields that are taken where they ask for nothing: these values, or whatever it is."""

_PROMPTS = 128
_CHOICES = 256
_STOPS = 16

Count = Annotated[int, msgspec.Meta(ge=1)]


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False


class _Sampled(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    model: str = ""
    n: Count | None = None
    temperature: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_token_ids: list[int] | None = None
    weight_version: WeightVersion = WeightVersion()


class CompletionRequest(_Sampled, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | int | list[int]] | None = None
    max_tokens: Count | None = None
    logprobs: int | bool | None = None


class ChatRequest(_Sampled, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/chat/completions`. With `prompt_token_ids`, `messages` are not read."""

    messages: list[dict[str, Any]] = []
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """A request as it is served: samples of prompts, choice by choice in order."""

    chat: bool
    prompts: tuple[tuple[int, ...], ...]
    n: int
    max_tokens: int
    temperature: float
    seed: int
    stops: tuple[str, ...]
    logprobs: bool
    stream: bool
    usage: bool
    wanted: Wanted


def parse_body(data: bytes, *, chat: bool) -> CompletionRequest | ChatRequest:
    """Raises FormatError for what is no request, UsageError for a field that asks for what there is not."""
    try:
        fields = msgspec.json.decode(data, type=dict[str, Any])
        for name in fields.keys() & _NEUTRAL.keys():
            value, allowed = fields.pop(name), _NEUTRAL[name]
            if _ANY not in allowed and not any(value == one for one in allowed):
                raise UsageError(name, expected=f"{allowed[-1]!r} or nothing", found=repr(value)[:80])
        return msgspec.convert(fields, type=ChatRequest) if chat else msgspec.convert(fields, type=CompletionRequest)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError("request", found=str(error)) from None


def is_text(body: CompletionRequest | ChatRequest) -> bool:
    """Whether a tokenizer is needed to read the prompt or to find where the answer stops."""
    if body.stop:
        return True
    if body.prompt_token_ids is not None:
        return False
    return isinstance(body, ChatRequest) or not _are_tokens(body.prompt)


def make_ask(
    body: CompletionRequest | ChatRequest, words: Words | None, *, run: str, most_stale: int | None, chat_tokens: int
) -> Ask:
    """Raises UsageError and LimitError. `chat_tokens`: how long a chat's answer is where it does not say.

    A completion has OpenAI's 16. `words` is there where `is_text`.
    """
    if body.model and body.model != run:
        raise UsageError("model", expected=run, found=body.model[:80])
    chat = isinstance(body, ChatRequest)
    prompts = _prompts(body, words)
    n = body.n or 1
    if not 1 <= len(prompts) <= _PROMPTS or n * len(prompts) > _CHOICES:
        expected = f"at most {_PROMPTS} prompts and {_CHOICES} choices"
        raise LimitError("request", expected=expected, found=f"{len(prompts)} prompts of {n} choices")
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if len(stops) > _STOPS or any(len(stop) > 1024 for stop in stops):
        raise LimitError("stop", expected=f"at most {_STOPS} texts of at most 1024 characters", found="more")
    if isinstance(body, ChatRequest):
        most = body.max_completion_tokens or body.max_tokens or chat_tokens
    else:
        most = body.max_tokens or 16
        if body.logprobs not in (None, True, False, 0, 1):
            raise UsageError("logprobs", expected="0 or 1: the log-prob of the token itself", found=str(body.logprobs))
    return Ask(
        chat=chat,
        prompts=prompts,
        n=n,
        max_tokens=most,
        temperature=1.0 if body.temperature is None else body.temperature,
        seed=secrets.randbits(48) if body.seed is None else body.seed,
        stops=stops,
        logprobs=body.logprobs is not None and body.logprobs is not False,
        stream=bool(body.stream),
        usage=body.stream_options is not None and body.stream_options.include_usage,
        wanted=parse_wanted(body.weight_version, most_stale),
    )


def _prompts(body: CompletionRequest | ChatRequest, words: Words | None) -> tuple[tuple[int, ...], ...]:
    if body.prompt_token_ids is not None:
        return (tuple(body.prompt_token_ids),)
    if isinstance(body, ChatRequest):
        assert words is not None, "a chat is text"
        return (tuple(words.chat([_flat(message) for message in body.messages])),)
    prompt = body.prompt
    if prompt is None:
        raise UsageError("prompt", expected="a text, token ids, or a list of either", found="none")
    parts: Sequence[Any] = [prompt] if isinstance(prompt, str) or _is_flat(prompt) else prompt
    found: list[tuple[int, ...]] = []
    for part in parts:
        if isinstance(part, str):
            assert words is not None, "a text needs a tokenizer"
            found.append(tuple(words.encode(part)))
        elif isinstance(part, list):
            found.append(tuple(part))
        else:
            raise UsageError("prompt", expected="a text, token ids, or a list of either", found="a mixture")
    return tuple(found)


def _is_flat(prompt: Sequence[Any]) -> bool:
    return bool(prompt) and all(isinstance(token, int) for token in prompt)


def _are_tokens(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(isinstance(part, int | list) for part in prompt)


def _flat(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose content is one text; other parts than text are refused."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        if not all(isinstance(part, str) for part in parts):
            raise UsageError("messages", expected="content of text alone", found="another part")
        content = "".join(map(str, parts))
    if not isinstance(message.get("role"), str) or not isinstance(content, str):
        raise UsageError("messages", expected="a role and a text in each", found=repr(message)[:80])
    return {**message, "content": content}
