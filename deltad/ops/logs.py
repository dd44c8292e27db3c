"""How the daemon logs: one JSON object a line, or for a person at a terminal, readable lines.

Everything ends up here, what libraries log through `logging` included. Where the journal reads standard error, each
line carries its priority, so that `journalctl -p warning` shows what is amiss. Values are logged as they are
given, so callers give names, sizes and digests, and never a token.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import TextIO

import structlog
from aiohttp.http_exceptions import HttpProcessingError

_LIBRARIES = ("aiohttp.access", "asyncio", "watchfiles")


_PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
"""Levels, and what syslog calls them."""


def configure(
    json: bool | None = None,
    *,
    level: int = logging.INFO,
    stream: TextIO | None = None,
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Set up structlog and `logging`, replacing what was set up before.

    `json`: None decides by the stream: readable on a terminal, JSON elsewhere. `stream`: stderr by default.
    """
    stream = sys.stderr if stream is None else stream
    pretty = stream.isatty() if json is None else not json
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    rendering: list[structlog.typing.Processor] = (
        [structlog.dev.ConsoleRenderer(colors=stream.isatty())]
        if pretty
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    if level > logging.DEBUG:
        handler.addFilter(_not_a_callers_fault)
    kind = _ForJournal if _is_journal(stream, environment) else structlog.stdlib.ProcessorFormatter
    handler.setFormatter(
        kind(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name in _LIBRARIES:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))


class _ForJournal(structlog.stdlib.ProcessorFormatter):
    """Puts a line's priority before it, as sd-daemon(3) has it."""

    def format(self, record: logging.LogRecord) -> str:
        priority = next((number for level, number in _PRIORITIES if record.levelno >= level), 7)
        return f"<{priority}>{super().format(record)}"


def _is_journal(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Whether the journal reads this very stream: the service manager names what it gave the process."""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError, AttributeError):
        return False
    return environment.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


def _not_a_callers_fault(record: logging.LogRecord) -> bool:
    """aiohttp logs a traceback for each request that is not HTTP: anyone who can connect could fill the log."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))
