"""The course of an answer over replicas and swaps: which tokens count, and what is left to sample.

Sans-IO: lines of replicas in, pieces of the answer out. Owns the invariant that every sample is a gapless sequence of
tokens, none of them twice, each with the version that gave it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from deltad.errors import ReplicaError
from deltad.types import Version, parse_version
from rollout_plugin.gateway.wanted import OnSwap, Wanted
from rollout_plugin.messages import StreamLine

# These are made for every token: msgspec makes them several times faster than dataclasses.


class Piece(msgspec.Struct, frozen=True):
    """Tokens of a sample that follow what came before, all by one version. `finish` is set in its last piece.

    `anew`: what came of the sample before is void.
    """

    sample: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: str
    finish: str = ""
    anew: bool = False


class Segment(msgspec.Struct):
    """Tokens `start` to `end` (exclusive) of a sample, which one version gave."""

    version: str
    start: int
    end: int


@dataclass(slots=True)
class Track:
    """A sample as far as it is. `interrupted`: its replica has swapped weights, and it is to be read anew.

    `leg` is the version that gave the first token since it was last read.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    finish: str = ""
    interrupted: bool = False
    leg: str = ""

    @property
    def version(self) -> str:
        return self.segments[-1].version if self.segments else ""


class Course:
    """`n` samples of at most `most` tokens each, of one prompt or several. Samples are counted from 0."""

    def __init__(self, wanted: Wanted, *, n: int, most: int) -> None:
        self._wanted = wanted
        self._most = most
        self.tracks = [Track() for _ in range(n)]
        self._seen: dict[str, Version] = {}
        self.least = wanted.least
        """The version that whoever goes on must have at least: the newest that was seen."""
        self.given_away = False
        """Set by whoever sends pieces on as they come."""

    def take(self, line: StreamLine, samples: Sequence[int]) -> list[Piece]:
        """What a line of a replica adds. `samples` are those that the replica was asked for, in its order.

        Raises a retryable ReplicaError where the replica has swapped weights before it gave any token.
        """
        if line.ended is not None:
            pieces = (self._end(sample, done) for sample, done in zip(samples, line.ended, strict=True))
            return [piece for piece in pieces if piece is not None]
        if not line.token_ids:
            return []
        sample = samples[line.sample]
        track = self.tracks[sample]
        if track.finish or track.interrupted:
            return []
        version = self._seen.get(line.version) or self._see(line.version)
        right = self._wanted.takes_token(version)
        if not right and not track.token_ids:
            raise _swapped(self._wanted, version)
        if not right or (self._wanted.on_swap is OnSwap.ABORT and track.version not in ("", line.version)):
            return [self.finish(sample, "abort")]
        if self._wanted.on_swap is OnSwap.RESUME and track.leg not in ("", line.version):
            track.interrupted = True
            return []
        track.leg = line.version
        room = self._most - len(track.token_ids)
        tokens, logprobs = line.token_ids[:room], line.logprobs[:room]
        self._add(track, tokens, logprobs, line.version)
        return [Piece(sample, tokens, logprobs, line.version)]

    def finish(self, sample: int, why: str) -> Piece:
        """A sample ends here, whatever its replica would add."""
        track = self.tracks[sample]
        track.finish, track.interrupted = why, False
        return Piece(sample, (), (), track.version, why)

    def cut(self, sample: int, tokens: int, why: str) -> None:
        """A sample ends after so many tokens; those after them were not given away."""
        track = self.tracks[sample]
        del track.token_ids[tokens:], track.logprobs[tokens:]
        track.segments = [Segment(s.version, s.start, min(s.end, tokens)) for s in track.segments if s.start < tokens]
        self.finish(sample, why)

    def forget(self, samples: Sequence[int]) -> list[Piece]:
        """Begin those of the samples anew that are not at their end. Only where nothing of them was given away."""
        begun = [sample for sample in samples if self.tracks[sample].token_ids and not self.tracks[sample].finish]
        for sample in begun:
            self.tracks[sample] = Track()
        return [Piece(sample, (), (), "", anew=True) for sample in begun]

    def is_over(self, samples: Sequence[int]) -> bool:
        """Whether whoever samples these has nothing to add."""
        for sample in samples:
            track = self.tracks[sample]
            if not (track.finish or track.interrupted):
                return False
        return True

    def open(self, samples: Sequence[int]) -> list[int]:
        """Those of the samples that are not at their end, for whoever reads them next."""
        for sample in samples:
            self.tracks[sample].interrupted, self.tracks[sample].leg = False, ""
        return [sample for sample in samples if not self.tracks[sample].finish]

    def left(self, sample: int) -> int:
        """How many tokens a sample may still have."""
        return self._most - len(self.tracks[sample].token_ids)

    def _see(self, text: str) -> Version:
        """A version that is new here."""
        version = self._seen[text] = parse_version(text)
        self.least = version if self.least is None else max(self.least, version)
        return version

    def _end(self, sample: int, done: bool) -> Piece | None:
        track = self.tracks[sample]
        if track.finish or track.interrupted:
            return None
        return self.finish(sample, "stop" if done else "length")

    def _add(self, track: Track, tokens: Sequence[int], logprobs: Sequence[float], version: str) -> None:
        start = len(track.token_ids)
        track.token_ids += tokens
        track.logprobs += logprobs
        end = start + len(tokens)
        if track.segments and track.segments[-1].version == version:
            track.segments[-1].end = end
        else:
            track.segments.append(Segment(version, start, end))


def _swapped(wanted: Wanted, version: Version) -> ReplicaError:
    error = ReplicaError("replica", expected=str(wanted), found=str(version))
    error.retryable = True
    return error


def began_and_ended(tracks: Sequence[Track]) -> tuple[str, str]:
    """The oldest version that began a sample of these, and the newest that ended one; empty without tokens."""
    firsts: list[Version] = [parse_version(track.segments[0].version) for track in tracks if track.segments]
    lasts = [parse_version(track.segments[-1].version) for track in tracks if track.segments]
    return (str(min(firsts)), str(max(lasts))) if firsts else ("", "")
