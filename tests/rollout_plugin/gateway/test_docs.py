"""deltad/docs/GATEWAY.md says what there is."""

from __future__ import annotations

import re
from pathlib import Path

import deltad
from rollout_plugin.gateway.metrics import GatewayMetrics
from rollout_plugin.gateway.options import parse_options

PAGE = (Path(deltad.__file__).parent / "docs" / "GATEWAY.md").read_text()


def test_the_page_lists_every_metric_and_no_other() -> None:
    metrics = GatewayMetrics.create()
    kinds = {family.name + ("_total" if family.type == "counter" else "") for family in metrics.registry.collect()}
    assert set(re.findall(r"^\| `(deltad_gateway_\w+)`", PAGE, re.MULTILINE)) == kinds


def test_the_page_lists_every_option() -> None:
    given = parse_options(["--socket", "/s", "--run", "r"])
    assert given.most_running == 256
    for name in given.__slots__:
        flag = {
            "door": "socket",
            "host": "listen",
            "port": "listen",
            "most_waiting": "most-held",
            "pace": "rollouts-per-version",
        }
        assert f"--{flag.get(name, name.replace('_', '-'))}" in PAGE, name
