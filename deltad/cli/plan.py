"""`deltad plan graph`: what a daemon would fold, cut and drop, and why; or what it would in a scenario.

A scenario is simulated here, without a daemon. Nothing is written in either case.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from deltad.cli.connect import Daemon, Whole, daemon_options, help_if_alone, json_option, the_run
from deltad.cli.output import show, show_json
from deltad.cli.progress import step
from deltad.errors import UsageError
from deltad.figures import count, percent, size
from deltad.ops.blocks import Block, Facts, Line, Table, columns
from deltad.types import RunId, parse_run

if TYPE_CHECKING:
    from deltad.client.messages import PlanReply
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
@click.argument("run", metavar="[RUN]", type=parse_run, required=False)
@click.option("--simulate", is_flag=True, help="Simulate a run, one version an hour, instead of asking the daemon.")
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
@daemon_options
@json_option
def graph(
    *,
    daemon: Daemon,
    run: RunId | None,
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
    """Say what the daemon would fold, cut and drop in the version graph of RUN now, and why.

    With --simulate, a run is simulated instead: regions leave for hours or weeks, join late, and are rolled back at
    times. What they pull is compared with full copies; then comes all that was decided in the last day, in words. A
    year takes a minute or two. The other options describe it.

    \b
    Examples:
      deltad plan graph my-run
      deltad plan graph --simulate
      deltad plan graph --simulate --days 30 --disk 16GiB --json
    """
    if not simulate:
        client = daemon.client()
        found = client.plan(the_run(client, run))
        if as_json:
            show_json(found)
        else:
            show(_plan_blocks(found))
        return
    if run is not None:
        raise UsageError("deltad plan graph", expected="either a run of the daemon or --simulate", found="both")

    from deltad.store.graph.simulate import Scenario
    from deltad.store.graph.simulate import simulate as simulated

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
        outcome = simulated(scenario)
    if as_json:
        show_json(_told(outcome))
    else:
        show(list(_blocks(outcome)))


def _plan_blocks(found: PlanReply) -> list[Block]:
    budget = f"{size(found.rate)} a second; {size(found.saved)} are left of it now"
    facts = Facts(
        f"run {found.run}",
        [
            ("being made", found.making or "nothing"),
            ("may be read", budget if found.rate else "nothing: `[daemon] derive_rate` is 0"),
        ],
    )
    rows = [(one.variant, one.what, one.why, one.put_off or "now") for one in found.decided]
    heads = columns("variant", "what", "why", "when")
    return [facts, Table("decided", heads, rows, empty="nothing: every way is short enough")]


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
