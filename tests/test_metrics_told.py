"""What is measured is told: in the page of reference, and on the dashboard or the records under it."""

from __future__ import annotations

import re

from deltad.ops.dashboard import queries
from deltad.ops.metrics import Metrics
from tests.kit.prometheus import ALERTS, RECORDS, asked, measured


def test_every_metric_is_in_the_docs_and_on_the_dashboard_and_nothing_else_is() -> None:
    registered = {family.name for family in Metrics.create("").registry.collect()}
    assert {name.removesuffix("_total") for name in measured()} == registered
    expressions = [*queries(), *(rule["expr"] for rule in RECORDS.values())]
    shown = set().union(*map(asked, expressions))
    assert measured() - shown == set(), "add it to a panel in deltad/ops/dashboard.py"
    assert shown - measured() == set(), "there is no such metric"
    assert set().union(*(asked(rule["expr"]) for rule in ALERTS.values())) <= measured()
    recorded = set(re.findall(r"deltad:\w+:\w+", "\n".join([*queries(), *(r["expr"] for r in ALERTS.values())])))
    assert recorded == RECORDS.keys()
