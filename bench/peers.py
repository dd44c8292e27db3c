"""Others' programs, run beside us from an environment of their own (`make venv-peers`)."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.harness import ROOT

_PYTHON = ROOT / ".venv-peers" / "bin" / "python"


class PeerMissingError(Exception):
    """A peer cannot be had; the text says why."""


class Cwtrain:
    """cwtrain in a process of its own, with a delta, its inverse and a mirror made. A context manager."""

    def __init__(self, base: Path, new: Path, work: Path, *, python: Path = _PYTHON) -> None:
        if not python.exists():
            raise PeerMissingError("cwtrain is not installed; make venv-peers")
        script = Path(__file__).with_name("peer_cwtrain.py")
        self._process = subprocess.Popen(
            [str(python), str(script), str(base), str(new), str(work)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            ready, self.version, threads, size = self._line().split()
            if ready != "ready":
                raise PeerMissingError(f"cwtrain said {ready!r}")
        except BaseException:
            self._stop()
            raise
        self.threads, self.delta_bytes = int(threads), int(size)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def write(self) -> float:
        """Seconds of one `write_delta`."""
        return self._ask("write")

    def apply(self) -> float:
        """Seconds of one `WeightMirror.apply_delta`."""
        return self._ask("apply")

    def _ask(self, what: str) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        return float(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            assert self._process.stderr is not None
            said = self._process.stderr.read().strip().splitlines()
            raise PeerMissingError(f"cwtrain ended: {said[-1] if said else 'without a word'}")
        return line

    def _stop(self) -> None:
        self._process.kill()
        self._process.communicate()
