"""What a test vector is: one frame, the lanes that it starts from and leads to, and its bytes.

`frames/NAME.json` holds the layout's tensors, the rectangles, the mode that it was encoded in (empty: whole;
`folded` and `table`: as no encoder would, for decoders only), the canonical bytes of every tensor before
and after in hex, and the frame's bytes in hex (empty: nothing changed, so there is no frame). Stored
streams are as one zstd made them; another one may store the same plain streams otherwise, so those are
what encoders are compared by.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deltad.delta.backend import UNSIGNED
from deltad.delta.frame import Rect
from deltad.delta.layout import Layout, TensorSpec
from deltad.types import DTYPES
from tests.kit.weights import ArrayWeights

HERE = Path(__file__).parent
FRAMES = HERE / "frames"


@dataclass(frozen=True)
class Vector:
    name: str
    tensors: tuple[TensorSpec, ...]
    rects: tuple[Rect, ...]
    mode: str
    base: ArrayWeights
    target: ArrayWeights
    frame: bytes

    @property
    def layout(self) -> Layout:
        return Layout(1, self.tensors)

    def write(self) -> None:
        fields = {
            "tensors": [[spec.name, spec.dtype, list(spec.shape)] for spec in self.tensors],
            "rects": [[rect.tensor, list(rect.offset), list(rect.extent)] for rect in self.rects],
            "mode": self.mode,
            "base": [array.tobytes().hex() for array in self.base.arrays],
            "target": [array.tobytes().hex() for array in self.target.arrays],
            "frame": self.frame.hex(),
        }
        lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in fields.items())
        (FRAMES / f"{self.name}.json").write_text(f"{{\n{lines}\n}}\n")

    @classmethod
    def read(cls, path: Path) -> Vector:
        fields = json.loads(path.read_text())
        tensors = tuple(TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in fields["tensors"])
        return cls(
            name=path.stem,
            tensors=tensors,
            rects=tuple(Rect(tensor, tuple(offset), tuple(extent)) for tensor, offset, extent in fields["rects"]),
            mode=fields["mode"],
            base=_weights(tensors, fields["base"]),
            target=_weights(tensors, fields["target"]),
            frame=bytes.fromhex(fields["frame"]),
        )


def _weights(tensors: tuple[TensorSpec, ...], parts: list[str]) -> ArrayWeights:
    return ArrayWeights(
        [
            np.frombuffer(bytes.fromhex(part), UNSIGNED[DTYPES[spec.dtype].lane_bytes]).copy()
            for spec, part in zip(tensors, parts, strict=True)
        ]
    )


def all_vectors() -> list[Vector]:
    return [Vector.read(path) for path in sorted(FRAMES.glob("*.json"))]
