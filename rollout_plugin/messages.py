"""What is said on a replica's own endpoint: one struct per JSON body.

Versions travel as text (`v000123`). Every answer names the versions whose weights made it.
"""

from __future__ import annotations

import msgspec

from deltad.client.messages import ErrorReply


class GenerateRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sample `n` answers to one prompt; `temperature` 0 is greedy.

    With `min_version`, an older replica first waits up to `wait` seconds for that version or a newer one. With
    `stream`, the answer comes as lines while it is sampled: `StreamLine` each.
    """

    prompt_ids: list[int]
    n: int = 1
    max_new_tokens: int = 16
    temperature: float = 1.0
    seed: int = 0
    min_version: str = ""
    wait: float = 0.0
    stream: bool = False


class SampleBody(msgspec.Struct, frozen=True):
    """One answer; the three lists have one entry per token. `ended`: by an end-of-sequence token.

    `logprobs` are those of the policy itself (temperature 1); `versions` are the ones that gave them.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[str, ...]
    ended: bool


class GenerateReply(msgspec.Struct, frozen=True):
    """The answers. `versions`: all that sampled a token of them, ascending."""

    id: str
    replica: str
    versions: tuple[str, ...]
    samples: tuple[SampleBody, ...]


class StreamLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of a streamed answer: tokens of one sample by one version, or the end.

    The first line of all has the answer's `id` and its replica. The last one has `ended`: for each sample, whether it
    came to its end by itself; or `error`, and then the answer is not whole. A stream that just stops was cut.
    """

    sample: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    version: str = ""
    id: str = ""
    replica: str = ""
    ended: tuple[bool, ...] | None = None
    error: Refusal | None = None


class LogprobsRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Score a sequence; `min_version` and `wait` as for sampling."""

    token_ids: list[int]
    min_version: str = ""
    wait: float = 0.0


class LogprobsReply(msgspec.Struct, frozen=True):
    """Entry i is the log-prob of token i + 1, given all before it."""

    replica: str
    version: str
    logprobs: tuple[float, ...]


class VersionReply(msgspec.Struct, frozen=True):
    """What is served; `verified` once all of it was read back; `coming` while another is on its way."""

    replica: str
    run: str
    variant: str
    version: str
    verified: bool
    coming: str


class Refusal(ErrorReply, frozen=True):
    """An error, with what is served now and what is coming, so that a caller can tell whether to wait."""

    version: str = ""
    coming: str = ""
