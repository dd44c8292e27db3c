"""The shipped rules, which metrics they name, and a real Prometheus that evaluates them each half second."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import yaml

from deltad.ops import shipped
from deltad.ops.reference import metrics_page

RULES = yaml.safe_load(shipped.read("rules.yml"))
ALERTS = {rule["alert"]: rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule}
RECORDS = {rule["record"]: rule for group in RULES["groups"] for rule in group["rules"] if "record" in rule}


def measured() -> set[str]:
    """Every metric of the code, by the name that it is documented under."""
    return set(re.findall(r"^\| `(deltad_\w+)` \|", metrics_page(), re.MULTILINE))


def asked(text: str) -> set[str]:
    """Every metric that an expression names; of a histogram, the histogram."""
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"deltad_\w+", text)}


class Prometheus:
    """One server with its own directory. `targets` are `host:port`, scraped as job `deltad`."""

    def __init__(self, home: Path, port: int, targets: Sequence[str]) -> None:
        home.mkdir(parents=True)
        self.home = home
        self.url = f"http://127.0.0.1:{port}"
        (home / "rules.yml").write_text(shipped.read("rules.yml"))
        (home / "prometheus.yml").write_text(
            "global: {scrape_interval: 500ms, scrape_timeout: 400ms, evaluation_interval: 500ms}\n"
            "rule_files: [rules.yml]\n"
            f"scrape_configs: [{{job_name: deltad, static_configs: [{{targets: {json.dumps(list(targets))}}}]}}]\n"
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._port = port

    def start(self) -> Prometheus:
        command = [
            "prometheus",
            f"--config.file={self.home / 'prometheus.yml'}",
            f"--storage.tsdb.path={self.home / 'data'}",
            f"--web.listen-address=127.0.0.1:{self._port}",
        ]
        with (self.home / "log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        return self

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(30)

    def ask(self, expression: str) -> list[dict[str, Any]]:
        """The series of an expression now. Raises RuntimeError for one that it does not understand."""
        with urlopen(f"{self.url}/api/v1/query?{urlencode({'query': expression})}", timeout=10) as reply:
            answer = json.load(reply)
        if answer["status"] != "success":
            raise RuntimeError(f"{expression}: {answer}")
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def comes(self, expression: str, within: float = 30.0) -> list[dict[str, Any]]:
        """The series of an expression once there are any; none if there never were."""
        deadline = time.monotonic() + within
        while True:
            try:
                found = self.ask(expression)
            except OSError:
                found = []
            if found or time.monotonic() > deadline:
                return found
            time.sleep(0.2)
