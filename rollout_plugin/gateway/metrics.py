"""The gateway's metrics. deltad/docs/GATEWAY.md lists them all."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


@dataclass(frozen=True, slots=True)
class GatewayMetrics:
    """Make it with `create`."""

    registry: CollectorRegistry
    requests: Counter
    running: Gauge
    held: Gauge
    held_seconds: Histogram
    first_token_seconds: Histogram
    tokens: Counter
    spanning: Counter
    aborted: Counter
    resumed: Counter
    replicas: Gauge
    latest: Gauge

    @classmethod
    def create(cls) -> GatewayMetrics:
        registry = CollectorRegistry()
        name = "deltad_gateway"

        def counter(what: str, help: str, *labels: str) -> Counter:
            return Counter(f"{name}_{what}", help, labels, registry=registry)

        def gauge(what: str, help: str) -> Gauge:
            return Gauge(f"{name}_{what}", help, registry=registry)

        def histogram(what: str, help: str) -> Histogram:
            return Histogram(f"{name}_{what}", help, registry=registry, buckets=_SECONDS)

        return cls(
            registry=registry,
            requests=counter(
                "requests", "Requests for an answer that are over, by route and HTTP status", "route", "status"
            ),
            running=gauge("running_requests", "Requests that replicas sample for now"),
            held=gauge("held_requests", "Requests that wait for a version, for a replica or for their turn"),
            held_seconds=histogram("held_seconds", "How long requests that were sampled for had waited"),
            first_token_seconds=histogram("first_token_seconds", "From a request's arrival to its first token"),
            tokens=counter("tokens", "Tokens that were given away"),
            spanning=counter("spanning_answers", "Samples with tokens of more than one version"),
            aborted=counter("aborted_answers", "Samples that ended at a swap because they asked for that"),
            resumed=counter(
                "resumed_answers", "Answers that went on at a replica anew: it had swapped, failed or broken off", "why"
            ),
            replicas=gauge("replicas", "Replicas that serve"),
            latest=gauge("latest_version_number", "Number of the newest version that the daemon knows of"),
        )
