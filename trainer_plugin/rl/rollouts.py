"""Asks the remote replica for samples and log-probs over HTTP. Standard library and msgspec only.

A replica that is away, swapping or behind only delays: every request is tried again, with back-off,
until the patience is over. May never sample anything itself.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import time
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from deltad.client.client import rebuild_error
from deltad.client.messages import ErrorReply
from deltad.errors import DeltadError, PeerError, UnavailableError, UsageError

Reply = TypeVar("Reply", bound=msgspec.Struct)
T = TypeVar("T")
OnRetry = Callable[[int, DeltadError], None]
"""Told the attempt (from 1) and why it failed."""

_REPLY_BYTES = 16 << 20
_TIMEOUT = 120.0
_WAIT = 20.0
_FIRST_DELAY = 0.2
_LONGEST_DELAY = 5.0


class Sample(msgspec.Struct, frozen=True):
    """One answer as the replica sends it; one entry per token in each list."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[str, ...]
    ended: bool


class Generated(msgspec.Struct, frozen=True):
    """The answers to one prompt, and all versions that sampled a token of them."""

    id: str
    replica: str
    versions: tuple[str, ...]
    samples: tuple[Sample, ...]


class Scored(msgspec.Struct, frozen=True):
    """Log-probs of a sequence: entry i is that of token i + 1."""

    replica: str
    version: str
    logprobs: tuple[float, ...]


class _Generate(msgspec.Struct, frozen=True):
    prompt_ids: tuple[int, ...]
    n: int
    max_new_tokens: int
    temperature: float
    seed: int
    min_version: str
    wait: float = _WAIT


class _Score(msgspec.Struct, frozen=True):
    token_ids: tuple[int, ...]
    min_version: str
    wait: float = _WAIT


class RemoteReplica:
    """A replica by its URL (`http://HOST:PORT`). Raises UsageError for any other form."""

    def __init__(self, url: str, *, patience: float, on_retry: OnRetry) -> None:
        self._url = url
        self._host, self._port = _parse_url(url)
        self._patience = patience
        self._on_retry = on_retry

    def generate(
        self,
        prompt_ids: tuple[int, ...],
        *,
        n: int,
        max_new_tokens: int,
        temperature: float,
        seed: int,
        min_version: str,
    ) -> Generated:
        """Sample at `min_version` or newer. Raises UnavailableError once the patience is over."""
        request = _Generate(prompt_ids, n, max_new_tokens, temperature, seed, min_version)
        return self._insist("/v1/generate", request, Generated)

    def logprobs(self, token_ids: tuple[int, ...], *, min_version: str) -> Scored:
        """Score at `min_version` or newer. Raises UnavailableError once the patience is over."""
        return self._insist("/v1/logprobs", _Score(token_ids, min_version), Scored)

    def _insist(self, path: str, request: msgspec.Struct, kind: type[Reply]) -> Reply:
        body = msgspec.json.encode(request)
        return insist(lambda: self._post(path, body, kind), self._patience, self._on_retry)

    def _post(self, path: str, body: bytes, kind: type[Reply]) -> Reply:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_TIMEOUT)
        try:
            connection.request("POST", path, body=body, headers={"Content-Type": "application/json"})
            response = connection.getresponse()
            data = response.read(_REPLY_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise UnavailableError(f"replica at {self._url}", found=str(error) or type(error).__name__) from None
        finally:
            connection.close()
        try:
            if response.status != 200:
                raise rebuild_refusal(msgspec.json.decode(data, type=ErrorReply))
            return msgspec.json.decode(data, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise PeerError(f"replica at {self._url}", expected=kind.__name__, found=str(error)) from None


def _parse_url(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    with contextlib.suppress(ValueError):  # a port that is no number
        if parts.scheme == "http" and parts.hostname and parts.port and parts.path in ("", "/"):
            return parts.hostname, parts.port
    raise UsageError(f"replica {url!r}", expected="http://HOST:PORT")


def rebuild_refusal(reply: ErrorReply) -> DeltadError:
    """The error of a reply, retryable exactly where the reply says so."""
    error = rebuild_error(reply)
    error.retryable = reply.retryable
    return error


def insist(work: Callable[[], T], patience: float, on_retry: OnRetry) -> T:
    """Do `work` again and again while its error is retryable, for `patience` seconds; then its last error."""
    until = time.monotonic() + patience
    for attempt in itertools.count(1):
        try:
            return work()
        except DeltadError as error:
            if not error.retryable or time.monotonic() >= until:
                raise
            on_retry(attempt, error)
        time.sleep(min(_LONGEST_DELAY, _FIRST_DELAY * 2 ** min(attempt - 1, 10)))
    raise AssertionError("counting does not end")
