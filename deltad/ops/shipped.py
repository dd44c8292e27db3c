"""The files that come with deltad for those who operate it: units, alert rules, a dashboard, examples.

Reads the package and writes nothing. Owns where each file belongs, and that what is shown names this deltad's command.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from deltad.errors import NotFoundError
from deltad.ops.dashboard import dashboard
from deltad.ops.reference import config_page, metrics_page

_COMMAND = "@DELTAD@"
_WRITTEN: dict[str, Callable[[], str]] = {
    "dashboard.json": dashboard,
    "metrics": metrics_page,
    "config": config_page,
}
"""What is written from the code when it is asked for."""
_PAGES = {"runbook": "RUNBOOK.md", "install": "INSTALL.md"}
"""Pages of the documentation, which lie in the package as well."""

SYSTEM = {
    "systemd/deltad.service": "etc/systemd/system/deltad.service",
    "systemd/sysusers.conf": "etc/sysusers.d/deltad.conf",
    "systemd/tmpfiles.conf": "etc/tmpfiles.d/deltad.conf",
}
"""What a host where root installs gets, and where."""
GPU = {"systemd/gpu.conf": "etc/systemd/system/deltad.service.d/gpu.conf"}
USER = {"systemd/deltad-user.service": "systemd/user/deltad.service"}
"""What a user gets, below `$XDG_CONFIG_HOME`."""
CONFIG = "deltad.toml"


@dataclass(frozen=True, slots=True)
class Placed:
    """A file to be written. One that is `kept` is the operator's once it is there, and never written again."""

    path: Path
    text: str
    kept: bool = False


def names() -> list[str]:
    """Every file, by its path below the folder of shipped files."""
    return sorted([*_walk(files("deltad.ops").joinpath("files"), ""), *_WRITTEN, *_PAGES])


def read(name: str) -> str:
    """A file by its path or, where that is the only one, its last part. Raises NotFoundError."""
    found = [known for known in names() if known == name] or [
        known for known in names() if known.rsplit("/", 1)[-1] == name
    ]
    if len(found) != 1:
        raise NotFoundError(f"shipped file {name!r}", expected=f"one of {', '.join(names())}")
    if written := _WRITTEN.get(found[0]):
        return written()
    if page := _PAGES.get(found[0]):
        return files("deltad").joinpath("docs", page).read_text(encoding="utf-8")
    text = files("deltad.ops").joinpath("files", *found[0].split("/")).read_text(encoding="utf-8")
    return text.replace(_COMMAND, command())


def command() -> str:
    """How a service manager starts this very deltad."""
    script = Path(sys.executable).with_name("deltad")
    return str(script) if os.access(script, os.X_OK) else f"{sys.executable} -m deltad"


def system_files(root: Path, *, gpu: bool) -> list[Placed]:
    """What belongs onto a host, below `root`."""
    wanted = {**SYSTEM, **(GPU if gpu else {})}
    units = [Placed(root / path, read(name)) for name, path in wanted.items()]
    return [*units, Placed(root / "etc/deltad" / CONFIG, read(CONFIG), kept=True)]


def user_files(config_home: Path, state_home: Path) -> list[Placed]:
    """What belongs into a user's directories, where nobody is root."""
    unit = [Placed(config_home / path, read(name)) for name, path in USER.items()]
    places = f'store = "{state_home / "deltad"}"\nsocket = "{state_home / "deltad" / "deltad.sock"}"\n'
    head, name, rest = read(CONFIG).partition('name = "CHANGE-ME"')
    line, _, tail = rest.partition("\n")
    return [*unit, Placed(config_home / "deltad" / CONFIG, f"{head}{name}{line}\n{places}{tail}", kept=True)]


def _walk(folder: Traversable, prefix: str) -> list[str]:
    found: list[str] = []
    for entry in folder.iterdir():
        if entry.is_dir():
            found += _walk(entry, f"{prefix}{entry.name}/")
        elif not entry.name.endswith((".pyc", ".py", ".css", ".js")):
            found.append(prefix + entry.name)
    return found
