"""Every alert fires for what it is about and not for less, and nothing that is measured is left out."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

import deltad
from deltad.ops import shipped
from tests.kit.prometheus import ALERTS, asked, measured

DOCS = Path(deltad.__file__).parent / "docs"
_ON = 'instance="h:7701"'


@dataclass(frozen=True)
class Case:
    """Series, in promtool's words, under which an alert fires, and such under which it does not, after so long."""

    after: str
    fires: dict[str, str]
    quiet: dict[str, str]
    step: str = "1m"
    """How far samples, and looks at the rules, are apart."""


def _one(after: str, name: str, fires: str, quiet: str, labels: str = "", *, step: str = "1m") -> Case:
    series = f"{name}{{{', '.join(filter(None, (labels, _ON)))}}}"
    return Case(after, {series: fires}, {series: quiet}, step)


_R = 'run="r"'
CASES = {
    "DeltadDown": _one("5m", "up", "0x10", "1x10", 'job="deltad"'),
    "DeltadRestarts": _one("61m", "deltad_process_start_time_seconds", "0+60x61", "7x61"),
    "DeltadNotReady": _one("6m", "deltad_ready", "0x10", "0x3 1x10"),
    "DeltadNoNewVersion": _one("70m", "deltad_latest_version_created_timestamp_seconds", "0x80", "0+60x80", _R),
    "DeltadReplicaMismatch": _one("1m", "deltad_replicas_mismatched", "1x5", "0x5", _R),
    "DeltadReplicaFenced": _one("3m", "deltad_replicas", "1x5", "0x5", f'{_R}, state="fenced"'),
    "DeltadReplicaUnknown": _one("6m", "deltad_replicas", "2x9", "2x2 0x9", f'{_R}, state="unknown"'),
    "DeltadReplicasBehind": Case(
        "12m",
        {f'deltad_replica_versions_behind{{{_R}, {_ON}, daemon="b", replica="r0"}}': "4x20"},
        {
            f'deltad_replica_versions_behind{{{_R}, {_ON}, daemon="b", replica="r0"}}': "4x20",
            f"deltad_target_held{{{_R}, {_ON}}}": "1x20",
        },
    ),
    "DeltadTargetHeld": _one("26h", "deltad_target_held", "1x30", "1x20 0x10", _R, step="1h"),
    "DeltadLongPauses": Case(
        "40m",
        {
            f'deltad_pause_seconds_bucket{{{_R}, {_ON}, le="1"}}': "0x60",
            f'deltad_pause_seconds_bucket{{{_R}, {_ON}, le="2.5"}}': "0+1x60",
            f'deltad_pause_seconds_bucket{{{_R}, {_ON}, le="+Inf"}}': "0+1x60",
        },
        {
            f'deltad_pause_seconds_bucket{{{_R}, {_ON}, le="1"}}': "0+1x60",
            f'deltad_pause_seconds_bucket{{{_R}, {_ON}, le="+Inf"}}': "0+1x60",
        },
    ),
    "DeltadUpstreamDown": _one("6m", "deltad_upstream_up", "0x9", "1x9", 'upstream="http://u"'),
    "DeltadPullsFail": _one(
        "20m", "deltad_pull_failures_total", "0+1x30", "3x30", 'upstream="http://u", kind="Unavailable"'
    ),
    "DeltadPullsRefused": _one(
        "5m", "deltad_pull_failures_total", "0 0 0 1x9", "1x9", 'upstream="http://u", kind="Integrity"'
    ),
    "DeltadLinkTooSlow": Case(
        "50m",
        {
            f"deltad_versions_passed_over_total{{{_R}, {_ON}}}": "0+3x60",
            f"deltad_versions_pulled_total{{{_R}, {_ON}}}": "0+1x60",
        },
        {
            f"deltad_versions_passed_over_total{{{_R}, {_ON}}}": "0+1x60",
            f"deltad_versions_pulled_total{{{_R}, {_ON}}}": "0+3x60",
        },
    ),
    "DeltadBucketFails": _one("20m", "deltad_bucket_failures_total", "0+1x30", "3x30", 'bucket="s3://b", kind="Store"'),
    "DeltadCheckpointRefused": _one(
        "5m", "deltad_checkpoints_refused_total", "0 0 1x9", "1x9", f'{_R}, reason="Conflict"'
    ),
    "DeltadPublishesSkipped": _one("50m", "deltad_publishes_skipped_total", "0+1x60", "5x60", f'{_R}, reason="busy"'),
    "DeltadDeltasDense": Case(
        "65m",
        {
            f"deltad_elements_changed_total{{{_R}, {_ON}}}": "0+300x90",
            f"deltad_elements_total{{{_R}, {_ON}}}": "0+1000x90",
        },
        {
            f"deltad_elements_changed_total{{{_R}, {_ON}}}": "0+3x90",
            f"deltad_elements_total{{{_R}, {_ON}}}": "0+1000x90",
        },
    ),
    "DeltadDiskFull": _one("3m", "deltad_store_free_bytes", "1000000000x9", "2000000000x9"),
    "DeltadDiskFillsUp": _one("9h", "deltad_store_free_bytes", "10000000000-600000000x12", "10000000000x12", step="1h"),
    "DeltadDamage": _one("1m", "deltad_scrub_unhealed", "1x5", "0x5"),
    "DeltadScrubLate": _one("530h", "deltad_scrub_covered_timestamp_seconds", "1x540", "0x540", step="1h"),
    "DeltadEdgesRefused": _one("90m", "deltad_edges_refused_total", "0+1x99", "2x99", f'{_R}, reason="StoreFull"'),
    "DeltadBackendFellBack": _one("5m", "deltad_backend_fallbacks_total", "0 0 1x9", "1x9", 'backend="cupy"'),
    "DeltadBackendSlow": Case(
        "12m",
        {f'deltad_backend_info{{{_ON}, backend="numpy", reason="x"}}': "1x20"},
        {f'deltad_backend_info{{{_ON}, backend="numba", reason="x"}}': "1x20"},
    ),
    "DeltadReloadRefused": _one("5m", "deltad_config_reloads_total", "0 0 1x9", "1x9", 'outcome="refused"'),
    "DeltadDescriptors": Case(
        "9m",
        {f"deltad_process_open_fds{{{_ON}}}": "900x20", f"deltad_process_max_fds{{{_ON}}}": "1000x20"},
        {f"deltad_process_open_fds{{{_ON}}}": "100x20", f"deltad_process_max_fds{{{_ON}}}": "1000x20"},
    ),
}


def _tests(step: str) -> Iterator[dict[str, object]]:
    for name, case in ((name, case) for name, case in CASES.items() if case.step == step):
        for series, count in ((case.fires, 1), (case.quiet, 0)):
            yield {
                "interval": step,
                "name": f"{name} {'fires' if count else 'is quiet'}",
                "input_series": [{"series": each, "values": values} for each, values in series.items()],
                "promql_expr_test": [
                    {
                        "expr": f'count(ALERTS{{alertname="{name}", alertstate="firing"}}) or vector(0)',
                        "eval_time": case.after,
                        "exp_samples": [{"labels": "{}", "value": count}],
                    }
                ],
            }


def test_every_alert_fires_for_what_it_is_about_and_not_for_less(tmp_path: Path) -> None:
    assert CASES.keys() == ALERTS.keys()
    (tmp_path / "rules.yml").write_text(shipped.read("rules.yml"))
    words = {
        "interval": "1m",
        "input_series": [{"series": f'deltad_upstream_up{{{_ON}, upstream="http://u"}}', "values": "0x9"}],
        "alert_rule_test": [
            {
                "alertname": "DeltadUpstreamDown",
                "eval_time": "6m",
                "exp_alerts": [
                    {
                        "exp_labels": {"severity": "warning", "instance": "h:7701", "upstream": "http://u"},
                        "exp_annotations": {
                            "summary": "h:7701 gets no answer from http://u.",
                            "runbook": "RUNBOOK.md#deltadupstreamdown",
                        },
                    }
                ],
            }
        ],
    }
    for step, tests in (("1m", [*_tests("1m"), words]), ("1h", [*_tests("1h")])):
        document = {"rule_files": ["rules.yml"], "evaluation_interval": step, "tests": tests}
        (tmp_path / f"{step}.yml").write_text(yaml.safe_dump(document))
    ended = subprocess.run(
        ["promtool", "test", "rules", "1m.yml", "1h.yml"], cwd=tmp_path, check=False, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_every_alert_has_a_section_of_the_runbook_and_every_section_an_alert() -> None:
    _, *sections = re.split(r"^## ", (DOCS / "RUNBOOK.md").read_text(), flags=re.MULTILINE)
    told = {section.partition("\n")[0]: section for section in sections}
    assert list(told) == list(ALERTS), "in the order of the rules"
    for name, section in told.items():
        assert all(f"**{part}.**" in section for part in ("Meaning", "Check", "Fix")), name
        assert ALERTS[name]["annotations"]["runbook"] == f"RUNBOOK.md#{name.lower()}"
        assert ALERTS[name]["labels"]["severity"] in ("info", "warning", "critical")
    assert shipped.read("runbook") == (DOCS / "RUNBOOK.md").read_text()


def test_what_the_runbook_names_is_measured() -> None:
    named = asked((DOCS / "RUNBOOK.md").read_text())
    assert named
    assert named <= measured()


def test_the_dashboard_is_one_that_grafana_reads() -> None:
    document = json.loads(shipped.read("dashboard.json"))
    panels = document["panels"]
    assert [panel["title"] for panel in panels if panel["type"] == "row"] == ["Freshness", "Flow", "Cost", "Health"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels]
    assert len(set(taken)) == len(taken)
    assert all(panel["description"] and panel["targets"] for panel in panels if panel["type"] == "timeseries")
