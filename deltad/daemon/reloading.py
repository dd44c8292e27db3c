"""Taking up a changed configuration while the daemon runs: who is recognised, who is trusted, and certificates.

Owns one invariant: a file that cannot be used in full changes nothing. What needs a restart is named.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import structlog

from deltad.config import Config, load_config, warnings
from deltad.errors import DeltadError

log = structlog.get_logger()

_TAKEN_UP = ("tokens", "peers", "trusts")
"""The parts of the configuration that a reload takes up whole. Of others it reads the files that they name anew."""

Apply = Callable[[Config], None]


class Reloader:
    """Reloads one file. `apply` are told of each configuration that can be used, and may raise before they change
    anything; `on_reload` of how it went; `before` and `after` of a reload that was asked for, however it goes."""

    def __init__(
        self,
        config: Config,
        *,
        on_reload: Callable[[bool], None],
        before: Callable[[], None] = lambda: None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        self.config = config
        self.problem = ""
        """Why the file that lies there now was not taken up; empty if it was."""
        self._applies: list[Apply] = []
        self._on_reload = on_reload
        self._before, self._after = before, after
        self._asked = asyncio.Event()

    def then(self, apply: Apply) -> None:
        """Tell `apply` of each configuration that is taken up. It is called in a worker thread."""
        self._applies.append(apply)

    def ask(self) -> None:
        """Reload soon. Safe in a signal handler of the event loop."""
        self._asked.set()

    async def run(self) -> None:
        """Reload whenever it is asked for."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            self._before()
            try:
                await self.reload()
            finally:
                self._after()

    async def reload(self) -> None:
        """Read the file, and take up what can be. Raises nothing for a file that cannot be used."""
        try:
            await asyncio.to_thread(self._reload, self.config.path)
        except DeltadError as error:
            self.problem = str(error)
            log.error("config_not_reloaded", error=self.problem)
            self._on_reload(False)
        else:
            self.problem = ""
            self._on_reload(True)

    def _reload(self, path: Path) -> None:
        found = load_config(path)
        for doubt in warnings(found):
            log.warning("config_warning", warning=doubt)
        for apply in self._applies:
            apply(found)
        taken = replace(self.config, **{name: getattr(found, name) for name in _TAKEN_UP})
        left = [name for name in Config.__slots__ if getattr(found, name) != getattr(taken, name)]
        self.config = taken
        log.info("config_reloaded", needs_restart=", ".join(left) or "nothing")
