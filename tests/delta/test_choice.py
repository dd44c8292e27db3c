"""Which backend is chosen, and what is said of it: only what proves right, and of that the fastest."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltad.delta.backend import Backend, Changes, Lanes, Place, Segments
from deltad.delta.backend.choice import Candidates, Choice, Finding, decide, probe
from deltad.delta.backend.fallback import FIRST_REST_SECONDS, Fallback, Switch
from deltad.delta.backend.numpy import NumpyBackend
from deltad.delta.digest import U64
from deltad.errors import ConfigError, DeviceError
from deltad.types import DType
from tests.kit.devices import Clock, FakeDevice

DATA = np.arange(100, dtype=np.uint8)
PLACES = [Place(1, 0)]


def test_the_fastest_wins_and_the_sentence_has_the_figures() -> None:
    findings = [Finding("cupy", rate=18.2e9), Finding("numba", rate=5.1e9), Finding("numpy")]
    assert decide(findings) == ("cupy", "18.2 GB/s against 5.1 GB/s of numba, PCIe included")
    findings[0] = Finding("cupy", rate=0.83e9)
    assert decide(findings) == ("numba", "5.1 GB/s against 0.83 GB/s of cupy, PCIe included")


def test_what_cannot_be_used_is_passed_over_with_the_reason() -> None:
    no_gpu = Finding("cupy", "cupy is not installed")
    no_numba = Finding("numba", "its sums are wrong")
    assert decide([no_gpu, Finding("numba"), Finding("numpy")]) == ("numba", "no GPU (cupy is not installed)")
    assert decide([no_gpu, no_numba, Finding("numpy")]) == (
        "numpy",
        "no GPU (cupy is not installed); numba does not work here: its sums are wrong",
    )
    assert decide([Finding("cupy", rate=9e9), no_numba, Finding("numpy", rate=1e8)]) == (
        "cupy",
        "9.0 GB/s against 0.10 GB/s of numpy, PCIe included",
    )


rates = st.sampled_from([0.0, 1e8, 5e9, 2e10])


@given(st.tuples(st.booleans(), st.booleans()), st.tuples(rates, rates, rates))
def test_the_choice_is_right_and_none_that_is_right_is_faster_or_as_fast_and_preferred(
    wrong: tuple[bool, bool], speeds: tuple[float, float, float]
) -> None:
    findings = [
        Finding("cupy", "no device" if wrong[0] else "", 0.0 if wrong[0] else speeds[0]),
        Finding("numba", "wrong" if wrong[1] else "", 0.0 if wrong[1] else speeds[1]),
        Finding("numpy", "", speeds[2]),
    ]
    name, reason = decide(findings)
    by_name = {found.name: found for found in findings}
    assert not by_name[name].flaw
    for place, found in enumerate(findings):
        if not found.flaw:
            assert found.rate <= by_name[name].rate
            assert found.rate < by_name[name].rate or place >= findings.index(by_name[name])
        elif place < findings.index(by_name[name]):
            assert found.flaw in reason


class Probe:
    """One probe over the backends that a test says are here, and the switches that it was told of."""

    def __init__(
        self,
        kind: str = "auto",
        *,
        cupy: Callable[[], Backend] | str = "cupy is not installed",
        numba: Backend | str = "it cannot be imported",
        clock: Clock | None = None,
    ) -> None:
        self.clock = clock or Clock()
        self.switches: list[Switch] = []
        self.opened = 0
        self._cupy = cupy
        found: Candidates = {
            "cupy": self._open,
            "numba": lambda: (None, numba) if isinstance(numba, str) else (numba, "numba 1.0 works here"),
        }
        self.choice: Choice = probe(kind, found, clock=self.clock, on_switch=self.switches.append)

    def _open(self) -> tuple[Backend | None, str]:
        self.opened += 1
        return (None, self._cupy) if isinstance(self._cupy, str) else (self._cupy(), "")

    @property
    def name(self) -> str:
        return self.choice.backend.name


class Wrong(FakeDevice):
    """Sums one more than it should."""

    def sum(self, lanes: Segments, places: Sequence[Place]) -> U64:
        return super().sum(lanes, places) + np.uint64(1)


class Astray(FakeDevice):
    """Says that it wrote, and did not."""

    def apply(self, target: Lanes, changes: Changes, dtype: DType, seed: int) -> tuple[Lanes, U64]:
        return super().apply(target.copy(), changes, dtype, seed)


def numba_of(clock: Clock, costs: float) -> FakeDevice:
    backend = FakeDevice(clock=clock, costs=costs)
    backend.name = "numba"
    return backend


def test_without_a_gpu_numba_is_taken_and_nothing_is_measured() -> None:
    clock = Clock()
    probed = Probe(numba=numba_of(clock, 1.0), clock=clock)
    assert probed.choice.reason == "no GPU (cupy is not installed)"
    assert probed.name == "numba"


def test_a_faster_gpu_is_taken_with_the_cpu_behind_it() -> None:
    clock = Clock()
    numba = numba_of(clock, 0.4e-9)
    probed = Probe(cupy=lambda: FakeDevice(clock=clock, costs=0.1e-9), numba=numba, clock=clock)
    assert probed.choice.reason == "20.0 GB/s against 5.0 GB/s of numba, PCIe included"
    assert isinstance(probed.choice.backend, Fallback)
    assert probed.choice.backend.cpu is numba


def test_a_slower_gpu_is_left_to_others() -> None:
    clock = Clock()
    numba = numba_of(clock, 0.4e-9)
    probed = Probe(cupy=lambda: FakeDevice(clock=clock, costs=1e-9), numba=numba, clock=clock)
    assert probed.choice == Choice(numba, "5.0 GB/s against 2.0 GB/s of cupy, PCIe included")


def test_a_slow_candidate_is_measured_on_a_part_and_no_longer() -> None:
    clock = Clock()
    before = clock.now
    Probe(cupy=lambda: FakeDevice(clock=clock, costs=1e-6), numba=numba_of(clock, 2e-6), clock=clock)
    assert clock.now - before < 6.0, "the whole frame takes 25 s"


@pytest.mark.parametrize("device", [Wrong, Astray])
def test_a_gpu_that_answers_otherwise_than_the_reference_is_never_taken(device: type[FakeDevice]) -> None:
    probed = Probe(cupy=device, numba=NumpyBackend())
    assert probed.choice.reason.startswith("no GPU (its sums are wrong" if device is Wrong else "no GPU (it does not")
    with pytest.raises(ConfigError, match="cupy that works here"):
        Probe("cupy", cupy=device)


def test_numba_that_answers_otherwise_is_never_taken() -> None:
    probed = Probe(numba=Wrong())
    assert probed.name == "numpy"
    assert probed.choice.reason.endswith("numba does not work here: its sums are wrong")
    with pytest.raises(ConfigError, match="its sums are wrong"):
        Probe("numba", numba=Wrong())


def test_a_device_that_another_process_fills_is_let_be() -> None:
    def filled() -> Backend:
        raise DeviceError("GPU 0", expected="2 GiB of free memory", found="1 GiB")

    probed = Probe(cupy=filled, numba=NumpyBackend())
    assert probed.choice.reason == "no GPU (GPU 0: expected 2 GiB of free memory, found 1 GiB)"
    with pytest.raises(ConfigError, match="found GPU 0: expected 2 GiB"):
        Probe("cupy", cupy=filled)


def test_a_device_that_is_lost_while_it_is_measured_is_passed_over() -> None:
    proof = FakeDevice()
    Probe("cupy", cupy=lambda: proof)
    probed = Probe(cupy=lambda: FakeDevice(lambda number: number >= proof.calls), numba=NumpyBackend())
    assert probed.name == "numpy"
    assert f"no GPU (GPU 0: lost in call {proof.calls})" in probed.choice.reason


def test_a_driver_that_raises_what_nobody_expects_is_a_finding() -> None:
    def crashes() -> Backend:
        raise OSError("libcuda.so.1: cannot open")

    assert "no GPU (OSError: libcuda.so.1: cannot open)" in Probe(cupy=crashes).choice.reason


def test_a_named_backend_is_taken_without_a_contest_and_no_gpu_is_touched_for_a_cpu() -> None:
    for kind, name, reason in [
        ("numpy", "numpy", "as configured"),
        ("numba", "numpy", "as configured; numba 1.0 works here"),
    ]:
        probed = Probe(kind, cupy=FakeDevice, numba=NumpyBackend())
        assert (probed.name, probed.choice.reason, probed.opened) == (name, reason, 0)
    clock = Clock()
    probed = Probe("cupy", cupy=lambda: FakeDevice(clock=clock, costs=1.0), numba=NumpyBackend(), clock=clock)
    assert (probed.name, probed.choice.reason) == ("cupy", "as configured")
    with pytest.raises(ConfigError, match="auto, cupy, numba or numpy"):
        Probe("gpu")


def test_a_device_that_failed_comes_back_only_when_it_proves_right_again() -> None:
    proof = FakeDevice()
    Probe("cupy", cupy=lambda: proof)
    devices = iter([FakeDevice(lambda number: number >= proof.calls), Wrong(), FakeDevice()])
    probed = Probe("cupy", cupy=lambda: next(devices), numba=NumpyBackend())
    for rest, name in [(0, "numpy"), (FIRST_REST_SECONDS, "numpy"), (2 * FIRST_REST_SECONDS, "cupy")]:
        probed.clock.now += rest
        assert np.array_equal(probed.choice.backend.sum([DATA], PLACES), NumpyBackend().sum([DATA], PLACES))
        assert probed.name == name
    assert [switch.backend for switch in probed.switches] == ["numpy", "cupy"]


def test_where_cupy_is_missing_that_is_what_is_said() -> None:
    script = (
        "import sys; sys.modules['cupy'] = None\n"
        "from deltad.delta.backend.choice import candidates\n"
        "print(candidates(0, 2 << 30)['cupy']())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout == "(None, 'cupy is not installed')\n"
