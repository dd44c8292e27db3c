"""All metrics of the daemon, in one place and one registry of its own.

Whoever learns a fact calls the method named after it; no other module makes metrics or labels. Rules:
moments are timestamps (an age is for whoever asks to compute), shares are two counters and never a
ratio, seconds and bytes are the units, and no label is called `region`, which is the scraper's word.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from deltad.client.messages import RegionView, ReplicaReport, ReplicaState, VersionInfo
from deltad.errors import DeltadError
from deltad.types import parse_version

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_PAUSE_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)

Metric = Counter | Gauge | Histogram


@dataclass(frozen=True, slots=True)
class Metrics:
    """The metrics of one daemon. Make it with `create`."""

    registry: CollectorRegistry
    process: ProcessCollector
    build_info: Gauge
    backend_info: Gauge
    backend_fallbacks: Counter
    versions_published: Counter
    versions_coded: Counter
    versions_pulled: Counter
    versions_passed_over: Counter
    publishes_skipped: Counter
    elements: Counter
    elements_changed: Counter
    delta_bytes: Counter
    full_bytes_avoided: Counter
    encode_seconds: Histogram
    transfer_seconds: Histogram
    latest_version_number: Gauge
    latest_version_created: Gauge
    replicas: Gauge
    replicas_at_target: Gauge
    replicas_mismatched: Gauge
    replica_versions_behind: Gauge
    pause_seconds: Histogram
    stage_seconds: Histogram
    verify_seconds: Histogram
    target_held: Gauge
    relay_received_bytes: Counter
    relay_sent_bytes: Counter
    bucket_sent_bytes: Counter
    bucket_failures: Counter
    upstream_up: Gauge
    pull_failures: Counter
    checkpoints_refused: Counter
    edges_made: Counter
    edges_made_bytes: Counter
    edge_make_seconds: Histogram
    edges_dropped: Counter
    edges_refused: Counter
    store_bytes: Gauge
    store_free_bytes: Gauge
    scrub_read_bytes: Counter
    scrub_damaged: Counter
    scrub_healed: Counter
    scrub_unhealed: Gauge
    scrub_covered: Gauge
    config_reloads: Counter
    ready: Gauge
    _shown: dict[str, frozenset[tuple[str, ...]]] = field(default_factory=dict)

    @classmethod
    def create(cls, version: str) -> Metrics:
        """Fresh metrics of a daemon of this version, in a registry of their own."""
        registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"deltad_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"deltad_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, *labels: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(f"deltad_{name}", text, labels, registry=registry, buckets=buckets)

        metrics = cls(
            registry=registry,
            process=ProcessCollector(namespace="deltad", registry=registry),
            build_info=gauge("build_info", "Always 1; the label tells what runs.", "version"),
            backend_info=gauge(
                "backend_info", "Always 1; the labels tell which backend computes, and why.", "backend", "reason"
            ),
            backend_fallbacks=counter(
                "backend_fallbacks", "Times that work went on with the CPU because a device failed.", "backend"
            ),
            versions_published=counter("versions_published", "Versions made durable from checkpoints here.", "run"),
            versions_coded=counter("versions_coded", "Versions published here, by how they are coded.", "run", "coder"),
            versions_pulled=counter("versions_pulled", "Versions pulled from upstreams.", "run"),
            versions_passed_over=counter(
                "versions_passed_over", "Versions that were never pulled, because a newer one was.", "run"
            ),
            publishes_skipped=counter(
                "publishes_skipped",
                "Steps that a trainer here did not publish, by kind of reason, told with the next that it did.",
                "run",
                "reason",
            ),
            elements=counter("elements", "Elements of the versions that were published or pulled.", "run"),
            elements_changed=counter(
                "elements_changed", "Those of them whose bits differ from the version before: the density.", "run"
            ),
            delta_bytes=counter("delta_bytes", "Bytes of the edges that were published or pulled.", "run"),
            full_bytes_avoided=counter(
                "full_bytes_avoided", "Bytes that sending whole versions would have taken beyond that.", "run"
            ),
            encode_seconds=histogram("encode_seconds", "Reading, diffing and storing a version.", "run"),
            transfer_seconds=histogram("transfer_seconds", "Pulling a version.", "run"),
            latest_version_number=gauge("latest_version_number", "Number of the newest durable version.", "run"),
            latest_version_created=gauge(
                "latest_version_created_timestamp_seconds",
                "When the newest durable version was published, by its publisher's clock.",
                "run",
            ),
            replicas=gauge("replicas", "Replicas, here and in the regions below, by state.", "run", "state"),
            replicas_at_target=gauge(
                "replicas_at_target", "Replicas that were read back at the version that they should serve.", "run"
            ),
            replicas_mismatched=gauge(
                "replicas_mismatched", "Replicas whose weights, read back, are not what was published.", "run"
            ),
            replica_versions_behind=gauge(
                "replica_versions_behind",
                "How many versions of the run are newer than the one that a replica serves.",
                "run",
                "daemon",
                "replica",
            ),
            pause_seconds=histogram(
                "pause_seconds",
                "How long generation stood still at a commit of a replica at this daemon.",
                "run",
                buckets=_PAUSE_SECONDS,
            ),
            stage_seconds=histogram(
                "stage_seconds", "Staging a version beside the live weights of a replica at this daemon.", "run"
            ),
            verify_seconds=histogram(
                "verify_seconds", "Reading all served weights of a replica at this daemon back.", "run"
            ),
            target_held=gauge(
                "target_held", "Whether this daemon's fleet is held at a version (1) or follows the newest (0).", "run"
            ),
            relay_received_bytes=counter("relay_received_bytes", "Bytes received from an upstream.", "upstream"),
            relay_sent_bytes=counter("relay_sent_bytes", "Bytes sent to daemons that pull from here."),
            bucket_sent_bytes=counter("bucket_sent_bytes", "Bytes of objects put into a bucket.", "bucket"),
            bucket_failures=counter(
                "bucket_failures", "Tries to keep a run in a bucket that failed, by kind of error.", "bucket", "kind"
            ),
            upstream_up=gauge("upstream_up", "Whether the upstream answered last (1) or failed (0).", "upstream"),
            pull_failures=counter("pull_failures", "Pulls that failed, by kind of error.", "upstream", "kind"),
            checkpoints_refused=counter(
                "checkpoints_refused", "Checkpoints that were not published, by kind of error.", "run", "reason"
            ),
            edges_made=counter("edges_made", "Skip deltas, inverses and anchors made here.", "run", "kind"),
            edges_made_bytes=counter("edges_made_bytes", "Bytes of the edges that were made here.", "run"),
            edge_make_seconds=histogram("edge_make_seconds", "Making one edge.", "run"),
            edges_dropped=counter("edges_dropped", "Edges made here that were dropped again.", "run"),
            edges_refused=counter("edges_refused", "Edges that could not be made, by kind of error.", "run", "reason"),
            store_bytes=gauge("store_bytes", "Size of all objects in the store."),
            store_free_bytes=gauge("store_free_bytes", "What may still be written on the store's file system."),
            scrub_read_bytes=counter("scrub_read_bytes", "Bytes that the scrub read."),
            scrub_damaged=counter(
                "scrub_damaged", "Damaged objects, records and generations of mirrors that were found."
            ),
            scrub_healed=counter(
                "scrub_healed", "Damaged objects, records and generations of mirrors that were healed."
            ),
            scrub_unhealed=gauge("scrub_unhealed", "What is damaged and not healed now."),
            scrub_covered=gauge(
                "scrub_covered_timestamp_seconds",
                "All that was stored at this moment was read by the scrub since; 0 until then.",
            ),
            config_reloads=counter("config_reloads", "Reloads of the configuration, by outcome.", "outcome"),
            ready=gauge("ready", "Whether /readyz says yes (1) or no (0)."),
        )
        metrics.build_info.labels(version).set(1)
        return metrics

    def backend(self, name: str, reason: str) -> None:
        """This backend computes from now on."""
        self.backend_info.clear()
        self.backend_info.labels(name, reason).set(1)

    def reloaded(self, taken_up: bool) -> None:
        """A reload of the configuration was asked for, and the file was taken up or refused."""
        self.config_reloads.labels("taken_up" if taken_up else "refused").inc()

    def fell_back(self, name: str) -> None:
        """This device's backend failed, and the CPU's went on."""
        self.backend_fallbacks.labels(name).inc()

    def published(self, info: VersionInfo) -> None:
        """A version was published here."""
        self.versions_published.labels(info.run).inc()
        self.versions_coded.labels(info.run, info.coder).inc()
        self.encode_seconds.labels(info.run).observe(info.seconds.encode)
        self._moved(info, info.delta_bytes)

    def pulled(self, info: VersionInfo) -> None:
        """A version was pulled. What counts is what was fetched for it, which is less after a cut."""
        self.versions_pulled.labels(info.run).inc()
        self.transfer_seconds.labels(info.run).observe(info.seconds.transfer)
        self._moved(info, info.pulled_bytes)

    def passed_over(self, run: str, count: int) -> None:
        """So many versions were never pulled before one that was."""
        self.versions_passed_over.labels(run).inc(count)

    def publishes_skipped_for(self, run: str, reasons: Mapping[str, int]) -> None:
        """A trainer did not publish so many steps, by kind of reason."""
        for reason, count in reasons.items():
            self.publishes_skipped.labels(run, reason).inc(max(count, 0))

    def latest(self, info: VersionInfo) -> None:
        """This is the newest durable version of its run, whether new or found at the start."""
        self.latest_version_number.labels(info.run).set(parse_version(info.version).number)
        self.latest_version_created.labels(info.run).set(info.created)

    def fleet(self, run: str, states: Iterable[ReplicaState]) -> None:
        """The states of all replicas of a run. States that nobody is in are shown as 0."""
        tally = Tally(states)
        for state in ReplicaState:
            self.replicas.labels(run, state.value).set(tally[state])

    def replica_reported(self, before: ReplicaReport, now: ReplicaReport) -> None:
        """A replica at this daemon said how it is. What one version took it is counted once."""
        if (
            now.version
            and now.seconds.pause
            and (now.version, now.seconds.pause)
            != (
                before.version,
                before.seconds.pause,
            )
        ):
            self.pause_seconds.labels(now.run).observe(now.seconds.pause)
            self.stage_seconds.labels(now.run).observe(now.seconds.stage)
        if now.seconds.verify and (now.version, now.seconds.verify) != (before.version, before.seconds.verify):
            self.verify_seconds.labels(now.run).observe(now.seconds.verify)

    def standing(self, run: str, regions: Iterable[RegionView], *, mismatched: int) -> None:
        """How far behind every replica of a run is, and how many serve what was never published.

        A replica that is gone is shown no more.
        """
        shown = {
            (run, region.report.daemon, replica.replica): replica.staleness
            for region in regions
            for replica in region.report.runs[run].replicas
        }
        for labels in self._shown.get(run, frozenset()) - shown.keys():
            self.replica_versions_behind.remove(*labels)
        self._shown[run] = frozenset(shown)
        for labels, behind in shown.items():
            self.replica_versions_behind.labels(*labels).set(behind)
        self.replicas_mismatched.labels(run).set(mismatched)

    def forget(self, run: str) -> None:
        """A run is gone: none of its series is shown any more."""
        for metric in self.metrics():
            if "run" in metric._labelnames:
                metric.remove_by_labels({"run": run})
        self._shown.pop(run, None)

    def metrics(self) -> list[Metric]:
        """All of them, in the order of their fields."""
        held = (getattr(self, each.name) for each in fields(self))
        return [metric for metric in held if isinstance(metric, Metric)]

    def target(self, run: str, *, held: bool, verified: int) -> None:
        """Whether the fleet is held, and how many replicas, here and below, serve what they should."""
        self.target_held.labels(run).set(held)
        self.replicas_at_target.labels(run).set(verified)

    def upstream(self, url: str, *, up: bool) -> None:
        """An upstream answered, or failed to."""
        self.upstream_up.labels(url).set(up)

    def received(self, url: str, count: int) -> None:
        """Bytes came from an upstream."""
        self.relay_received_bytes.labels(url).inc(count)

    def sent(self, count: int) -> None:
        """Bytes of an object were sent to a daemon that pulls from here."""
        self.relay_sent_bytes.inc(count)

    def put_into_bucket(self, url: str, count: int) -> None:
        """An object of so many bytes was put into a bucket."""
        self.bucket_sent_bytes.labels(url).inc(count)

    def bucket_failed(self, url: str, error: DeltadError) -> None:
        """A run could not be brought into a bucket, or a bucket not be swept."""
        self.bucket_failures.labels(url, error.kind).inc()

    def pull_failed(self, url: str, error: DeltadError) -> None:
        """A pull from an upstream failed."""
        self.pull_failures.labels(url, error.kind).inc()

    def checkpoint_refused(self, run: str, error: DeltadError) -> None:
        """A checkpoint was not published."""
        self.checkpoints_refused.labels(run, error.kind).inc()

    def edge_made(self, run: str, kind: str, size: int, seconds: float) -> None:
        """An edge of so many bytes was made here."""
        self.edges_made.labels(run, kind).inc()
        self.edges_made_bytes.labels(run).inc(size)
        self.edge_make_seconds.labels(run).observe(seconds)

    def edge_dropped(self, run: str) -> None:
        """An edge that was made here was dropped."""
        self.edges_dropped.labels(run).inc()

    def edge_refused(self, run: str, error: DeltadError) -> None:
        """An edge could not be made."""
        self.edges_refused.labels(run, error.kind).inc()

    def store(self, *, used: int, free: int) -> None:
        """How full the store is, in bytes."""
        self.store_bytes.set(used)
        self.store_free_bytes.set(free)

    def scrubbed(self, count: int) -> None:
        """The scrub read so many bytes."""
        self.scrub_read_bytes.inc(count)

    def damage(self, *, found: int, healed: int, unhealed: int, covered: float) -> None:
        """What was found damaged and what was healed since the last call, and how things are now."""
        self.scrub_damaged.inc(found)
        self.scrub_healed.inc(healed)
        self.scrub_unhealed.set(unhealed)
        self.scrub_covered.set(covered)

    def _moved(self, info: VersionInfo, size: int) -> None:
        self.delta_bytes.labels(info.run).inc(size)
        self.full_bytes_avoided.labels(info.run).inc(max(info.full_bytes - size, 0))
        self.elements.labels(info.run).inc(info.elements)
        self.elements_changed.labels(info.run).inc(info.changed)
        self.latest(info)
