"""A process with vLLM in it: replicas of the product's own code, driven by JSON lines on standard input.

Run by the Python of the environment that has vLLM. One replica at a time, and beside it fresh engines to compare with.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from deltad.checkpoint import open_checkpoint
from deltad.client import Client
from deltad.delta.backend import choose
from deltad.delta.digest import root_of
from deltad.errors import DeltadError
from deltad.types import RunId, Variant, Version
from rollout_plugin.engines import Sampling
from rollout_plugin.engines.vllm.engine import CachePolicy, EngineArgs, LLMEngine, VllmEngine, VllmLoader
from rollout_plugin.engines.vllm.worker import CLASS
from rollout_plugin.log import Log
from rollout_plugin.replica import Replica
from rollout_plugin.server import Endpoint
from rollout_plugin.serving import Serving

SMALL = {"enforce_eager": True, "max_model_len": 512, "max_num_seqs": 8, "num_gpu_blocks_override": 128}


class Host:
    """What the lines ask for: one method each."""

    def __init__(self, maps: Path) -> None:
        self._maps = maps
        self._arguments: dict[str, Any] = {}
        self._running: tuple[Replica, Endpoint, threading.Thread] | None = None
        self._serving = Serving()
        self._beside: list[VllmEngine] = []

    def start(self, socket: str, arguments: dict[str, Any], cache: str) -> str:
        """Start a replica; returns where it serves."""
        self._arguments = arguments
        loader = VllmLoader({**SMALL, **arguments}, CachePolicy(cache), self._maps)
        log = Log(sys.stderr)
        self._serving = Serving()
        named = {"run": RunId("policy"), "variant": Variant("bf16")}
        endpoint = Endpoint(self._serving, replica="r1", host="127.0.0.1", port=0, log=log, **named)
        url = endpoint.start()
        replica = Replica(
            Client(socket),
            name="r1",
            address=url,
            load=loader,
            serving=self._serving,
            backend=choose(),
            log=log,
            poll_seconds=0.5,
            **named,
        )
        thread = threading.Thread(target=replica.run)
        thread.start()
        self._running = (replica, endpoint, thread)
        return url

    def stop(self) -> None:
        """End the replica."""
        assert self._running is not None
        replica, endpoint, thread = self._running
        replica.finish()
        endpoint.stop()
        thread.join()
        while self._beside:
            self._beside.pop().close()

    def served(self, prompt: list[int]) -> dict[str, Any]:
        """What the replica's engine is at this moment."""
        engine = self._serving.engine(wait=60)
        assert isinstance(engine, VllmEngine)
        return _facts(engine, prompt)

    def fresh(self, directory: str, prompt: list[int]) -> dict[str, Any]:
        """What an engine is that was started from this checkpoint."""
        engine = _load(directory, {**SMALL, **self._arguments}, self._maps)
        # An engine that is closed takes down what all engines of its process share.
        self._beside.append(engine)
        return _facts(engine, prompt)

    def packed(self, directory: str) -> str:
        """With which words the replica's side refuses an engine that vLLM loaded as it loads by itself."""
        loaded = LLMEngine.from_engine_args(
            EngineArgs(model=directory, worker_extension_cls=CLASS, skip_tokenizer_init=True, **SMALL)
        )
        with open_checkpoint(Path(directory)) as checkpoint:
            layout = checkpoint.layout
        engine = VllmEngine(loaded, Version(1, 0), ends=[], cache=CachePolicy.KEEP)
        try:
            engine.bind(layout, None)
        except DeltadError as error:
            return f"{error.kind}: {error}"
        finally:
            engine.close()
        return ""

    def damage(self) -> None:
        """Flip a bit of the first tensor where the engine computes with it."""
        engine = self._serving.engine(wait=60)
        assert isinstance(engine, VllmEngine)
        engine.live.lanes(0, 0, 1)[0] ^= 1


def _load(directory: str, arguments: dict[str, Any], maps: Path | None) -> VllmEngine:
    with open_checkpoint(Path(directory)) as checkpoint:
        layout = checkpoint.layout
    return VllmLoader(arguments, maps=maps)(Path(directory), layout, Version(1, 0))


def _facts(engine: VllmEngine, prompt: list[int]) -> dict[str, Any]:
    """Its root, the bits of its parameters by vLLM's own checksums, and what it says to a prompt."""
    with engine.pause():
        checksums = engine.engine.collective_rpc("compute_weight_checksums")
    (sample,) = engine.generate(prompt, Sampling(max_new_tokens=24, temperature=0))
    return {
        "root": root_of(engine.live.layout, engine.live.sums(choose())).hex(),
        "checksums": checksums,
        "tokens": sample.token_ids,
        "logprobs": sample.logprobs,
        "scored": engine.logprobs([*prompt, *sample.token_ids]).logprobs,
    }


def main() -> None:
    # vLLM and its libraries write to standard output too; answers go where they cannot.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    host = Host(Path(sys.argv[1]))
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = {"value": getattr(host, asked.pop("do"))(**asked)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
