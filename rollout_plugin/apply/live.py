"""The live parameters of a torch model, seen as the tensors of a layout.

No byte is copied: every tensor of the layout is a flat numpy array of unsigned lanes over the storage
that the engine computes with, so what is read here is what is served, and what is written here is
live. May not run while a forward pass does, unless it only reads. Owns one invariant: each storage of
the model belongs to exactly one tensor of the layout, so that a root over the layout covers ALL
weights and a patch lands once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from deltad.delta.backend import Backend, Lanes
from deltad.delta.codec import Patch, apply_patch, sum_weights
from deltad.delta.digest import U64
from deltad.delta.layout import Layout, TensorSpec
from deltad.errors import ReplicaError
from rollout_plugin.engines import Checkpoint

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
"""Torch's dtypes by their safetensors names."""

LANE_DTYPES: dict[int, torch.dtype] = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
"""The unsigned dtype of a lane by its width in bytes."""


class LiveWeights:
    """Implements `rollout_plugin.engines.LiveTensors`, and gives whole tensors to write into.

    Raises ReplicaError, naming the tensor, unless model and layout cover each other exactly: a tensor
    of the layout without a parameter, a parameter or persistent buffer that no tensor accounts for,
    another shape or dtype, a parameter that is not contiguous, on another device, or packed away by the
    engine (empty), and two tensors of the layout in one storage. A tied parameter may be an alias in
    the layout or be missing there.
    """

    def __init__(self, layout: Layout, model: torch.nn.Module) -> None:
        self.layout = layout
        self._model = model
        held = _held(model)
        self._addresses = {name: tensor.data_ptr() for name, tensor in held.items()}
        self._lanes: list[Lanes | None] = []
        owners: dict[int, str] = {}
        for spec in layout.tensors:
            if spec.alias_of:
                _check_alias(spec, held)
                self._lanes.append(None)
                continue
            tensor = _checked(spec, held.get(spec.name))
            if spec.lanes:
                if (other := owners.get(tensor.data_ptr())) is not None:
                    raise ReplicaError(
                        f"tensor {spec.name!r}",
                        expected="a parameter of its own",
                        found=f"the storage of {other!r}, which the engine ties to it",
                        hint="publish the model with the tie declared in its config",
                    )
                owners[tensor.data_ptr()] = spec.name
            self._lanes.append(_as_lanes(tensor, spec))
        _check_accounted(layout, held, owners)
        _check_disjoint({name: held[name] for name in owners.values()})

    def lanes(self, tensor: int, start: int, count: int) -> Lanes:
        """A view of the live storage; empty for an alias."""
        whole = self._lanes[tensor]
        if whole is None:
            raise ReplicaError(
                f"tensor {self.layout.tensors[tensor].name!r}", expected="weights", found="an alias, which holds none"
            )
        return whole[start : start + count]

    def whole(self, tensor: int) -> Lanes:
        """All lanes of a tensor in canonical order: writing them changes what is served."""
        return self.lanes(tensor, 0, self.layout.tensors[tensor].lanes)

    def release(self, tensor: int, start: int, count: int) -> None:
        """Nothing: the engine needs them."""

    def sums(self, backend: Backend) -> U64:
        return sum_weights(self.layout, self, backend)

    def stage(self, steps: Sequence[Sequence[Patch]], backend: Backend) -> LiveWrites:
        return LiveWrites(self, steps, backend)

    def copy_from(self, checkpoint: Checkpoint) -> None:
        for tensor, lanes in checkpoint.tensors():
            self.whole(tensor)[:] = lanes

    def check_live(self) -> None:
        """Raises ReplicaError if the engine has moved a parameter: what is seen here is then not what is served."""
        for name, tensor in _held(self._model).items():
            if self._addresses.get(name) != tensor.data_ptr():
                raise ReplicaError(
                    f"parameter {name!r}",
                    expected="the storage that it was found in",
                    found="another one",
                    hint="the engine replaced its weights; load a fresh checkpoint",
                )


class LiveWrites:
    """Implements `rollout_plugin.engines.Writes`: a parameter is written as the layout has it."""

    def __init__(self, live: LiveWeights, steps: Sequence[Sequence[Patch]], backend: Backend) -> None:
        self._live = live
        self._steps = steps
        self._backend = backend
        self._undo: list[Patch] = []
        self._added: U64 = np.zeros((len(live.layout.tensors), 2), np.uint64)

    def write(self, step: int) -> U64:
        for patch in self._steps[step]:
            self._undo.append(self._apply(patch))
        return self._added.copy()

    def undo(self) -> U64:
        while self._undo:
            self._apply(self._undo[-1])
            self._undo.pop()
        return self._added.copy()

    def _apply(self, patch: Patch) -> Patch:
        """Write one patch; returns the one that undoes it."""
        spec = self._live.layout.tensors[patch.tensor]
        old = apply_patch(patch, self._live.whole(patch.tensor), spec, self._added, self._backend)
        return patch.inverted(old, spec)


def _held(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name; a tied one under each of its names."""
    return dict(model.state_dict(keep_vars=True))


def _check_alias(spec: TensorSpec, held: dict[str, torch.Tensor]) -> None:
    alias, target = held.get(spec.name), held.get(spec.alias_of)
    if alias is not None and target is not None and alias.data_ptr() != target.data_ptr():
        raise ReplicaError(
            f"parameter {spec.name!r}",
            expected=f"the storage of {spec.alias_of!r}, to which the layout ties it",
            found="a storage of its own",
            hint="the engine must tie them, or it would go on with an old copy",
        )


def _checked(spec: TensorSpec, tensor: torch.Tensor | None) -> torch.Tensor:
    thing = f"tensor {spec.name!r}"
    if tensor is None:
        raise ReplicaError(thing, expected="a parameter of that name in the engine", found="none")
    if tensor.numel() == 0 and spec.elements:
        raise ReplicaError(
            thing,
            expected=f"{spec.elements} live elements",
            found="an empty parameter",
            hint="the engine packed the weights away, where an update would not reach them",
        )
    if tuple(tensor.shape) != spec.shape:
        raise ReplicaError(thing, expected=f"shape {list(spec.shape)}", found=f"{list(tensor.shape)}")
    name = DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))
    if name != spec.dtype:
        raise ReplicaError(thing, expected=f"dtype {spec.dtype}", found=name)
    if tensor.device.type != "cpu":
        raise ReplicaError(thing, expected="a parameter in host memory", found=f"device {tensor.device}")
    if not tensor.is_contiguous():
        raise ReplicaError(
            thing, expected="a contiguous parameter", found=f"strides {tensor.stride()} for shape {list(spec.shape)}"
        )
    return tensor


def _as_lanes(tensor: torch.Tensor, spec: TensorSpec) -> Lanes:
    flat = tensor.detach().reshape(-1).view(LANE_DTYPES[spec.type.lane_bytes])
    lanes: Lanes = flat.numpy()
    return lanes


def _check_accounted(layout: Layout, held: dict[str, torch.Tensor], owners: dict[int, str]) -> None:
    for name, tensor in held.items():
        if name not in layout.index and tensor.numel() and tensor.data_ptr() not in owners:
            raise ReplicaError(
                f"parameter {name!r}",
                expected="a tensor of the layout that updates it",
                found="none",
                hint="it would keep its old weights unseen; is this the model that was published?",
            )


def _check_disjoint(tensors: dict[str, torch.Tensor]) -> None:
    end, owner = 0, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_ptr()):
        if tensor.data_ptr() < end:
            raise ReplicaError(f"parameter {name!r}", expected="a storage of its own", found=f"one inside {owner!r}'s")
        end, owner = tensor.data_ptr() + tensor.numel() * tensor.element_size(), name
