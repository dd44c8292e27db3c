"""What a daemon says of the edges that lead to its latest version, and how the one that asked reads it.

It may not decide which way is taken. Owns two invariants: an edge that stays on its host is never spoken of; and
an answer is refused as a whole if any of it is malformed.
"""

from __future__ import annotations

from contextlib import suppress

import msgspec

from deltad.delta.manifest import EdgeKind
from deltad.delta.record import EdgeRef
from deltad.errors import FormatError, LimitError, NotFoundError
from deltad.limits import DEFAULT_LIMITS, Limits
from deltad.protocol.hints import Hint
from deltad.relay.wire import dotted, parse_dotted
from deltad.store.path import Hop
from deltad.store.runs import RunStore
from deltad.types import Version, parse_digest, parse_variant

HINTED_EDGES = 64
"""Of a longer path, the first of its edges are told."""


class EdgeHint(msgspec.Struct, frozen=True):
    """An edge: versions as `E.N`, no base for an anchor; its manifest's SHA-256 in hex and size, and all its bytes."""

    variant: str
    kind: EdgeKind
    base: str
    target: str
    manifest: str
    size: int
    bytes: int
    coders: tuple[int, ...]


class EdgeHints(msgspec.Struct, frozen=True):
    """The edges on the cheapest path to a daemon's latest version, in the order of applying them, by variant."""

    edges: tuple[EdgeHint, ...]


def offer(run: RunStore, after: Version | None) -> EdgeHints:
    """The cheapest path to the latest version of a run: from `after` where it leads there, else from an anchor.

    Reads the disk: call it in a worker thread. Raises NotFoundError for a run without versions.
    """
    latest = run.latest()
    if latest is None:
        raise NotFoundError(f"run {run.run}", found="no version of it is held here")
    edges: list[EdgeHint] = []
    for variant in latest.variants:
        hops: list[Hop] = []
        elsewhere = run.anchors_elsewhere(variant.name)
        for avoid in ([], elsewhere) if elsewhere else ([],):
            with suppress(NotFoundError):
                hops += run.path(latest, variant.name, [] if after is None else [after], local=False, avoid=avoid).hops
        # What leads to a version that a fork starts from is told of the run that it belongs to; whoever cannot have
        # that one is told of the way from an anchor of the fork itself, where there is one.
        hops = [hop for at, hop in enumerate(hops) if hop.record.run == run.run and hop not in hops[:at]]
        for hop in hops[: HINTED_EDGES - len(edges)]:
            edge, target, base_id = hop.edge, hop.record.version, hop.record.base(hop.edge)
            if base_id is None or (base_id.run == run.run and base_id.version < target):
                size, coders = run.weight(edge)
                base = "" if edge.base is None else dotted(edge.base)
                edges.append(
                    EdgeHint(
                        variant.name, edge.kind, base, dotted(target), edge.manifest.hex(), edge.size, size, coders
                    )
                )
    return EdgeHints(tuple(edges))


def read_hints(hints: EdgeHints, *, limits: Limits = DEFAULT_LIMITS) -> tuple[Hint, ...]:
    """Raises FormatError, UsageError or LimitError."""
    if len(hints.edges) > HINTED_EDGES:
        raise LimitError("list of edges", expected=f"at most {HINTED_EDGES}", found=str(len(hints.edges)))
    return tuple(_read(hint, limits) for hint in hints.edges)


def _read(hint: EdgeHint, limits: Limits) -> Hint:
    manifest = parse_digest(hint.manifest)
    thing = f"edge {hint.manifest}"
    if (hint.base == "") != (hint.kind is EdgeKind.ANCHOR):
        raise FormatError(thing, expected="a base exactly where the edge is not an anchor", found=hint.kind)
    if not 0 < hint.size <= min(hint.bytes, limits.manifest_bytes):
        raise LimitError(
            thing,
            expected=f"a manifest of 1 to {limits.manifest_bytes} bytes, and no more than the edge takes",
            found=f"{hint.size} of {hint.bytes}",
        )
    if len(hint.coders) > limits.coders:
        raise LimitError(thing, expected=f"at most {limits.coders} coders", found=str(len(hint.coders)))
    base = parse_dotted(hint.base) if hint.base else None
    edge = EdgeRef(hint.kind, base, manifest, hint.size)
    return Hint(parse_variant(hint.variant), parse_dotted(hint.target), edge, hint.bytes, hint.coders)
