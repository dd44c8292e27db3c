"""The version record: what a publisher says, and later signs, about one version.

Stored and relayed verbatim. It names everything else (layouts, manifests) by digest, so a record that
is trusted makes all of it trusted.
"""

from __future__ import annotations

import msgspec

from deltad.delta.encoding import check_reader, check_signature, decode, encode, sha256
from deltad.delta.manifest import EdgeKind
from deltad.errors import FormatError, LimitError, UsageError
from deltad.limits import DEFAULT_LIMITS, Limits
from deltad.types import DIGEST_BYTES, Digest, Version, VersionId, parse_run, parse_variant


class EdgeRef(msgspec.Struct, frozen=True, array_like=True):
    """An edge that leads to this version: its kind, its base (none for an anchor) and its manifest."""

    kind: EdgeKind
    base: Version | None
    manifest: bytes
    size: int


class VariantRecord(msgspec.Struct, frozen=True):
    """One precision of the version: its layout, its root and the edges that lead to it."""

    name: str
    layout: bytes
    layout_size: int
    root: bytes
    edges: tuple[EdgeRef, ...]


class VersionRecord(msgspec.Struct, frozen=True):
    """A version of a run. `sequence` grows by one with every record of the run, over all epochs.

    `parent_run` is empty unless this version forks another run. `identity` is the caller's own name for
    it. `created_ns` (Unix time) is for people; nothing is decided by it.
    """

    format: int
    least_reader: int
    run: str
    version: Version
    parent: Version | None
    sequence: int
    variants: tuple[VariantRecord, ...]
    parent_run: str = ""
    identity: str = ""
    created_ns: int = 0
    source: str = ""
    key_id: str = ""
    signature: bytes = b""

    @property
    def id(self) -> VersionId:
        return VersionId(parse_run(self.run), self.version)

    @property
    def digest(self) -> Digest:
        return sha256(encode(self))

    def encode(self) -> bytes:
        return encode(self)

    def base(self, edge: EdgeRef) -> VersionId | None:
        """The version that an edge to this one starts from; None for an anchor.

        Where this version forks another run, the edges that it names start there. Others stay within its run.
        """
        if edge.base is None:
            return None
        named = self.parent_run and any(edge in variant.edges for variant in self.variants)
        return VersionId(parse_run(self.parent_run if named else self.run), edge.base)

    @property
    def bases_elsewhere(self) -> frozenset[VersionId]:
        """The versions of another run that its edges start from; none but for a fork."""
        bases = (self.base(edge) for variant in self.variants for edge in variant.edges) if self.parent_run else ()
        return frozenset(base for base in bases if base is not None)

    def variant(self, name: str) -> VariantRecord:
        """The variant of that name. Raises FormatError if this version has none."""
        for variant in self.variants:
            if variant.name == name:
                return variant
        raise FormatError(f"{self.id}", expected=f"variant {name!r}", found=", ".join(v.name for v in self.variants))


def decode_record(data: bytes, *, limits: Limits = DEFAULT_LIMITS) -> VersionRecord:
    """Parse and check a record. Raises FormatError or LimitError."""
    record = decode(VersionRecord, data, what="version record", limit=limits.record_bytes)
    check_reader(record.format, record.least_reader, "version record")
    check_signature(record.key_id, record.signature, "version record")
    try:
        parse_run(record.run)
        if record.parent_run:
            parse_run(record.parent_run)
        for variant in record.variants:
            parse_variant(variant.name)
    except UsageError as error:
        raise FormatError("version record", found=str(error)) from None
    version = record.version
    if version.epoch < 1 or version.number < 0 or record.sequence < 1:
        raise FormatError("version record", expected="epoch ≥ 1, number ≥ 0, sequence ≥ 1", found=str(version))
    if record.parent_run and (record.parent is None or record.parent_run == record.run):
        raise FormatError(f"{record.id}", expected="a parent of another run", found=f"{record.parent} of {record.run}")
    if record.parent is not None and not record.parent_run and record.parent >= version:
        raise FormatError(f"{record.id}", expected="a parent that is older", found=str(record.parent))
    if not 1 <= len(record.variants) <= limits.variants:
        raise LimitError(f"{record.id}", expected=f"1 to {limits.variants} variants", found=str(len(record.variants)))
    for variant in record.variants:
        _check_variant(record, variant, limits)
    return record


def _check_variant(record: VersionRecord, variant: VariantRecord, limits: Limits) -> None:
    thing = f"{record.id} variant {variant.name}"
    digests = [variant.layout, variant.root, *(edge.manifest for edge in variant.edges)]
    if any(len(digest) != DIGEST_BYTES for digest in digests):
        raise FormatError(thing, expected=f"digests of {DIGEST_BYTES} bytes")
    if not 0 < variant.layout_size <= limits.layout_bytes:
        raise LimitError(
            thing, expected=f"a layout of 1 to {limits.layout_bytes} bytes", found=str(variant.layout_size)
        )
    if not variant.edges:
        raise FormatError(thing, expected="at least one edge that leads to it", found="none")
    for edge in variant.edges:
        if (edge.base is None) != (edge.kind is EdgeKind.ANCHOR):
            raise FormatError(thing, expected="a base exactly where the edge is not an anchor", found=edge.kind)
        if not 0 < edge.size <= limits.manifest_bytes:
            raise LimitError(thing, expected=f"a manifest of 1 to {limits.manifest_bytes} bytes", found=str(edge.size))
