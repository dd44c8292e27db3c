"""Live weights: every byte that is served belongs to exactly one tensor of the layout, or the replica refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from deltad.checkpoint import open_checkpoint
from deltad.delta.codec import sum_weights
from deltad.delta.layout import Layout, TensorSpec
from deltad.errors import ReplicaError
from rollout_plugin.apply.live import DTYPE_NAMES, LiveWeights


def layout(*specs: TensorSpec) -> Layout:
    return Layout(1, tuple(sorted(specs, key=lambda spec: spec.name)))


class Holder(torch.nn.Module):
    """A module with whatever tensors a test gives it."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def floats(*shape: int) -> torch.Tensor:
    return torch.arange(1, 1 + int(np.prod(shape)), dtype=torch.float32).reshape(shape)


def test_the_root_of_a_loaded_model_is_the_root_of_its_checkpoint(tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16)
    with open_checkpoint(tiny) as checkpoint:
        live = LiveWeights(checkpoint.layout, model)
        assert "lm_head.weight" not in checkpoint.layout.index, "the tiny model ties its head"
        assert np.array_equal(sum_weights(checkpoint.layout, live), sum_weights(checkpoint.layout, checkpoint))


@pytest.mark.parametrize("dtype", list(DTYPE_NAMES), ids=str)
def test_writing_a_lane_changes_the_parameter_itself_whatever_its_dtype(dtype: torch.dtype) -> None:
    raw = np.arange(6 * dtype.itemsize, dtype=np.uint8) % 2
    tensor = torch.from_numpy(raw).view(dtype).reshape(2, 3)
    live = LiveWeights(layout(TensorSpec("w", DTYPE_NAMES[dtype], (2, 3))), Holder(w=tensor))
    assert live.whole(0).tobytes() == raw.tobytes()
    live.whole(0)[4] ^= 1
    assert raw[4 * dtype.itemsize] == (4 * dtype.itemsize) % 2 ^ 1


def test_scalars_and_empty_tensors_have_lanes_too() -> None:
    specs = (TensorSpec("empty", "F32", (0, 4)), TensorSpec("scalar", "F32", ()))
    live = LiveWeights(layout(*specs), Holder(empty=torch.zeros(0, 4), scalar=torch.tensor(1.5)))
    assert live.whole(0).size == 0
    assert live.whole(1).view(np.float32).tolist() == [1.5]


def test_lanes_are_a_window_of_the_whole() -> None:
    live = LiveWeights(layout(TensorSpec("w", "F32", (3, 4))), Holder(w=floats(3, 4)))
    assert live.lanes(0, 5, 2).view(np.float32).tolist() == [6.0, 7.0]


def test_a_tied_head_may_be_missing_from_the_layout_or_be_an_alias_in_it() -> None:
    weight = floats(4, 2)
    model = Holder(embed=weight, head=weight)
    embed = TensorSpec("embed", "F32", (4, 2))
    LiveWeights(layout(embed), model)
    live = LiveWeights(layout(embed, TensorSpec("head", "F32", (4, 2), alias_of="embed")), model)
    with pytest.raises(ReplicaError, match="an alias, which holds none"):
        live.whole(1)


def test_an_alias_may_be_missing_from_the_engine() -> None:
    embed, head = TensorSpec("embed", "F32", (4, 2)), TensorSpec("head", "F32", (4, 2), alias_of="embed")
    LiveWeights(layout(embed, head), Holder(embed=floats(4, 2)))


def test_a_head_that_kept_its_old_copy_is_refused() -> None:
    embed, head = TensorSpec("embed", "F32", (4, 2)), TensorSpec("head", "F32", (4, 2), alias_of="embed")
    with pytest.raises(ReplicaError, match=r"parameter 'head'.*found a storage of its own"):
        LiveWeights(layout(embed, head), Holder(embed=floats(4, 2), head=floats(4, 2)))


def test_two_tensors_of_the_layout_in_one_storage_are_refused() -> None:
    weight = floats(4, 2)
    embed, head = TensorSpec("embed", "F32", (4, 2)), TensorSpec("head", "F32", (4, 2))
    with pytest.raises(ReplicaError, match=r"tensor 'head'.*the storage of 'embed'"):
        LiveWeights(layout(embed, head), Holder(embed=weight, head=weight))


def test_parameters_that_overlap_are_refused() -> None:
    fused = floats(4, 2)
    specs = (TensorSpec("a", "F32", (3, 2)), TensorSpec("b", "F32", (2, 2)))
    with pytest.raises(ReplicaError, match=r"parameter 'b'.*one inside 'a'"):
        LiveWeights(layout(*specs), Holder(a=fused[:3], b=fused[2:]))


@pytest.mark.parametrize(
    ("held", "words"),
    [
        (Holder(), r"tensor 'w': expected a parameter of that name in the engine, found none"),
        (Holder(w=floats(3, 2)), r"tensor 'w': expected shape \[2, 3\], found \[3, 2\]"),
        (Holder(w=floats(2, 3).double()), r"tensor 'w': expected dtype F32, found F64"),
        (Holder(w=floats(3, 2).T), r"tensor 'w': expected a contiguous parameter"),
        (Holder(w=torch.zeros(0)), r"tensor 'w': expected 6 live elements.*packed the weights away"),
        (Holder(w=floats(2, 3).to("meta")), r"tensor 'w': expected a parameter in host memory, found device meta"),
        (Holder(w=floats(2, 3), bias=floats(3)), r"parameter 'bias': expected a tensor of the layout"),
    ],
    ids=["missing", "shape", "dtype", "strides", "packed away", "device", "unaccounted"],
)
def test_an_engine_that_the_layout_does_not_cover_is_refused_by_name(held: Holder, words: str) -> None:
    with pytest.raises(ReplicaError, match=words):
        LiveWeights(layout(TensorSpec("w", "F32", (2, 3))), held)


def test_buffers_that_are_derived_need_no_tensor() -> None:
    model = Holder(w=floats(2, 3))
    model.register_buffer("inverse_frequencies", floats(8), persistent=False)
    LiveWeights(layout(TensorSpec("w", "F32", (2, 3))), model)


def test_a_parameter_that_the_engine_replaced_is_noticed() -> None:
    model = Holder(w=floats(2, 3))
    live = LiveWeights(layout(TensorSpec("w", "F32", (2, 3))), model)
    live.check_live()
    model.w = floats(2, 3)
    with pytest.raises(ReplicaError, match=r"parameter 'w'.*found another one"):
        live.check_live()
