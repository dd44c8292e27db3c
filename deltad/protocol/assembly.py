"""How the shares of many ranks become one version: who holds what, who hands it over, and when a step is whole.

Pure: no clock, no store. Owns two invariants: the shards that are handed over cover every element of every tensor
exactly once; and a step is whole only when every rank has handed over its share of the same step on the same base.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from deltad.client.handover import HandedOver, HandOver, JoinRequest, ShardSpec
from deltad.delta import FORMAT
from deltad.delta.digest import SUM_BYTES
from deltad.delta.encoding import sha256
from deltad.delta.frame import Rect, disjoint
from deltad.delta.layout import FileSpec, Layout, TensorSpec, check_layout
from deltad.delta.manifest import ChunkRef
from deltad.errors import BaseMismatchError, ConflictError, FormatError, UsageError
from deltad.limits import DEFAULT_LIMITS, Limits
from deltad.types import DTYPES


@dataclass(frozen=True, slots=True)
class Arrangement:
    """What all ranks hold together: the layout, the non-weight files, and who hands over which shards.

    `owned` numbers each rank's shards as it declared them; `shards` are the rectangles of just those.
    """

    layout: Layout
    files: Mapping[str, bytes]
    owned: tuple[tuple[int, ...], ...]
    shards: tuple[tuple[Rect, ...], ...]


def arrange(ranks: Sequence[JoinRequest], *, limits: Limits = DEFAULT_LIMITS) -> Arrangement:
    """Raises UsageError, naming the tensor, where ranks contradict each other or leave elements out or hold some twice;
    FormatError or LimitError where together they make no layout."""
    specs: dict[str, TensorSpec] = {}
    for request in ranks:
        for shard in request.shards:
            _check_shard(shard, specs.setdefault(shard.name, TensorSpec(shard.name, shard.dtype, shard.shape)))
    files: dict[str, bytes] = {}
    for request in ranks:
        for name, data in request.files:
            if files.setdefault(name, data) != data:
                raise UsageError(f"file {name[:120]!r}", expected="the same bytes from every rank", found="others")
    layout = Layout(
        FORMAT,
        tuple(specs[name] for name in sorted(specs)),
        tuple(FileSpec(name, len(files[name]), sha256(files[name])) for name in sorted(files)),
    )
    check_layout(layout, limits=limits)
    owned = _owners(ranks)
    shards = tuple(
        tuple(_rect(request.shards[i], layout) for i in numbers) for request, numbers in zip(ranks, owned, strict=True)
    )
    _check_cover(layout, shards)
    return Arrangement(layout, files, owned, shards)


def _rect(shard: ShardSpec, layout: Layout) -> Rect:
    return Rect(layout.index[shard.name], shard.offset, shard.extent)


def _check_shard(shard: ShardSpec, known: TensorSpec) -> None:
    thing = f"tensor {shard.name[:120]!r}"
    dtype = DTYPES.get(shard.dtype)
    if dtype is None or dtype.bits < 8:
        raise UsageError(thing, expected="a dtype of whole bytes that safetensors knows", found=shard.dtype[:40])
    if (shard.dtype, shard.shape) != (known.dtype, known.shape):
        raise UsageError(
            thing,
            expected=f"{known.dtype} {list(known.shape)}, as another rank has it",
            found=f"{shard.dtype} {list(shard.shape)}",
        )
    inside = len(shard.offset) == len(shard.extent) == len(shard.shape) and all(
        offset >= 0 and extent >= 0 and offset + extent <= size
        for offset, extent, size in zip(shard.offset, shard.extent, shard.shape, strict=True)
    )
    if not inside:
        raise UsageError(
            thing,
            expected=f"a shard within {list(shard.shape)}",
            found=f"offset {list(shard.offset)}, extent {list(shard.extent)}",
        )


def _owners(ranks: Sequence[JoinRequest]) -> tuple[tuple[int, ...], ...]:
    """Of what several ranks hold alike, the one that has least to do so far hands it over."""
    holders: dict[ShardSpec, list[tuple[int, int]]] = {}
    for rank, request in enumerate(ranks):
        for i, shard in enumerate(request.shards):
            if math.prod(shard.extent):
                holders.setdefault(shard, []).append((rank, i))
    load = [0] * len(ranks)
    owned: list[list[int]] = [[] for _ in ranks]
    # The largest first, and what only one rank holds before all: its load is not to be chosen.
    for shard, held in sorted(holders.items(), key=lambda item: (len(item[1]) > 1, -math.prod(item[0].extent))):
        rank, i = min(held, key=lambda where: (load[where[0]], where))
        owned[rank].append(i)
        load[rank] += math.prod(shard.extent) * DTYPES[shard.dtype].lane_bytes
    return tuple(tuple(sorted(numbers)) for numbers in owned)


def _check_cover(layout: Layout, shards: Sequence[Sequence[Rect]]) -> None:
    by_tensor: dict[int, list[Rect]] = {i: [] for i in range(len(layout.tensors))}
    for rects in shards:
        for rect in rects:
            by_tensor[rect.tensor].append(rect)
    for i, spec in enumerate(layout.tensors):
        rects = by_tensor[i]
        if not disjoint(rects, spec.lane_shape):
            raise UsageError(f"tensor {spec.name[:120]!r}", expected="shards that are equal or apart", found="overlaps")
        covered = sum(rect.lanes for rect in rects)
        if covered != spec.lanes:
            raise UsageError(
                f"tensor {spec.name[:120]!r}",
                expected=f"ranks that hold all {spec.lanes} elements between them",
                found=f"{covered}",
                hint="a rank that holds a part has to declare it, on every mesh dimension",
            )


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank has handed over of a step: its chunks, all durable, in order, and what it says of them."""

    chunks: tuple[ChunkRef, ...]
    said: HandedOver


@dataclass(slots=True)
class Step:
    """One step on its way. `head` is what every rank says alike."""

    head: HandOver
    begun: set[int] = field(default_factory=set)
    shares: dict[int, Share] = field(default_factory=dict)


class Territory:
    """The shards that one rank hands over, beyond which its frames may not reach."""

    def __init__(self, rank: int, shards: Sequence[Rect]) -> None:
        self._rank = rank
        self._shards: dict[int, list[Rect]] = {}
        for shard in shards:
            self._shards.setdefault(shard.tensor, []).append(shard)

    def check(self, rects: Sequence[Rect]) -> None:
        """Raises UsageError unless every rectangle is within one of the shards."""
        for rect in rects:
            if not any(_within(rect, shard) for shard in self._shards.get(rect.tensor, ())):
                raise UsageError(
                    f"frame of rank {self._rank}",
                    expected="changes of the shards that it hands over",
                    found=f"tensor {rect.tensor}, {list(rect.offset)} + {list(rect.extent)}",
                )


@dataclass(slots=True)
class Session:
    """The ranks that publish a run together, and the step that they are at."""

    name: str
    world: int
    joined: dict[int, JoinRequest] = field(default_factory=dict)
    arrangement: Arrangement | None = None
    step: Step | None = None

    def join(self, request: JoinRequest, *, limits: Limits = DEFAULT_LIMITS) -> None:
        """A rank has come, or has come again with the same shards. The last one makes the arrangement."""
        thing = f"rank {request.rank} of session {self.name}"
        if request.world != self.world:
            raise UsageError(
                thing, expected=f"a world of {self.world}, as the first rank said", found=f"{request.world}"
            )
        if not 0 <= request.rank < self.world:
            raise UsageError(thing, expected=f"a rank below {self.world}")
        known = self.joined.get(request.rank)
        if known is not None and (known.shards, known.files) != (request.shards, request.files):
            raise ConflictError(
                thing,
                expected="the shards that it joined with",
                found=_difference(known, request),
                hint="a new layout is a new session",
            )
        self.joined[request.rank] = request
        if self.arrangement is None and len(self.joined) == self.world:
            try:
                self.arrangement = arrange([self.joined[rank] for rank in range(self.world)], limits=limits)
            except (UsageError, FormatError):
                self.joined.clear()  # whoever mends it joins anew
                raise

    def missing(self) -> list[int]:
        """The ranks that have not joined or, while a step is on its way, have not handed over their share of it."""
        done = self.joined if self.step is None or self.arrangement is None else self.step.shares
        return [rank for rank in range(self.world) if rank not in done]

    def begin(self, head: HandOver) -> Step:
        """A rank begins to hand over. A step that others have left behind is given up for its sake.

        Raises ConflictError for a rank that has not joined, is behind, comes twice, or names the version otherwise;
        BaseMismatchError where it has another base than the others.
        """
        thing = f"rank {head.rank} of session {self.name}, step {head.number}"
        if self.arrangement is None or not 0 <= head.rank < self.world:
            raise ConflictError(thing, expected="a rank that has joined, as all others have")
        step = self.step
        if step is None or head.number > step.head.number:
            self.step = step = Step(head)
        if head.number < step.head.number:
            raise ConflictError(thing, expected=f"step {step.head.number}, which other ranks have begun")
        if head.rank in step.begun:
            raise ConflictError(thing, expected="each rank once", found="this one a second time")
        if head.base != step.head.base:
            raise BaseMismatchError(
                thing,
                expected=f"base {step.head.base or 'none'}, as rank {step.head.rank} has",
                found=f"{head.base or 'none'}",
                hint="hand over this step whole on all ranks",
            )
        if _named(head) != _named(step.head):
            raise ConflictError(
                thing, expected=f"to be named as by rank {step.head.rank}", found="another name or epoch"
            )
        step.begun.add(head.rank)
        return step

    def deliver(self, step: Step, rank: int, share: Share) -> bool:
        """A rank's share is durable. Whether the step is whole now; raises ConflictError for one that was given up."""
        arrangement = self._arrangement()
        if step is not self.step:
            raise self.given_up(step)
        shards = len(arrangement.owned[rank])
        sums = SUM_BYTES * shards
        based = sums if step.head.base is not None else 0
        if (len(share.said.sums), len(share.said.base_sums)) != (sums, based) or share.said.changed < 0:
            raise UsageError(f"rank {rank}: sums", expected=f"16 bytes for each of its {shards} shards")
        step.shares[rank] = share
        return len(step.shares) == self.world

    def territory(self, rank: int) -> Territory:
        """What a rank may write to."""
        return Territory(rank, self._arrangement().shards[rank])

    def give_up(self, step: Step) -> None:
        """Whatever became of it, this step makes no version any more."""
        if self.step is step:
            self.step = None

    def given_up(self, step: Step) -> ConflictError:
        """Why a step that was begun will make no version."""
        later = "" if self.step is None else f": rank {self.step.head.rank} went on to step {self.step.head.number}"
        return ConflictError(f"step {step.head.number} of session {self.name}", found=f"given up{later}")

    def _arrangement(self) -> Arrangement:
        if self.arrangement is None:
            raise ConflictError(f"session {self.name}", expected="all ranks joined", found=f"missing {self.missing()}")
        return self.arrangement


def _named(head: HandOver) -> tuple[str, bool, str, int]:
    return head.identity, head.new_epoch, head.resume_from, head.epoch


def _within(rect: Rect, shard: Rect) -> bool:
    return all(
        so <= o and o + e <= so + se
        for o, e, so, se in zip(rect.offset, rect.extent, shard.offset, shard.extent, strict=True)
    )


def _difference(known: JoinRequest, request: JoinRequest) -> str:
    before = {shard.name: shard for shard in known.shards}
    after = {shard.name: shard for shard in request.shards}
    names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if not names:
        return "other files"
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"others of {', '.join(repr(name[:120]) for name in names[:3])}{more}"
