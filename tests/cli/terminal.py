"""Running the command the way a shell does: in this process for its words, in one of its own for the rest."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from deltad.cli.main import run


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended and what it said."""

    code: int
    out: str
    err: str

    @property
    def reply(self) -> Any:
        """Standard output as JSON."""
        return json.loads(self.out)

    @property
    def refusal(self) -> Any:
        """Standard error as JSON."""
        return json.loads(self.err)

    def assert_refused(self, code: int, *words: str) -> None:
        """It ended with `code` and one line on standard error that has all the `words`."""
        assert self.code == code, self
        assert self.err.startswith("deltad: "), self.err
        assert self.err.count("\n") == 1, self.err
        for word in words:
            assert word in self.err, self.err


Deltad = Callable[..., Ended]


@pytest.fixture
def deltad(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Deltad:
    """Runs `deltad ARGUMENTS…` in this process, without a daemon of the caller's environment."""
    monkeypatch.delenv("DELTAD_SOCKET", raising=False)
    monkeypatch.delenv("DELTAD_DEBUG", raising=False)

    def call(*arguments: object) -> Ended:
        code = run([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return Ended(code, said.out, said.err)

    return call


def start(*arguments: object, **options: Any) -> subprocess.Popen[bytes]:
    """`deltad ARGUMENTS…` in a process of its own."""
    return subprocess.Popen([sys.executable, "-m", "deltad", *map(str, arguments)], **options)


def end(*arguments: object) -> Ended:
    """`deltad ARGUMENTS…` in a process of its own, to its end."""
    process = start(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate()
    return Ended(process.returncode, out.decode(), err.decode())
