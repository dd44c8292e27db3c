"""A real headless Chromium: what it makes of a page, and a picture of it."""

from __future__ import annotations

import subprocess
from pathlib import Path


class Browser:
    """Chromium with a profile of its own below `home`."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def document(self, url: str, *, budget: int = 2000) -> str:
        """The document after its scripts ran for `budget` milliseconds of the page's own time."""
        return self._run(url, "--dump-dom", f"--virtual-time-budget={budget}").stdout

    def picture(self, url: str, path: Path, *, height: int = 1600) -> tuple[Path, str]:
        """A picture of the page, 1280 wide, and what the browser's console said."""
        size = f"--window-size=1280,{height}"
        ended = self._run(url, f"--screenshot={path}", size, "--enable-logging=stderr", "--v=0")
        return path, "\n".join(line for line in ended.stderr.splitlines() if ":CONSOLE" in line)

    def _run(self, url: str, *options: str) -> subprocess.CompletedProcess[str]:
        command = [
            *("chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *("--disable-dev-shm-usage", "--no-first-run", f"--user-data-dir={self.home}", *options, url),
        ]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
