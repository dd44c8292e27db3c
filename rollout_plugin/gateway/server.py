"""The routes of the gateway, and the way of a request through it: parsed, held back, sampled, shaped.

No request, however malformed, gives a 5xx unless no replica can serve it.
"""

from __future__ import annotations

import asyncio
import hmac
import time
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

import msgspec
from aiohttp import web
from prometheus_client import generate_latest

from deltad.errors import DeltadError, DeniedError, FormatError, LimitError, NotFoundError, UnavailableError
from rollout_plugin.gateway.answer import Answer, Prompt, merged
from rollout_plugin.gateway.course import Course, Piece, began_and_ended
from rollout_plugin.gateway.fleet import Fleet
from rollout_plugin.gateway.metrics import GatewayMetrics
from rollout_plugin.gateway.openai import Ask, is_text, make_ask, parse_body
from rollout_plugin.gateway.roster import Member, pick
from rollout_plugin.gateway.shape import Choice, Shape
from rollout_plugin.gateway.text import Words
from rollout_plugin.gateway.turns import Turns
from rollout_plugin.gateway.upstream import Replicas
from rollout_plugin.log import Log

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_BODY_BYTES = 8 << 20
_OPEN = frozenset({"/healthz", "/readyz", "/metrics"})
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


@dataclass(frozen=True, slots=True)
class Settings:
    """`patience`: seconds that a request waits for its turn, and one that has begun for a replica."""

    run: str
    patience: float = 30.0
    most_stale: int | None = None
    chat_tokens: int = 256
    keys: tuple[str, ...] = ()


class Gateway:
    """One run's front door. `words` gives its tokenizer; it blocks, and raises UsageError where there is none."""

    def __init__(
        self,
        settings: Settings,
        *,
        fleet: Fleet,
        replicas: Replicas,
        turns: Turns,
        metrics: GatewayMetrics,
        words: Callable[[], Words],
        log: Log,
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._replicas = replicas
        self._turns = turns
        self._metrics = metrics
        self._load_words = words
        self._words: Words | None = None
        self._loading = asyncio.Lock()
        self._log = log
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._open = 0
        metrics.running.set_function(lambda: turns.admission.running)
        metrics.held.set_function(lambda: turns.admission.waiting)
        metrics.replicas.set_function(lambda: len(fleet.roster.members))
        metrics.latest.set_function(lambda: fleet.roster.latest.number if fleet.roster.latest else -1)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=_BODY_BYTES, middlewares=[self._guard])
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{model}", self._model)
        app.router.add_get("/v1/replicas", self._show_replicas)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._show_metrics)
        return app

    async def drain(self, seconds: float) -> bool:
        """Take no new request, and wait for those that run; false where some are left after so many seconds."""
        self._draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            return False
        return True

    # What stands before every route.

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if request.path not in _OPEN:
                self._check_key(request)
            return await handler(request)
        except DeltadError as error:
            status = 401 if isinstance(error, DeniedError) else error.http_status
            return self._refusal(request, error, 400 if isinstance(error, FormatError) and status == 422 else status)
        except web.HTTPRequestEntityTooLarge as error:
            said = LimitError("request", expected=f"a body of at most {_BODY_BYTES} bytes")
            return self._refusal(request, said, error.status)
        except web.HTTPException as error:
            said_not = NotFoundError(f"{request.method} {request.path[:80]}", found=error.reason)
            return self._refusal(request, said_not, error.status)
        except Exception:
            self._log.write("request_failed", path=request.path, error=traceback.format_exc())
            return self._refusal(request, UnavailableError("gateway", found="a bug", hint="see its log"), 500)

    def _check_key(self, request: web.Request) -> None:
        keys = self._settings.keys
        shown = request.headers.get("Authorization", "").removeprefix("Bearer ").encode()
        # All are compared, whichever is right.
        right = [hmac.compare_digest(shown, key.encode()) for key in keys]
        if keys and not any(right):
            raise DeniedError("gateway", expected="`Authorization: Bearer KEY`", found="another key or none")

    def _refusal(self, request: web.Request, error: DeltadError, status: int) -> web.Response:
        route = request.match_info.route.resource.canonical if request.match_info.route.resource else "other"
        self._metrics.requests.labels(route, status).inc()
        headers = {"Retry-After": "1"} if error.retryable else {}
        return _json(self._error(error, status), status, headers)

    def _error(self, error: DeltadError, status: int) -> dict[str, object]:
        roster = self._fleet.roster
        return {
            "error": {
                "message": str(error),
                "type": _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error"),
                "param": None,
                "code": error.kind,
                "retryable": error.retryable,
                "versions": sorted({str(member.version) for member in roster.members}),
                "coming": str(roster.latest) if roster.latest else "",
            }
        }

    # Answers.

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=False)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=True)

    async def _answer(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        arrived = time.monotonic()
        if self._draining:
            raise UnavailableError("gateway", found="draining", hint="ask another one")
        self._open += 1
        self._idle.clear()
        try:
            body = parse_body(await request.read(), chat=chat)
            words = await self._find_words() if is_text(body) else self._words
            settings = self._settings
            ask = make_ask(
                body, words, run=settings.run, most_stale=settings.most_stale, chat_tokens=settings.chat_tokens
            )
            async with self._turn(ask) as members:
                self._metrics.held_seconds.observe(time.monotonic() - arrived)
                response = await self._respond(request, ask, words, members, arrived)
            self._metrics.requests.labels(request.path, response.status).inc()
            return response
        finally:
            self._open -= 1
            if not self._open:
                self._idle.set()

    async def _find_words(self) -> Words:
        async with self._loading:
            if self._words is None:
                self._words = await asyncio.to_thread(self._load_words)
            return self._words

    @asynccontextmanager
    async def _turn(self, ask: Ask) -> AsyncIterator[list[Member]]:
        """Hold a request back until a version that it wants is served and it is its turn; gives who begins."""
        rollouts, wanted = len(ask.prompts), ask.wanted
        admission = self._turns.admission
        admission.queue()
        try:
            until = asyncio.get_running_loop().time() + wanted.wait
            while True:
                await self._fleet.choose(wanted, ask.prompts[0], until=until)
                await self._turns.take(rollouts, self._settings.patience)
                fit = self._fleet.roster.fit(wanted)
                if fit:
                    break
                self._turns.give_back(rollouts, answered=False)
        finally:
            admission.unqueue()
        answered = False
        try:
            yield [pick(fit, prompt, self._fleet.loads) for prompt in ask.prompts]
            answered = True
        finally:
            self._turns.give_back(rollouts, answered=answered)

    async def _respond(
        self, request: web.Request, ask: Ask, words: Words | None, members: Sequence[Member], arrived: float
    ) -> web.StreamResponse:
        shape = Shape(ask, self._settings.run)
        course = Course(ask.wanted, n=len(ask.prompts) * ask.n, most=ask.max_tokens)
        answers = [
            Answer(
                Prompt(prompt, range(at * ask.n, (at + 1) * ask.n), ask.temperature, ask.seed + at * ask.n, ask.wanted),
                course,
                fleet=self._fleet,
                replicas=self._replicas,
                metrics=self._metrics,
                patience=self._settings.patience,
            )
            for at, prompt in enumerate(ask.prompts)
        ]
        choices = [Choice(index, words, ask.stops) for index in range(len(course.tracks))]
        sources = [answer.pieces(member) for answer, member in zip(answers, members, strict=True)]
        async with aclosing(merged(sources)) as batches:
            batch = await anext(batches, None)
            self._metrics.first_token_seconds.observe(time.monotonic() - arrived)
            if ask.stream:
                response = await self._stream(
                    request, shape, _Begun(course, choices, batch, batches, answers[0].replica)
                )
                self._count(course)
                return response
            while batch is not None:
                for piece in batch:
                    _say(choices[piece.sample], piece, course)
                batch = await anext(batches, None)
        self._count(course)
        began, ended = began_and_ended(course.tracks)
        headers = {"Deltad-Version-Began": began, "Deltad-Version-Ended": ended, "Deltad-Replica": answers[0].replica}
        body = shape.whole(choices, course.tracks)
        return web.Response(body=body, content_type="application/json", headers=headers)

    async def _stream(self, request: web.Request, shape: Shape, begun: _Begun) -> web.StreamResponse:
        course, choices, batch = begun.course, begun.choices, begun.first
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                "Deltad-Version-Began": next((piece.version for piece in batch or () if piece.version), ""),
                "Deltad-Replica": begun.replica,
            }
        )
        course.given_away = True
        await response.prepare(request)
        said = [shape.opening(choices)]
        try:
            while batch is not None:
                for piece in batch:
                    choice = choices[piece.sample]
                    if (spoken := _say(choice, piece, course)) is not None:
                        said.append(shape.chunk(choice, spoken[1], spoken[0], course.tracks[piece.sample]))
                await response.write(b"".join(said))
                said.clear()
                batch = await anext(begun.batches, None)
        except DeltadError as error:
            self._log.write("answer_broken_off", id=shape.id, error=str(error))
            said.append(b"data: " + msgspec.json.encode(self._error(error, error.http_status)) + b"\n\n")
        else:
            said.append(shape.closing(course.tracks))
        await response.write(b"".join(said))
        await response.write_eof()
        return response

    def _count(self, course: Course) -> None:
        self._metrics.tokens.inc(sum(len(track.token_ids) for track in course.tracks))
        for track in course.tracks:
            if len(track.segments) > 1:
                self._metrics.spanning.inc()
            if track.finish == "abort":
                self._metrics.aborted.inc()

    # What there is.

    async def _models(self, request: web.Request) -> web.Response:
        return _json({"object": "list", "data": [self._card()]})

    async def _model(self, request: web.Request) -> web.Response:
        if request.match_info["model"] != self._settings.run:
            raise NotFoundError(f"model {request.match_info['model'][:80]}", expected=self._settings.run)
        return _json(self._card())

    def _card(self) -> dict[str, object]:
        roster = self._fleet.roster
        return {
            "id": self._settings.run,
            "object": "model",
            "created": 0,
            "owned_by": "deltad",
            "weight_versions": sorted({str(member.version) for member in roster.members}),
            "latest": str(roster.latest) if roster.latest else "",
        }

    async def _show_replicas(self, request: web.Request) -> web.Response:
        admission = self._turns.admission
        return _json(
            {
                "run": self._settings.run,
                "latest": str(self._fleet.roster.latest or ""),
                "running": admission.running,
                "held": admission.waiting,
                "trouble": self._fleet.trouble,
                "replicas": [
                    {
                        "name": member.name,
                        "version": str(member.version),
                        "staleness": member.staleness,
                        "verified": member.proven,
                        "requests": self._fleet.loads.get(member.name, 0),
                    }
                    for member in self._fleet.roster.members
                ],
            }
        )

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.Response(text="alive\n")

    async def _readyz(self, request: web.Request) -> web.Response:
        if self._draining:
            return web.Response(text="draining\n", status=503)
        if not self._fleet.roster.members:
            return web.Response(text="no replica serves\n", status=503)
        return web.Response(text="ready\n")

    async def _show_metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(self._metrics.registry), headers={"Content-Type": "text/plain; version=0.0.4"}
        )


@dataclass(frozen=True, slots=True)
class _Begun:
    """A request whose first pieces have come: `first`, and `batches` for the rest."""

    course: Course
    choices: Sequence[Choice]
    first: list[Piece] | None
    batches: AsyncGenerator[list[Piece], None]
    replica: str


def _say(choice: Choice, piece: Piece, course: Course) -> tuple[str, Piece] | None:
    """A piece with its text, as it is given away: a stop text ends its sample. None for what comes after that."""
    if choice.ended:
        return None
    if piece.anew:
        choice.begin()
        return None
    text = choice.push(piece)
    if choice.stopped and not piece.finish:
        choice.ended = True
        course.cut(piece.sample, choice.tokens, "stop")
        piece = msgspec.structs.replace(piece, finish="stop")
    return text, piece


def _json(body: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json", headers=headers)
