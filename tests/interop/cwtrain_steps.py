"""Drives a deployment through cwtrain. Run by the Python of .venv-peers.

    python cwtrain_steps.py BASE_URL DEPLOYMENT < steps.json

Steps are a list of [verb, arguments]; prints a list of what each gave: a hot load, or the error that cwtrain raised.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from cwtrain import HotLoader  # type: ignore[import-not-found]
from cwtrain.errors import CWTrainError  # type: ignore[import-not-found]
from cwtrain.hotload import PromptCachePolicy  # type: ignore[import-not-found]
from cwtrain.infra.client import InferenceClient  # type: ignore[import-not-found]


def told(loader: HotLoader, load: Any) -> dict[str, Any]:
    return {
        "id": load.id,
        "identity": load.identity,
        "state": load.state.name,
        "chain": [each.identity for each in load.spec.snapshot_chain],
        "cache": load.spec.prompt_cache_policy.name,
        "replicas": [
            {"name": each.name, "state": each.state.name, "identity": each.current_snapshot_identity}
            for each in loader.client.list_hot_load_replicas(load.id)
        ],
        "current": loader.current_identity(),
    }


def step(loader: HotLoader, verb: str, words: dict[str, Any]) -> Any:
    if policy := words.pop("cache", None):
        words["prompt_cache_policy"] = PromptCachePolicy[policy]
    try:
        if verb == "request":
            return loader.client._request(**words)
        if verb == "deployment":
            return {"ready": loader.deployment.ready, "bucket": loader.deployment.hot_load.bucket}
        if verb == "upload":
            loader.upload(**words)
            return None
        found = getattr(loader, verb)(**words)
        return told(loader, found)
    except CWTrainError as error:
        return {"error": type(error).__name__, "message": str(error)}


def main(base_url: str, deployment: str) -> None:
    with InferenceClient(base_url=base_url) as client:
        loader = HotLoader(client, deployment, poll_interval=0.1, timeout=60.0)
        print(json.dumps([step(loader, verb, dict(words)) for verb, words in json.load(sys.stdin)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
