"""Which backend a process computes with, and why: opened, proven right, measured where two are right.

Nothing is taken on trust: a candidate that cannot be opened, or answers otherwise than the reference, is
passed over with the reason. What decides is `decide`, which is pure; the clock comes from the caller.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import numpy as np

from deltad.delta.backend import Backend, Lanes, Place
from deltad.delta.backend.fallback import Fallback, Switch
from deltad.delta.backend.numpy import NumpyBackend
from deltad.delta.backend.proof import flaw
from deltad.errors import ConfigError, DeviceError
from deltad.limits import DEVICE_MEMORY_BYTES
from deltad.types import DTYPES

KINDS = ("auto", "cupy", "numba", "numpy")

Opened = tuple[Backend | None, str]
"""A backend, or None where it cannot be used here, and what was found."""
Candidates = Mapping[str, Callable[[], Opened]]
"""By name, what opens a backend: `cupy` and `numba`. The reference is always there."""

_CUDA = "deltad.delta.backend.cuda"
_BF16 = DTYPES["BF16"]
_SAMPLE_LANES = 1 << 19
_FRAME_LANES = 1 << 23
_PARTS = 16
_LEAST_GOES, _MOST_GOES = 3, 9
_MEASURE_SECONDS = 0.03
_SLOW_SECONDS = 0.015
"""Who takes longer over a part of the frame is not measured on all of it. A GPU's start of a frame takes less."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A backend, and why it is this one at the start."""

    backend: Backend
    reason: str


@dataclass(frozen=True, slots=True)
class Finding:
    """What is known of a candidate. `flaw` says why it cannot be used; empty if it is right.

    `rate`: bytes of weights that it encodes a second, from the host's memory to the host's; 0 if not measured.
    """

    name: str
    flaw: str = ""
    rate: float = 0.0


def decide(findings: Sequence[Finding]) -> tuple[str, str]:
    """The name of the best candidate, and why it is that. They come in the order of preference; the last is right.

    The fastest wins; of those that were not measured, or are as fast, the first. The sentence has the figures,
    and the flaws of all that were preferred to the winner.
    """
    right = [found for found in findings if not found.flaw]
    best = max(right, key=lambda found: found.rate)
    others = [found for found in right if found.rate and found is not best]
    reasons = [_why_not(found) for found in findings[: findings.index(best)] if found.flaw]
    if others:
        against = ", ".join(f"{_speed(found.rate)} of {found.name}" for found in others)
        reasons.insert(0, f"{_speed(best.rate)} against {against}, PCIe included")
    return best.name, "; ".join(reasons)


def _why_not(found: Finding) -> str:
    return f"no GPU ({found.flaw})" if found.name == "cupy" else f"{found.name} does not work here: {found.flaw}"


def _speed(rate: float) -> str:
    return f"{rate / 1e9:.{1 if rate >= 1e9 else 2}f} GB/s"


def choose(kind: str) -> Backend:
    """See `deltad.delta.backend.choose`."""
    if _known(kind) == "numpy":
        return NumpyBackend()
    backend, finding = _cupy(0, DEVICE_MEMORY_BYTES) if kind == "cupy" else _numba()
    return NumpyBackend() if backend is None and kind == "auto" else _usable(kind, backend, finding)


def probe(
    kind: str, candidates: Candidates, *, clock: Callable[[], float], on_switch: Callable[[Switch], None]
) -> Choice:
    """The backend for a daemon: `auto` takes the fastest of those that prove right, another kind the one it names.

    A GPU's backend comes with the CPU's behind it; `on_switch` is told when it fails and when it is back. Raises
    ConfigError for a named one that does not work here. Takes a tenth of a second where kernels are cached.
    """
    if _known(kind) == "numpy":
        return Choice(NumpyBackend(), "as configured")
    numba, about_numba = _proven(candidates["numba"])
    if kind == "numba":
        return Choice(_usable(kind, numba, about_numba), f"as configured; {about_numba}")
    cpu = numba or NumpyBackend()

    def guarded(device: Backend) -> Fallback:
        return Fallback(device, cpu, reopen=reopen, now=clock, on_switch=on_switch)

    def reopen() -> Backend:
        backend, finding = _proven(candidates["cupy"])
        if backend is None:
            raise DeviceError("cupy", found=finding)
        return backend

    device, about_device = _proven(candidates["cupy"])
    if kind == "cupy":
        return Choice(guarded(_usable(kind, device, about_device)), "as configured")
    rates: dict[str, float] = {}
    if device is not None:
        try:
            rates = _rates({"cupy": device, cpu.name: cpu}, clock)
        except DeviceError as error:
            device, about_device = None, str(error)
    name, reason = decide(
        [
            Finding("cupy", "" if device else about_device, rates.get("cupy", 0.0)),
            Finding("numba", "" if numba else about_numba, rates.get("numba", 0.0)),
            Finding("numpy", rate=rates.get("numpy", 0.0)),
        ]
    )
    return Choice(guarded(device) if device and name == "cupy" else cpu, reason)


def candidates(device: int, memory_limit: int) -> Candidates:
    """The candidates of this build. `device` is the GPU's index, `memory_limit` the bytes of it that may be taken."""
    return {"cupy": lambda: _cupy(device, memory_limit), "numba": _numba}


def _known(kind: str) -> str:
    if kind not in KINDS:
        raise ConfigError(f"[backend] kind = {kind!r}", expected=f"{', '.join(KINDS[:-1])} or {KINDS[-1]}")
    return kind


def _usable(kind: str, backend: Backend | None, finding: str) -> Backend:
    if backend is None:
        raise ConfigError(
            f"[backend] kind = {kind!r}", expected=f"{kind} that works here", found=finding, hint="set it to 'auto'"
        )
    return backend


def _cupy(device: int, memory_limit: int) -> Opened:
    if find_spec("cupy") is None or find_spec(_CUDA) is None:
        return None, "cupy is not installed"
    try:
        return import_module(_CUDA).open_backend(device, memory_limit), ""
    except Exception as error:  # a broken installation raises whatever its libraries do
        return None, _said(error)


@cache
def _numba() -> Opened:
    """Numba's, if it can be imported and sums like the reference."""
    if forbidden := machine_code_forbidden():
        return None, forbidden
    try:
        from deltad.delta.backend.numba.proof import proven
    except ImportError as error:
        return None, f"it cannot be imported ({error})"
    try:
        return proven()
    except Exception as error:  # whatever a compiler may raise: there is another backend
        return None, _said(error)


def machine_code_forbidden() -> str:
    """Why this process may make no machine code, as with systemd's MemoryDenyWriteExecute=; empty where it may.

    Asked before a compiler is loaded, which would end the process instead of saying so.
    """
    try:
        mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC).close()
    except OSError as error:
        return f"machine code may not be made here ({error.strerror}): MemoryDenyWriteExecute= or SELinux forbids it"
    return ""


def _proven(open_backend: Callable[[], Opened]) -> Opened:
    """What was opened, if its small frames are the reference's too."""
    try:
        backend, finding = open_backend()
        wrong = "" if backend is None else flaw(backend)
    except Exception as error:  # whatever a compiler or a driver may raise: there is another backend
        return None, _said(error)
    return (None, wrong) if wrong else (backend, finding)


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, DeviceError) else f"{type(error).__name__}: {error}"


def _rates(backends: Mapping[str, Backend], clock: Callable[[], float]) -> dict[str, float]:
    """Bytes of weights that each encodes a second, in one frame that is like training's. Raises DeviceError."""
    old, new = _frame()
    return {name: _rate(backend, old, new, clock) for name, backend in backends.items()}


def _rate(backend: Backend, old: Lanes, new: Lanes, clock: Callable[[], float]) -> float:
    """By the best of several goes over the frame; for a slow backend, over a part of it."""

    def seconds(lanes: int) -> float:
        best, until = math.inf, clock() + _MEASURE_SECONDS
        for go in range(_MOST_GOES):
            if go >= _LEAST_GOES and clock() >= until:
                break
            start = clock()
            backend.encode([old[:lanes]], [new[:lanes]], [Place(0, 0)], _BF16, "fast")
            best = min(best, clock() - start)
        return max(best, 1e-9)

    lanes = old.size // _PARTS
    took = seconds(lanes)
    if took < _SLOW_SECONDS:
        lanes, took = old.size, seconds(old.size)
    return lanes * old.itemsize / took


def _frame() -> tuple[Lanes, Lanes]:
    """Two states of 16 MiB of bfloat16, a share of which a step of training has changed."""
    rng = np.random.default_rng(0)
    old = rng.normal(0, 0.02, _SAMPLE_LANES).astype(np.float32)
    new = old + rng.normal(0, 1e-6, _SAMPLE_LANES).astype(np.float32)
    repeats = _FRAME_LANES // _SAMPLE_LANES
    before, after = (np.tile((state.view(np.uint32) >> 16).astype(np.uint16), repeats) for state in (old, new))
    return before, after
