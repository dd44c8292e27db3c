"""`deltad plan graph`: what would be folded, cut and dropped, and why.

A scenario is simulated here, without a daemon; nothing is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from deltad.cli.connect import Whole, help_if_alone, json_option
from deltad.cli.output import show, show_json
from deltad.cli.progress import step
from deltad.errors import UsageError
from deltad.figures import count, percent, size
from deltad.ops.blocks import Block, Facts, Line, Table, columns

if TYPE_CHECKING:
    from deltad.store.graph.simulate import Outcome, Scenario


class Size(click.ParamType[int]):
    """Bytes with a unit, as in the configuration: `80MB` is none, `80MiB` is one."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from deltad.config.values import RefusedError, size_of

        if isinstance(value, int):
            return value
        try:
            return size_of(value, least=1)
        except RefusedError as error:
            self.fail(f"{value!r}: expected {error.expected}", param, ctx)


_SIZE = Size()


@click.group(invoke_without_command=True, short_help="Say what would be decided, and why.")
@click.pass_context
def plan(context: click.Context) -> int | None:
    """Say what would be decided, and why. Nothing is changed."""
    return help_if_alone(context)


@plan.command(short_help="What would be folded, cut and dropped in the version graph.")
@click.option("--simulate", is_flag=True, help="Simulate a run, one version an hour, instead of asking a daemon.")
@click.option("--days", type=Whole(1, 3650), default=365, show_default=True, help="How long it runs.")
@click.option(
    "--readers", type=Whole(1, 1000), default=6, show_default=True, help="Regions that pull; they come and go."
)
@click.option("--weights", type=_SIZE, default="13GiB", show_default=True, help="The weights as they are.")
@click.option("--anchor", type=_SIZE, default="9GiB", show_default=True, help="An anchor of them.")
@click.option("--delta", type=_SIZE, default="80MiB", show_default=True, help="A delta, about.")
@click.option("--disk", type=_SIZE, default="64GiB", show_default=True, help="All derived edges together, at most.")
@click.option("--work", type=_SIZE, default="4GiB", show_default=True, help="What may be read in an hour to make them.")
@click.option("--keep", type=Whole(1, 100_000), default=1000, show_default=True, help="Versions that are kept.")
@click.option("--by-context", is_flag=True, help="Deltas are coded by context, and do not fold without weights.")
@click.option("--seed", type=Whole(0, 2**31), default=0, show_default=True, help="Another course of events.")
@json_option
def graph(
    *,
    simulate: bool,
    days: int,
    readers: int,
    weights: int,
    anchor: int,
    delta: int,
    disk: int,
    work: int,
    keep: int,
    by_context: bool,
    seed: int,
    as_json: bool,
) -> None:
    """Simulate a run, and say what was pulled, stored and decided.

    Regions leave for hours or weeks, join late, and are rolled back at times. What they pull is compared with full
    copies; then comes all that was decided in the last day, in words. A year takes a minute or two.

    \b
    Examples:
      deltad plan graph --simulate
      deltad plan graph --simulate --days 30 --disk 16GiB --json
    """
    from deltad.store.graph.simulate import Scenario
    from deltad.store.graph.simulate import simulate as run

    if not simulate:
        raise UsageError("deltad plan graph", expected="--simulate", hint="see `deltad plan graph --help`")
    scenario = Scenario(
        hours=24 * days,
        readers=readers,
        state=weights,
        anchor=anchor,
        delta=delta,
        disk=disk,
        work=work,
        keep=keep,
        context=float(by_context),
        seed=seed,
    )
    with step(f"simulating {count(days, 'day')}"):
        outcome = run(scenario)
    if as_json:
        show_json(_told(outcome))
    else:
        show(list(_blocks(outcome)))


def _told(outcome: Outcome) -> dict[str, object]:
    numbers: dict[str, object] = {
        "scenario": outcome.scenario,
        "pulls": outcome.pulls,
        "pulled_bytes": outcome.pulled,
        "snapshot_bytes": outcome.snapshots,
        "saved_share": outcome.saved,
        "most_edges_of_a_catch_up": outcome.most_hops,
        "most_versions_behind": outcome.most_lag,
        "most_bytes_of_a_catch_up": outcome.most_catch_up,
        "joins": outcome.joins,
        "most_edges_of_a_join": outcome.most_join_hops,
        "most_bytes_of_a_join": outcome.most_join,
        "anchors_pulled_again": outcome.again,
        "decided": outcome.made,
        "work_bytes": outcome.work,
        "stored_bytes": outcome.stored,
        "stored_edges": outcome.stored_edges,
        "most_derived_bytes": outcome.most_derived,
    }
    numbers["last_day"] = [
        {"version": hour, "what": str(action), "why": action.reason} for hour, action in outcome.last
    ]
    return numbers


def _blocks(outcome: Outcome) -> list[Block]:
    scenario = outcome.scenario
    pulled = sum(outcome.pulled.values())
    kinds = ", ".join(f"{size(bytes_)} of {kind}s" for kind, bytes_ in sorted(outcome.pulled.items()))
    decided = ", ".join(f"{number:,} × {what}" for what, number in sorted(outcome.made.items()))
    facts = Facts(
        f"{count(scenario.hours, 'version')}, {count(scenario.readers, 'region')}",
        [
            ("pulled", f"{size(pulled)} in {count(outcome.pulls, 'pull')}: {kinds}"),
            ("full copies", f"{size(outcome.snapshots)} for the same pulls; {percent(outcome.saved)} saved"),
            (
                "catching up",
                f"{count(outcome.most_hops, 'edge')} and {size(outcome.most_catch_up)} at most, "
                f"up to {count(outcome.most_lag, 'version')} behind",
            ),
            (
                "joining",
                f"{count(outcome.most_join_hops, 'edge')} and {size(outcome.most_join)} at most, "
                f"{outcome.joins:,} times, {outcome.again:,} of them where a version was held",
            ),
            ("stored", f"{size(outcome.stored)} in {count(outcome.stored_edges, 'edge')} at the end"),
            ("derived", f"{size(outcome.most_derived)} at most, of {size(scenario.disk)}"),
            ("read for it", f"{size(outcome.work)}, of {size(outcome.granted)}"),
            ("decided", decided),
        ],
    )
    rows = [(f"v{hour:06d}", str(action), action.reason) for hour, action in outcome.last]
    return [Line(_scene(scenario)), facts, Table("the last day", columns("at", "what", "why"), rows)]


def _scene(scenario: Scenario) -> str:
    return (
        f"{count(scenario.hours // 24, 'day')} with a version an hour: weights of {size(scenario.state)}, "
        f"anchors of {size(scenario.anchor)}, deltas of about {size(scenario.delta)}"
        f"{', by context' if scenario.context else ''}"
    )
