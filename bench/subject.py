"""A pair as something to encode: in memory, or as two checkpoint directories."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.pairs import Bits, Extent, States
from deltad.delta import FORMAT
from deltad.delta.layout import Layout, TensorSpec

_DTYPE = "BF16"


class Memory:
    """A flat array as weights of a layout. Implements `deltad.delta.weights.Weights`; reads and writes through."""

    def __init__(self, tensors: tuple[Extent, ...], bits: Bits) -> None:
        self._bits = bits
        self._starts = np.cumsum([0, *(extent.lanes for extent in tensors)]).tolist()

    def lanes(self, tensor: int, start: int, count: int) -> Bits:
        first = self._starts[tensor] + start
        return self._bits[first : first + count]

    def release(self, tensor: int, start: int, count: int) -> None:
        """Nothing to let go: the array is someone else's."""


@dataclass(frozen=True, slots=True)
class Subject:
    """Two states in memory, and the layout of both."""

    states: States
    layout: Layout
    old: Memory
    new: Memory

    @classmethod
    def of(cls, states: States) -> Subject:
        """The states as plain arrays in memory, whatever they were before."""
        old, new = (np.array(bits, np.uint16) for bits in (states.old, states.new))
        tensors = tuple(TensorSpec(extent.name, _DTYPE, extent.shape) for extent in states.tensors)
        return cls(
            States(states.pair, states.tensors, old, new),
            Layout(FORMAT, tensors),
            Memory(states.tensors, old),
            Memory(states.tensors, new),
        )

    def copy_of_old(self) -> tuple[Bits, Memory]:
        """A writable copy of the old state, and the same as weights."""
        bits = self.states.old.copy()
        return bits, Memory(self.states.tensors, bits)


def write_checkpoint(tensors: tuple[Extent, ...], bits: Bits, directory: Path) -> int:
    """A Hugging Face checkpoint with these weights in one file. The offset of the first weight in it."""
    directory.mkdir(parents=True)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for extent in tensors:
        end = at + 2 * extent.lanes
        header[extent.name] = {"dtype": _DTYPE, "shape": list(extent.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.write(np.ascontiguousarray(bits).data)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    return 8 + len(text)
