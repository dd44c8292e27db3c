"""The files of a checkpoint directory: where they are, what identifies them, and opening them safely.

Reads directories and file statuses, never weights. Owns one invariant: whatever a checkpoint's names,
links and index say, no file outside its directory is ever opened.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from deltad.delta.layout import FILE_NAMES
from deltad.errors import CheckpointError, LimitError
from deltad.limits import DEFAULT_LIMITS, Limits

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
WEIGHT_SUFFIX = ".safetensors"

SUBFOLDERS = ("huggingface", "actor/huggingface")
"""Where trainers with a layout of their own (verl) put the Hugging Face checkpoint."""


@dataclass(frozen=True, slots=True)
class FileStamp:
    """What tells one state of a file from another without reading it. `name` is relative to the checkpoint."""

    name: str
    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, name: str, status: os.stat_result) -> FileStamp:
        return cls(name, status.st_size, status.st_mtime_ns, status.st_ino)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The stamps of a checkpoint's weight files, index and non-weight files, in order of name.

    Two fingerprints are equal when nothing that would be published was written, replaced, added or
    removed between them. A directory without such files has an empty one.
    """

    files: tuple[FileStamp, ...] = ()

    def difference(self, later: Fingerprint) -> str:
        """The first file in which `later` differs, in words; empty if there is none."""
        before = {stamp.name: stamp for stamp in self.files}
        after = {stamp.name: stamp for stamp in later.files}
        for name in sorted(before.keys() | after.keys()):
            if name not in after:
                return f"{name} is gone"
            if name not in before:
                return f"{name} is new"
            if before[name] != after[name]:
                return f"{name} was written ({before[name].size} bytes before, {after[name].size} now)"
        return ""


def fingerprint(directory: Path, *, limits: Limits = DEFAULT_LIMITS) -> Fingerprint:
    """The state of the checkpoint in `directory`; empty where there is none, or no directory.

    Raises CheckpointError if the directory cannot be read, LimitError if it has too many files.
    """
    home = locate(directory, limits=limits)
    prefix = "" if home == directory else f"{home.relative_to(directory)}/"
    stamps = []
    for name in sorted(list_names(home, limits=limits)):
        if not (is_weights(name) or name in FILE_NAMES):
            continue
        try:
            stamps.append(FileStamp.of(prefix + name, os.stat(home / name)))
        except FileNotFoundError:
            continue  # removed since it was listed, or a link to nothing: the fingerprint differs without it
        except OSError as error:
            raise unreadable(home / name, error) from error
    return Fingerprint(tuple(stamps))


def locate(directory: Path, *, limits: Limits = DEFAULT_LIMITS) -> Path:
    """The folder of `directory` that holds the Hugging Face checkpoint; `directory` itself where none does."""
    for folder in (directory, *(directory / name for name in SUBFOLDERS)):
        if any(is_weights(name) for name in list_names(folder, limits=limits)):
            return folder
    return directory


def is_weights(name: str) -> bool:
    """Whether a file name is that of weights or of their index."""
    return name.endswith(WEIGHT_SUFFIX) or name == INDEX_NAME


def list_names(directory: Path, *, limits: Limits = DEFAULT_LIMITS) -> list[str]:
    """The names in a directory; none where it does not exist. Raises CheckpointError or LimitError."""
    names: list[str] = []
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if len(names) == limits.checkpoint_files:
                    raise LimitError(
                        f"{directory}", expected=f"at most {limits.checkpoint_files} entries", found="more of them"
                    )
                names.append(entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise unreadable(directory, error) from error
    return names


@contextmanager
def open_inside(home: Path, name: str) -> Iterator[FileIO]:
    """Open the regular file `name` of the resolved directory `home` for reading.

    A link is followed only to a place within `home`. Raises CheckpointError.
    """
    path = home / name
    if name in ("", ".", "..") or "/" in name or "\0" in name or not _is_encodable(name):
        raise CheckpointError(f"{home}", expected="names of files in this directory", found=repr(name[:120]))
    try:
        resolved = path.resolve(strict=True)
        if resolved.parent != home and home not in resolved.parents:
            raise CheckpointError(
                f"{path}",
                expected="a file in its checkpoint directory",
                found=f"a link to {resolved}",
                hint="copy the checkpoint with its files (`cp -rL`)",
            )
        # A pipe must not block the reader, and a link that was put there since is not followed.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(resolved, flags)
    except FileNotFoundError:
        raise CheckpointError(f"{path}", expected="a file", found="none") from None
    except (OSError, RuntimeError) as error:  # RuntimeError: links that lead in a circle, before Python 3.13
        raise unreadable(path, error) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path}", expected="a regular file", found="something else of that name")
    with FileIO(descriptor) as file:
        yield file


def _is_encodable(name: str) -> bool:
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return True


def read_bounded(file: FileIO, path: Path, limit: int) -> bytes:
    """All bytes of an open file of at most `limit` bytes. Raises CheckpointError or LimitError."""
    try:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise LimitError(f"{path}", expected=f"at most {limit} bytes", found=f"{size} bytes")
        # One byte more than the size, so that a file that grows meanwhile is not taken for a whole one.
        data = os.pread(file.fileno(), size + 1, 0)
    except OSError as error:
        raise unreadable(path, error) from error
    if len(data) != size:
        raise CheckpointError(f"{path}", expected=f"{size} bytes", found="a file that changes while it is read")
    return data


def unreadable(path: Path, error: OSError | RuntimeError) -> CheckpointError:
    """The error for a path that the operating system refuses to read."""
    reason = error.strerror if isinstance(error, OSError) else str(error)
    hint = "raise the limit of open files (`ulimit -n`)" if getattr(error, "errno", 0) == 24 else ""
    return CheckpointError(f"{path}", expected="something readable", found=f"{reason}", hint=hint)
