"""What is synced before what, read off the system calls of real publishes (P5, P6, P13)."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PUBLISH = """
import sys
from pathlib import Path
from tests.kit.trainer import Trainer
trainer = Trainer(Path(sys.argv[1]))
for number in range(3):
    trainer.step(number)
"""
CALL = re.compile(r"\b(fsync|rename|renameat2?|link|linkat)\((.*)\) = 0")


def calls(tmp_path: Path) -> list[tuple[str, list[str]]]:
    """The successful fsyncs, renames and links of three publishes, in order, with their paths."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed; with it, this reads what is synced before what")
    trace = tmp_path / "trace"
    command = ["strace", "-f", "-y", "-s", "400", "-e", "trace=fsync,rename,renameat,renameat2,link,linkat"]
    command += ["-o", str(trace), sys.executable, "-c", PUBLISH, str(tmp_path / "run")]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120, stdout=subprocess.DEVNULL)
    found = []
    for line in trace.read_text().splitlines():
        if match := CALL.search(line):
            quoted = re.findall(r'"([^"]*)"', match[2])
            found.append((match[1].rstrip("at2"), quoted or re.findall(r"<([^>]*)>", match[2])))
    return found


def test_objects_then_the_record_then_the_pointer_then_the_baseline(tmp_path: Path) -> None:
    store = tmp_path / "run" / "store"
    synced: set[str] = set()
    unsynced_directories: set[str] = set()
    order: list[str] = []
    for name, paths in calls(tmp_path):
        if name == "fsync":
            synced.add(paths[0])
            unsynced_directories.discard(paths[0])
            continue
        target = Path(paths[-1])
        if name == "rename" and target.is_relative_to(store) and str(store / "tmp") in paths[0]:
            assert paths[0] in synced, f"{target} got its name before its bytes were synced"
            if "objects" not in target.parts:
                assert not unsynced_directories, f"{target} was written while names it needs were not durable"
            unsynced_directories.add(str(target.parent))
        if target.suffix == ".record":
            order.append("record")
        elif target.name == "latest":
            order.append("latest")
        elif name == "link" and "baseline" in target.parts and order[-1] != "baseline":
            order.append("baseline")
    assert order == ["record", "latest", "baseline"] * 3
