"""What is installed is pinned by hash, what could not be audited is not called good, and no model brings code."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
PIN = re.compile(r"^([a-z0-9-]+)==([^ ;\\]+)", re.MULTILINE)


def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", ROOT / ".ci" / "audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_that_a_daemon_needs_is_pinned_by_hash_at_the_versions_that_are_tested() -> None:
    locked_text = (ROOT / "constraints-hashed.txt").read_text()
    locked, tested = dict(PIN.findall(locked_text)), dict(PIN.findall((ROOT / "constraints.txt").read_text()))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["daemon"]]
    names = {re.split(r"[<>=!~\[; ]", requirement)[0] for requirement in needed}
    assert names <= locked.keys(), "run `make lock`"
    assert {name: tested[name] for name in locked.keys() & tested.keys()} == {
        name: version for name, version in locked.items() if name in tested
    }, "run `make lock`"
    blocks = re.split(r"^(?=[a-z])", locked_text, flags=re.MULTILINE)[1:]
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", block) for block in blocks)


@pytest.mark.parametrize(
    ("answer", "code", "words"),
    [
        ({"dependencies": [{"name": "a", "version": "1", "vulns": []}]}, 0, "no known vulnerability in 1 of 1"),
        ({"dependencies": [{"name": "a", "version": "1", "vulns": [{"id": "CVE-1"}]}]}, 1, "a 1: CVE-1"),
        ({"dependencies": [{"name": "a", "skip_reason": "not found"}]}, 0, "audit skipped: not found"),
        ({"dependencies": []}, 0, "audit skipped"),
        ({}, 0, "audit skipped"),
    ],
)
def test_an_audit_that_could_ask_nobody_is_called_skipped(answer: object, code: int, words: str) -> None:
    found, sentence = audit().verdict(json.dumps(answer))
    assert found == code
    assert words in sentence


def test_no_code_is_ever_taken_from_a_checkpoint() -> None:
    for package in ("deltad", "rollout_plugin", "trainer_plugin", "bench"):
        for path in (ROOT / package).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for node in ast.walk(tree):
                if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                    assert isinstance(node.value, ast.Constant), path
                    assert node.value.value is False, path
                assert not (isinstance(node, ast.Constant) and node.value == "trust_remote_code"), path
                imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                imported += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert not {"pickle", "dill", "cloudpickle", "shelve", "marshal"} & set(imported), path
