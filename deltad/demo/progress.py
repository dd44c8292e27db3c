"""What is seen while the demo runs: a live table on a terminal, plain lines elsewhere, a table at the end.

It may not find anything out: it draws what the ledger and the sight hold. Text that came from other programs
is escaped before it reaches a terminal.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO

from deltad.demo.observe import RegionSight, Sight
from deltad.demo.report import DemoReport, Facts, Ledger, VersionReport

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

_STAGES = {  # of a version that region 2 holds and the replica does not serve yet, by the replica's state
    "registered": "loading",
    "staging": "staging",
    "ready": "ready",
    "committing": "committing",
    "committed": "verifying",
    "rolled-back": "rolled back",
    "fenced": "fenced",
}


class Progress(Protocol):
    """Shows a run. `say` is one sentence for people; `show` is called whenever anything may have changed."""

    def say(self, text: str) -> None: ...

    def show(self, sight: Sight, ledger: Ledger) -> None: ...

    def close(self) -> None: ...


def make_progress(stream: TextIO) -> Progress:
    """Live where the stream is a terminal, plain lines where it is none."""
    return LiveProgress(stream) if stream.isatty() else PlainProgress(stream)


class PlainProgress:
    """One line for each thing that happened, each once."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._started = time.monotonic()
        self._said: set[str] = set()

    def say(self, text: str) -> None:
        """Print one line with the seconds since the start."""
        print(f"[{time.monotonic() - self._started:6.1f} s] {clean(text)}", file=self._stream, flush=True)

    def show(self, sight: Sight, ledger: Ledger) -> None:
        """Print what is new."""
        for version in sight.written:
            self._once(f"{version} written by the trainer")
        for version, facts in sorted(ledger.versions.items()):
            for text in _happened(version, facts):
                self._once(text)

    def close(self) -> None:
        """Nothing is left open."""

    def _once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.say(text)


def _happened(version: str, facts: Facts) -> list[str]:
    found = []
    if info := facts.published:
        change = f"{_share(info.density)} of the weights changed" if info.kind == "delta" else info.kind
        found.append(f"{version} published in region 1: {change}, encoded in {info.seconds.encode:.2f} s")
    if (info := facts.pulled) and info.pulled_bytes:
        found.append(
            f"{version} pulled by region 2: {size(info.pulled_bytes)}, {_percent(info.pulled_bytes, info.full_bytes)}"
            f" of full, in {info.seconds.transfer:.2f} s"
        )
    if facts.served and facts.published:
        root = "equals the published root" if facts.match else "IS NOT THE PUBLISHED ROOT"
        found.append(
            f"{version} live on the replica in region 2: root {facts.served_root[:12]} {root}, "
            f"generation stood still for {1000 * facts.served.seconds.pause:.0f} ms"
        )
    if facts.logprob_gap is not None:
        found.append(
            f"{version} verified {facts.end_to_end:.2f} s after it was written: log-probs {facts.logprob_gap:.4f} from "
            f"the trainer's, {facts.logprob_shift:.4f} from the first version's"
        )
    if facts.reward_mean is not None:
        found.append(f"{version} sampled rollouts in region 2: mean reward {facts.reward_mean:.3f}")
    return found


class LiveProgress:
    """A table that is drawn again in place, on a terminal."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console

        self._console = Console(file=stream, highlight=False)
        self._started = time.monotonic()
        self._live: Live | None = None

    def say(self, text: str) -> None:
        """Print a line above the table."""
        self._console.print(clean(text), markup=False)

    def show(self, sight: Sight, ledger: Ledger) -> None:
        """Draw the table again."""
        if self._live is None:
            from rich.live import Live

            self._live = Live(console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        self._live.update(self._draw(sight, ledger))

    def close(self) -> None:
        """Remove the table."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _draw(self, sight: Sight, ledger: Ledger) -> RenderableType:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        head = Table.grid(padding=(0, 2))
        for name, text in _header(sight, time.monotonic() - self._started):
            head.add_row(Text(name, style="dim"), Text(clean(text)))
        table = Table(box=None, pad_edge=False, padding=(0, 2))
        for column in ("version", "stage", "region 2 pulled", "of full", "rate", "seconds", "reward"):
            table.add_column(column, justify="left" if column in ("version", "stage") else "right", header_style="dim")
        for version in sorted({*sight.written, *ledger.versions}):
            facts = ledger.versions.get(version, Facts())
            style = "green" if facts.match else ("red" if facts.served else "")
            table.add_row(version, Text(stage(version, facts, sight), style=style), *_numbers(facts))
        return Group(head, "", table)


def _header(sight: Sight, elapsed: float) -> list[tuple[str, str]]:
    replica = sight.replica
    served = f"serves {replica.version or 'nothing yet'}, {replica.state.value}" if replica else "loading"
    return [
        ("", f"{elapsed:.0f} s"),
        ("trainer", sight.trainer),
        ("region 1", _region(sight.region_1)),
        ("link", f"{size(sight.link_bytes)} so far, {size(sight.link_rate)}/s"),
        ("region 2", _region(sight.region_2)),
        ("replica", served),
    ]


def _region(region: RegionSight) -> str:
    return f"{region.latest or 'no version yet'}{', ' + region.activity if region.activity else ''}"


def stage(version: str, facts: Facts, sight: Sight) -> str:
    """Where a version is on its way, in one word or two."""
    if facts.served is not None:
        return "verified" if facts.match else "ROOT DIFFERS"
    if facts.published is None:
        return "publishing"
    if facts.pulled is None:
        return "transferring"
    replica = sight.replica.state.value if sight.replica else ""
    return _STAGES.get(replica, "in region 2")


def _numbers(facts: Facts) -> tuple[str, ...]:
    pulled = facts.pulled
    seconds = pulled.seconds.transfer if pulled else 0.0
    return (
        size(pulled.pulled_bytes) if pulled else "",
        _percent(pulled.pulled_bytes, pulled.full_bytes) if pulled else "",
        f"{size(pulled.pulled_bytes / seconds)}/s" if pulled and seconds else "",
        f"{facts.end_to_end:.1f}" if facts.end_to_end else "",
        f"{facts.reward_mean:.2f}" if facts.reward_mean is not None else "",
    )


_COLUMNS = (
    "version", "changed", "pulled", "of full", "settle", "encode", "transfer", "stage", "pause", "verify",
    "end to end", "reward", "log-prob gap", "root", "match",
)  # fmt: skip
_NARROW_COLUMNS = ("version", "changed", "pulled", "of full", "pause", "end to end", "reward", "match")
_GAP = 2


def show_report(report: DemoReport, complaints: Sequence[str], stream: TextIO, path: Path) -> None:
    """Print the final table, what it comes to, and the report's `path`. A narrow terminal gets the main columns."""
    title = (
        f"{clean(report.model)}, {report.parameters:,} parameters, "
        f"over {report.link.rtt_ms:g} ms and {report.link.mbit_s:g} Mbit/s"
    )
    grid = [_COLUMNS, *(_row(version) for version in report.versions)]
    widths = [max(len(row[i]) for row in grid) for i in range(len(_COLUMNS))]
    if stream.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        console = Console(file=stream, highlight=False)
        fits = sum(widths) + _GAP * len(widths) <= console.width
        shown = [i for i, column in enumerate(_COLUMNS) if fits or column in _NARROW_COLUMNS]
        table = Table(box=None, pad_edge=False, padding=(0, _GAP // 2))
        for i in shown:
            table.add_column(_COLUMNS[i], justify="right" if i else "left", header_style="dim", no_wrap=True)
        for cells, version in zip(grid[1:], report.versions, strict=True):
            table.add_row(*(Text(cells[i], style="" if version.match else "red") for i in shown))
        console.print("", Text(title, style="bold"), table, sep="\n")
    else:
        print(f"\n{title}", file=stream)
        for row in grid:
            first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            print((" " * _GAP).join((first.strip().ljust(widths[0]), *rest)).rstrip(), file=stream)
    print(f"\nrollouts from the remote replica: {report.rollouts_from_remote}", file=stream)
    for complaint in complaints:
        print(f"  {clean(complaint)}", file=stream)
    print(f"report: {clean(str(path))}", file=stream)
    print(f"all_match: {'true' if report.all_match else 'false'}", file=stream, flush=True)


def _row(version: VersionReport) -> tuple[str, ...]:
    seconds = version.seconds
    return (
        version.version,
        _share(version.density),
        size(version.delta_bytes),
        f"{version.percent_of_full:.3f} %",
        *(f"{value:.2f} s" for value in (seconds.settle, seconds.encode, seconds.transfer, seconds.stage)),
        f"{1000 * seconds.pause:.0f} ms",
        f"{seconds.verify:.2f} s",
        f"{seconds.end_to_end:.2f} s",
        "" if version.reward_mean is None else f"{version.reward_mean:.3f}",
        "" if version.logprob_gap is None else f"{version.logprob_gap:.4f}",
        version.root_served[:8],
        "yes" if version.match else "NO",
    )


def size(count: float) -> str:
    """Bytes for people, in powers of 1024."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"


def _share(density: float) -> str:
    """What is not all is not shown as all."""
    return f"{100 * density if density == 1 else min(100 * density, 99.999):.3f} %"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.3g} %" if whole else ""


def clean(text: str) -> str:
    """The same text on one line, with everything escaped that a terminal might obey."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
