"""A daemon that is fed by a trainer which writes disk-deltas: each becomes a version, in whatever order they come."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltad.client.messages import DiskDeltaRequest, ExportRequest, PublishRequest
from deltad.errors import BaseMissingError, DeltadError
from tests.kit.checkpoints import MODEL, read_checkpoint, write_checkpoint
from tests.kit.daemons import Daemon
from tests.kit.disk_deltas import apply_delta, tensor_bytes, write_delta
from tests.kit.weights import ArrayWeights

WAIT = 60.0
STATES = [ArrayWeights.bell(MODEL)]
for seed in range(1, 6):
    STATES.append(STATES[-1].changed(0.02, seed=seed))


class Fed:
    """A daemon that watches a trainer's directory of `weight_v{N:06d}`."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.trainer = home / "trainer"
        self.trainer.mkdir()
        self.daemon = Daemon(
            home / "d",
            "d",
            f'[[run]]\nid = "r"\n[[watch]]\nrun = "r"\ndirectory = "{self.trainer}"\n'
            f'pattern = "weight_v{{number}}"\nquiet = "100ms"\nrescan = "300ms"\n',
        )

    def full(self, number: int) -> None:
        write_checkpoint(self.trainer / f"weight_v{number:06d}", STATES[number])

    def delta(self, number: int, base: int, *, below: Path | None = None, **how: str) -> Path:
        directory = (below or self.trainer) / f"weight_v{number:06d}"
        made = directory.with_name(directory.name + ".tmp")
        write_delta(
            made,
            tensor_bytes(STATES[base]),
            tensor_bytes(STATES[number]),
            **{"version": f"{number:06d}", "base_version": f"{base:06d}", **how},
        )
        os.rename(made, directory)
        return directory

    def arrived(self, number: int) -> None:
        after = "" if number == 0 else f"v{number - 1:06d}"
        info = self.daemon.client.latest("r", after=after, wait=WAIT)
        assert info is not None, self.daemon.log
        assert info.version == f"v{number:06d}", self.daemon.log

    def says(self, words: str) -> None:
        deadline = time.monotonic() + WAIT
        while words not in self.daemon.client.status().region.runs["r"].activity:
            assert time.monotonic() < deadline, self.daemon.log
            time.sleep(0.05)

    def weights(self, number: int) -> ArrayWeights:
        there = self.home / f"exported-{number}-{time.monotonic_ns()}"
        self.daemon.client.export("r", ExportRequest(version=f"v{number:06d}", directory=str(there)))
        return read_checkpoint(there)


@pytest.fixture
def fed(tmp_path: Path) -> Iterator[Fed]:
    fed = Fed(tmp_path)
    yield fed
    if fed.daemon.process is not None:
        fed.daemon.process.kill()
        fed.daemon.process.wait()


def test_a_chain_of_deltas_of_every_kind_becomes_versions_bit_for_bit(fed: Fed) -> None:
    fed.daemon.start()
    fed.full(0)
    fed.arrived(0)
    kinds = [("xor", "adler32"), ("overwrite", "xxh3-128"), ("xor", "blake3"), ("overwrite", "adler32")]
    for number, (encoding, checksum) in enumerate(kinds, 1):
        fed.delta(number, number - 1, encoding=encoding, checksum=checksum)
        fed.arrived(number)
    for number in range(len(kinds) + 1):
        assert fed.weights(number).equals(STATES[number])
    info = fed.daemon.client.versions("r")[-1]
    assert info.kind == "delta"
    assert list((fed.home / "d" / "store" / "tmp").iterdir()) == [], "nothing is left of what was rebuilt aside"


def test_a_delta_that_comes_before_its_base_is_published_once_the_base_is_there(fed: Fed) -> None:
    fed.daemon.start()
    fed.delta(3, 2)
    fed.delta(2, 1)
    fed.says("version '000001' of run r, which it applies to")
    assert fed.daemon.client.versions("r") == ()
    # Not by the watch: an operator gives it the base that the trainer began from.
    base = write_checkpoint(fed.home / "base", STATES[1])
    fed.daemon.client.publish("r", PublishRequest(directory=str(base), number=1))
    fed.arrived(2)
    fed.arrived(3)
    assert fed.weights(3).equals(STATES[3])


def test_a_delta_that_waits_for_its_base_waits_on_after_a_restart(fed: Fed) -> None:
    fed.daemon.start()
    fed.delta(2, 1)
    fed.says("which it applies to")
    fed.daemon.kill()
    fed.daemon.start()
    fed.full(1)
    fed.arrived(1)
    fed.arrived(2)
    assert fed.weights(2).equals(STATES[2])


def test_a_damaged_delta_costs_only_itself_and_a_full_checkpoint_begins_anew(fed: Fed) -> None:
    fed.daemon.start()
    fed.full(0)
    fed.arrived(0)
    bad = fed.delta(1, 0, below=fed.home)
    shard = bad / "model-00000-of-00002.safetensors"
    data = bytearray(shard.read_bytes())
    data[-20] ^= 1
    shard.write_bytes(bytes(data))
    os.rename(bad, fed.trainer / bad.name)
    fed.says("refused")
    fed.full(3)
    info = fed.daemon.client.latest("r", after="v000000", wait=WAIT)
    assert info is not None
    assert info.version == "v000003"
    fed.delta(4, 3)
    fed.arrived(4)
    assert fed.weights(4).equals(STATES[4])


def test_a_delta_published_by_hand_says_that_its_base_is_missing(fed: Fed) -> None:
    fed.daemon.start()
    delta = fed.delta(5, 4, below=fed.home, version="step-5", base_version="step-4")
    with pytest.raises(DeltadError, match="version 'step-4' of run r, which it applies to") as refused:
        fed.daemon.client.publish("r", PublishRequest(directory=str(delta), number=5))
    assert refused.type is BaseMissingError
    assert refused.value.retryable
    base = write_checkpoint(fed.home / "base", STATES[4])
    fed.daemon.client.publish("r", PublishRequest(directory=str(base), number=4, identity="step-4"))
    reply = fed.daemon.client.publish("r", PublishRequest(directory=str(delta), number=5))
    assert reply.version.identity == "step-5"
    assert fed.weights(5).equals(STATES[5])


def test_it_is_exported_as_a_delta_that_others_apply(fed: Fed) -> None:
    fed.daemon.start()
    fed.full(0)
    fed.arrived(0)
    fed.delta(1, 0)
    fed.arrived(1)
    there = fed.home / "out"
    request = ExportRequest(version="v000001", directory=str(there), disk_delta=DiskDeltaRequest())
    assert fed.daemon.client.export("r", request).directory == str(there)
    assert apply_delta(there, tensor_bytes(STATES[0])) == tensor_bytes(STATES[1])
