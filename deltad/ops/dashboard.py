"""The Grafana dashboard, written out from the few words that a panel needs: freshness, flow, cost and health.

Pure. Every query names a metric of `deltad.ops.metrics` or a record of the shipped rules; a test asks them all of a
Prometheus.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 3


@dataclass(frozen=True, slots=True)
class Query:
    """An expression of PromQL, and how its series are called."""

    expression: str
    legend: str = "{{instance}}"


@dataclass(frozen=True, slots=True)
class Panel:
    """Series over time, in Grafana's `unit`. `about` says what to look for."""

    title: str
    unit: str
    about: str
    queries: tuple[Query, ...]


def _p(title: str, unit: str, about: str, *queries: tuple[str, str] | str) -> Panel:
    found = (Query(q) if isinstance(q, str) else Query(*q) for q in queries)
    return Panel(title, unit, about, tuple(found))


_RUN = "{{run}} at {{instance}}"
_BY = 'run=~"$run"'

ROWS: dict[str, tuple[Panel, ...]] = {
    "Freshness": (
        _p(
            "Age of the newest version",
            "s",
            "A saw: it falls with each version. A slope without an end is a trainer or a link that stands still.",
            (f"time() - deltad_latest_version_created_timestamp_seconds{{{_BY}}}", _RUN),
        ),
        _p(
            "Newest version",
            "none",
            "All daemons of a run should climb together.",
            (f"deltad_latest_version_number{{{_BY}}}", _RUN),
        ),
        _p(
            "Versions behind, by replica",
            "none",
            "0 or 1 is what a link that keeps up gives.",
            (f"deltad_replica_versions_behind{{{_BY}}}", "{{replica}} of {{daemon}}"),
        ),
        _p(
            "Replicas by state",
            "none",
            "Only what was read back counts as verified.",
            (f"deltad_replicas{{{_BY}}}", "{{state}} at {{instance}}"),
        ),
        _p(
            "At their target",
            "none",
            "Beside the replicas that are held: whether the fleet is.",
            (f"deltad_replicas_at_target{{{_BY}}}", "at target, {{instance}}"),
            (f"deltad_target_held{{{_BY}}}", "held, {{instance}}"),
        ),
        _p(
            "Weights that were never published",
            "none",
            "Must be 0.",
            (f"deltad_replicas_mismatched{{{_BY}}}", _RUN),
        ),
    ),
    "Flow": (
        _p(
            "Versions a minute",
            "none",
            "Published, pulled, and passed over because a newer one came.",
            (f"60 * rate(deltad_versions_published_total{{{_BY}}}[5m])", "published, {{instance}}"),
            (f"60 * rate(deltad_versions_pulled_total{{{_BY}}}[5m])", "pulled, {{instance}}"),
            (f"60 * rate(deltad_versions_passed_over_total{{{_BY}}}[5m])", "passed over, {{instance}}"),
        ),
        _p(
            "Time from checkpoint to durable",
            "s",
            "The 90th percentile of encoding.",
            (
                f"histogram_quantile(0.9, sum by (run, le) (rate(deltad_encode_seconds_bucket{{{_BY}}}[30m])))",
                "{{run}}",
            ),
        ),
        _p(
            "Time to pull",
            "s",
            "The 90th percentile, by daemon.",
            (f"deltad:transfer_seconds:p90{{{_BY}}}", _RUN),
            (
                f"rate(deltad_transfer_seconds_sum{{{_BY}}}[30m]) / rate(deltad_transfer_seconds_count{{{_BY}}}[30m])",
                "mean",
            ),
        ),
        _p(
            "Bytes between daemons",
            "Bps",
            "Received from upstreams, sent to those that pull here, put into buckets.",
            ("rate(deltad_relay_received_bytes_total[5m])", "from {{upstream}}"),
            ("rate(deltad_relay_sent_bytes_total[5m])", "sent by {{instance}}"),
            ("rate(deltad_bucket_sent_bytes_total[5m])", "into {{bucket}}"),
        ),
        _p(
            "Pause of generation",
            "s",
            "How long a commit stops a replica; staging and reading back do not.",
            (f"deltad:pause_seconds:p99{{{_BY}}}", "pause, {{run}}"),
            (
                f"histogram_quantile(0.9, sum by (run, le) (rate(deltad_stage_seconds_bucket{{{_BY}}}[30m])))",
                "stage, {{run}}",
            ),
            (
                f"histogram_quantile(0.9, sum by (run, le) (rate(deltad_verify_seconds_bucket{{{_BY}}}[30m])))",
                "verify, {{run}}",
            ),
        ),
        _p(
            "Upstreams that answer",
            "none",
            "1 where the last question was answered.",
            ("deltad_upstream_up", "{{upstream}}, {{instance}}"),
        ),
    ),
    "Cost": (
        _p(
            "Density",
            "percentunit",
            "The share of elements that changed: what a delta costs follows it.",
            (f"deltad:density:ratio{{{_BY}}}", _RUN),
            (f"sum by (run) (rate(deltad_elements_changed_total{{{_BY}}}[5m]))", "changed a second, {{run}}"),
            (f"sum by (run) (rate(deltad_elements_total{{{_BY}}}[5m]))", "elements a second, {{run}}"),
        ),
        _p(
            "Bytes a version",
            "bytes",
            "Of the edges that were published or pulled.",
            (f"deltad:bytes_per_version:avg{{{_BY}}}", _RUN),
            (f"rate(deltad_delta_bytes_total{{{_BY}}}[5m])", "a second, {{instance}}"),
        ),
        _p(
            "Saved against whole versions",
            "percentunit",
            "What was not sent, of what whole versions would have taken.",
            (f"deltad:saved:ratio{{{_BY}}}", _RUN),
            (f"rate(deltad_full_bytes_avoided_total{{{_BY}}}[5m])", "bytes avoided a second, {{instance}}"),
        ),
        _p(
            "How versions are coded",
            "none",
            "By the coder that the slowest link below asked for.",
            (f"sum by (run, coder) (increase(deltad_versions_coded_total{{{_BY}}}[1h]))", "{{coder}}, {{run}}"),
        ),
        _p(
            "Derived edges",
            "none",
            "Skip deltas, inverses and anchors made and dropped in the background.",
            (f"increase(deltad_edges_made_total{{{_BY}}}[1h])", "{{kind}}, {{instance}}"),
            (f"increase(deltad_edges_dropped_total{{{_BY}}}[1h])", "dropped, {{instance}}"),
            (f"increase(deltad_edges_refused_total{{{_BY}}}[1h])", "refused: {{reason}}"),
        ),
        _p(
            "Cost of derived edges",
            "none",
            "Bytes and seconds an hour.",
            (f"increase(deltad_edges_made_bytes_total{{{_BY}}}[1h])", "bytes, {{instance}}"),
            (f"increase(deltad_edge_make_seconds_sum{{{_BY}}}[1h])", "seconds, {{instance}}"),
        ),
    ),
    "Health": (
        _p(
            "Ready",
            "none",
            "What /readyz says; the status page there says why not.",
            ("deltad_ready", "{{instance}}"),
            ("deltad_build_info", "{{version}} at {{instance}}"),
        ),
        _p(
            "Failures an hour",
            "none",
            "Pulls, buckets, checkpoints and steps, by kind.",
            ("increase(deltad_pull_failures_total[1h])", "pull, {{kind}}, {{upstream}}"),
            ("increase(deltad_bucket_failures_total[1h])", "bucket, {{kind}}, {{bucket}}"),
            (f"increase(deltad_checkpoints_refused_total{{{_BY}}}[1h])", "checkpoint, {{reason}}, {{run}}"),
            (f"increase(deltad_publishes_skipped_total{{{_BY}}}[1h])", "step, {{reason}}, {{run}}"),
        ),
        _p(
            "Disk of the store",
            "bytes",
            "A publish is refused before the reserve is touched.",
            ("deltad_store_bytes", "held, {{instance}}"),
            ("deltad_store_free_bytes", "free, {{instance}}"),
        ),
        _p(
            "Scrub",
            "none",
            "Damage that was found, healed, and is left.",
            ("increase(deltad_scrub_damaged_total[1d])", "found, {{instance}}"),
            ("increase(deltad_scrub_healed_total[1d])", "healed, {{instance}}"),
            ("deltad_scrub_unhealed", "left, {{instance}}"),
            ("rate(deltad_scrub_read_bytes_total[5m])", "bytes a second, {{instance}}"),
            ("time() - (deltad_scrub_covered_timestamp_seconds > 0)", "seconds since all was read, {{instance}}"),
        ),
        _p(
            "Backend",
            "none",
            "What computes, and failures of a device.",
            ("deltad_backend_info", "{{backend}} at {{instance}}"),
            ("increase(deltad_backend_fallbacks_total[1h])", "fell back from {{backend}}, {{instance}}"),
            ("increase(deltad_config_reloads_total[1h])", "reload {{outcome}}, {{instance}}"),
        ),
        _p(
            "Process: memory",
            "bytes",
            "Resident and virtual memory of the daemon.",
            ("deltad_process_resident_memory_bytes", "resident, {{instance}}"),
            ("deltad_process_virtual_memory_bytes", "virtual, {{instance}}"),
        ),
        _p(
            "Process",
            "none",
            "Processors, descriptors, and how long it has run.",
            ("rate(deltad_process_cpu_seconds_total[5m])", "processors, {{instance}}"),
            ("deltad_process_open_fds", "descriptors, {{instance}}"),
            ("deltad_process_max_fds", "descriptors allowed, {{instance}}"),
            ("time() - deltad_process_start_time_seconds", "seconds up, {{instance}}"),
        ),
    ),
}


def queries() -> list[str]:
    """Every expression, with `$run` as Grafana fills it in where all runs are shown."""
    return [query.expression.replace("$run", ".*") for row in ROWS.values() for panel in row for query in panel.queries]


def dashboard() -> str:
    """The dashboard as Grafana imports it."""
    source = {"type": "prometheus", "uid": "${source}"}
    document = {
        "title": "deltad",
        "uid": "deltad",
        "description": "Freshness, flow, cost and health of daemons that move policies between regions.",
        "tags": ["deltad"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
                {
                    "name": "run",
                    "label": "Run",
                    "type": "query",
                    "datasource": source,
                    "query": "label_values(deltad_latest_version_number, run)",
                    "includeAll": True,
                    "allValue": ".*",
                    "multi": True,
                    "refresh": 2,
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
        "panels": list(_panels(source)),
    }
    return json.dumps(document, indent=1) + "\n"


def _panels(source: dict[str, str]) -> Iterator[dict[str, Any]]:
    number = y = 0
    for title, row in ROWS.items():
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": False,
            "panels": [],
            "gridPos": {"h": 1, "w": _WIDTH * _COLUMNS, "x": 0, "y": y},
        }
        y += 1
        for place, panel in enumerate(row):
            number += 1
            yield {
                "id": number,
                "type": "timeseries",
                "title": panel.title,
                "description": panel.about,
                "datasource": source,
                "gridPos": {
                    "h": _HEIGHT,
                    "w": _WIDTH,
                    "x": place % _COLUMNS * _WIDTH,
                    "y": y + place // _COLUMNS * _HEIGHT,
                },
                "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
                "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
                "targets": [
                    {
                        "refId": chr(ord("A") + i),
                        "datasource": source,
                        "expr": query.expression,
                        "legendFormat": query.legend,
                    }
                    for i, query in enumerate(panel.queries)
                ],
            }
        y += -(-len(row) // _COLUMNS) * _HEIGHT
