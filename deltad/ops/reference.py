"""The pages of reference that are written from the code: every metric, and every key of the configuration. Pure."""

from __future__ import annotations

from deltad.config import UNITS, explain
from deltad.ops.metrics import Metrics

_KINDS = {"counter": "counter", "gauge": "gauge", "histogram": "histogram"}


def metrics_page() -> str:
    """`METRICS.md`."""
    metrics = Metrics.create("")
    lines = [
        "# Metrics",
        "",
        "What `/metrics` gives, where `[metrics] listen` is set: in the text format of Prometheus, or as OpenMetrics.",
        "Moments are timestamps, shares are two counters, and a series goes when its run or replica does. Alert rules",
        "and a dashboard over these come along: `deltad ops show rules.yml`, `deltad ops show dashboard.json`.",
        "This page is written by `deltad ops show metrics`.",
        "",
        "| metric | kind | labels | what it tells |",
        "|---|---|---|---|",
    ]
    for metric in metrics.metrics():
        [family] = metric.describe()
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = ", ".join(f"`{label}`" for label in metric._labelnames) or "–"
        lines.append(f"| `{name}` | {_KINDS[family.type]} | {labels} | {family.documentation} |")
    for family in metrics.process.collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        lines.append(f"| `{name}` | {_KINDS[family.type]} | – | {family.documentation} |")
    lines += ["", "The buckets of histograms, in seconds:", ""]
    for metric in metrics.metrics():
        [family] = metric.describe()
        if family.type == "histogram":
            bounds = ", ".join(f"{bound:g}" for bound in metric._kwargs["buckets"])
            lines.append(f"- `{family.name}`: {bounds}")
    return "\n".join(lines) + "\n"


def config_page() -> str:
    """`CONFIG.md`."""
    lines = [
        "# Configuration",
        "",
        f"One file of TOML, which `deltad serve --config FILE` reads. {UNITS}",
        "Sections in double brackets may stand in it more than once. `deltad config check FILE` judges a file, `deltad",
        "config show FILE` fills in the defaults. What SIGHUP takes up: `[[token]]`, `[[peer]]`, `[[trust]]`, and the",
        "files with tokens, certificates and keys; all else needs a restart, and the log says so. This page is written",
        "by `deltad ops show config`.",
    ]
    for section in explain():
        lines += [
            "",
            f"## `{section.name}`",
            "",
            _sentence(section.text),
            "",
            "| key | default | what it is |",
            "|---|---|---|",
        ]
        for key in section.keys:
            default = "required" if key.required else f"`{key.default}`"
            lines.append(f"| `{key.name}` | {default} | {key.text} |")
    return "\n".join(lines) + "\n"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
