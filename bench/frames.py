"""The parts of an edge that are measured by themselves: frames from two states, and frames onto one.

Whole edges are `deltad.delta.codec`'s affair; here every frame is a piece of work of its own, for one thread or
for several.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.subject import Subject
from deltad.delta import FORMAT
from deltad.delta.backend import Backend, Mode, Place
from deltad.delta.codec import DELTA_FRAME_BYTES, EdgeEncoder, sum_weights
from deltad.delta.coding import WHOLE
from deltad.delta.digest import U64, pack_sums, tensor_seed, unpack_sums, zero_sum
from deltad.delta.emit import FrameWriter
from deltad.delta.encoding import encode
from deltad.delta.frame import Rect, plan_frames, read_chunk
from deltad.delta.layout import Layout
from deltad.delta.manifest import ChunkRef, EdgeKind, Manifest, State, make_pages
from deltad.delta.record import EdgeRef, VariantRecord, VersionRecord
from deltad.delta.weights import Weights, borrowed_segments, places_of, read_segments
from deltad.limits import DEFAULT_LIMITS
from deltad.types import Version

_BACKENDS = {"numpy": ("numpy", "NumpyBackend"), "numba": ("numba.engine", "NumbaBackend")}


def backend(name: str) -> Backend:
    """The backend of that name, whatever a configuration would choose. Raises ImportError if it is not there."""
    module = importlib.import_module(f"deltad.delta.backend.{_BACKENDS[name][0]}")
    found: Backend = getattr(module, _BACKENDS[name][1])()
    return found


@dataclass(frozen=True, slots=True)
class Frames:
    """A layout cut into frames, and what writes and reads them in one mode."""

    layout: Layout
    backend: Backend
    mode: Mode
    frame_bytes: int = DELTA_FRAME_BYTES
    digest: bool = True
    """Whether the backend follows the sums. If not, they are zero, and so is what they are checked against."""
    rects: tuple[tuple[Rect, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        cut = tuple(plan_frames(self.layout, frame_bytes=self.frame_bytes))
        object.__setattr__(self, "rects", cut)

    def encode(self, rects: tuple[Rect, ...], old: Weights, new: Weights) -> list[bytes]:
        """Plan, encode, compress and frame these rectangles."""
        writer = FrameWriter(self.layout, self.backend, self.mode, DEFAULT_LIMITS)
        with (
            borrowed_segments(old, rects, self.layout) as before,
            borrowed_segments(new, rects, self.layout) as after,
        ):
            return [frame.data for frame in writer.delta(rects, before, after, writer.encode(rects, before, after))]

    def encode_all(self, old: Weights, new: Weights) -> list[bytes]:
        """All frames, one after the other."""
        return [frame for rects in self.rects for frame in self.encode(rects, old, new)]

    def apply(self, data: bytes, target: Weights) -> None:
        """Parse, decompress, decode, check and apply whole frames in place, following the sums."""
        for frame in read_chunk(data, self.layout):
            header = frame.header
            if header.coder in WHOLE:
                raise ValueError("a whole frame: these states differ too much to measure a delta with")
            self.backend.decode_apply(
                header.coding,
                unpack_sums(header.check, 1)[0] if self.digest else zero_sum(),
                frame.streams,
                read_segments(target, header.rects, self.layout),
                places_of(header.rects, self.layout),
                self.layout.tensors[header.rects[0].tensor].type,
            )

    def apply_all(self, frames: Sequence[bytes], target: Weights) -> None:
        """All frames, one after the other."""
        for data in frames:
            self.apply(data, target)


def checked(data: bytes, name: bytes) -> bytes:
    """`data`, if its SHA-256 is `name`. Raises ValueError."""
    if hashlib.sha256(data).digest() != name:
        raise ValueError("expected the bytes that were written")
    return data


def full_digest(subject: Subject, backend: Backend) -> Callable[[], None]:
    """The two lanes of the element sum over all of the new state."""
    extents = subject.states.tensors
    parts = np.split(subject.states.new, np.cumsum([extent.lanes for extent in extents])[:-1])
    places = [Place(tensor_seed(extent.name), 0) for extent in extents]

    def work() -> None:
        backend.sum(parts, places)

    return work


def encode_edge(
    layout: Layout, base: Weights, target: Weights, base_sums: U64, backend: Backend, *, threads: int = 1
) -> list[bytes]:
    """The chunks of a whole edge, coded `fast`, as a publisher makes them."""
    encoder = EdgeEncoder(layout, target, backend, base=base, base_sums=base_sums, mode="fast", threads=threads)
    return [chunk.data for chunk in encoder.chunks()]


def delta_bytes(subject: Subject, backend: Backend, mode: Mode, base_sums: U64 | None = None) -> int:
    """Everything that a region pulls for this version and this mode: chunks, pages, manifest and record."""
    return sum(map(len, _edge(subject, backend, mode, base_sums)))


def _edge(subject: Subject, backend: Backend, mode: Mode, base_sums: U64 | None) -> Iterator[bytes]:
    layout = subject.layout
    if base_sums is None:
        base_sums = sum_weights(layout, subject.old, backend)
    encoder = EdgeEncoder(layout, subject.new, backend, base=subject.old, base_sums=base_sums, mode=mode)
    chunks: list[ChunkRef] = []
    for chunk in encoder.chunks():
        chunks.append(chunk.ref)
        yield chunk.data
    pages = list(make_pages(chunks))
    yield from (data for _, data in pages)
    before, after = Version(1, 1), Version(1, 2)
    root = encoder.root
    manifest = encode(
        Manifest(
            format=FORMAT,
            least_reader=FORMAT,
            kind=EdgeKind.DELTA,
            run="bench",
            variant="bf16",
            layout=layout.digest,
            base=State(before, root),
            target=State(after, root),
            sums=pack_sums(encoder.sums),
            pages=tuple(page for page, _ in pages),
            coders=encoder.coders,
            changed=int(encoder.changed.sum()),
            elements=sum(tensor.lanes for tensor in layout.tensors),
            chunk_bytes=sum(chunk.size for chunk in chunks),
        )
    )
    yield manifest
    edge = EdgeRef(EdgeKind.DELTA, before, layout.digest, len(manifest))
    yield VersionRecord(
        format=FORMAT,
        least_reader=FORMAT,
        run="bench",
        version=after,
        parent=before,
        sequence=2,
        variants=(VariantRecord("bf16", layout.digest, len(layout.encode()), root, (edge,)),),
    ).encode()
