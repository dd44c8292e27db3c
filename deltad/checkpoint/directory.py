"""Opening a Hugging Face checkpoint directory, and reading its weights by window.

Windows of weights are lent by `deltad.checkpoint.windows`, mapped or read. Memory is bounded by those that are
on loan, whatever the model's size.

Owns two invariants. A checkpoint opens only when it is complete: every file that its index names is
there, headers, sizes and index agree, and nothing changed while that was found out. And what was read is
what was opened: `check_unchanged` tells whether anything was written since.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np

from deltad.checkpoint.disk_delta.index import find_disk_delta
from deltad.checkpoint.files import (
    INDEX_NAME,
    SINGLE_NAME,
    WEIGHT_SUFFIX,
    FileStamp,
    Fingerprint,
    fingerprint,
    is_weights,
    list_names,
    locate,
    open_inside,
    read_bounded,
    unreadable,
)
from deltad.checkpoint.foreign import no_checkpoint
from deltad.checkpoint.safetensors import Entry, parse_json, read_header
from deltad.checkpoint.windows import Arena, WeightFile, Window
from deltad.delta import FORMAT
from deltad.delta.backend import UNSIGNED, Lanes
from deltad.delta.encoding import sha256
from deltad.delta.layout import FILE_NAMES, FileSpec, Layout, TensorSpec, check_layout
from deltad.delta.quant import bf16_from_f32
from deltad.errors import CheckpointChangedError, CheckpointError, LimitError, UsageError
from deltad.limits import DEFAULT_LIMITS, Limits

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_CONFIG = "config.json"
_WINDOW_BYTES = 4 << 20
_CAST_LANES = 1 << 18


@dataclass(frozen=True, slots=True)
class _Source:
    """Where the bytes of one tensor are, and their dtype there."""

    file: WeightFile
    entry: Entry

    def borrow(self, start: int, count: int, arena: Arena) -> Window:
        """The bytes of some lanes as they are in the file."""
        width = self.entry.spec.type.lane_bytes
        return self.file.borrow(self.entry.offset + start * width, count * width, arena)

    def lanes_of(self, window: Window) -> Lanes:
        return window.bytes.view(UNSIGNED[self.entry.spec.type.lane_bytes])


@dataclass(frozen=True, slots=True)
class _Weights:
    """The weight files of a complete checkpoint, open."""

    home: Path
    state: Fingerprint
    sources: Mapping[str, _Source]


class _Loans(threading.local):
    """What a thread has on loan, by what it asked for, and the arena that it is in."""

    def __init__(self) -> None:
        self.arena = Arena()
        self.lent: dict[tuple[int, int, int], list[Window]] = {}


class Checkpoint:
    """An open checkpoint. Implements `deltad.delta.weights.Weights`; a context manager.

    Several threads may read at once. What is on loan when it is closed must not be looked at any more.
    """

    def __init__(
        self, directory: Path, weights: _Weights, layout: Layout, *, limits: Limits, opened: ExitStack
    ) -> None:
        self.directory = directory
        self.layout = layout
        self.fingerprint = weights.state
        self._home = weights.home
        self._sources = tuple(weights.sources[spec.name] for spec in layout.tensors)
        self._limits = limits
        self._opened = opened
        self._closed = False
        self._mine = _Loans()

    def lanes(self, tensor: int, start: int, count: int) -> Lanes:
        """`count` lanes of tensor number `tensor` from canonical position `start`, on loan until `release`.

        While they are, nobody can change them: whoever opens their file to write to it has to wait.
        Raises CheckpointChangedError if the file has become shorter, CheckpointError if it is unreadable.
        """
        spec = self.layout.tensors[tensor]
        if self._closed or not 0 <= start <= start + count <= spec.lanes:
            raise ValueError(f"lanes {start} to {start + count} of {spec.name!r}, which has {spec.lanes}, or is closed")
        source = self._sources[tensor]
        if source.entry.spec.dtype == spec.dtype:
            window = source.borrow(start, count, self._mine.arena)
        else:
            window = self._rounded(source, start, count)
        self._mine.lent.setdefault((tensor, start, count), []).append(window)
        return window.bytes.view(UNSIGNED[spec.type.lane_bytes])

    def release(self, tensor: int, start: int, count: int) -> None:
        """The end of a loan, in the thread that took it. Nothing happens where there is none."""
        lent = self._mine.lent
        if windows := lent.get((tensor, start, count)):
            self._sources[tensor].file.give_back(windows.pop())
            if not windows:
                del lent[tensor, start, count]

    def _rounded(self, source: _Source, start: int, count: int) -> Window:
        """float32 lanes as bfloat16."""
        arena = self._mine.arena
        window = arena.take(2 * count)
        lanes = window.bytes.view(np.uint16)
        try:
            for at in range(0, count, _CAST_LANES):
                part = source.borrow(start + at, min(_CAST_LANES, count - at), arena)
                lanes[at : at + _CAST_LANES] = bf16_from_f32(source.lanes_of(part))
                source.file.give_back(part)
        except BaseException:
            source.file.give_back(window)
            raise
        return window

    def file_bytes(self, name: str) -> bytes:
        """The non-weight file `name` of `layout.files`. Raises CheckpointChangedError if it is another by now."""
        spec = next((file for file in self.layout.files if file.name == name), None)
        if spec is None:
            raise UsageError(f"{self.directory}", expected="a file of its layout", found=repr(name[:120]))
        with open_inside(self._home, name) as file:
            data = read_bounded(file, self._home / name, self._limits.file_bytes)
        if sha256(data) != spec.digest:
            raise _changed(self.directory, f"{name} was written")
        return data

    def check_unchanged(self) -> None:
        """Raises CheckpointChangedError if any of its files was written, replaced, added or removed since."""
        difference = self.fingerprint.difference(fingerprint(self.directory, limits=self._limits))
        if difference:
            raise _changed(self.directory, difference)

    def file_stamps(self) -> dict[Path, FileStamp]:
        """The files that the layout was read from, with their stamps: weights, index, non-weight files."""
        used = {source.file.path.name for source in self._sources} | {file.name for file in self.layout.files}
        found = {}
        for stamp in self.fingerprint.files:
            path = self.directory / stamp.name
            if path.name in used or path.name == INDEX_NAME:
                found[path] = stamp
        return found

    def close(self) -> None:
        """Close its files. Does no harm twice."""
        self._closed = True
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def open_checkpoint(directory: Path, *, publish_as: str = "source", limits: Limits = DEFAULT_LIMITS) -> Checkpoint:
    """Open the complete checkpoint in `directory`, or in the subfolder where its trainer keeps it.

    `publish_as` is `source` for the bits as written, or `bf16` to see F32 tensors rounded to bfloat16.
    An output head with the bits of the input embedding is an alias where the config ties them.

    Raises CheckpointError for a directory that is incomplete, malformed, foreign or none at all,
    CheckpointChangedError if it was written meanwhile, LimitError above a ceiling.
    """
    if publish_as not in ("source", "bf16"):
        raise UsageError(f"publish_as {publish_as!r}", expected="source or bf16")
    with ExitStack() as stack:
        weights = stack.enter_context(_open_weights(directory, limits))
        files, config = _read_files(weights.home, limits)
        tensors = [_publish(source.entry.spec, publish_as) for source in weights.sources.values()]
        layout = Layout(FORMAT, tuple(sorted(tensors, key=lambda spec: spec.name)), files)
        if _ties_embeddings(config, weights.home) and _same_bits(weights.sources):
            layout = _with_alias(layout)
        check_layout(layout, limits=limits)
        checkpoint = Checkpoint(directory, weights, layout, limits=limits, opened=stack.pop_all())
    try:
        checkpoint.check_unchanged()
    except BaseException:
        checkpoint.close()
        raise
    return checkpoint


def require_config(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError for a checkpoint without the config that an engine is built from."""
    if not any(file.name == _CONFIG for file in checkpoint.layout.files):
        raise _no_config(checkpoint.directory)


def check_complete(directory: Path, *, limits: Limits = DEFAULT_LIMITS) -> Fingerprint:
    """Judge a checkpoint by its index, headers and names alone, and return the state in which it is complete.

    A disk-delta directory is judged as one. Raises what `open_checkpoint` and `require_config` raise for one that is
    not, or `find_disk_delta`.
    """
    before = fingerprint(directory, limits=limits)
    if find_disk_delta(directory, limits=limits) is not None:
        difference = before.difference(fingerprint(directory, limits=limits))
        if difference:
            raise _changed(directory, difference)
        return before
    with _open_weights(directory, limits) as weights:
        if not any(Path(stamp.name).name == _CONFIG for stamp in weights.state.files):
            raise _no_config(directory)
        difference = weights.state.difference(fingerprint(directory, limits=limits))
        if difference:
            raise _changed(directory, difference)
        return weights.state


@contextmanager
def _open_weights(directory: Path, limits: Limits) -> Iterator[_Weights]:
    state = fingerprint(directory, limits=limits)
    found = locate(directory, limits=limits)
    home, root = found.resolve(), directory.resolve()
    if home != root and root not in home.parents:
        raise CheckpointError(f"{found}", expected="a folder inside the checkpoint", found=f"a link to {home}")
    names, index = _weight_files(directory, home, limits)
    sources: dict[str, _Source] = {}
    with ExitStack() as stack:
        for name in names:
            path = found / name
            file = stack.enter_context(_open_weight_file(home, name, index))
            weights = WeightFile(file, path)
            stack.callback(weights.close)
            for entry in _read_entries(file, path, limits):
                _check_place(entry.spec.name, name, sources, index, home)
                sources[entry.spec.name] = _Source(weights, entry)
            if len(sources) > limits.tensors:
                raise LimitError(f"{directory}", expected=f"at most {limits.tensors} tensors", found="more of them")
        missing = sorted((index or {}).keys() - sources.keys())
        if missing:
            raise CheckpointError(
                f"{home / INDEX_NAME}: tensor {missing[0][:120]!r}",
                expected=f"it in {(index or {})[missing[0]]}",
                found="no such tensor there",
            )
        yield _Weights(home, state, sources)


def _weight_files(directory: Path, home: Path, limits: Limits) -> tuple[list[str], dict[str, str] | None]:
    """The weight files to read, and the index (tensor → file) where there is one."""
    names = list_names(home, limits=limits)
    if INDEX_NAME in names:
        index = _read_index(home, limits)
        if SINGLE_NAME in names and SINGLE_NAME not in index.values():
            raise CheckpointError(
                f"{home}",
                expected=f"either {SINGLE_NAME} or {INDEX_NAME}",
                found="both, and the index does not name that file",
                hint="remove the one that an earlier save left behind",
            )
        return sorted(set(index.values())), index
    weights = sorted(name for name in names if is_weights(name))
    if SINGLE_NAME in weights:
        return [SINGLE_NAME], None
    whole = [name for name in weights if not _is_part(name) and name != "adapter_model.safetensors"]
    if len(weights) == 1 and whole:
        return whole, None
    if not weights or weights == ["adapter_model.safetensors"]:
        raise no_checkpoint(directory)
    raise CheckpointError(
        f"{home}",
        expected=f"{INDEX_NAME}, which says what belongs together",
        found=f"{len(weights)} {WEIGHT_SUFFIX} files without it, the first {weights[0][:120]}",
        hint="the checkpoint is not written to its end, or its index was lost",
    )


def _is_part(name: str) -> bool:
    """Whether a name like `model-00001-of-00003.safetensors` says that there is more."""
    stem = name.removesuffix(WEIGHT_SUFFIX)
    rest, _, total = stem.rpartition("-of-")
    return bool(rest) and total.isdecimal() and int(total[:9]) > 1


def _read_index(home: Path, limits: Limits) -> dict[str, str]:
    path = home / INDEX_NAME
    with open_inside(home, INDEX_NAME) as file:
        index = parse_json(read_bounded(file, path, limits.index_bytes), f"{path}", what="text")
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{path}", expected="an object whose weight_map gives each tensor's file", found="none")
    metadata = index.get("metadata")
    if isinstance(metadata, dict) and "delta_encoding" in metadata:
        raise CheckpointError(
            f"{path}",
            expected="a full checkpoint",
            found=f"a disk-delta directory ({str(metadata['delta_encoding'])[:40]}), which holds differences only",
            hint="a run publishes it where it holds the base version; else let the trainer write full checkpoints",
        )
    if len(weight_map) > limits.tensors:
        raise LimitError(f"{path}", expected=f"at most {limits.tensors} tensors", found=str(len(weight_map)))
    for tensor, name in weight_map.items():
        if not name.endswith(WEIGHT_SUFFIX) or "/" in name:
            raise CheckpointError(
                f"{path}: tensor {tensor[:120]!r}",
                expected=f"the name of a {WEIGHT_SUFFIX} file in the same directory",
                found=repr(name[:120]),
            )
    return weight_map


@contextmanager
def _open_weight_file(home: Path, name: str, index: Mapping[str, str] | None) -> Iterator[FileIO]:
    if index is not None and not os.path.exists(home / name):
        raise CheckpointError(
            f"{home / INDEX_NAME}",
            expected=f"every file that it names, such as {name[:120]}",
            found="no such file",
            hint="the checkpoint is not written to its end, or a file was lost",
        )
    with open_inside(home, name) as file:
        yield file


def _read_entries(file: FileIO, path: Path, limits: Limits) -> tuple[Entry, ...]:
    try:
        return read_header(file.fileno(), os.fstat(file.fileno()).st_size, f"{path}", limits=limits).entries
    except OSError as error:
        raise unreadable(path, error) from error


def _check_place(
    tensor: str, file: str, before: Mapping[str, _Source], index: Mapping[str, str] | None, home: Path
) -> None:
    """Each tensor is in one file, and in the one that the index says."""
    thing = f"{home}: tensor {tensor[:120]!r}"
    if tensor in before:
        other = before[tensor].file.path.name
        raise CheckpointError(thing, expected="it in one file", found=f"it in {other} and {file}")
    if index is None:
        return
    if tensor not in index:
        raise CheckpointError(thing, expected=f"only tensors that {INDEX_NAME} names", found=f"it in {file}")
    if index[tensor] != file:
        raise CheckpointError(thing, expected=f"it in {index[tensor]}, as {INDEX_NAME} says", found=f"it in {file}")


def _read_files(home: Path, limits: Limits) -> tuple[tuple[FileSpec, ...], bytes]:
    """The non-weight files that travel with a version, and the text of the config."""
    specs, config = [], b"{}"
    for name in sorted(FILE_NAMES.intersection(list_names(home, limits=limits))):
        with open_inside(home, name) as file:
            data = read_bounded(file, home / name, limits.file_bytes)
        specs.append(FileSpec(name, len(data), sha256(data)))
        if name == _CONFIG:
            config = data
    return tuple(specs), config


def _publish(spec: TensorSpec, publish_as: str) -> TensorSpec:
    cast = publish_as == "bf16" and spec.dtype == "F32"
    return msgspec.structs.replace(spec, dtype="BF16") if cast else spec


def _ties_embeddings(text: bytes, home: Path) -> bool:
    # Not `parse_json`: configs in use hold `Infinity`, and the same name twice does no harm here.
    try:
        config: Any = json.loads(text)
    except (ValueError, RecursionError):
        raise CheckpointError(f"{home / _CONFIG}", expected="JSON", found="something else, or half of it") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{home / _CONFIG}", expected="a JSON object", found=type(config).__name__)
    tied = config.get("tie_word_embeddings")
    inner = config.get("text_config")
    if tied is None and isinstance(inner, dict):
        tied = inner.get("tie_word_embeddings")
    return tied is True


def _same_bits(sources: Mapping[str, _Source]) -> bool:
    """Whether the output head is there and equals the input embedding in the files, bit by bit."""
    if HEAD not in sources or EMBEDDING not in sources:
        return False
    head, embedding = sources[HEAD], sources[EMBEDDING]
    spec, other = head.entry.spec, embedding.entry.spec
    if (spec.dtype, spec.shape) != (other.dtype, other.shape):
        return False
    step = _WINDOW_BYTES // spec.type.lane_bytes
    arena = Arena()
    for start in range(0, spec.lanes, step):
        count = min(step, spec.lanes - start)
        ours, theirs = head.borrow(start, count, arena), embedding.borrow(start, count, arena)
        same = np.array_equal(ours.bytes, theirs.bytes)
        embedding.file.give_back(theirs)
        head.file.give_back(ours)
        if not same:
            return False
    return True


def _with_alias(layout: Layout) -> Layout:
    tensors = tuple(
        msgspec.structs.replace(spec, alias_of=EMBEDDING) if spec.name == HEAD else spec for spec in layout.tensors
    )
    return Layout(layout.format, tensors, layout.files)


def _no_config(directory: Path) -> CheckpointError:
    return CheckpointError(
        f"{directory}",
        expected=f"{_CONFIG} beside the weights, which every engine is built from",
        found="none",
        hint=f"copy the {_CONFIG} of the model there, or let the trainer write it (`save_pretrained` does)",
    )


def _changed(directory: Path, difference: str) -> CheckpointChangedError:
    return CheckpointChangedError(
        f"{directory}",
        expected="the files as they were when it was opened",
        found=difference,
        hint="it was written while it was read; nothing was published, and it is read again when it is settled",
    )
