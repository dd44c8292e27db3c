"""The layout: the ordered tensor table of a variant and its small non-weight files.

Tensors are ordered by name, so that equal models have equal layouts however a trainer cut them into
files. Owns the rules of what a tensor may be: a known dtype, a bounded shape, a unique name.
"""

from __future__ import annotations

import math
from functools import cached_property

import msgspec

from deltad.delta.encoding import check_format, decode, encode, sha256
from deltad.errors import FormatError, LimitError
from deltad.limits import DEFAULT_LIMITS, Limits
from deltad.types import DTYPES, Digest, DType

FILE_NAMES = frozenset(
    {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "chat_template.jinja",
        "chat_template.json",
        "preprocessor_config.json",
        "processor_config.json",
        "video_preprocessor_config.json",
    }
)
"""The non-weight files that travel with a version. Data only; code is never carried."""


_PACKED = frozenset(dtype.name for dtype in DTYPES.values() if dtype.bits < 8)


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor. `alias_of` names the tensor whose storage it shares; an alias carries no weights."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    alias_of: str = ""

    @property
    def type(self) -> DType:
        return DTYPES[self.dtype]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size of the canonical row-major bytes; 0 for an alias."""
        return 0 if self.alias_of else self.elements * self.type.bits // 8

    @property
    def lanes(self) -> int:
        return self.bytes // self.type.lane_bytes

    @property
    def lane_shape(self) -> tuple[int, ...]:
        """The shape in lanes: the last dimension of a packed dtype shrinks to whole bytes."""
        return (self.lanes,) if self.dtype in _PACKED else self.shape


class FileSpec(msgspec.Struct, frozen=True, array_like=True):
    """A non-weight file: its name, size in bytes and content."""

    name: str
    size: int
    digest: bytes


class Layout(msgspec.Struct, frozen=True, dict=True):
    """The tensor table of one variant and the files beside it. Content-addressed by `digest`."""

    format: int
    tensors: tuple[TensorSpec, ...]
    files: tuple[FileSpec, ...] = ()

    @cached_property
    def digest(self) -> Digest:
        return sha256(encode(self))

    @cached_property
    def table_digest(self) -> Digest:
        """Digest of the tensor table alone: two versions with equal tables differ only in weights."""
        return sha256(msgspec.msgpack.encode(self.tensors))

    @cached_property
    def index(self) -> dict[str, int]:
        """Tensor name → position in `tensors`."""
        return {tensor.name: i for i, tensor in enumerate(self.tensors)}

    @property
    def weight_bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.tensors)

    @property
    def elements(self) -> int:
        return sum(tensor.elements for tensor in self.tensors if not tensor.alias_of)

    def encode(self) -> bytes:
        return encode(self)


def decode_layout(data: bytes, *, limits: Limits = DEFAULT_LIMITS) -> Layout:
    """Parse and check a layout. Raises FormatError or LimitError."""
    layout = decode(Layout, data, what="layout", limit=limits.layout_bytes)
    check_format(layout.format, "layout")
    check_layout(layout, limits=limits)
    return layout


def check_layout(layout: Layout, *, limits: Limits = DEFAULT_LIMITS) -> None:
    """Raises FormatError or LimitError unless every rule of a layout holds."""
    if len(layout.tensors) > limits.tensors:
        raise LimitError("layout", expected=f"at most {limits.tensors} tensors", found=str(len(layout.tensors)))
    if len(layout.files) > limits.files:
        raise LimitError("layout", expected=f"at most {limits.files} files", found=str(len(layout.files)))
    previous = ""
    for i, tensor in enumerate(layout.tensors):
        check_tensor(tensor, limits=limits)
        if i and tensor.name <= previous:
            raise FormatError(
                f"layout: tensor {tensor.name!r}",
                expected="tensors in ascending order of name, each once",
                found=f"it follows {previous!r}",
            )
        previous = tensor.name
    for tensor in layout.tensors:
        _check_alias(layout, tensor)
    previous = ""
    for file in layout.files:
        if file.name not in FILE_NAMES:
            raise FormatError(f"layout: file {file.name[:80]!r}", expected="one of the known non-weight files")
        if file.name <= previous:
            raise FormatError(f"layout: file {file.name!r}", expected="files in ascending order, each once")
        if not 0 <= file.size <= limits.file_bytes:
            raise LimitError(
                f"layout: file {file.name!r}",
                expected=f"0 to {limits.file_bytes} bytes",
                found=f"{file.size} bytes",
            )
        if len(file.digest) != 32:
            raise FormatError(f"layout: file {file.name!r}", expected="a 32-byte SHA-256")
        previous = file.name


def check_tensor(tensor: TensorSpec, *, limits: Limits = DEFAULT_LIMITS) -> None:
    """Raises FormatError or LimitError unless name, dtype and shape are within bounds."""
    thing = f"tensor {tensor.name[:120]!r}"
    name_bytes = len(tensor.name.encode("utf-8", "surrogatepass"))
    if not 1 <= name_bytes <= limits.tensor_name_bytes:
        raise LimitError(thing, expected=f"a name of 1 to {limits.tensor_name_bytes} bytes", found=f"{name_bytes}")
    if tensor.dtype not in DTYPES:
        raise FormatError(thing, expected=f"a dtype of {', '.join(sorted(DTYPES))}", found=repr(tensor.dtype[:40]))
    if len(tensor.shape) > limits.tensor_dims:
        raise LimitError(thing, expected=f"at most {limits.tensor_dims} dimensions", found=str(len(tensor.shape)))
    if any(extent < 0 for extent in tensor.shape):
        raise FormatError(thing, expected="dimensions of 0 or more", found=str(list(tensor.shape)))
    bits = tensor.elements * tensor.type.bits
    if bits > limits.tensor_bytes * 8:
        raise LimitError(thing, expected=f"at most {limits.tensor_bytes} bytes", found=f"shape {list(tensor.shape)}")
    if bits % 8:
        raise FormatError(
            thing, expected="a whole number of bytes", found=f"{tensor.elements} elements of {tensor.type.bits} bits"
        )


def _check_alias(layout: Layout, tensor: TensorSpec) -> None:
    if not tensor.alias_of:
        return
    thing = f"tensor {tensor.name[:120]!r}"
    at = layout.index.get(tensor.alias_of)
    if at is None:
        raise FormatError(thing, expected="an alias of a tensor in the same layout", found=repr(tensor.alias_of[:120]))
    target = layout.tensors[at]
    if target.alias_of:
        raise FormatError(thing, expected="an alias of a tensor that holds weights", found=f"alias {target.name!r}")
    if (target.dtype, target.shape) != (tensor.dtype, tensor.shape):
        raise FormatError(
            thing,
            expected=f"{target.dtype} {list(target.shape)} like {target.name!r}",
            found=f"{tensor.dtype} {list(tensor.shape)}",
        )
