"""The chunks of an edge in a store: written as they are made, and found again by its manifest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from deltad.delta.emit import EncodedChunk
from deltad.delta.layout import Layout
from deltad.delta.manifest import ChunkRef, Manifest, PageRef, decode_page, make_pages
from deltad.delta.stored import StoredDelta
from deltad.store.store import Store
from deltad.types import Digest


def store_chunks(store: Store, made: Iterable[EncodedChunk]) -> tuple[tuple[PageRef, ...], int]:
    """Make chunks durable as they come, and their pages; how a manifest lists them, and the bytes of all chunks."""
    chunks: list[ChunkRef] = []
    for chunk in made:
        store.put_chunk(chunk.data)
        chunks.append(chunk.ref)
    return store_pages(store, chunks)


def store_pages(store: Store, chunks: Sequence[ChunkRef]) -> tuple[tuple[PageRef, ...], int]:
    """`store_chunks` for chunks that are durable already."""
    pages = []
    for page, data in make_pages(chunks, limits=store.limits):
        store.put(data)
        pages.append(page)
    return tuple(pages), sum(chunk.size for chunk in chunks)


def chunks_of(store: Store, manifest: Manifest, layout: Layout) -> Iterator[ChunkRef]:
    """The chunk list of an edge, page by page. Raises NotFoundError, IntegrityError or FormatError."""
    for page in manifest.pages:
        yield from decode_page(store.read(Digest(page.digest)), page, layout, limits=store.limits)


def stored_delta(store: Store, manifest: Manifest, layout: Layout) -> StoredDelta:
    """The edge as something to fold, whose chunks are read, and compared with their names, when they are needed."""
    return StoredDelta(tuple(chunks_of(store, manifest, layout)), store.read)
