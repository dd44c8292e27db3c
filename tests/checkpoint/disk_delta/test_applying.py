"""Disk-delta directories, as others write them, applied and written: bit for bit, and nothing believed."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard

from deltad.checkpoint import check_complete, open_checkpoint
from deltad.checkpoint.disk_delta import (
    Checksum,
    Encoding,
    apply_disk_delta,
    find_disk_delta,
    is_named,
    write_disk_delta,
)
from deltad.delta.layout import Layout, TensorSpec
from deltad.errors import CheckpointError, DeltadError, FormatError, IntegrityError, LimitError, UsageError
from tests.kit.checkpoints import MODEL, read_checkpoint, write_checkpoint
from tests.kit.disk_deltas import INDEX, SUMS, apply_delta, difference, shard_bytes, tensor_bytes, write_delta
from tests.kit.weights import ArrayWeights

OLD = ArrayWeights.bell(MODEL)
NEW = OLD.changed(0.05)


def written(directory: Path, old: ArrayWeights = OLD, new: ArrayWeights = NEW, **how: object) -> Path:
    names = {"version": "000002", "base_version": "000001", **how}
    return write_delta(directory, tensor_bytes(old), tensor_bytes(new), **names)  # type: ignore[arg-type]


def applied(delta: Path, base: Path, layout: Layout = MODEL) -> ArrayWeights:
    found = find_disk_delta(delta)
    assert found is not None
    apply_disk_delta(found, base, layout, threads=2)
    return read_checkpoint(base)


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("checksum", ["adler32", "xxh3-128", "blake3"])
def test_what_others_wrote_is_applied_bit_for_bit(encoding: str, checksum: str, tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", OLD, shard_bytes=3000)
    delta = written(tmp_path / "weight_v000002", encoding=encoding, checksum=checksum)
    assert applied(delta, base).equals(NEW)


@pytest.mark.parametrize("encoding", list(Encoding))
@pytest.mark.parametrize("checksum", list(Checksum))
def test_what_is_written_says_to_any_reader_what_it_was_made_from(
    encoding: Encoding, checksum: Checksum, tmp_path: Path
) -> None:
    new = NEW.copy()
    new.arrays[2] = OLD.arrays[2]
    there = tmp_path / "weight_v000002"
    made = write_disk_delta(
        there, MODEL, OLD, new, version="000002", base_version="000001", encoding=encoding, checksum=checksum, threads=2
    )
    assert made.tensors == len(MODEL.tensors) - 1
    index = json.loads((there / INDEX).read_text())
    assert MODEL.tensors[2].name not in index["weight_map"], "it did not change"
    assert index["metadata"] == {
        "version": "000002",
        "base_version": "000001",
        "delta_encoding": encoding.value,
        "compression_format": "zstd",
        "checksum_format": checksum.value,
    }
    assert apply_delta(there, tensor_bytes(OLD)) == tensor_bytes(new)
    assert applied(there, write_checkpoint(tmp_path / "base", OLD)).equals(new)
    assert not list(there.glob("*.incomplete"))


def test_shards_are_cut_and_named_and_every_tensor_is_found_again(tmp_path: Path) -> None:
    there = tmp_path / "d"
    write_disk_delta(there, MODEL, OLD, NEW, version="2", base_version="1", shard_bytes=500)
    names = sorted(path.name for path in there.iterdir())
    shards = len(names) - 1
    assert shards > 1
    assert names == [*(f"model-{i:05d}-of-{shards:05d}.safetensors" for i in range(shards)), INDEX]
    assert apply_delta(there, tensor_bytes(OLD)) == tensor_bytes(NEW)


def test_a_delta_that_changes_nothing_is_an_index_alone(tmp_path: Path) -> None:
    made = write_disk_delta(tmp_path / "d", MODEL, OLD, OLD, version="2", base_version="1")
    assert made.tensors == 0
    assert [path.name for path in (tmp_path / "d").iterdir()] == [INDEX]
    base = write_checkpoint(tmp_path / "base", OLD)
    assert applied(tmp_path / "d", base).equals(OLD)
    assert applied(written(tmp_path / "theirs", new=OLD), base).equals(OLD)


def test_every_shape_and_every_name_goes_through(tmp_path: Path) -> None:
    layout = Layout(
        0,
        (
            TensorSpec('a/ß 層 "quoted"', "F64", (3, 0, 2)),
            TensorSpec("scalar", "F32", ()),
            TensorSpec("ü", "I8", (7,)),
        ),
        MODEL.files,
    )
    old = ArrayWeights.random(layout)
    new = old.changed(0.5)
    for encoding in Encoding:
        there = tmp_path / encoding
        write_disk_delta(there, layout, old, new, version="2", base_version="1", encoding=encoding)
        assert apply_delta(there, tensor_bytes(old, layout)) == tensor_bytes(new, layout)
        base = write_checkpoint(tmp_path / f"base-{encoding}", old, layout=layout)
        assert applied(there, base, layout).equals(new)


def test_positions_of_an_overwrite_may_come_in_any_order(tmp_path: Path) -> None:
    old, new = tensor_bytes(OLD), tensor_bytes(NEW)
    delta = written(tmp_path / "d", encoding="overwrite", shards=1)
    name = "embed.weight"
    before, after = np.frombuffer(old[name], np.uint8), np.frombuffer(new[name], np.uint8)
    at = np.flatnonzero(before != after)[::-1].astype("<u4")
    plain = struct.pack("<I", at.size) + at.tobytes() + after[at].tobytes()
    replace(delta, {name: zstandard.compress(plain)}, {name: SUMS["adler32"](new[name])})
    assert applied(delta, write_checkpoint(tmp_path / "base", OLD)).arrays[0].tobytes() == new[name]


def replace(delta: Path, tensors: dict[str, bytes], sums: dict[str, str]) -> None:
    """Make the delta one of these tensors alone."""
    shard = "model-00000-of-00001.safetensors"
    for path in delta.glob("*.safetensors"):
        path.unlink()
    (delta / shard).write_bytes(shard_bytes(tensors, sums))
    index = json.loads((delta / INDEX).read_text())
    index["weight_map"] = dict.fromkeys(tensors, shard)
    (delta / INDEX).write_text(json.dumps(index))


def test_a_delta_is_a_complete_checkpoint_to_the_watch_and_none_to_a_reader_of_weights(tmp_path: Path) -> None:
    delta = written(tmp_path / "weight_v000002")
    assert {Path(stamp.name).name for stamp in check_complete(delta).files} == {path.name for path in delta.iterdir()}
    with pytest.raises(CheckpointError, match=r"found a disk-delta directory \(xor\)"):
        open_checkpoint(delta)
    assert find_disk_delta(write_checkpoint(tmp_path / "full", OLD)) is None
    assert find_disk_delta(tmp_path / "nothing") is None


def say(key: str, value: object) -> Callable[[Path], None]:
    def change(delta: Path) -> None:
        index = json.loads((delta / INDEX).read_text())
        index["metadata"][key] = value
        (delta / INDEX).write_text(json.dumps(index))

    return change


def put(name: str, plain: bytes, *, encoding: str = "xor", checksum: str = "00000000") -> Callable[[Path], None]:
    def change(delta: Path) -> None:
        say("delta_encoding", encoding)(delta)
        replace(delta, {name: zstandard.compress(plain)}, {name: checksum})

    return change


def lose_a_shard(delta: Path) -> None:
    (delta / "model-00001-of-00002.safetensors").unlink()


def cut_a_shard(delta: Path) -> None:
    path = delta / "model-00000-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-3])


def swap_a_checksum(delta: Path) -> None:
    path = delta / "model-00000-of-00002.safetensors"
    good = SUMS["adler32"](tensor_bytes(NEW)["embed.weight"])
    path.write_bytes(path.read_bytes().replace(good.encode(), b"00112233"))


def drop_a_checksum(delta: Path) -> None:
    path = delta / "model-00000-of-00002.safetensors"
    good = SUMS["adler32"](tensor_bytes(NEW)["embed.weight"])
    path.write_bytes(path.read_bytes().replace(good.encode(), b"        "))


def no_zstd(delta: Path) -> None:
    replace(delta, {"scale": b"these are no zstd frames"}, {"scale": "00000000"})


NORM = MODEL.tensors[2].bytes

BAD = {
    "a shard that the index names is missing": (lose_a_shard, "found none"),
    "a shard is cut short": (cut_a_shard, "cut short"),
    "a checksum of other bytes": (swap_a_checksum, "embed.weight.*adler32 00112233 of its new bytes"),
    "no checksum": (drop_a_checksum, "8 hex digits"),
    "a checksum format that nobody knows": (say("checksum_format", "crc32"), "adler32 or xxh3-128 or blake3.*'crc32'"),
    "checksums of another format": (say("checksum_format", "blake3"), "64 hex digits"),
    "a compression that nobody reads": (say("compression_format", "arc_v2"), "zstd, found 'arc_v2'"),
    "an encoding that nobody reads": (say("delta_encoding", "rsync"), "xor or overwrite, found 'rsync'"),
    "no base": (say("base_version", None), "base_version"),
    "an endless name of the base": (say("base_version", "1" * 129), "base_version"),
    "no zstd frame": (no_zstd, "scale.*a zstd frame"),
    "a tensor that the base lacks": (put("another", b"1234"), "a tensor of version 000001"),
    "a difference that is too short": (put("layers.0.norm.weight", bytes(NORM - 1)), "found 47 bytes"),
    "a difference that is too long": (put("layers.0.norm.weight", bytes(NORM + 1)), "a longer one"),
    "more changes than bytes": (
        put("scale", struct.pack("<I", 5) + bytes(25), encoding="overwrite"),
        "at most 4 changed bytes, found 5",
    ),
    "a position beyond the tensor": (
        put("scale", struct.pack("<II", 1, 4) + b"x", encoding="overwrite"),
        "positions below 4, found 4",
    ),
    "positions that end early": (put("scale", struct.pack("<II", 2, 1), encoding="overwrite"), "8 more bytes"),
}


@pytest.mark.parametrize("how", BAD)
def test_it_is_refused_with_the_reason(how: str, tmp_path: Path) -> None:
    spoil, reason = BAD[how]
    base = write_checkpoint(tmp_path / "base", OLD)
    delta = written(tmp_path / "d")
    spoil(delta)
    with pytest.raises((CheckpointError, FormatError, IntegrityError), match=reason):
        applied(delta, base)


def test_what_inflates_without_end_is_not_inflated(tmp_path: Path) -> None:
    delta = written(tmp_path / "d")
    put("scale", bytes(1 << 30))(delta)
    with pytest.raises(CheckpointError, match="a longer one"):
        applied(delta, write_checkpoint(tmp_path / "base", OLD))


def test_a_delta_on_another_base_is_told_by_its_checksums(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", OLD.changed(0.01, seed=9))
    with pytest.raises(IntegrityError, match="the base is not the version 000001 that the trainer had"):
        applied(written(tmp_path / "d"), base)


def test_a_shard_never_leads_out_of_its_directory(tmp_path: Path) -> None:
    (tmp_path / "outside.safetensors").write_bytes(b"secret")
    delta = written(tmp_path / "d")
    index = json.loads((delta / INDEX).read_text())
    for name in ("../outside.safetensors", "/etc/passwd", str(tmp_path / "outside.safetensors")):
        (delta / INDEX).write_text(json.dumps({**index, "weight_map": {"scale": name}}))
        with pytest.raises(CheckpointError):
            find_disk_delta(delta)


@pytest.fixture
def tied() -> Layout:
    head = TensorSpec("lm_head.weight", "BF16", (8, 4), alias_of="model.embed_tokens.weight")
    return Layout(0, (head, TensorSpec("model.embed_tokens.weight", "BF16", (8, 4))), MODEL.files)


def test_a_tied_head_may_be_named_as_long_as_it_stays_tied(tied: Layout, tmp_path: Path) -> None:
    old = ArrayWeights.random(Layout(0, tied.tensors[1:], ()))
    new = old.changed(0.2)
    before, after = old.arrays[0].tobytes(), new.arrays[0].tobytes()
    names = ("lm_head.weight", "model.embed_tokens.weight")
    plain = Layout(0, tied.tensors[1:], MODEL.files)

    def base(name: str) -> Path:
        return write_checkpoint(tmp_path / name, old, layout=plain)

    both = write_delta(
        tmp_path / "both", dict.fromkeys(names, before), dict.fromkeys(names, after), version="2", base_version="1"
    )
    assert applied(both, base("one"), tied).equals(new)
    apart = write_delta(
        tmp_path / "apart",
        dict.fromkeys(names, before),
        {names[0]: before[::-1], names[1]: after},
        version="2",
        base_version="1",
    )
    alone = write_delta(
        tmp_path / "alone",
        dict.fromkeys(names, before),
        {names[0]: after, names[1]: before},
        version="2",
        base_version="1",
    )
    for delta in (apart, alone):
        with pytest.raises(CheckpointError, match="which it is tied to"):
            applied(delta, base(f"for-{delta.name}"), tied)


def test_writing_into_a_directory_that_holds_something_is_refused_and_touches_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(UsageError, match="a new or an empty directory"):
        write_disk_delta(tmp_path, MODEL, OLD, NEW, version="2", base_version="1")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


class Breaking(ArrayWeights):
    """Cannot be read to its end."""

    def lanes(self, tensor: int, start: int, count: int) -> np.ndarray:  # type: ignore[override,type-arg]
        if tensor == 3:
            raise LimitError("broken")
        return super().lanes(tensor, start, count)


def test_what_breaks_while_it_is_written_leaves_nothing_that_looks_like_a_delta(tmp_path: Path) -> None:
    with pytest.raises(DeltadError, match="broken"):
        write_disk_delta(
            tmp_path / "d", MODEL, OLD, Breaking(NEW.arrays), version="2", base_version="1", shard_bytes=100
        )
    assert list((tmp_path / "d").iterdir()) == []


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("000002", "2", True),
        ("2", "2", True),
        ("a", "a", True),
        ("2", "3", False),
        ("²", "2", False),
    ],
)
def test_versions_are_the_same_by_name_or_by_number(one: str, other: str, same: bool) -> None:
    assert is_named(one, other) is same


def test_the_kit_says_what_the_layout_says() -> None:
    assert difference(b"abcd", b"abxd", "xor") == bytes([0, 0, ord("c") ^ ord("x"), 0])
    assert difference(b"abcd", b"abxd", "overwrite") == struct.pack("<II", 1, 2) + b"x"
