"""`diff`, `inspect` and `verify` of files: no daemon, and no belief in what a file says of itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from deltad.checkpoint.directory import open_checkpoint
from deltad.delta.codec import sum_weights
from deltad.delta.digest import root_of
from deltad.protocol.mode import MODES
from tests.cli.models import BROKEN, bits, noise, nudged, pickled, write
from tests.cli.terminal import Deltad
from tests.kit.versions import Lineage

BEFORE = bits()
AFTER = nudged(nudged(BEFORE, "model.layer.weight", 50), "model.norm.weight", 64)


def root(directory: Path) -> str:
    with open_checkpoint(directory) as checkpoint:
        return root_of(checkpoint.layout, sum_weights(checkpoint.layout, checkpoint)).hex()


def test_diff_lists_the_most_changed_tensors_first_and_what_a_publish_would_send(
    deltad: Deltad, tmp_path: Path
) -> None:
    old, new = write(tmp_path / "old", BEFORE), write(tmp_path / "new", AFTER)
    ended = deltad("diff", old, new)
    assert ended.code == 0
    rows = [line.split() for line in ended.out.splitlines()]
    assert rows[1] == ["model.norm.weight", "BF16", "128", "64", "50.0", "%"]
    assert rows[2] == ["model.layer.weight", "BF16", "128×128", "50", "0.31", "%"]
    assert "model.embed.weight" not in ended.out
    assert "kind       delta" in ended.out
    assert "114 of 24,704 elements, 0.46 %" in ended.out
    assert "1 of 3 tensors" in ended.out
    assert root(new) in ended.out
    assert "model.embed.weight" in deltad("diff", old, new, "--all").out


def test_diff_as_json_counts_bytes_that_are_far_fewer_than_the_weights(deltad: Deltad, tmp_path: Path) -> None:
    old, new = write(tmp_path / "old", BEFORE), write(tmp_path / "new", AFTER)
    reply = deltad("diff", old, new, "--json").reply
    assert (reply["kind"], reply["changed"], reply["elements"]) == ("delta", 114, 24704)
    assert reply["full_bytes"] == 49408
    assert 0 < reply["chunk_bytes"] < reply["delta_bytes"] < reply["full_bytes"] / 20
    assert reply["root"] == root(new)
    assert [tensor["changed"] for tensor in reply["tensors"]] == [64, 50, 0]


def test_diff_counts_what_the_coder_that_is_asked_for_would_send(deltad: Deltad, tmp_path: Path) -> None:
    old, new = write(tmp_path / "old", BEFORE), write(tmp_path / "new", AFTER)
    replies = {mode: deltad("diff", old, new, "--coder", mode, "--json").reply for mode in ("blind", "fast", "dense")}
    assert {mode: reply["coder"] for mode, reply in replies.items()} == {mode: mode for mode in replies}
    assert replies["blind"]["chunk_bytes"] != replies["dense"]["chunk_bytes"]
    assert deltad("diff", old, new, "--json").reply == replies["dense"]
    assert "coder      dense" in deltad("diff", old, new).out
    assert deltad("diff", old, new, "--coder", "context").code == 64


def test_diff_of_equal_checkpoints_is_an_empty_delta(deltad: Deltad, tmp_path: Path) -> None:
    old, new = write(tmp_path / "old", BEFORE), write(tmp_path / "new", BEFORE)
    assert "no tensor changed" in deltad("diff", old, new).out
    assert deltad("diff", old, new, "--json").reply["chunks"] == 0


def test_diff_of_other_shapes_is_an_anchor_that_names_the_first_tensor_in_the_way(
    deltad: Deltad, tmp_path: Path
) -> None:
    old, new = write(tmp_path / "old", BEFORE), write(tmp_path / "new", bits(rows=32))
    ended = deltad("diff", old, new)
    assert ended.code == 0
    assert "anchor: tensor model.embed.weight was BF16 [64, 128] and is BF16 [32, 128]" in ended.out


def test_diff_refuses_another_model_as_a_publish_would(deltad: Deltad, tmp_path: Path) -> None:
    old, new = write(tmp_path / "old", BEFORE), write(tmp_path / "new", {f"other.{n}": w for n, w in BEFORE.items()})
    deltad("diff", old, new).assert_refused(
        65, f"{new}", f"the model of {old} (3 tensors)", "only 0 of 3 tensors", "publish another model as another run"
    )


def test_diff_of_bf16_and_its_fp32_copy_says_which_key_publishes_it(deltad: Deltad, tmp_path: Path) -> None:
    wide = {name: (lanes.astype(np.uint32) << 16) for name, lanes in BEFORE.items()}
    old, new = write(tmp_path / "old", BEFORE), write(tmp_path / "new", wide)
    deltad("diff", old, new).assert_refused(65, f"{new}", 'these weights are fp32; `publish_as = "bf16"`')
    assert "no tensor changed" in deltad("diff", old, new, "--publish-as", "bf16").out


def test_diff_of_weights_that_all_changed_is_an_anchor_and_still_says_what_changed(
    deltad: Deltad, tmp_path: Path
) -> None:
    before = noise(1)
    after = noise(2) | {"model.norm.weight": before["model.norm.weight"]}
    old, new = write(tmp_path / "old", before), write(tmp_path / "new", after)
    reply = deltad("diff", old, new, "--json").reply
    assert reply["kind"] == "anchor"
    assert reply["coder"] not in MODES
    assert "above the break-even: the delta takes" in reply["reason"]
    assert 0.9 < reply["density"] < 1
    assert reply["chunk_bytes"] < 1.1 * reply["full_bytes"]


def test_inspect_of_a_checkpoint_shows_its_tensors_files_and_totals(deltad: Deltad, tmp_path: Path) -> None:
    directory = write(tmp_path / "c", BEFORE)
    ended = deltad("inspect", directory)
    assert ended.code == 0
    for word in ("24,704", "48.2 KiB", "BF16", "tokenizer.json", "model.embed.weight", "64×128"):
        assert word in ended.out
    reply = deltad("inspect", "--json", directory).reply
    assert [tensor["name"] for tensor in reply["tensors"]] == sorted(BEFORE)
    assert [file["name"] for file in reply["files"]] == ["config.json", "tokenizer.json"]


def test_inspect_of_one_safetensors_file_shows_that_file_alone(deltad: Deltad, tmp_path: Path) -> None:
    file = write(tmp_path / "c", BEFORE) / "model-00002-of-00002.safetensors"
    reply = deltad("inspect", "--json", file).reply
    assert [tensor["name"] for tensor in reply["tensors"]] == ["model.norm.weight"]
    assert reply["files"] == []


def test_inspect_lists_the_largest_tensors_and_all_of_them_where_asked(deltad: Deltad, tmp_path: Path) -> None:
    layout = tmp_path / "layout"
    layout.write_bytes(Lineage(tensors=30, elements=64).publish().layout.encode())
    assert "10 more tensors; --all lists all of them" in deltad("inspect", layout).out
    assert "layer.029" in deltad("inspect", layout, "--all").out


def test_verify_of_a_directory_alone_says_its_root(deltad: Deltad, tmp_path: Path) -> None:
    directory = write(tmp_path / "c", BEFORE)
    ended = deltad("verify", directory)
    assert ended.code == 0
    assert "compared with nothing" in ended.out
    assert root(directory) in ended.out
    assert deltad("verify", directory, "--json").reply["root"] == root(directory)


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_checkpoint_is_one_line_and_65(kind: str, deltad: Deltad, tmp_path: Path) -> None:
    make, words = BROKEN[kind]
    made = make(tmp_path / "broken")
    directory = made if made.is_dir() else made.parent
    whole = write(tmp_path / "whole", BEFORE)
    for command in (["inspect"], ["verify"], ["diff", whole]):
        deltad(*command, directory).assert_refused(65, str(directory), *words)
    refusal = deltad("inspect", "--json", directory).refusal
    assert refusal["error"] == "Checkpoint"
    assert refusal["exit_code"] == 65


def test_a_truncated_file_is_named_with_what_was_expected_and_found(deltad: Deltad, tmp_path: Path) -> None:
    file = write(tmp_path / "c", BEFORE) / "model-00002-of-00002.safetensors"
    full = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-10])
    deltad("inspect", file).assert_refused(65, str(file), f"{full} bytes", f"{full - 10} bytes", "cut short")


def test_a_pickle_is_named_and_never_opened(deltad: Deltad, tmp_path: Path) -> None:
    file = pickled(tmp_path / "c")
    deltad("inspect", file).assert_refused(65, str(file), "a pickle checkpoint", "never opened")


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_what_is_neither_on_disk_nor_a_version_is_66(command: str, deltad: Deltad) -> None:
    deltad(command, "no/such/thing").assert_refused(66, "no/such/thing", "such as policy/v000012")


def test_a_directory_to_compare_that_is_not_there_is_66(deltad: Deltad, tmp_path: Path) -> None:
    deltad("diff", write(tmp_path / "old", BEFORE), tmp_path / "no").assert_refused(66, f"{tmp_path}/no")
