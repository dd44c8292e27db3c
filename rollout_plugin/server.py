"""A replica's HTTP endpoint: samples, log-probs, and which version gave them.

Runs an event loop in a thread of its own and hands requests to worker threads, since an engine's steps
block. Has no state but `Serving`'s; no request, however malformed, gives a 5xx unless the replica
itself cannot serve.
"""

from __future__ import annotations

import asyncio
import threading
import traceback
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import msgspec
from aiohttp import web

from deltad.errors import ConfigError, DeltadError, FormatError, LimitError, NotFoundError, ReplicaError
from deltad.types import Version, parse_version
from rollout_plugin.engines import Listener, Sample, Sampling
from rollout_plugin.log import Log
from rollout_plugin.messages import (
    GenerateReply,
    GenerateRequest,
    LogprobsReply,
    LogprobsRequest,
    Refusal,
    SampleBody,
    StreamLine,
    VersionReply,
)
from rollout_plugin.serving import Serving
from rollout_plugin.streaming import TokenStream

Body = TypeVar("Body", bound=msgspec.Struct)
Done = TypeVar("Done")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_BODY_BYTES = 1 << 20
_LONGEST_WAIT = 60.0
_SAMPLES = 256
_TOKENS = 1 << 16
_WORKERS = 32
_ROUTES = "there are POST /v1/generate, POST /v1/logprobs, GET /v1/version and GET /healthz"


class Endpoint:
    """Serves one replica. `start` returns its URL; `stop` ends all requests and the thread."""

    def __init__(
        self, serving: Serving, *, replica: str, run: str, variant: str, host: str, port: int, log: Log
    ) -> None:
        self._serving = serving
        self._log = log
        self._replica = replica
        self._run = run
        self._variant = variant
        self._address = (host, port)
        self._workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="request")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending = asyncio.Event()
        self._thread = threading.Thread(target=self._main, name="endpoint", daemon=True)
        self._url: Future[str] = Future()

    def start(self) -> str:
        """Bind and serve. Raises ConfigError if the address cannot be bound."""
        self._thread.start()
        return self._url.result()

    def stop(self) -> None:
        """Stop listening and end what runs. The caller has fenced the engine, so running requests end soon."""
        if self._loop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ending.set)
            self._thread.join()
        self._workers.shutdown(wait=True, cancel_futures=True)

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except OSError as error:
            host, port = self._address
            self._url.set_exception(ConfigError(f"--listen {host}:{port}", found=error.strerror or str(error)))

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        runner = web.AppRunner(self._app(), access_log=None, shutdown_timeout=2.0)
        await runner.setup()
        try:
            host, port = self._address
            await web.TCPSite(runner, host, port).start()
            port = runner.addresses[0][1]
            self._url.set_result(f"http://{f'[{host}]' if ':' in host else host}:{port}")
            await self._ending.wait()
        finally:
            await runner.cleanup()

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=_BODY_BYTES, middlewares=[self._refuse])
        app.router.add_post("/v1/generate", self._generate)
        app.router.add_post("/v1/logprobs", self._logprobs)
        app.router.add_get("/v1/version", self._version)
        app.router.add_get("/healthz", self._healthz)
        return app

    @web.middleware
    async def _refuse(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except DeltadError as error:
            return self._refusal(error, error.http_status)
        except web.HTTPRequestEntityTooLarge as error:
            return self._refusal(LimitError("request", expected=f"a body of at most {_BODY_BYTES} bytes"), error.status)
        except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
            said = NotFoundError(f"{request.method} {request.path[:80]}", found=error.reason, hint=_ROUTES)
            return self._refusal(said, error.status)
        except web.HTTPException as error:
            return self._refusal(FormatError(f"{request.method} request", found=error.reason), error.status)
        except Exception as error:
            self._log.write("request_failed", path=request.path, error=traceback.format_exc())
            return self._refusal(ReplicaError("request", found=f"{type(error).__name__}", hint="see the log"), 500)

    def _refusal(self, error: DeltadError, status: int) -> web.Response:
        return _json(self._refused(error), status)

    def _refused(self, error: DeltadError) -> Refusal:
        served, _, coming = self._serving.view()
        return Refusal(error.kind, str(error), error.retryable, error.exit_code, _text(served), _text(coming))

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        asked = await _read(request, GenerateRequest)
        least = _least(asked.min_version)
        _check_size(asked)
        answer = uuid.uuid4().hex
        if asked.stream:
            return await self._stream(request, asked, least, answer)

        def work() -> GenerateReply:
            samples, versions = self._sample(asked, least, answer)
            return GenerateReply(
                answer,
                self._replica,
                tuple(str(version) for version in versions),
                tuple(
                    SampleBody(s.token_ids, s.logprobs, tuple(str(version) for version in s.versions), s.ended)
                    for s in samples
                ),
            )

        return _json(await self._in_worker(work))

    def _sample(
        self, asked: GenerateRequest, least: Version | None, answer: str, listener: Listener | None = None
    ) -> tuple[list[Sample], list[Version]]:
        """In a worker: the samples, and the versions that gave them, ascending."""
        engine = self._serving.engine(least, min(asked.wait, _LONGEST_WAIT))
        fences = self._serving.fences
        sampling = Sampling(asked.n, asked.max_new_tokens, asked.temperature, asked.seed)
        samples = engine.generate(asked.prompt_ids, sampling, listener)
        versions = {version for sample in samples for version in sample.versions}
        self._serving.note(answer, versions, fences)
        return samples, sorted(versions)

    async def _stream(
        self, request: web.Request, asked: GenerateRequest, least: Version | None, answer: str
    ) -> web.StreamResponse:
        """Lines while they come. What fails before the first token is refused like any request."""
        stream = TokenStream(self._serving, answer)
        work = asyncio.ensure_future(self._in_worker(lambda: self._sample(asked, least, answer, stream)))
        work.add_done_callback(lambda _: stream.end())
        try:
            lines = await stream.batch()
            if not lines:
                await work  # raises what is refused, or there is an empty answer
            response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
            await response.prepare(request)
            await _write(response, StreamLine(id=answer, replica=self._replica), *lines)
            while lines := await stream.batch():
                await _write(response, *lines)
            await _write(response, await self._last_line(work))
            await response.write_eof()
            return response
        finally:
            stream.leave()
            await asyncio.wait([work])

    async def _last_line(self, work: Awaitable[tuple[list[Sample], list[Version]]]) -> StreamLine:
        try:
            samples, _ = await work
        except DeltadError as error:
            return StreamLine(error=self._refused(error))
        return StreamLine(ended=tuple(sample.ended for sample in samples))

    async def _logprobs(self, request: web.Request) -> web.StreamResponse:
        asked = await _read(request, LogprobsRequest)
        least = _least(asked.min_version)

        def work() -> LogprobsReply:
            scored = self._serving.engine(least, min(asked.wait, _LONGEST_WAIT)).logprobs(asked.token_ids)
            return LogprobsReply(self._replica, str(scored.version), scored.logprobs)

        return _json(await self._in_worker(work))

    async def _version(self, request: web.Request) -> web.StreamResponse:
        engine = self._serving.engine()
        _, verified, coming = self._serving.view()
        return _json(
            VersionReply(self._replica, self._run, self._variant, str(engine.version), verified, _text(coming))
        )

    async def _healthz(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text="alive\n")

    async def _in_worker(self, work: Callable[[], Done]) -> Done:
        return await asyncio.get_running_loop().run_in_executor(self._workers, work)


async def _read(request: web.Request, kind: type[Body]) -> Body:
    data = await request.read()
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"{request.path} body", found=str(error)) from None


def _least(text: str) -> Version | None:
    return parse_version(text) if text else None


def _check_size(asked: GenerateRequest) -> None:
    if asked.n > _SAMPLES or asked.n * asked.max_new_tokens > _TOKENS:
        raise LimitError(
            "sampling",
            expected=f"at most {_SAMPLES} samples and {_TOKENS} new tokens a request",
            found=f"{asked.n} of {asked.max_new_tokens}",
        )


def _text(version: Version | None) -> str:
    return str(version) if version else ""


async def _write(response: web.StreamResponse, *lines: StreamLine) -> None:
    await response.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def _json(body: msgspec.Struct, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")
