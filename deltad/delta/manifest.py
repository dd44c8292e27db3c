"""The manifest: the description of one edge of the version graph.

The chunk list is paged, so that a reader of a very large edge holds one page at a time; pages, like
chunks and the layout, are named by the SHA-256 of their bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Annotated

import msgspec

from deltad.delta.digest import SUM_BYTES, U64, root_of, unpack_sums
from deltad.delta.encoding import check_reader, check_signature, decode, encode, sha256
from deltad.delta.layout import Layout
from deltad.errors import FormatError, IntegrityError, LimitError
from deltad.limits import DEFAULT_LIMITS, Limits
from deltad.types import DIGEST_BYTES, Version


class EdgeKind(StrEnum):
    ANCHOR = "anchor"
    DELTA = "delta"
    SKIP_DELTA = "skip-delta"


class ChunkRef(msgspec.Struct, frozen=True, array_like=True):
    """A chunk as a manifest names it. The tensor range covers all that its frames touch."""

    digest: bytes
    size: int
    first_tensor: int
    last_tensor: int


class ChunkPage(msgspec.Struct, frozen=True):
    """A run of a manifest's chunk list, in order."""

    # Such lengths are checked before the first element is made, which costs a dozen times its bytes.
    chunks: Annotated[tuple[ChunkRef, ...], msgspec.Meta(max_length=DEFAULT_LIMITS.page_chunks)]


class PageRef(msgspec.Struct, frozen=True, array_like=True):
    """A page as a manifest names it: content, size and how many chunks it lists."""

    digest: bytes
    size: int
    chunks: int


class State(msgspec.Struct, frozen=True, array_like=True):
    """One end of an edge. `run` is empty for the manifest's own run, and names another after a fork."""

    version: Version
    root: bytes
    run: str = ""


class Manifest(msgspec.Struct, frozen=True):
    """One edge: from `base` (none for an anchor) to `target`, in one variant.

    `sums` is 16 bytes per tensor in layout order, the element sums of the target; `changed` counts the
    changed elements and `chunk_bytes` the bytes of all chunks. `reason` says in words why an anchor was
    cut where a delta might have been. `tensor_sha256` (anchors) is 32 bytes per tensor, or empty.
    """

    format: int
    least_reader: int
    kind: EdgeKind
    run: str
    variant: str
    layout: bytes
    base: State | None
    target: State
    sums: bytes
    pages: Annotated[tuple[PageRef, ...], msgspec.Meta(max_length=DEFAULT_LIMITS.chunks)]
    coders: Annotated[tuple[int, ...], msgspec.Meta(max_length=DEFAULT_LIMITS.coders)]
    changed: int
    elements: int
    chunk_bytes: int
    reason: str = ""
    tensor_sha256: bytes = b""
    key_id: str = ""
    signature: bytes = b""

    @property
    def density(self) -> float:
        """Share of elements whose bits changed; 1 for an anchor."""
        return self.changed / self.elements if self.elements else 0.0

    def tensor_sums(self, layout: Layout) -> U64:
        """The target's sums, checked against its root. Shape [tensors, 2]. Raises IntegrityError."""
        if len(self.sums) != SUM_BYTES * len(layout.tensors):
            raise FormatError(
                "manifest", expected=f"sums of {len(layout.tensors)} tensors", found=f"{len(self.sums)} bytes"
            )
        sums = unpack_sums(self.sums, len(layout.tensors))
        if root_of(layout, sums) != self.target.root:
            raise IntegrityError("manifest", expected=f"root {self.target.root.hex()}", found="other tensor sums")
        return sums


def decode_manifest(data: bytes, *, limits: Limits = DEFAULT_LIMITS) -> Manifest:
    """Parse and check a manifest. Raises FormatError or LimitError."""
    manifest = decode(Manifest, data, what="manifest", limit=limits.manifest_bytes)
    check_reader(manifest.format, manifest.least_reader, "manifest")
    check_signature(manifest.key_id, manifest.signature, "manifest")
    if (manifest.base is None) != (manifest.kind is EdgeKind.ANCHOR):
        raise FormatError("manifest", expected="a base exactly where the edge is not an anchor", found=manifest.kind)
    digests = [manifest.layout, manifest.target.root, *(page.digest for page in manifest.pages)]
    if manifest.base is not None:
        digests.append(manifest.base.root)
    if any(len(digest) != DIGEST_BYTES for digest in digests):
        raise FormatError("manifest", expected=f"digests of {DIGEST_BYTES} bytes")
    if sum(page.chunks for page in manifest.pages) > limits.chunks:
        raise LimitError("manifest", expected=f"at most {limits.chunks} chunks")
    if any(
        not 0 < page.chunks <= limits.page_chunks or not 0 < page.size <= limits.page_bytes for page in manifest.pages
    ):
        raise LimitError("manifest", expected=f"pages of 1 to {limits.page_chunks} chunks, {limits.page_bytes} bytes")
    if not 0 <= manifest.changed <= manifest.elements:
        raise FormatError("manifest", expected=f"0 to {manifest.elements} changes", found=str(manifest.changed))
    return manifest


def decode_page(data: bytes, ref: PageRef, layout: Layout, *, limits: Limits = DEFAULT_LIMITS) -> tuple[ChunkRef, ...]:
    """Parse and check one page. Raises FormatError or LimitError."""
    page = decode(ChunkPage, data, what="manifest page", limit=limits.page_bytes)
    if len(page.chunks) != ref.chunks:
        raise FormatError("manifest page", expected=f"{ref.chunks} chunks", found=str(len(page.chunks)))
    for chunk in page.chunks:
        if len(chunk.digest) != DIGEST_BYTES or not 0 < chunk.size <= limits.chunk_bytes:
            raise LimitError("manifest page", expected=f"chunks of 1 to {limits.chunk_bytes} bytes")
        if not 0 <= chunk.first_tensor <= chunk.last_tensor < len(layout.tensors):
            raise FormatError("manifest page", expected=f"tensors below {len(layout.tensors)}")
    return page.chunks


def make_pages(chunks: Sequence[ChunkRef], *, limits: Limits = DEFAULT_LIMITS) -> Iterator[tuple[PageRef, bytes]]:
    """Cut a chunk list into pages."""
    for start in range(0, len(chunks), limits.page_chunks):
        part = tuple(chunks[start : start + limits.page_chunks])
        data = encode(ChunkPage(part))
        yield PageRef(sha256(data), len(data), len(part)), data
