"""One line, one fact; for programs as JSON, for people to read."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from aiohttp import web

from deltad.ops.logs import configure


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_off_a_terminal_every_line_is_one_json_object() -> None:
    stream = io.StringIO()
    configure(stream=stream)
    structlog.get_logger().info("version_published", run="policy", text="two\nlines", size=3)
    [line] = lines(stream)
    assert line["event"] == "version_published"
    assert (line["run"], line["text"], line["size"], line["level"]) == ("policy", "two\nlines", 3, "info")
    assert str(line["timestamp"]).endswith("Z")


def test_what_libraries_log_comes_out_the_same_way() -> None:
    stream = io.StringIO()
    configure(stream=stream)
    logging.getLogger("some.library").warning("%d of %s", 3, "four")
    [line] = lines(stream)
    assert (line["event"], line["logger"], line["level"]) == ("3 of four", "some.library", "warning")


@pytest.mark.parametrize("library", [False, True])
def test_a_traceback_stays_on_its_line(library: bool) -> None:
    stream = io.StringIO()
    configure(stream=stream)
    try:
        raise ValueError("broken")
    except ValueError:
        (logging.getLogger("x") if library else structlog.get_logger()).exception("internal_error")
    [line] = lines(stream)
    assert "ValueError: broken" in str(line["exception"])
    assert "Traceback" in str(line["exception"])


def test_on_a_terminal_lines_are_for_reading() -> None:
    stream = Terminal()
    configure(stream=stream)
    structlog.get_logger().info("version_published", run="policy")
    with pytest.raises(json.JSONDecodeError):
        lines(stream)
    assert "version_published" in stream.getvalue()
    assert "policy" in stream.getvalue()


@pytest.mark.parametrize(("json_wanted", "stream"), [(True, Terminal()), (False, io.StringIO())])
def test_the_form_can_be_chosen(json_wanted: bool, stream: io.StringIO) -> None:
    configure(json_wanted, stream=stream)
    structlog.get_logger().info("version_published")
    assert stream.getvalue().startswith("{") == json_wanted
    assert "\x1b" not in stream.getvalue()


def test_debug_lines_and_routine_library_lines_are_left_out_unless_wanted() -> None:
    stream = io.StringIO()
    configure(stream=stream)
    structlog.get_logger().debug("request")
    logging.getLogger("aiohttp.access").info("GET /metrics")
    assert stream.getvalue() == ""
    configure(stream=stream, level=logging.DEBUG)
    structlog.get_logger().debug("request")
    assert [line["event"] for line in lines(stream)] == ["request"]


def test_where_the_journal_reads_each_line_carries_its_priority(tmp_path: Path) -> None:
    with (tmp_path / "journal").open("w+") as stream:
        found = os.fstat(stream.fileno())
        configure(stream=stream, environment={"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"})
        logger = structlog.get_logger()
        logger.info("one")
        logger.warning("two")
        logger.error("three")
        logging.getLogger("some.library").critical("four")
        stream.seek(0)
        said = stream.read().splitlines()
    assert [line[:3] for line in said] == ["<6>", "<4>", "<3>", "<2>"]
    assert [json.loads(line[3:])["event"] for line in said] == ["one", "two", "three", "four"]


@pytest.mark.parametrize("named", ["", "1:1", "nonsense"])
def test_where_the_journal_reads_another_stream_nothing_stands_before_a_line(tmp_path: Path, named: str) -> None:
    with (tmp_path / "file").open("w+") as stream:
        configure(stream=stream, environment={"JOURNAL_STREAM": named})
        structlog.get_logger().warning("one")
        stream.seek(0)
        assert stream.read().startswith("{")


async def test_whoever_sends_nonsense_cannot_fill_the_log() -> None:
    stream = io.StringIO()
    configure(stream=stream)
    runner = web.AppRunner(web.Application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"GET / HTTP/1.1\r\nHost: a\x00b\r\n\r\n")
    assert b"400" in await reader.read()
    writer.close()
    await runner.cleanup()
    assert stream.getvalue() == ""


def test_configuring_again_replaces_and_does_not_double() -> None:
    first, second = io.StringIO(), io.StringIO()
    logger = structlog.get_logger()
    configure(stream=first)
    logger.info("one")
    configure(stream=second)
    logger.info("two")
    assert [line["event"] for line in lines(first)] == ["one"]
    assert [line["event"] for line in lines(second)] == ["two"]
