"""Drives a deployment through the SDK of Fireworks. Run by the Python of .venv-peers.

    python fireworks_steps.py BASE_URL DEPLOYMENT < steps.json

Steps are a list of [verb, arguments]; prints a list of what each gave, or the error that the SDK raised.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from fireworks.training.sdk.deployment import DeploymentManager  # type: ignore[import-not-found]

MODEL = "accounts/lab/models/tiny"


class Impatient(DeploymentManager):  # type: ignore[misc]
    """Asks more often than every few seconds."""

    def wait_for_hotload(self, *words: Any, **how: Any) -> bool:
        done: bool = super().wait_for_hotload(*words, **how, poll_interval=0.1)
        return done


def step(manager: DeploymentManager, deployment: str, verb: str, words: dict[str, Any]) -> Any:
    try:
        if verb == "request":
            path, headers = words.pop("path"), words.pop("headers", {})
            reply = manager._sync_request(
                manager.hotload_api_url + path, headers=manager._hotload_headers(deployment, MODEL) | headers, **words
            )
            return {"status": reply.status_code, "body": reply.json()}
        if verb == "account":
            return manager.account_id
        if verb in {"hotload_and_wait", "wait_for_hotload"}:
            words = {"timeout_seconds": 60, **words}
        found = getattr(manager, verb)(deployment, MODEL, **words)
        return {"done": found, "error": manager.last_hotload_error_message} if isinstance(found, bool) else found
    except Exception as error:
        return {"raised": type(error).__name__, "message": str(error)}


def main(base_url: str, deployment: str) -> None:
    manager = Impatient(
        api_key=os.environ["FIREWORKS_API_KEY"], base_url=base_url, hotload_api_url=base_url, verify_ssl=True
    )
    print(json.dumps([step(manager, deployment, verb, dict(words)) for verb, words in json.load(sys.stdin)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
