"""A replica's log: one JSON object per line."""

from __future__ import annotations

import json
import threading
import time
from typing import TextIO


class Log:
    """Writes `{"time", "event", …}` lines to a stream, from any thread. `bound` fields are in every line."""

    def __init__(self, stream: TextIO, **bound: object) -> None:
        self._stream = stream
        self._bound = bound
        self._lock = threading.Lock()

    def write(self, event: str, **fields: object) -> None:
        """One line; values that JSON does not know are written as text."""
        line = {"time": round(time.time(), 3), "event": event, **self._bound, **fields}
        text = json.dumps(line, default=str)
        with self._lock:
            self._stream.write(text + "\n")
            self._stream.flush()
