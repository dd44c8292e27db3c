"""Writing a checkpoint: what comes back is what went in, and the usual libraries load it."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from deltad.checkpoint import CheckpointWriter, open_checkpoint
from deltad.delta.encoding import sha256
from deltad.delta.layout import FileSpec, Layout, TensorSpec
from deltad.errors import CheckpointError, IntegrityError, UsageError
from tests.checkpoint.shards import INDEX
from tests.kit.weights import ArrayWeights, layouts, weights

CONFIG = b'{"architectures": []}'


def write(directory: Path, layout: Layout, source: ArrayWeights, *, shard_bytes: int = 1 << 30) -> None:
    with CheckpointWriter(directory, layout, shard_bytes=shard_bytes) as writer:
        for i, spec in enumerate(layout.tensors):
            assert writer.lanes(i, 0, spec.lanes).flags.aligned
            writer.lanes(i, 0, spec.lanes)[:] = source.lanes(i, 0, spec.lanes)
            writer.release(i, 0, spec.lanes)
        for file in layout.files:
            writer.write_file(file.name, CONFIG)
        writer.finish()


@given(data=st.data(), shard_bytes=st.sampled_from([1, 40, 200, 1 << 30]))
def test_any_weights_come_back_bit_for_bit_however_they_are_cut(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, shard_bytes: int
) -> None:
    directory = tmp_path_factory.mktemp("writer") / "out"
    layout = data.draw(layouts(max_tensors=6))
    source = data.draw(weights(layout))
    write(directory, layout, source, shard_bytes=shard_bytes)
    with open_checkpoint(directory) as checkpoint:
        assert checkpoint.layout == layout
        read = ArrayWeights([checkpoint.lanes(i, 0, spec.lanes) for i, spec in enumerate(layout.tensors)])
        assert read.equals(source)
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "numpy") as file:
            assert set(file.keys()) <= set(layout.index)
        assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0
    assert (directory / INDEX).exists() == (len(list(directory.glob("*.safetensors"))) > 1)


def a_layout(**lanes: int) -> Layout:
    return Layout(1, tuple(TensorSpec(name, "BF16", (count,)) for name, count in sorted(lanes.items())))


def test_shards_are_whole_tensors_in_layout_order_below_the_given_size(tmp_path: Path) -> None:
    layout = a_layout(a=10, b=10, c=60, d=5, e=15)
    write(tmp_path / "out", layout, ArrayWeights.random(layout), shard_bytes=40)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["total_size"] == layout.weight_bytes == 200
    places = [int(index["weight_map"][name].split("-")[1]) for name in "abcde"]
    assert places == [1, 1, 2, 3, 3]


def test_tensors_are_zero_until_they_are_written_and_windows_are_writable(tmp_path: Path) -> None:
    layout = a_layout(a=10_000)
    with CheckpointWriter(tmp_path / "out", layout) as writer:
        assert not writer.lanes(0, 0, 10_000).any()
        writer.lanes(0, 5000, 3)[:] = [1, 2, 3]
        writer.release(0, 0, 10_000)
        assert writer.lanes(0, 4999, 5).tolist() == [0, 1, 2, 3, 0]
        with pytest.raises(ValueError, match="lanes"):
            writer.lanes(0, 9999, 2)
        writer.finish()
        with pytest.raises(ValueError, match="closed"):
            writer.lanes(0, 0, 1)
    with open_checkpoint(tmp_path / "out") as checkpoint:
        assert checkpoint.lanes(0, 4999, 5).tolist() == [0, 1, 2, 3, 0]


@pytest.mark.parametrize("shard_bytes", [8, 1 << 20])
def test_until_it_is_finished_there_is_nothing_that_loads(tmp_path: Path, shard_bytes: int) -> None:
    layout = a_layout(a=4, b=4)
    writer = CheckpointWriter(tmp_path / "out", layout, shard_bytes=shard_bytes)
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".incomplete"}
    writer.finish()
    open_checkpoint(tmp_path / "out").close()
    assert not list((tmp_path / "out").glob("*.incomplete"))


def test_what_is_left_unfinished_is_removed(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "out", a_layout(a=4)) as writer:
        writer.lanes(0, 0, 4)[:] = 1
    assert not list((tmp_path / "out").iterdir())


def test_a_directory_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(UsageError, match="a new or an empty directory"):
        CheckpointWriter(tmp_path, a_layout(a=4))
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_file_is_written_only_if_it_is_the_layouts(tmp_path: Path) -> None:
    layout = Layout(1, (), (FileSpec("config.json", len(CONFIG), sha256(CONFIG)),))
    with CheckpointWriter(tmp_path / "out", layout) as writer:
        with pytest.raises(IntegrityError):
            writer.write_file("config.json", b"{}")
        with pytest.raises(UsageError):
            writer.write_file("../config.json", CONFIG)
        writer.write_file("config.json", CONFIG)
        writer.finish()
    assert (tmp_path / "out" / "config.json").read_bytes() == CONFIG


FULL_DISK = """
import resource, sys
from pathlib import Path
from deltad.checkpoint import CheckpointWriter
from deltad.delta.layout import Layout, TensorSpec
from deltad.errors import StoreFullError

resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
layout = Layout(1, tuple(TensorSpec(name, "U8", (size,)) for name, size in (("a", 1 << 19), ("b", 1 << 21))))
try:
    CheckpointWriter(Path(sys.argv[1]), layout, shard_bytes=1 << 19)
except StoreFullError as error:
    print(error)
"""


def test_no_room_is_an_error_before_anything_is_mapped_and_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path / "out")], capture_output=True, text=True, check=True, timeout=60
    )
    assert "expected room for" in done.stdout
    assert not list((tmp_path / "out").iterdir())


def test_all_of_its_room_is_taken_before_anything_is_written(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "out", a_layout(a=1 << 20)):
        (path,) = (tmp_path / "out").iterdir()
        assert path.stat().st_blocks * 512 >= path.stat().st_size > 2 << 20


def tiny_llama(*, tied: bool, dtype: torch.dtype = torch.bfloat16) -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).to(dtype)


def copy(source: Path, target: Path, shard_bytes: int) -> Layout:
    with (
        open_checkpoint(source) as checkpoint,
        CheckpointWriter(target, checkpoint.layout, shard_bytes=shard_bytes) as to,
    ):
        for i, spec in enumerate(checkpoint.layout.tensors):
            to.lanes(i, 0, spec.lanes)[:] = checkpoint.lanes(i, 0, spec.lanes)
        for file in checkpoint.layout.files:
            to.write_file(file.name, checkpoint.file_bytes(file.name))
        to.finish()
        return checkpoint.layout


@pytest.mark.parametrize("shard_bytes", [4000, 1 << 30], ids=["sharded", "single"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_transformers_loads_what_was_read_and_written(tmp_path: Path, tied: bool, shard_bytes: int) -> None:
    model = tiny_llama(tied=tied)
    model.save_pretrained(tmp_path / "saved", max_shard_size="6KB" if shard_bytes == 4000 else "5GB")
    copy(tmp_path / "saved", tmp_path / "copy", shard_bytes)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "copy", dtype="auto")
    expected, found = model.state_dict(), loaded.state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name].view(torch.int16), found[name].view(torch.int16)) for name in expected)
    assert (loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()) == tied


def test_a_head_that_its_trainer_wrote_twice_is_tied_again_by_transformers(tmp_path: Path) -> None:
    model = tiny_llama(tied=True)
    model.save_pretrained(tmp_path / "saved")
    from safetensors.torch import load_file, save_file

    tensors = load_file(tmp_path / "saved" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "saved" / "model.safetensors", metadata={"format": "pt"})
    layout = copy(tmp_path / "saved", tmp_path / "copy", 1 << 30)
    assert layout.tensors[layout.index["lm_head.weight"]].alias_of == "model.embed_tokens.weight"
    with safe_open(tmp_path / "copy" / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "copy", dtype="auto")
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()


def test_its_own_memory_is_let_go(tmp_path: Path) -> None:
    layout = Layout(1, (TensorSpec("a", "U8", (64 << 20,)),))
    with CheckpointWriter(tmp_path / "out", layout) as writer:
        before = resident()
        for start in range(0, 64 << 20, 4 << 20):
            writer.lanes(0, start, 4 << 20)[:] = 7
            writer.release(0, start, 4 << 20)
        assert resident() - before < 24 << 20
        assert np.all(writer.lanes(0, 60 << 20, 4 << 20) == 7)


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


WRITE = """
import sys
from pathlib import Path
from deltad.checkpoint import CheckpointWriter
from deltad.delta.layout import Layout, TensorSpec
from deltad.errors import StoreError

layout = Layout(1, tuple(TensorSpec(name, "U8", (8,)) for name in "ab"))
try:
    with CheckpointWriter(Path(sys.argv[1]), layout, shard_bytes=8) as writer:
        for i in range(2):
            writer.lanes(i, 0, 8)[:] = 1 + i
        writer.finish()
except StoreError as error:
    print(error)
"""
CALLS = {"fsync": 5, "rename": 3}
"""What `finish` asks of the operating system for two shards and an index."""


def traced(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Write two shards under strace."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed; with it, this reads what is synced and dies at each step")
    return subprocess.run(
        ["strace", "-f", "-y", *options, "-o", str(directory) + ".trace", sys.executable, "-c", WRITE, str(directory)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_a_file_gets_its_name_after_it_is_synced_and_the_index_last(tmp_path: Path) -> None:
    assert traced(tmp_path / "out", "-e", "trace=fsync,rename").returncode == 0
    synced, named = [], []
    for line in (tmp_path / "out.trace").read_text().splitlines():
        if "fsync(" in line:
            synced.append(Path(line.split("<")[1].split(">")[0]).name)
        elif "rename(" in line:
            old, new = (Path(part).name for part in line.split('"')[1::2])
            assert old in synced
            named.append(new)
            assert new != INDEX or synced[-1] == "out", "the shards' names are durable before the index has its"
    assert named[-1] == INDEX
    assert len(named) == 3
    assert synced[-1] == "out"


@pytest.mark.parametrize(("call", "number"), [(call, i) for call in CALLS for i in range(1, CALLS[call] + 1)])
def test_killed_at_any_step_it_leaves_a_whole_checkpoint_or_nothing_that_loads(
    tmp_path: Path, call: str, number: int
) -> None:
    killed = traced(tmp_path / "out", "-e", f"inject={call}:signal=SIGKILL:when={number}")
    assert killed.returncode == -signal.SIGKILL
    try:
        checkpoint = open_checkpoint(tmp_path / "out")
    except CheckpointError:
        return
    with checkpoint:
        assert [checkpoint.lanes(i, 0, 8).tolist() for i in range(2)] == [[1] * 8, [2] * 8]


@pytest.mark.parametrize(("call", "number"), [("fsync", 1), ("fsync", 2), ("fsync", 3), ("fsync", 4)])
def test_a_sync_that_fails_is_not_tried_again_and_nothing_is_left_that_loads(
    tmp_path: Path, call: str, number: int
) -> None:
    done = traced(tmp_path / "out", "-e", f"inject={call}:error=EIO:when={number}")
    assert "Input/output error" in done.stdout
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path / "out").close()
