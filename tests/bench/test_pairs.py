"""Pairs are kept and read as they were made, by name, and a directory that is there is whole."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from bench import pairs, slices
from bench.pairs import FRESH, GRID, PAIRS, RUNS, SIMULATED, Pair, appearing
from bench.simulated import simulate, states, tensors, to_bf16


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_every_pair_is_of_states_that_its_run_keeps() -> None:
    assert all({pair.old, pair.new} <= set(pair.run.kept) for pair in PAIRS)
    assert {pair.run for pair in PAIRS} == set(RUNS)
    assert len({pair.name for pair in PAIRS}) == len(PAIRS)
    assert {pair.run.kind for pair in PAIRS} == {"grid", "off-grid", "restart", "simulated"}
    assert [pair.new - pair.old for pair in PAIRS if not pair.single] == [8]


def test_no_single_step_is_one_of_adams_first() -> None:
    assert all(pair.new >= 3 for pair in PAIRS if pair.run.kind != "simulated")


def test_a_run_that_was_not_made_is_refused_with_the_command_that_makes_it() -> None:
    assert not pairs.made(GRID)
    with pytest.raises(FileNotFoundError, match=r"python -m bench\.pairs make grid"):
        pairs.load(PAIRS[0])


def test_states_are_read_as_they_were_kept() -> None:
    state = {name: np.arange(size, dtype=np.uint16) for name, size in (("a", 3), ("b", 5))}
    with appearing(GRID, {"numpy": "1"}, tiny=True) as keeper:
        for step in GRID.kept:
            keeper.keep(step, ((name, bits + np.uint16(step)) for name, bits in state.items()))
        assert not pairs.made(GRID, tiny=True)
    found = pairs.load(Pair("", GRID, 2, 3), tiny=True)
    assert found.old.tolist() == [2, 3, 4, 2, 3, 4, 5, 6]
    assert found.new.tolist() == [3, 4, 5, 3, 4, 5, 6, 7]
    assert [(extent.name, extent.shape) for extent in found.tensors] == [("a", (3,)), ("b", (5,))]
    assert found.density == 1.0
    assert pairs.read_table(GRID, tiny=True).command == "python -m bench.pairs make grid --tiny"


def test_a_run_that_fails_leaves_nothing(cache: Path) -> None:
    def fail() -> None:
        with appearing(GRID, {}, tiny=True) as keeper:
            keeper.keep(0, [("a", np.zeros(3, np.uint16))])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not [path for path in cache.rglob("*") if path.is_file()]


@pytest.mark.parametrize("second", [["b", "a"], ["a"], ["a", "c"]])
def test_a_state_with_other_tensors_is_refused(second: list[str], tmp_path: Path) -> None:
    bits = np.zeros(3, np.uint16)
    keeper = pairs.Keeper(tmp_path)
    keeper.keep(0, [("a", bits), ("b", bits)])
    with pytest.raises(ValueError, match="tensors"):
        keeper.keep(1, [(name, bits) for name in second])


def test_rounding_to_bf16_is_to_nearest_even() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, 1.005, -1.00390625, 0.0, -0.0], np.float32)
    assert [f"{bits:04x}" for bits in to_bf16(values)] == ["3f80", "3f80", "3f82", "3f81", "bf80", "0000", "8000"]


@pytest.mark.parametrize("run", SIMULATED, ids=lambda run: run.name)
def test_a_simulation_changes_about_the_share_that_its_name_says(run: pairs.Run) -> None:
    changed = np.concatenate([(old != new).reshape(-1) for _, old, new in states(run, part=slices.SIMULATED_PART)])
    assert changed.mean() == pytest.approx(run.density, rel=0.25)


def test_a_simulation_is_the_same_every_time() -> None:
    simulate(SIMULATED[0], tiny=True)
    found = pairs.load(Pair("", SIMULATED[0], 0, 1), tiny=True)
    again = np.concatenate([new.reshape(-1) for _, _, new in states(SIMULATED[0], part=64)])
    assert np.array_equal(found.new, again)
    assert found.tensors == tensors(part=64)
    with pytest.raises(OSError, match=r"not empty|exists"):
        simulate(SIMULATED[0], tiny=True)


def made_up(run: pairs.Run, seed: int) -> None:
    """A run whose states differ in a few weights, in a model of an embedding and three layers."""
    names = ["model.embed_tokens.weight", *(f"model.layers.{i}.mlp.weight" for i in (1, 10, 2)), "model.norm.weight"]
    rng = np.random.default_rng(seed)
    state = {name: rng.integers(0x3C00, 0x3D00, (9, 8)).astype(np.uint16) for name in names}
    with appearing(run, {}) as keeper:
        for step in run.kept:
            keeper.keep(step, state.items())
            for bits in state.values():
                bits[rng.random(bits.shape) < 0.1] ^= 0x8003


def test_a_slice_holds_one_layer_and_the_embedding_of_every_pair_that_was_made(tmp_path: Path) -> None:
    made_up(GRID, 1)
    made_up(FRESH, 2)
    slices.cut(tmp_path / "slice")
    for pair in PAIRS:
        if pair.run not in {GRID, FRESH}:
            continue
        kept, whole = slices.load(pair, tmp_path / "slice"), pairs.load(pair)
        assert [extent.name for extent in kept.tensors] == ["model.embed_tokens.weight", "model.layers.10.mlp.weight"]
        for mine, all_of_it in ((kept.old, whole.old), (kept.new, whole.new)):
            assert np.array_equal(mine, np.concatenate([all_of_it[:72], all_of_it[144:216]]))
    with pytest.raises(KeyError):
        slices.load(next(pair for pair in PAIRS if pair.run.kind == "restart"), tmp_path / "slice")


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_planes_keep_integers_of_any_width(width: int) -> None:
    values = np.random.default_rng(width).integers(0, 1 << (8 * width), 1000, np.uint64, endpoint=False)
    narrow = values.astype(f"u{width}")
    assert np.array_equal(slices.unpack(slices.pack(narrow)), narrow)
    assert slices.unpack(slices.pack(narrow[:0])).size == 0


def test_a_tile_is_the_same_slice_over_and_over() -> None:
    one = slices.load(next(pair for pair in PAIRS if pair.run is SIMULATED[0]))
    three = slices.tile(one, 3)
    assert np.array_equal(three.new, np.concatenate([one.new] * 3))
    assert sum(extent.lanes for extent in three.tensors) == three.old.size
    assert [extent.name for extent in three.tensors] == sorted({extent.name for extent in three.tensors})


@pytest.mark.skipif(os.environ.get("DELTAD_TEST_FULL") != "1", reason="trains a model: run `make test-full`")
def test_a_trained_run_is_made_once_from_the_demos_learner(capsys: pytest.CaptureFixture[str]) -> None:
    pairs.make([GRID, FRESH], tiny=True)
    for run in (GRID, FRESH):
        assert 0 < pairs.load(Pair("", run, run.kept[-2], run.kept[-1]), tiny=True).density < 0.2
    assert np.any(pairs.state(GRID, 0, tiny=True) != pairs.state(FRESH, 0, tiny=True))
    capsys.readouterr()
    pairs.make([GRID], tiny=True)
    assert capsys.readouterr().out == "grid: is there\n"
