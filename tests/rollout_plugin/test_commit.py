"""A commit by itself: when its pause ends, the weights are one version or nobody may read them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from deltad.checkpoint import open_checkpoint
from deltad.delta.backend import choose
from deltad.delta.codec import Patch, apply_patch, sum_weights
from deltad.delta.digest import U64, root_of
from deltad.errors import UnavailableError
from deltad.protocol.activate import Broken, Committed, RolledBack
from deltad.types import Version
from rollout_plugin.commit import commit_deltas
from rollout_plugin.engines import Sampling
from rollout_plugin.engines.transformers import TransformersEngine, load
from rollout_plugin.staging import StagedDeltas, StagedStep
from tests.rollout_plugin.test_replica import PROMPT, FailingBackend

V0, V1, V2 = (Version(1, number) for number in range(3))


@pytest.fixture
def engine(tiny: Path) -> TransformersEngine:
    with open_checkpoint(tiny) as checkpoint:
        return load(tiny, checkpoint.layout, V0)


def sums(engine: TransformersEngine) -> U64:
    return sum_weights(engine.live.layout, engine.live)


def patch(tensor: int, *positions: int) -> Patch:
    """One step up the line of bf16 for each of these lanes."""
    return Patch(tensor, np.array(positions), np.ones(len(positions), np.uint16), absolute=False)


def staged(engine: TransformersEngine, *steps: tuple[Patch, ...], failing: range = range(0)) -> StagedDeltas:
    """Steps with the sums that they lead to, found by applying them to a copy."""
    layout, backend = engine.live.layout, choose()
    lanes = [engine.live.whole(i).copy() for i in range(len(layout.tensors))]
    after = sums(engine)
    made = []
    for number, patches in enumerate(steps, 1):
        for each in patches:
            apply_patch(each, lanes[each.tensor], layout.tensors[each.tensor], after, backend)
        made.append(StagedStep(Version(1, number), after.copy()))
    writes = engine.live.stage(steps, FailingBackend(failing))
    return StagedDeltas(made[-1].version, root_of(layout, after), tuple(made), writes)


def test_all_steps_are_written_in_one_pause_and_the_version_flips_with_them(engine: TransformersEngine) -> None:
    target = staged(engine, (patch(0, 1, 5), patch(3, 2)), (patch(0, 5),))
    assert isinstance(commit_deltas(engine, target, sums(engine)), Committed)
    assert engine.version == V2
    assert root_of(engine.live.layout, sums(engine)) == target.root


def test_a_failure_in_the_second_step_undoes_the_first_one_too(engine: TransformersEngine) -> None:
    before = sums(engine)
    target = staged(engine, (patch(0, 1, 5), patch(3, 2)), (patch(0, 5),), failing=range(3, 4))
    outcome = commit_deltas(engine, target, before)
    assert outcome == RolledBack("MemoryError: application 3")
    assert engine.version == V0
    assert np.array_equal(sums(engine), before)


def test_the_sums_of_what_is_served_are_left_as_they_are(engine: TransformersEngine) -> None:
    served = sums(engine)
    kept = served.copy()
    commit_deltas(engine, staged(engine, (patch(0, 1),)), served)
    assert np.array_equal(served, kept)


def test_what_cannot_be_undone_is_fenced_before_any_step_can_read_it(engine: TransformersEngine) -> None:
    target = staged(engine, (patch(0, 1), patch(3, 2)), failing=range(2, 9))
    before = sums(engine)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.generate, PROMPT, Sampling(max_new_tokens=400))
        outcome = commit_deltas(engine, target, before)
        assert isinstance(outcome, Broken)
        assert "could not be undone" in outcome.error
        with pytest.raises(UnavailableError, match="could not be undone"):
            engine.logprobs(PROMPT)
        with pytest.raises(UnavailableError, match="could not be undone"):
            running.result()


def test_nothing_is_written_where_the_engine_has_replaced_a_parameter(engine: TransformersEngine) -> None:
    target = staged(engine, (patch(0, 1),))
    before = engine.live.whole(0).copy()
    parameter = engine.model.model.norm.weight
    parameter.data = parameter.data.clone()
    outcome = commit_deltas(engine, target, sums(engine))
    assert isinstance(outcome, RolledBack)
    assert "the engine replaced its weights" in outcome.error
    assert np.array_equal(engine.live.whole(0), before)
    assert engine.version == V0
