"""What the daemon learns is what Prometheus reads."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from prometheus_client import Counter, Gauge, Histogram

from deltad.client.messages import RegionReport, RegionView, ReplicaReport, ReplicaState, RunReport, Seconds
from deltad.errors import CheckpointError, PeerError
from deltad.ops.metrics import Metrics
from tests.kit.operations import RUN, version_info


@pytest.fixture
def metrics() -> Metrics:
    return Metrics.create("0.1.0")


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"deltad_{name}", labels)


def test_two_daemons_in_one_process_share_no_metric() -> None:
    one, other = Metrics.create("1"), Metrics.create("1")
    one.published(version_info(1))
    assert value(one, "versions_published_total", run=RUN) == 1
    assert value(other, "versions_published_total", run=RUN) is None


def test_a_published_version_is_counted_with_its_bytes_and_its_time(metrics: Metrics) -> None:
    info = msgspec.structs.replace(version_info(4), seconds=Seconds(encode=1.5))
    metrics.published(info)
    assert value(metrics, "versions_published_total", run=RUN) == 1
    assert value(metrics, "delta_bytes_total", run=RUN) == info.delta_bytes
    assert value(metrics, "full_bytes_avoided_total", run=RUN) == info.full_bytes - info.delta_bytes
    assert value(metrics, "encode_seconds_sum", run=RUN) == 1.5
    assert value(metrics, "latest_version_number", run=RUN) == 4
    assert value(metrics, "latest_version_created_timestamp_seconds", run=RUN) == info.created
    assert value(metrics, "versions_pulled_total", run=RUN) is None


def test_published_versions_are_counted_by_how_they_are_coded(metrics: Metrics) -> None:
    for coder in ("dense", "dense", "blind"):
        metrics.published(msgspec.structs.replace(version_info(1), coder=coder, coder_reason="b pulls at 1.0 MB/s"))
    assert value(metrics, "versions_coded_total", run=RUN, coder="dense") == 2
    assert value(metrics, "versions_coded_total", run=RUN, coder="blind") == 1


def test_a_pulled_version_counts_the_bytes_that_were_fetched_for_it(metrics: Metrics) -> None:
    info = msgspec.structs.replace(version_info(4), pulled_bytes=50, seconds=Seconds(transfer=3.0))
    metrics.pulled(info)
    assert value(metrics, "versions_pulled_total", run=RUN) == 1
    assert value(metrics, "delta_bytes_total", run=RUN) == 50
    assert value(metrics, "full_bytes_avoided_total", run=RUN) == info.full_bytes - 50
    assert value(metrics, "transfer_seconds_sum", run=RUN) == 3.0
    assert value(metrics, "versions_published_total", run=RUN) is None


def test_an_edge_larger_than_the_model_avoids_nothing_and_breaks_no_counter(metrics: Metrics) -> None:
    metrics.published(msgspec.structs.replace(version_info(1), delta_bytes=10_000, full_bytes=2000))
    assert value(metrics, "full_bytes_avoided_total", run=RUN) == 0


def test_every_state_of_the_fleet_is_shown_and_falls_back_to_zero(metrics: Metrics) -> None:
    metrics.fleet(RUN, [ReplicaState.VERIFIED, ReplicaState.VERIFIED, ReplicaState.UNKNOWN])
    assert value(metrics, "replicas", run=RUN, state="verified") == 2
    assert value(metrics, "replicas", run=RUN, state="unknown") == 1
    metrics.fleet(RUN, [])
    assert [value(metrics, "replicas", run=RUN, state=state.value) for state in ReplicaState] == [0] * len(ReplicaState)


def test_a_held_fleet_and_the_replicas_that_are_where_they_should_be_are_told(metrics: Metrics) -> None:
    metrics.target(RUN, held=True, verified=3)
    assert (value(metrics, "target_held", run=RUN), value(metrics, "replicas_at_target", run=RUN)) == (1, 3)
    metrics.target(RUN, held=False, verified=0)
    assert (value(metrics, "target_held", run=RUN), value(metrics, "replicas_at_target", run=RUN)) == (0, 0)


def test_the_density_is_two_counters(metrics: Metrics) -> None:
    metrics.published(version_info(1))
    metrics.pulled(version_info(2))
    assert (value(metrics, "elements_total", run=RUN), value(metrics, "elements_changed_total", run=RUN)) == (2000, 8)


def test_versions_that_never_came_and_steps_that_were_not_published_are_counted(metrics: Metrics) -> None:
    metrics.passed_over(RUN, 3)
    metrics.passed_over(RUN, 0)
    metrics.publishes_skipped_for(RUN, {"busy": 2, "Unavailable": 1})
    metrics.publishes_skipped_for(RUN, {"busy": -5})
    assert value(metrics, "versions_passed_over_total", run=RUN) == 3
    assert value(metrics, "publishes_skipped_total", run=RUN, reason="busy") == 2


def report(version: str, **seconds: float) -> ReplicaReport:
    return ReplicaReport("r0", RUN, "bf16", ReplicaState.VERIFIED, version, seconds=Seconds(**seconds))


def test_what_one_version_took_a_replica_is_counted_once_however_often_it_is_said(metrics: Metrics) -> None:
    told = [
        report(""),
        report("v000001", stage=2.0, pause=0.01),
        report("v000001", stage=2.0, pause=0.01),
        report("v000001", stage=2.0, pause=0.01, verify=0.5),
        report("v000002", stage=1.0, pause=0.02, verify=0.5),
    ]
    for before, now in pairwise(told):
        metrics.replica_reported(before, now)
    assert value(metrics, "pause_seconds_count", run=RUN) == 2
    assert value(metrics, "pause_seconds_sum", run=RUN) == pytest.approx(0.03)
    assert (value(metrics, "stage_seconds_sum", run=RUN), value(metrics, "verify_seconds_count", run=RUN)) == (3.0, 2)


def standing(*behind: int) -> list[RegionView]:
    replicas = tuple(ReplicaReport(f"r{i}", RUN, "bf16", ReplicaState.READY, staleness=n) for i, n in enumerate(behind))
    return [RegionView(RegionReport("b", "boot-1", 1, {RUN: RunReport(replicas=replicas)}), 0.0, True)]


def test_a_replica_that_is_gone_is_shown_no_more(metrics: Metrics) -> None:
    metrics.standing(RUN, standing(4, 1), mismatched=0)
    metrics.standing(RUN, standing(5), mismatched=1)
    assert value(metrics, "replica_versions_behind", run=RUN, daemon="b", replica="r0") == 5
    assert value(metrics, "replica_versions_behind", run=RUN, daemon="b", replica="r1") is None
    assert value(metrics, "replicas_mismatched", run=RUN) == 1


def test_of_a_run_that_is_gone_nothing_is_shown_and_of_another_all(metrics: Metrics) -> None:
    for run in (RUN, "other"):
        metrics.published(version_info(1, run=run))
        metrics.fleet(run, [ReplicaState.VERIFIED])
    metrics.standing(RUN, standing(1), mismatched=0)
    metrics.forget(RUN)
    runs = {s.labels.get("run") for family in metrics.registry.collect() for s in family.samples}
    assert runs == {None, "other"}


def test_failures_are_counted_by_kind(metrics: Metrics) -> None:
    metrics.pull_failed("http://u:1", PeerError("u"))
    metrics.checkpoint_refused(RUN, CheckpointError("/checkpoints/step_1"))
    assert value(metrics, "pull_failures_total", upstream="http://u:1", kind="Peer") == 1
    assert value(metrics, "checkpoints_refused_total", run=RUN, reason="Checkpoint") == 1


def test_the_backend_that_computes_now_is_the_only_one_shown(metrics: Metrics) -> None:
    metrics.backend("cupy", "as configured")
    metrics.backend("numba", "cupy failed")
    metrics.fell_back("cupy")
    assert value(metrics, "backend_info", backend="numba", reason="cupy failed") == 1
    assert value(metrics, "backend_info", backend="cupy", reason="as configured") is None
    assert value(metrics, "backend_fallbacks_total", backend="cupy") == 1


def test_links_and_store_show_their_present_state(metrics: Metrics) -> None:
    metrics.upstream("http://u:1", up=True)
    metrics.upstream("http://u:1", up=False)
    metrics.store(used=5, free=7)
    assert value(metrics, "upstream_up", upstream="http://u:1") == 0
    assert (value(metrics, "store_bytes"), value(metrics, "store_free_bytes")) == (5, 7)


def test_every_metric_follows_the_house_rules(metrics: Metrics) -> None:
    families = {family.name: family for family in metrics.registry.collect()}
    held = metrics.metrics()
    assert len(families) == len(held) + len(list(metrics.process.collect()))
    for metric in held:
        assert isinstance(metric, Counter | Gauge | Histogram)
        assert "region" not in metric._labelnames
    for name, family in families.items():
        assert name.startswith("deltad_")
        assert family.documentation.endswith(".")
        assert not name.endswith(("_age", "_age_seconds", "_ratio", "_percent"))
        assert not any(word in name for word in ("milliseconds", "kilobytes", "mib"))
