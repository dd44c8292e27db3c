"""The wheel: what it holds, what it needs, and that it works where nothing else is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import deltad
from deltad.ops import shipped

ROOT = Path(deltad.__file__).parents[1]
FULL = os.environ.get("DELTAD_TEST_FULL") == "1"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from what git tracks, in a directory of its own, by the setuptools that is here."""
    home = tmp_path_factory.mktemp("wheel")
    tracked = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], check=False, capture_output=True).stdout
    names = [name for name in tracked.decode().split("\0") if name and (ROOT / name).is_file()]
    if not names:
        pytest.skip("this is no checkout of git: what belongs into a wheel is not known")
    for name in names:
        target = home / "src" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", home / "out"]
    subprocess.run([*command, home / "src"], check=True, capture_output=True, timeout=280)
    [built] = (home / "out").glob("*.whl")
    return built


def test_the_wheel_holds_all_that_is_shipped_and_nothing_of_the_tests(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    package = ROOT / "deltad"
    wanted = {*(package / "docs").rglob("*.md"), *(package / "ops" / "files").rglob("*"), package / "py.typed"}
    wanted |= {*(package / "delta/backend/cuda/kernels").iterdir()}
    missing = {str(path.relative_to(ROOT)) for path in wanted if path.is_file()} - held
    assert missing == set()
    tops = {name.partition("/")[0] for name in held}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"deltad", "trainer_plugin", "rollout_plugin"}
    assert not [name for name in held if "test" in name.lower()]


@pytest.mark.parametrize("environment", ["of the tests", "of vLLM"])
def test_in_an_environment_that_has_what_it_needs_it_moves_no_pin(environment: str, wheel: Path) -> None:
    python = Path(sys.executable) if environment == "of the tests" else ROOT / ".venv-vllm/bin/python"
    if not python.exists():
        pytest.skip("vLLM's environment is not there: `make venv-vllm` makes it")
    # Nothing may be fetched: what it asks for is met by what is there, or this fails.
    command = [python, "-m", "pip", "install", "--dry-run", "--no-index", wheel]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    would = [line for line in ended.stdout.splitlines() if line.startswith("Would install")]
    assert all(line.split()[2:] == [f"deltad-{deltad.__version__}"] for line in would), would


def test_the_image_is_built_and_says_its_version(tmp_path: Path) -> None:
    engine = shutil.which("podman") or shutil.which("docker")
    if engine is None or subprocess.run([engine, "info"], check=False, capture_output=True).returncode:
        pytest.skip("no container engine (podman or docker) works here")
    (tmp_path / "Containerfile").write_text(shipped.read("Containerfile"))
    command = [engine, "build", "--quiet", "-f", tmp_path / "Containerfile", "-t", "deltad-test", ROOT]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=280)
    if "pull" in ended.stderr or "lookup" in ended.stderr:
        pytest.skip(f"the base image cannot be had here: {ended.stderr.strip()[-200:]}")
    assert ended.returncode == 0, ended.stderr
    said = subprocess.run(
        [engine, "run", "--rm", "deltad-test", "--version"], check=True, capture_output=True, text=True
    )
    assert said.stdout == f"deltad {deltad.__version__}\n"


@pytest.mark.skipif(not FULL, reason="takes minutes and a package index: DELTAD_TEST_FULL=1 runs it")
def test_in_a_clean_environment_the_wheel_serves_and_answers(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv/bin/python"
    pip = [python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt"]
    subprocess.run([*pip, f"{wheel}[daemon]"], check=True, timeout=280)
    deltad_command = tmp_path / "venv/bin/deltad"
    (tmp_path / "deltad.toml").write_text('[daemon]\nname = "a"\nstore = "s"\nsocket = "d.sock"\n[[run]]\nid = "r"\n')
    for words in (
        ["ops", "install", "--root", "root", "--no-warm"],
        ["config", "check", "deltad.toml"],
        ["ops", "warm"],
    ):
        subprocess.run([deltad_command, *words], check=True, cwd=tmp_path, timeout=280)
    assert f"ExecStart={deltad_command} serve" in (tmp_path / "root/etc/systemd/system/deltad.service").read_text()
    with subprocess.Popen([deltad_command, "serve", "--config", "deltad.toml"], cwd=tmp_path) as daemon:
        command = [deltad_command, "status", "--config", "deltad.toml"]
        while subprocess.run(command, check=False, cwd=tmp_path, capture_output=True).returncode:
            assert daemon.poll() is None
        daemon.terminate()
    assert daemon.returncode == 0
