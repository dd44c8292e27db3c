"""vLLM inside the replica's process: its scheduler is stepped here, so a pause is the gap between two steps.

Requests in flight stay in the scheduler with their caches while weights are written. Ranks beyond the first are
processes of vLLM's own. Owns the rule that a step and a call to the ranks never overlap where both would go through
one channel, and that no block of the prefix cache is shared between requests over a commit, unless told to.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

# Read by vLLM when it is imported and when it starts: the scheduler is to run here, and nothing is fetched or told.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
for name in ("HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS"):
    os.environ.setdefault(name, "1")

from vllm import EngineArgs, SamplingParams  # noqa: E402
from vllm.inputs import TokensPrompt  # noqa: E402
from vllm.outputs import RequestOutput  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402
from vllm.v1.engine.llm_engine import LLMEngine  # noqa: E402

from deltad.client.client import rebuild_error  # noqa: E402
from deltad.delta.layout import Layout  # noqa: E402
from deltad.errors import DeltadError, ReplicaError, UnavailableError  # noqa: E402
from deltad.types import Version  # noqa: E402
from rollout_plugin.apply.export import check_whole  # noqa: E402
from rollout_plugin.engines import Listener, Sample, Sampling, Scored  # noqa: E402
from rollout_plugin.engines.checks import check_sampling, check_tokens, diverged  # noqa: E402
from rollout_plugin.engines.gate import Gate  # noqa: E402
from rollout_plugin.engines.vllm import plugin  # noqa: E402
from rollout_plugin.engines.vllm.loader import FORMAT  # noqa: E402
from rollout_plugin.engines.vllm.ranks import LiveRanks  # noqa: E402
from rollout_plugin.engines.vllm.worker import CLASS, METHOD  # noqa: E402

_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_READS = frozenset({"begin", "stage", "lanes", "sums"})
"""Methods of a rank that write nothing live: where the rank is in this process, they run beside a step."""


class CachePolicy(StrEnum):
    """What becomes of cached keys and values at a commit.

    `new_requests_only`: requests in flight keep theirs, and new ones reuse none from before. `keep`: all are kept and
    reused. `reset`: all are dropped, and those of requests in flight are computed anew.
    """

    NEW_REQUESTS_ONLY = "new-requests-only"
    KEEP = "keep"
    RESET = "reset"


@dataclass(frozen=True, slots=True)
class VllmLoader:
    """Implements `rollout_plugin.engines.Loader`. `arguments` are those of vLLM's `EngineArgs`, by name.

    `maps`: a folder for maps that were found, or None to find them at each start.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    cache: CachePolicy = CachePolicy.NEW_REQUESTS_ONLY
    maps: Path | None = None

    def __call__(self, directory: Path, layout: Layout, version: Version) -> VllmEngine:
        plugin.register()
        _let_vllm_look_around()
        dtypes = {_DTYPES[spec.dtype] for spec in layout.tensors if spec.dtype in _DTYPES}
        given = {"dtype": dtypes.pop() if len(dtypes) == 1 else "auto", **self.arguments}
        try:
            engine = LLMEngine.from_engine_args(
                EngineArgs(
                    **{
                        **given,
                        "model": str(directory),
                        "load_format": FORMAT,
                        "worker_extension_cls": CLASS,
                        "async_scheduling": False,
                        "skip_tokenizer_init": True,
                        "disable_log_stats": True,
                    }
                )
            )
        except DeltadError:
            raise
        except Exception as error:
            check_whole(directory, layout)  # a file that went away is taken for a model that vLLM cannot load
            raise ReplicaError(f"checkpoint {directory}", expected="one that vLLM loads", found=str(error)) from error
        check_whole(directory, layout)
        loaded = VllmEngine(engine, version, ends=_end_tokens(directory), cache=self.cache)
        try:
            loaded.bind(layout, self.maps)
        except BaseException:
            loaded.close()
            raise
        return loaded


class VllmEngine:
    """Implements `rollout_plugin.engines.Engine` over vLLM's own engine. `bind` comes before anything else."""

    live: LiveRanks

    def __init__(self, engine: LLMEngine, version: Version, *, ends: Sequence[int], cache: CachePolicy) -> None:
        self.engine = engine
        self.version = version
        self._ends = list(ends)
        self._policy = cache
        self._salt = "" if cache is CachePolicy.KEEP else uuid.uuid4().hex
        self._flips = 0
        self._gate = Gate()
        self._holder: int | None = None
        self._alone = engine.vllm_config.parallel_config.world_size == 1
        self._longest = int(engine.model_config.max_model_len)
        self._vocabulary = int(engine.model_config.get_vocab_size())
        self._changed = threading.Condition()
        self._waiting: list[_Request] = []
        self._running: dict[str, _Request] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._step_on, name="vllm", daemon=True)
        self._thread.start()

    def bind(self, layout: Layout, maps: Path | None) -> None:
        """Find where the tensors of the layout are in every rank. Raises ReplicaError where they do not fit."""
        self._ask("bind", layout.encode(), str(maps or ""))
        self.live = LiveRanks(layout, self._ask)

    @contextmanager
    def _hold(self) -> Iterator[None]:
        with self._gate.hold():
            self._holder = threading.get_ident()
            try:
                yield
            finally:
                self._holder = None

    def pause(self) -> AbstractContextManager[None]:
        return self._hold()

    def flip(self, version: Version, cache: str = "") -> None:
        policy = CachePolicy(cache) if cache else self._policy
        if policy is CachePolicy.RESET:
            # Those in flight give their blocks back and compute them anew; without that vLLM keeps all and says no.
            if not self.engine.reset_prefix_cache(reset_running_requests=True):
                raise ReplicaError("prefix cache", expected="it empty after a reset", found="blocks that are in use")
            self.engine.reset_encoder_cache()
        elif policy is CachePolicy.NEW_REQUESTS_ONLY:
            # Of the commit and not of the version: one that is rolled back to must not find blocks of its past either.
            self._salt = uuid.uuid4().hex
        self._flips += 1
        self.version = version

    def fence(self, reason: str) -> None:
        self._gate.fence(reason)

    def unfence(self) -> None:
        self._gate.unfence()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self.engine.engine_core.shutdown()

    def generate(self, prompt_ids: Sequence[int], sampling: Sampling, listener: Listener | None = None) -> list[Sample]:
        check_tokens(prompt_ids, at_least=1, longest=self._longest, vocabulary=self._vocabulary)
        check_sampling(len(prompt_ids), sampling, longest=self._longest)
        requests = [
            _Request(
                list(prompt_ids),
                SamplingParams(
                    temperature=sampling.temperature,
                    max_tokens=sampling.max_new_tokens,
                    seed=(sampling.seed * 1_000_003 + at) & (2**63 - 1),
                    logprobs=0,
                    stop_token_ids=self._ends,
                    detokenize=False,
                    output_kind=RequestOutputKind.DELTA,
                ),
                at,
                listener,
            )
            for at in range(sampling.n)
        ]
        self._submit(requests)
        return [request.sample() for request in requests]

    def logprobs(self, token_ids: Sequence[int]) -> Scored:
        check_tokens(token_ids, at_least=2, longest=self._longest - 1, vocabulary=self._vocabulary)
        while True:
            flips = self._flips
            request = _Request(
                list(token_ids),
                SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False),
            )
            self._submit([request])
            scores = request.scores()
            # A long sequence is read in several steps: over a commit, it is read again.
            if self._flips == flips:
                return Scored(scores, request.versions[0])

    def _submit(self, requests: Sequence[_Request]) -> None:
        """Have requests run to their end. Raises UnavailableError where the engine was fenced before that."""
        with self._changed:
            if self._closed:
                raise UnavailableError("replica", found="closed", hint="sample elsewhere")
            self._waiting += requests
            self._changed.notify_all()
        for request in requests:
            request.ended.wait()
        for request in requests:
            if request.error is not None:
                raise request.error

    # The thread that steps the engine.

    def _step_on(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._waiting or self._running)
                if self._closed:
                    break
            try:
                with self._gate.step():
                    self._admit()
                    outputs = self.engine.step()
                    version = self.version
            except UnavailableError as error:
                self._end_all(error)
            except Exception as error:
                self._end_all(UnavailableError("vLLM", found=f"{type(error).__name__}: {error}"))
            else:
                for output in outputs:
                    self._deliver(output, version)
                self._let_go()
        self._end_all(UnavailableError("replica", found="closed", hint="sample elsewhere"))

    def _admit(self) -> None:
        with self._changed:
            waiting, self._waiting = self._waiting, []
        for request in waiting:
            prompt = TokensPrompt(prompt_token_ids=request.prompt)
            if self._salt:
                prompt["cache_salt"] = self._salt
            name = self.engine.add_request(uuid.uuid4().hex, prompt, request.params)
            self._running[name] = request

    def _deliver(self, output: Any, version: Version) -> None:
        assert isinstance(output, RequestOutput), "nothing but sampling is asked of the engine"
        request = self._find(output.request_id)
        if request is None:
            return
        request.take(output, version)
        if output.finished:
            self._running = {name: other for name, other in self._running.items() if other is not request}
            request.ended.set()

    def _let_go(self) -> None:
        """End what nobody wants any more; what was drawn until now is its answer."""
        gone = [name for name, request in self._running.items() if request.is_gone]
        if not gone:
            return
        with self._gate.turn():
            self.engine.abort_request(gone, internal=True)
        for name in gone:
            self._running.pop(name).ended.set()

    def _find(self, output_id: str) -> _Request | None:
        # vLLM answers under the id that it was given, and knows the request under that with an ending.
        return next((r for name, r in self._running.items() if name == output_id or name.startswith(output_id)), None)

    def _end_all(self, error: UnavailableError) -> None:
        with self._changed:
            waiting, self._waiting = self._waiting, []
        running, self._running = self._running, {}
        with self._gate.turn():
            self.engine.abort_request(list(running), internal=True)
        for request in (*waiting, *running.values()):
            request.error = error
            request.ended.set()

    # The ranks.

    def _ask(self, method: str, *arguments: object) -> list[Any]:
        """Implements `rollout_plugin.engines.vllm.ranks.Ask`."""
        if self._holder == threading.get_ident() or (self._alone and method in _READS):
            answers = self.engine.collective_rpc(METHOD, args=(method, *arguments))
        else:
            with self._gate.turn():
                answers = self.engine.collective_rpc(METHOD, args=(method, *arguments))
        for done, answer in answers:
            if not done:
                raise rebuild_error(answer)
        return [answer for _, answer in answers]


class _Request:
    """One request on its way through vLLM."""

    def __init__(
        self, prompt: list[int], params: SamplingParams, place: int = 0, listener: Listener | None = None
    ) -> None:
        self.prompt = prompt
        self.params = params
        self._place = place
        self._listener = listener
        self.ended = threading.Event()
        self.error: UnavailableError | None = None
        self.versions: list[Version] = []
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._scores: list[float] = []
        self._stopped = False

    def take(self, output: RequestOutput, version: Version) -> None:
        """What a step gave, by the weights of `version`."""
        if output.prompt_logprobs:
            rows = zip(output.prompt_logprobs[1:], self.prompt[1:], strict=True)
            self._scores = [row[token].logprob for row, token in rows if row is not None]
        for completion in output.outputs:
            tokens = list(completion.token_ids)
            self._tokens += tokens
            self.versions += [version] * len(tokens)
            logprobs: list[float] = []
            if completion.logprobs is not None:
                rows = zip(completion.logprobs, tokens, strict=True)
                logprobs = [row[token].logprob for row, token in rows if row is not None]
            self._logprobs += logprobs
            self._stopped |= completion.finish_reason == "stop"
            if self._listener is not None and tokens and not any(map(math.isnan, logprobs)):
                self._listener.took(self._place, tokens, logprobs, version)

    @property
    def is_gone(self) -> bool:
        return self._listener is not None and self._listener.gone

    def sample(self) -> Sample:
        self._check_numbers(self._logprobs)
        return Sample(tuple(self._tokens), tuple(self._logprobs), tuple(self.versions), self._stopped)

    def scores(self) -> tuple[float, ...]:
        self._check_numbers(self._scores)
        return tuple(self._scores)

    def _check_numbers(self, logprobs: Sequence[float]) -> None:
        if any(math.isnan(logprob) for logprob in logprobs):
            raise diverged(self.versions[-1])


def _let_vllm_look_around() -> None:
    """vLLM looks through every attribute of every module for kernels, and trips over a handle of numba's compiler.

    That answers any name with a wrapped function of its library, `__dict__` included; here it gets an honest one.
    """
    ffi = sys.modules.get("llvmlite.binding.ffi")
    functions = getattr(getattr(ffi, "lib", None), "_fntab", None)
    if isinstance(functions, dict):
        functions.setdefault("__dict__", {})


def _end_tokens(directory: Path) -> list[int]:
    """The end-of-sequence tokens that a checkpoint names: vLLM takes them from a tokenizer, and has none here."""
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        if path.is_file():
            ends = json.loads(path.read_bytes()).get("eos_token_id")
            if ends is not None:
                return [ends] if isinstance(ends, int) else list(ends)
    return []
