"""Opening a checkpoint directory: what is complete opens, and everything else gives one clear line (P1)."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltad.checkpoint import Checkpoint, check_complete, fingerprint, open_checkpoint
from deltad.delta.codec import sum_weights
from deltad.delta.encoding import sha256
from deltad.errors import CheckpointError, DeltadError, LimitError, UsageError
from deltad.limits import Limits
from tests.checkpoint.shards import (
    INDEX,
    as_weights,
    bf16,
    packed,
    random_tensors,
    raw_file,
    write_index,
    write_sharded,
    write_single,
)

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def contents(checkpoint: Checkpoint) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {
        spec.name: (spec.dtype, spec.shape, checkpoint.lanes(i, 0, spec.lanes).tobytes())
        for i, spec in enumerate(checkpoint.layout.tensors)
    }


def test_a_single_file_opens_with_every_dtype_scalar_and_empty_tensor(tmp_path: Path) -> None:
    tensors = random_tensors()
    with open_checkpoint(write_single(tmp_path, tensors)) as checkpoint:
        names = [spec.name for spec in checkpoint.layout.tensors]
        assert names == sorted(tensors)
        assert contents(checkpoint) == {name: (d, tuple(shape), data) for name, (d, shape, data) in tensors.items()}


def test_the_layout_does_not_depend_on_how_the_trainer_cut_its_files(tmp_path: Path) -> None:
    tensors = random_tensors()
    items = list(tensors.items())
    shards = [dict(items[:9]), {}, dict(items[9:10]), dict(items[10:])]
    with (
        open_checkpoint(write_single(tmp_path / "one", tensors)) as one,
        open_checkpoint(write_sharded(tmp_path / "many", shards)) as many,
        open_checkpoint(write_single(tmp_path / "named", tensors, "policy.safetensors")) as named,
    ):
        assert one.layout == many.layout == named.layout
        expected = sum_weights(one.layout, as_weights(tensors))
        for checkpoint in (one, many, named):
            assert np.array_equal(sum_weights(checkpoint.layout, checkpoint), expected)


@given(st.data())
def test_a_window_is_a_window_of_the_whole(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    directory = tmp_path_factory.mktemp("window")
    with open_checkpoint(write_single(directory, {"odd": ("U8", [3], b"abc"), "x": bf16(100)})) as checkpoint:
        start = data.draw(st.integers(0, 100))
        count = data.draw(st.integers(0, 100 - start))
        whole = checkpoint.lanes(1, 0, 100)
        assert np.array_equal(checkpoint.lanes(1, start, count), whole[start : start + count])
        with pytest.raises(ValueError, match="lanes"):
            checkpoint.lanes(1, start, 101 - start)


def test_the_files_beside_the_weights_travel_if_they_are_known_data(tmp_path: Path) -> None:
    write_single(tmp_path, {"x": bf16(4)})
    (tmp_path / "config.json").write_text('{"time_step_limit": [0.0, Infinity]}')
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "modeling_custom.py").write_text("import os")
    (tmp_path / "optimizer.pt").write_bytes(b"pickle")
    with open_checkpoint(tmp_path) as checkpoint:
        assert [file.name for file in checkpoint.layout.files] == ["config.json", "tokenizer.json"]
        assert checkpoint.file_bytes("tokenizer.json") == b"{}"
        assert checkpoint.layout.files[1].digest == sha256(b"{}")
        with pytest.raises(UsageError):
            checkpoint.file_bytes("modeling_custom.py")


@pytest.mark.parametrize("folder", ["huggingface", "actor/huggingface"])
def test_a_checkpoint_in_a_subfolder_of_its_step_is_found(tmp_path: Path, folder: str) -> None:
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / "model_world_size_1_rank_0.pt").write_bytes(b"pickle")
    write_single(tmp_path / folder, {"x": bf16(4)})
    (tmp_path / folder / "config.json").write_text("{}")
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.directory == tmp_path
        names = [f"{folder}/config.json", f"{folder}/model.safetensors"]
        assert [stamp.name for stamp in checkpoint.fingerprint.files] == names
        assert check_complete(tmp_path) == checkpoint.fingerprint


# What is refused. Each case spoils a directory that holds a true sharded checkpoint of a, b and c.

Spoil = Callable[[Path], None]


def remove(*names: str) -> Spoil:
    return lambda directory: [(directory / name).unlink() for name in names] and None


def put(name: str, content: bytes | str) -> Spoil:
    def spoil(directory: Path) -> None:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return spoil


def index(**weight_map: str) -> Spoil:
    return lambda directory: write_index(directory, weight_map)


def cut(name: str, size: int) -> Spoil:
    return lambda directory: os.truncate(directory / name, (directory / name).stat().st_size - size)


def empty(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.mkdir()


def both(*spoils: Spoil) -> Spoil:
    return lambda directory: [spoil(directory) for spoil in spoils] and None


def link_out(name: str) -> Spoil:
    def spoil(directory: Path) -> None:
        outside = directory.parent / ("outside-" + name)
        if (directory / name).exists():
            os.rename(directory / name, outside)
        else:
            outside.write_bytes(b"{}")
        (directory / name).symlink_to(outside)

    return spoil


TRUE = {"a": FIRST, "b": FIRST, "c": SECOND}
A = "BF16", [4], bytes(8)

REFUSED: dict[str, tuple[Spoil, str]] = {
    "empty": (empty, "an empty directory"),
    "missing": (shutil.rmtree, "nothing of that name"),
    "not yet any index": (remove(INDEX), "2 .safetensors files without it"),
    "only the first shard": (remove(INDEX, SECOND), "1 .safetensors files without it"),
    "a shard is missing": (remove(SECOND), f"such as {SECOND}, found no such file"),
    "a shard is cut short": (cut(SECOND, 1), "not written to its end"),
    "a shard has no header yet": (put(SECOND, bytes(4096)), "not written yet"),
    "a shard is empty": (put(SECOND, b""), "found a file of 0 bytes"),
    "a tensor twice": (put(SECOND, packed({"a": A, "c": A})), f"'a': expected it in one file, found it in {FIRST}"),
    "a tensor in another file than the index says": (index(**TRUE | {"b": SECOND}), f"'b': expected it in {SECOND}"),
    "a tensor that the index names and no file has": (index(**TRUE, d=SECOND), f"'d': expected it in {SECOND}"),
    "a tensor that the index does not name": (index(a=FIRST, c=SECOND), "'b': expected only tensors that"),
    "an index that is cut short": (cut(INDEX, 9), "not JSON"),
    "an index with a tensor twice": (put(INDEX, '{"weight_map": {"a": "x", "a": "y"}}'), "'a' twice"),
    "an index that is a list": (put(INDEX, "[]"), "weight_map"),
    "an index without a weight_map": (put(INDEX, "{}"), "weight_map"),
    "an index of numbers": (put(INDEX, '{"weight_map": {"a": 3}}'), "weight_map"),
    "an index that climbs out": (index(**TRUE | {"c": "../outside.safetensors"}), "in the same directory"),
    "an index with an absolute path": (index(**TRUE | {"c": "/etc/x.safetensors"}), "in the same directory"),
    "an index with a NUL": (index(**TRUE | {"c": "x\0.safetensors"}), "no such file"),
    "an index with half a surrogate": (index(**TRUE | {"c": "\ud800.safetensors"}), "no such file"),
    "an index that names a pickle": (index(**TRUE | {"c": "pytorch_model.bin"}), "'pytorch_model.bin'"),
    "a weight file that is a link out": (link_out(SECOND), "found a link to"),
    "an index that is a link out": (link_out(INDEX), "found a link to"),
    "a config that is a link out": (link_out("config.json"), "found a link to"),
    "a config that is cut short": (put("config.json", '{"tie_word'), "config.json: expected JSON"),
    "a config that is a list": (put("config.json", "[]"), "a JSON object"),
    "an index and another save's single file": (put("model.safetensors", packed({"a": A})), "found both"),
    "a weight file that is a directory": (both(remove(SECOND), lambda d: (d / SECOND).mkdir()), "a regular file"),
    "a weight file that is a pipe": (both(remove(SECOND), lambda d: os.mkfifo(d / SECOND)), "a regular file"),
    "links in a circle": (both(remove(SECOND), lambda d: (d / SECOND).symlink_to(SECOND)), SECOND),
    "a disk delta": (
        lambda d: write_index(d, TRUE, delta_encoding="xor", version="000003"),
        "a disk-delta directory (xor)",
    ),
    "an empty disk delta": (lambda d: write_index(d, {}, delta_encoding="overwrite"), "a disk-delta directory"),
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_sharded(tmp_path / "step_7", [{"a": bf16(4), "b": bf16(4)}, {"c": bf16(4)}])


@pytest.mark.parametrize(("spoil", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_a_spoiled_checkpoint_gives_one_line_that_names_it(directory: Path, spoil: Spoil, reason: str) -> None:
    with open_checkpoint(directory) as checkpoint:
        assert [spec.name for spec in checkpoint.layout.tensors] == ["a", "b", "c"]
    spoil(directory)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(directory).close()
    sentence = str(caught.value)
    assert str(directory) in sentence
    assert reason in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize("name", [name for name in REFUSED if "config" not in name])
def test_what_does_not_open_is_not_complete_either(directory: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=r"expected config\.json beside the weights"):
        check_complete(directory)
    (directory / "config.json").write_text("{}")
    check_complete(directory)
    REFUSED[name][0](directory)
    with pytest.raises(CheckpointError):
        check_complete(directory)


def test_a_path_to_a_file_is_no_checkpoint(directory: Path) -> None:
    with pytest.raises(CheckpointError, match="a checkpoint directory, found a file"):
        open_checkpoint(directory / FIRST).close()


def test_a_subfolder_that_is_a_link_out_is_refused(tmp_path: Path) -> None:
    write_single(tmp_path / "elsewhere", {"x": bf16(4)})
    (tmp_path / "step_1").mkdir()
    (tmp_path / "step_1" / "huggingface").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="a folder inside the checkpoint"):
        open_checkpoint(tmp_path / "step_1").close()


def test_links_within_the_checkpoint_and_to_it_are_followed(directory: Path, tmp_path: Path) -> None:
    (directory / "blobs").mkdir()
    os.rename(directory / SECOND, directory / "blobs" / "123")
    (directory / SECOND).symlink_to("blobs/123")
    (tmp_path / "latest").symlink_to(directory)
    with open_checkpoint(tmp_path / "latest") as checkpoint:
        assert len(contents(checkpoint)) == 3


def test_every_prefix_of_a_save_is_refused_until_its_last_byte(tmp_path: Path) -> None:
    """P1: the files of a save, cut after every few bytes, in the order in which save_pretrained writes them."""
    whole = write_sharded(tmp_path / "whole", [{"a": bf16(4)}, {"b": bf16(4)}])
    parts = [(name, (whole / name).read_bytes()) for name in (FIRST, SECOND, INDEX)]
    growing = tmp_path / "growing"
    growing.mkdir()
    for name, content in parts:
        for end in range(0, len(content), 7):
            (growing / name).write_bytes(content[:end])
            with pytest.raises(CheckpointError):
                open_checkpoint(growing).close()
        (growing / name).write_bytes(content)
    open_checkpoint(growing).close()


def test_ceilings_are_checked(directory: Path) -> None:
    for limits in (
        Limits(tensors=2),
        Limits(checkpoint_files=2),
        Limits(index_bytes=20),
        Limits(safetensors_header_bytes=16),
    ):
        with pytest.raises(LimitError):
            open_checkpoint(directory, limits=limits).close()
    (directory / "config.json").write_text("{}     ")
    with pytest.raises(LimitError, match=r"config\.json"):
        open_checkpoint(directory, limits=Limits(file_bytes=5)).close()


def test_an_unknown_cast_is_a_mistake_of_the_caller(directory: Path) -> None:
    with pytest.raises(UsageError, match="source or bf16"):
        open_checkpoint(directory, publish_as="fp8")


@given(
    st.dictionaries(
        st.sampled_from(["a", "b", "c", "d"]), st.sampled_from([FIRST, SECOND, "x.safetensors", "", "..", "/", "y"])
    )
)
def test_any_index_opens_the_true_checkpoint_or_nothing(
    tmp_path_factory: pytest.TempPathFactory, weight_map: dict[str, str]
) -> None:
    directory = tmp_path_factory.mktemp("index")
    write_sharded(directory, [{"a": bf16(4), "b": bf16(4)}, {"c": bf16(4)}])
    write_index(directory, weight_map)
    try:
        with open_checkpoint(directory) as checkpoint:
            opened = {spec.name for spec in checkpoint.layout.tensors}
    except DeltadError:
        opened = None
    belongs = {FIRST: {"a", "b"}, SECOND: {"c"}}
    named = set(weight_map.values())
    true = named <= belongs.keys() and all(
        belongs[file] == {tensor for tensor, where in weight_map.items() if where == file} for file in named
    )
    assert opened == (set(weight_map) if true else None)


def test_a_fingerprint_is_that_of_the_files_that_would_be_published(directory: Path) -> None:
    before = fingerprint(directory)
    assert [stamp.name for stamp in before.files] == [FIRST, SECOND, INDEX]
    assert fingerprint(directory) == before
    (directory / "optimizer.pt").write_bytes(b"more")
    (directory / "model-00003.safetensors.tmp").write_bytes(b"more")
    assert fingerprint(directory) == before
    (directory / "config.json").write_text("{}")
    assert before.difference(fingerprint(directory)) == "config.json is new"
    assert fingerprint(directory).difference(before) == "config.json is gone"
    assert fingerprint(directory / "nowhere").files == ()
    assert json.loads((directory / INDEX).read_text())["weight_map"] == TRUE


def test_a_header_that_holds_no_tensor_is_a_checkpoint_without_weights(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(raw_file({"__metadata__": {"format": "pt"}}))
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.layout.tensors == ()
