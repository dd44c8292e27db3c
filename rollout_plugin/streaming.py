"""Tokens on their way from an engine's thread to an event loop that sends them on.

Owns the streamed half of what `Serving` promises: a token that a version gave before it was verified leaves only
after its answer was noted as one to be named, should the version fail, and none leaves once the replica was fenced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from deltad.errors import UnavailableError
from deltad.types import Version
from rollout_plugin.messages import StreamLine
from rollout_plugin.serving import Serving


class TokenStream:
    """Implements `rollout_plugin.engines.Listener`; made and read in the event loop. `answer` is the answer's id."""

    def __init__(self, serving: Serving, answer: str) -> None:
        self._serving = serving
        self._answer = answer
        self._fences = serving.fences
        self._loop = asyncio.get_running_loop()
        self._lines: list[StreamLine] = []
        self._changed = asyncio.Event()
        self._ended = False
        self._gone = False
        self._noted: set[Version] = set()

    # The engine's side.

    def took(self, sample: int, token_ids: Sequence[int], logprobs: Sequence[float], version: Version) -> None:
        if self._gone:
            return
        if version not in self._noted:
            try:
                self._serving.note(self._answer, {version}, self._fences)
            except UnavailableError:
                self._gone = True  # the engine says why when it ends the request
                return
            self._noted.add(version)
        line = StreamLine(sample, tuple(token_ids), tuple(logprobs), str(version))
        self._loop.call_soon_threadsafe(self._put, line)

    @property
    def gone(self) -> bool:
        return self._gone

    # The event loop's side.

    def leave(self) -> None:
        """Nobody reads any more: the engine may stop."""
        self._gone = True

    def end(self) -> None:
        """Nothing follows what was taken until now."""
        self._ended = True
        self._changed.set()

    async def batch(self) -> list[StreamLine]:
        """The lines since the last call, at least one; none once the stream is at its end."""
        while not self._lines and not self._ended:
            self._changed.clear()
            await self._changed.wait()
        lines, self._lines = self._lines, []
        return lines

    def _put(self, line: StreamLine) -> None:
        self._lines.append(line)
        self._changed.set()
