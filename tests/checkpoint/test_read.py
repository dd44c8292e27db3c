"""Reading a checkpoint: ties, the cast, changes while it is read (P2), and bounded memory (P25)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from deltad.checkpoint import open_checkpoint
from deltad.errors import CheckpointChangedError, CheckpointError
from tests.checkpoint.shards import Tensor, bf16, packed, write_sharded, write_single

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
TIED, UNTIED = '{"tie_word_embeddings": true}', '{"tie_word_embeddings": false}'


def with_config(directory: Path, config: str) -> Path:
    (directory / "config.json").write_text(config)
    return directory


@pytest.mark.parametrize("config", [TIED, '{"text_config": {"tie_word_embeddings": true}}'])
def test_a_head_with_the_bits_of_the_embedding_is_an_alias_where_the_config_ties_them(
    tmp_path: Path, config: str
) -> None:
    same = "BF16", [4, 8], bf16(32)[2]
    write_sharded(tmp_path, [{HEAD: same}, {EMBEDDING: same, "z": bf16(4)}])
    with open_checkpoint(with_config(tmp_path, config)) as checkpoint:
        head, embedding, _ = checkpoint.layout.tensors
        assert (head.alias_of, embedding.alias_of) == (EMBEDDING, "")
        assert checkpoint.layout.weight_bytes == 64 + 8
        assert checkpoint.lanes(0, 0, 0).size == 0


def vector(*values: float) -> Tensor:
    return "F32", [len(values)], np.array(values, np.float32).tobytes()


@pytest.mark.parametrize(
    ("head", "embedding", "config"),
    [
        (vector(1, 2, 0.0), vector(1, 2, -0.0), TIED),
        (vector(1, 2), vector(1, 2.0000002), TIED),
        (vector(1, 2), ("F32", [1, 2], vector(1, 2)[2]), TIED),
        (vector(1, 2), ("U32", [2], vector(1, 2)[2]), TIED),
        (vector(1, 2), vector(1, 2), UNTIED),
        (vector(1, 2), vector(1, 2), "{}"),
        (vector(1, 2), vector(1, 2), '{"tie_word_embeddings": "yes"}'),
    ],
    ids=["another zero", "one bit", "another shape", "another dtype", "not tied", "not said", "said oddly"],
)
def test_anything_else_stays_two_tensors(tmp_path: Path, head: Tensor, embedding: Tensor, config: str) -> None:
    write_single(tmp_path, {HEAD: head, EMBEDDING: embedding})
    for publish_as in ("source", "bf16"):
        with open_checkpoint(with_config(tmp_path, config), publish_as=publish_as) as checkpoint:
            assert [spec.alias_of for spec in checkpoint.layout.tensors] == ["", ""]


def test_a_head_that_is_left_out_is_absent(tmp_path: Path) -> None:
    write_single(tmp_path, {EMBEDDING: bf16(4)})
    with open_checkpoint(with_config(tmp_path, TIED)) as checkpoint:
        assert [spec.name for spec in checkpoint.layout.tensors] == [EMBEDDING]


def test_published_as_bf16_floats_are_rounded_as_torch_does_and_nothing_else_is_touched(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(7)
    wide = torch.randn(70_001, generator=generator) * torch.logspace(-44, 38, 70_001)
    others = {"h": wide.half(), "d": wide[:9].double(), "i": torch.arange(5, dtype=torch.int32), "b": wide.bfloat16()}
    save_file({"w": wide, **others}, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as source, open_checkpoint(tmp_path, publish_as="bf16") as cast:
        specs = {spec.name: spec for spec in cast.layout.tensors}
        assert (specs["w"].dtype, specs["w"].shape) == ("BF16", (70_001,))
        for i, spec in enumerate(cast.layout.tensors):
            if spec.name == "w":
                expected = wide.bfloat16().view(torch.uint16).numpy()
                assert np.array_equal(cast.lanes(i, 0, spec.lanes), expected)
                assert np.array_equal(cast.lanes(i, 333, 777), expected[333:1110])
            else:
                assert spec == source.layout.tensors[i]
                assert np.array_equal(cast.lanes(i, 0, spec.lanes), source.lanes(i, 0, spec.lanes))


# P2: whatever a trainer does to a checkpoint that is being read.

MODEL = "model.safetensors"


def overwrite_in_place(directory: Path) -> None:
    content = packed({"x": bf16(5000, seed=2)})
    with (directory / MODEL).open("r+b") as file:
        file.write(content)


def replace(directory: Path) -> None:
    (directory / "new").write_bytes(packed({"x": bf16(5000, seed=2)}))
    os.replace(directory / "new", directory / MODEL)


CHANGES: dict[str, Callable[[Path], object]] = {
    "overwritten in place": overwrite_in_place,
    "truncated": lambda directory: os.truncate(directory / MODEL, 100),
    "grown": lambda directory: os.truncate(directory / MODEL, 20_000),
    "replaced by a rename": replace,
    "removed": lambda directory: (directory / MODEL).unlink(),
    "joined by another shard": lambda directory: (directory / "model-2.safetensors").write_bytes(b""),
    "joined by a tokenizer": lambda directory: (directory / "tokenizer.json").write_bytes(b"{}"),
    "given another config": lambda directory: (directory / "config.json").write_bytes(b'{"a": 1}'),
    "put elsewhere": lambda directory: os.rename(directory, directory.with_name("elsewhere")),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_checkpoint_that_is_changed_while_it_is_read_is_noticed(
    tmp_path: Path, change: Callable[[Path], object]
) -> None:
    directory = with_config(write_single(tmp_path / "step_1", {"x": bf16(5000)}), "{}")
    # Old enough that a change gets another time, whatever the resolution of the file system's clock.
    for path in directory.iterdir():
        os.utime(path, (1_700_000_000, 1_700_000_000))
    with open_checkpoint(directory) as checkpoint:
        checkpoint.lanes(0, 0, 10)
        checkpoint.check_unchanged()
        change(directory)
        with pytest.raises(CheckpointChangedError) as caught:
            checkpoint.check_unchanged()
        assert str(directory) in str(caught.value)
        assert caught.value.retryable


def test_a_file_that_is_cut_short_under_the_reader_is_an_error_and_not_its_death(tmp_path: Path) -> None:
    with open_checkpoint(write_single(tmp_path, {"x": bf16(5000)})) as checkpoint:
        before = checkpoint.lanes(0, 0, 5000)
        os.truncate(tmp_path / MODEL, 4096)
        with pytest.raises(CheckpointChangedError, match="the end of the file"):
            checkpoint.lanes(0, 0, 5000)
        assert before.tobytes() == bf16(5000)[2], "a window that was read is the reader's own"


def test_a_replaced_file_is_read_as_it_was_opened(tmp_path: Path) -> None:
    with open_checkpoint(write_single(tmp_path, {"x": bf16(5000)})) as checkpoint:
        replace(tmp_path)
        assert checkpoint.lanes(0, 0, 5000).tobytes() == bf16(5000)[2]


def test_another_file_of_the_same_name_is_not_handed_out_as_the_layouts(tmp_path: Path) -> None:
    directory = with_config(write_single(tmp_path, {"x": bf16(4)}), "{}")
    with open_checkpoint(directory) as checkpoint:
        assert checkpoint.file_bytes("config.json") == b"{}"
        (directory / "config.json").write_bytes(b"[]")
        with pytest.raises(CheckpointChangedError):
            checkpoint.file_bytes("config.json")
        (directory / "config.json").unlink()
        with pytest.raises(CheckpointError):
            checkpoint.file_bytes("config.json")


def test_a_closed_checkpoint_reads_nothing(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_single(tmp_path, {"x": bf16(4)}))
    checkpoint.close()
    checkpoint.close()
    with pytest.raises(ValueError, match="closed"):
        checkpoint.lanes(0, 0, 1)


@given(changed=st.booleans(), at=st.integers(0, 30))
def test_equal_fingerprints_mean_that_nothing_was_written(
    tmp_path_factory: pytest.TempPathFactory, changed: bool, at: int
) -> None:
    directory = write_single(tmp_path_factory.mktemp("fingerprint"), {"x": bf16(16)})
    os.utime(directory / MODEL, (1_700_000_000, 1_700_000_000))
    with open_checkpoint(directory) as before:
        if changed:
            with (directory / MODEL).open("r+b") as file:
                file.seek(-1 - at, os.SEEK_END)
                file.write(b"!")
        with open_checkpoint(directory) as after:
            assert (before.fingerprint == after.fingerprint) == (not changed)


GROWTH = """
import json, resource, sys
from pathlib import Path
from deltad.checkpoint import open_checkpoint

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

grown = {}
for publish_as in ("source", "bf16"):
    with open_checkpoint(Path(sys.argv[1]), publish_as=publish_as) as checkpoint:
        checkpoint.lanes(0, 0, 1)
        before, read = peak(), 0
        for i, spec in enumerate(checkpoint.layout.tensors):
            step = (4 << 20) // spec.type.lane_bytes
            for start in range(0, spec.lanes, step):
                window = checkpoint.lanes(i, start, min(step, spec.lanes - start))
                read += window.nbytes
                assert not window.any()
                checkpoint.release(i, start, window.size)
        checkpoint.check_unchanged()
    grown[publish_as] = {"read": read, "growth": peak() - before}
print(json.dumps(grown))
"""


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    lanes = 75_000_000  # 300 MB of F32 in one tensor, none of it on the disk
    header = json.dumps({"x": {"dtype": "F32", "shape": [lanes], "data_offsets": [0, 4 * lanes]}}).encode()
    path = tmp_path / MODEL
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + 4 * lanes)
    done = subprocess.run(
        [sys.executable, "-c", GROWTH, str(tmp_path)], capture_output=True, text=True, check=True, timeout=120
    )
    grown = json.loads(done.stdout)
    assert grown["source"]["read"] == 4 * lanes
    assert grown["bf16"]["read"] == 2 * lanes
    assert grown["source"]["growth"] < 48 << 20
    assert grown["bf16"]["growth"] < 48 << 20
