"""What the tests of the pull machine share: a daemon that pulls, and versions that contradict themselves."""

from dataclasses import replace

import msgspec

from deltad.delta.encoding import encode, sha256
from deltad.delta.manifest import (
    decode_manifest,
)
from deltad.delta.record import EdgeRef
from deltad.limits import Limits
from deltad.protocol.pull import PullPolicy
from deltad.protocol.pull_decisions import Decision, Fetch, Load
from deltad.types import Digest
from tests.kit.pulling import PullingDaemon
from tests.kit.versions import Published, forge

POLICY = PullPolicy(in_flight=4)


def daemon(*offered: Published, policy: PullPolicy = POLICY, limits: Limits | None = None) -> PullingDaemon:
    made = PullingDaemon("policy", policy, limits=limits or Limits())
    made.offer(*offered)
    return made


def kinds(decisions: list[Decision]) -> list[str]:
    return [d.wanted.kind.value if isinstance(d, (Fetch, Load)) else type(d).__name__ for d in decisions]


def answer_all(pulling: PullingDaemon) -> list[str]:
    """Carry out everything that is outstanding now; returns what it was."""
    now = list(pulling.outstanding)
    for decision in now:
        pulling.answer(decision)
    return kinds(now)


def numbers(pulling: PullingDaemon) -> list[int]:
    return [version.number for version in pulling.commits]


# What is refused.


def with_edges(published: Published, *edges: EdgeRef) -> Published:
    (variant,) = published.record.variants
    return forge(published, variants=(msgspec.structs.replace(variant, edges=edges),))


def with_manifest(published: Published, **changes: object) -> Published:
    """The same version with other fields in the manifest of its last edge, named as its record should."""
    (variant,) = published.record.variants
    edge = variant.edges[-1]
    manifest = decode_manifest(published.objects[Digest(edge.manifest)])
    data = encode(msgspec.structs.replace(manifest, **changes))
    edge = msgspec.structs.replace(edge, manifest=sha256(data), size=len(data))
    return replace(with_edges(published, edge), objects=published.objects | {sha256(data): data})
