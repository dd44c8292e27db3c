"""The watcher over real files: what trainers do to directories, and what is handed out (P1, P3)."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from deltad.checkpoint import fingerprint, open_checkpoint
from deltad.errors import DeltadError, UsageError
from deltad.watch.watcher import Candidate, DirectoryWatcher
from tests.checkpoint.shards import Tensor, bf16, packed, write_sharded, write_single

NEVER = 3600.0
"""A rescan that does not come within the test: only events make the watcher look."""

Refusals = asyncio.Queue[tuple[Path, DeltadError]]


class Watched:
    """A running watcher: `await next()` for the next candidate, `refused` for what it refuses.

    Whoever asks for the next one has published the one before: its number is the `newest`.
    """

    def __init__(self, watcher: DirectoryWatcher, refused: Refusals, newest: list[int | None]) -> None:
        self._candidates = aiter(watcher)
        self.refused = refused
        self.newest = newest
        self._pending: asyncio.Task[Candidate] | None = None

    async def next(self) -> Candidate:
        self.listen()
        assert self._pending is not None
        candidate = await asyncio.wait_for(self._pending, 30)
        self._pending = None
        self.newest.append(candidate.number)
        return candidate

    async def number(self) -> int:
        return (await self.next()).number

    def listen(self) -> None:
        """Let the watcher run although nobody awaits a candidate yet."""
        if self._pending is None:
            self._pending = asyncio.create_task(anext(self._candidates))  # type: ignore[arg-type]

    async def refusal(self) -> tuple[Path, str]:
        self.listen()
        path, error = await asyncio.wait_for(self.refused.get(), 30)
        return path, str(error)

    async def stop(self) -> None:
        if self._pending is not None:
            self._pending.cancel()
            await asyncio.wait([self._pending])
        await self._candidates.aclose()  # type: ignore[attr-defined]


@asynccontextmanager
async def watching(
    directory: Path,
    pattern: str = "step_{number}",
    *,
    quiet: float = 0.2,
    rescan: float = 0.1,
    after: int | None = None,
    there: Callable[[bool], None] = lambda there: None,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[Watched]:
    refused: Refusals = asyncio.Queue()
    newest = [after]
    watcher = DirectoryWatcher(
        directory,
        pattern,
        quiet=quiet,
        rescan=rescan,
        newest=lambda: newest[-1],
        on_there=there,
        clock=clock,
        on_refused=lambda path, error: refused.put_nowait((path, error)),
    )
    watched = Watched(watcher, refused, newest)
    try:
        yield watched
    finally:
        await watched.stop()


def write_model(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Weights with the config that they need to be complete."""
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / "config.json").exists():
        (directory / "config.json").write_text("{}")
    write_single(directory, tensors)


def save(directory: Path, number: int, name: str = "step_{}") -> Path:
    """Write a checkpoint as a careful trainer does: whole, then renamed."""
    target = directory / name.format(number)
    write_model(directory / f"tmp-{target.name}", {"x": bf16(64, seed=number)})
    os.rename(directory / f"tmp-{target.name}", target)
    return target


async def test_checkpoints_come_in_ascending_order_whatever_their_names_look_like(tmp_path: Path) -> None:
    for number in (100, 9, 20):
        save(tmp_path, number, "step_{:06d}")
    save(tmp_path, 5, "other_{}")
    (tmp_path / "step_7").write_text("a file")
    async with watching(tmp_path) as watched:
        candidates = [await watched.next() for _ in range(3)]
        assert [candidate.number for candidate in candidates] == [9, 20, 100]
        assert candidates[0].directory == tmp_path / "step_000009"
        assert all(candidate.settle >= 0.2 for candidate in candidates)
        save(tmp_path, 101)
        assert await watched.number() == 101


async def test_what_was_published_before_the_start_is_not_handed_out(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        save(tmp_path, number)
    async with watching(tmp_path, after=2) as watched:
        assert await watched.number() == 3


def abandon(directory: Path, number: int) -> None:
    """Leave a checkpoint half-way. Once it is reported, the watcher has looked and waits again."""
    (directory / f"step_{number}").mkdir(parents=True)
    (directory / f"step_{number}" / "model-00001-of-00002.safetensors").write_bytes(packed({"x": bf16(4)}))


async def test_an_event_is_enough_to_notice_a_checkpoint(tmp_path: Path) -> None:
    abandon(tmp_path, 1)
    async with watching(tmp_path, rescan=NEVER) as watched:
        await watched.refusal()
        save(tmp_path, 2)
        assert await watched.number() == 2


@pytest.mark.parametrize(
    "leave", [shutil.rmtree, lambda path: os.rename(path, path.with_name("away"))], ids=["rm", "mv"]
)
async def test_events_come_from_the_directory_that_has_the_name_now(
    tmp_path: Path, leave: Callable[[Path], object]
) -> None:
    directory = tmp_path / "checkpoints"
    abandon(directory, 1)
    async with watching(directory, rescan=NEVER) as watched:
        await watched.refusal()
        leave(directory)
        abandon(directory, 2)
        assert (await watched.refusal())[0] == directory / "step_2"
        save(directory, 3)
        assert await watched.number() == 3


async def test_a_file_system_without_events_only_delays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P3. Here the events come from a poll that is never due, so that only the rescan is left."""
    monkeypatch.setenv("WATCHFILES_FORCE_POLLING", "1")
    monkeypatch.setenv("WATCHFILES_POLL_DELAY_MS", "3600000")
    async with watching(tmp_path) as watched:
        watched.listen()
        save(tmp_path, 1)
        assert await watched.number() == 1
        save(tmp_path, 2)
        assert await watched.number() == 2


async def test_the_directory_may_come_later_go_away_and_come_back(tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "checkpoints"
    async with watching(directory) as watched:
        watched.listen()
        directory.mkdir(parents=True)
        save(directory, 1)
        assert await watched.number() == 1
        watched.listen()
        os.rename(directory, tmp_path / "away")
        directory.mkdir()
        save(directory, 2)
        assert await watched.number() == 2
        shutil.rmtree(directory)
        os.rename(tmp_path / "away", directory)
        save(directory, 3)
        assert await watched.number() == 3, "and 1, which came back as it was, is not handed out again"


async def test_a_checkpoint_below_its_step_is_found_by_a_pattern_that_is_a_path(tmp_path: Path) -> None:
    write_model(tmp_path / "a" / "global_step_3" / "actor" / "huggingface", {"x": bf16(4)})
    (tmp_path / "a" / "global_step_4").mkdir()
    async with watching(tmp_path, "a/global_step_{number}/actor") as watched:
        candidate = await watched.next()
        assert (candidate.number, candidate.directory) == (3, tmp_path / "a/global_step_3/actor")


async def test_an_abandoned_checkpoint_is_reported_once_and_holds_up_nobody(tmp_path: Path) -> None:
    write_sharded(tmp_path / "step_1", [{"a": bf16(4)}, {"b": bf16(4)}])
    (tmp_path / "step_1" / "model-00002-of-00002.safetensors").unlink()
    async with watching(tmp_path) as watched:
        path, reason = await watched.refusal()
        assert path == tmp_path / "step_1"
        assert "model-00002-of-00002.safetensors" in reason
        save(tmp_path, 2)
        assert await watched.number() == 2
        save(tmp_path, 3)
        assert await watched.number() == 3
        assert watched.refused.empty()


async def test_one_that_is_completed_after_it_was_reported_is_handed_out(tmp_path: Path) -> None:
    (tmp_path / "step_1").mkdir()
    (tmp_path / "step_1" / "pytorch_model.bin").write_bytes(b"pickle")
    async with watching(tmp_path) as watched:
        _, reason = await watched.refusal()
        assert "a pickle checkpoint" in reason
        write_model(tmp_path / "step_1", {"x": bf16(4)})
        assert await watched.number() == 1


async def test_one_without_its_config_is_waited_for_and_said_so(tmp_path: Path) -> None:
    write_single(tmp_path / "step_1", {"x": bf16(4)})
    async with watching(tmp_path) as watched:
        path, reason = await watched.refusal()
        assert path == tmp_path / "step_1"
        assert "expected config.json beside the weights, which every engine is built from, found none" in reason
        (tmp_path / "step_1" / "config.json").write_text("{}")
        assert await watched.number() == 1


async def test_a_step_that_is_written_again_is_handed_out_again(tmp_path: Path) -> None:
    for number in (1, 2):
        save(tmp_path, number)
    async with watching(tmp_path) as watched:
        assert [await watched.number(), await watched.number()] == [1, 2]
        shutil.rmtree(tmp_path / "step_1")
        save(tmp_path, 1)
        assert await watched.number() == 1


async def test_a_directory_that_is_not_there_is_said_once_and_so_is_that_it_has_come(tmp_path: Path) -> None:
    there: asyncio.Queue[bool] = asyncio.Queue()
    directory = tmp_path / "checkpoints"
    async with watching(directory, there=there.put_nowait) as watched:
        watched.listen()
        assert await asyncio.wait_for(there.get(), 30) is False
        save(directory, 1)
        assert await asyncio.wait_for(there.get(), 30) is True
        assert await watched.number() == 1
        watched.listen()
        shutil.rmtree(directory)
        assert await asyncio.wait_for(there.get(), 30) is False
        save(directory, 2)
        assert await watched.number() == 2
    assert there.get_nowait() is True
    assert there.empty()


async def test_a_directory_that_cannot_be_listed_is_reported_and_watched_on(tmp_path: Path) -> None:
    loop = tmp_path / "checkpoints"
    loop.symlink_to(tmp_path / ("x" * 300))
    async with watching(loop) as watched:
        path, reason = await watched.refusal()
        assert path == loop
        assert "name too long" in reason
        loop.unlink()
        save(loop, 1)
        assert await watched.number() == 1


async def test_a_directory_that_is_overwritten_gives_a_number_each_time(tmp_path: Path) -> None:
    async with watching(tmp_path, ".", after=7) as watched:
        for number, seed in ((8, 1), (9, 2)):
            write_model(tmp_path, {"x": bf16(64, seed=seed)})
            candidate = await watched.next()
            assert (candidate.number, candidate.directory) == (number, tmp_path)


async def test_the_trainers_own_step_is_the_number_once_it_is_written_after_the_weights(tmp_path: Path) -> None:
    latest = tmp_path / "latest"

    def write(content: int, *, at: int) -> None:
        write_model(latest, {"x": bf16(64, seed=content)})
        os.utime(latest / "model.safetensors", (at, at))

    def write_state(state: object, *, at: int) -> None:
        (latest / "trainer_state.json").write_text(json.dumps(state))
        os.utime(latest / "trainer_state.json", (at, at))

    write(1, at=1000)
    write_state({"global_step": 500, "log_history": [{"loss": float("nan")}]}, at=1001)
    async with watching(tmp_path, "latest") as watched:
        assert await watched.number() == 500
        write(2, at=2000)
        path, reason = await watched.refusal()
        assert path == latest
        assert "trainer_state.json is older than the weights" in reason
        write_state({"global_step": 510}, at=2001)
        assert await watched.number() == 510
        write(3, at=3000)
        assert "is older than" in (await watched.refusal())[1]
        write_state({"best_metric": None}, at=3001)
        assert "no global_step" in (await watched.refusal())[1]
        write_state({"global_step": 520}, at=3002)
        assert await watched.number() == 520


TRAINER = """
import os, sys, time
from pathlib import Path
from tests.checkpoint.shards import bf16, packed, write_index

directory, numbers, unfinished = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
for number in range(1, numbers + 1):
    step = directory / f"step_{number}"
    step.mkdir()
    (step / "config.json").write_text("{}")
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for name in names:
        content = packed({name[:11]: ("U8", [4096], bytes([number]) * 4096)})
        with (step / name).open("wb", buffering=0) as file:
            for at in range(0, len(content), 700):
                file.write(content[at:at + 700])
                time.sleep(0.001)
            if number == unfinished:
                print("unfinished", flush=True)
                sys.stdin.read()
    write_index(step, {name[:11]: name for name in names})
print("done", flush=True)
"""


def train(directory: Path, numbers: int, unfinished: int = 0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(directory), str(numbers), str(unfinished)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


async def test_a_trainer_that_writes_in_place_is_never_caught_half_way(tmp_path: Path) -> None:
    """P1: each checkpoint holds its own number in every byte."""
    with train(tmp_path, numbers=12) as trainer:
        async with watching(tmp_path, rescan=0.05) as watched:
            for expected in range(1, 13):
                candidate = await watched.next()
                assert candidate.number == expected
                with open_checkpoint(candidate.directory) as checkpoint:
                    assert len(checkpoint.layout.tensors) == 2
                    for i in range(2):
                        assert (checkpoint.lanes(i, 0, 4096) == expected).all()
                    checkpoint.check_unchanged()
                    assert checkpoint.fingerprint == candidate.fingerprint
        assert trainer.wait(timeout=30) == 0


async def test_one_that_is_replaced_between_the_look_and_the_check_is_handed_out_in_its_new_state(
    tmp_path: Path,
) -> None:
    step = save(tmp_path, 1)
    before = fingerprint(step)

    def clock() -> float:
        """The watcher asks for the time once it has looked; that is when the trainer strikes."""
        if fingerprint(step) == before:
            (step / "new").write_bytes(packed({"x": bf16(64, seed=99)}))
            os.replace(step / "new", step / "model.safetensors")
        return time.monotonic()

    async with watching(tmp_path, quiet=0.0, clock=clock) as watched:
        assert (await watched.next()).fingerprint == fingerprint(step) != before


async def test_what_a_killed_trainer_left_half_way_is_never_handed_out(tmp_path: Path) -> None:
    with train(tmp_path, numbers=3, unfinished=2) as trainer:
        assert trainer.stdout is not None
        assert await asyncio.to_thread(trainer.stdout.readline) == "unfinished\n"
        trainer.send_signal(signal.SIGKILL)
    async with watching(tmp_path) as watched:
        assert await watched.number() == 1
        path, reason = await watched.refusal()
        assert path == tmp_path / "step_2"
        assert "model.safetensors.index.json" in reason
        shutil.rmtree(tmp_path / "step_2")
        save(tmp_path, 2)
        assert await watched.number() == 2


@pytest.mark.parametrize("stop", ["cancelled", "closed"])
async def test_a_watcher_that_is_stopped_leaves_no_task_behind(tmp_path: Path, stop: str) -> None:
    save(tmp_path, 1)
    before = asyncio.all_tasks()
    candidates = aiter(DirectoryWatcher(tmp_path, "step_{number}", quiet=0.0, rescan=0.1))
    assert (await anext(candidates)).number == 1
    if stop == "cancelled":
        waiting = asyncio.ensure_future(anext(candidates))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
    else:
        await candidates.aclose()  # type: ignore[attr-defined]
    assert asyncio.all_tasks() == before


def test_a_pattern_that_is_none_is_refused_before_anything_is_watched(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        DirectoryWatcher(tmp_path, "{step}", quiet=1.0, rescan=1.0)
