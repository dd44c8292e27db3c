"""`deltad serve`: start everything, run until a signal, drain, exit 0.

The configuration was checked before anything here is bound or opened. Supervision is one rule: a part
that fails is logged and started again; it never takes another part down.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import ssl
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack

import structlog
import uvloop
from aiohttp import web

from deltad.config import Address, Config, LocalConfig, RelayConfig, TlsFiles, warnings
from deltad.daemon.admitting import local_door, relay_door
from deltad.daemon.hotloads import routes as hot_load_routes
from deltad.daemon.node import Node
from deltad.daemon.porch import Porch
from deltad.daemon.pulse import Pulse
from deltad.daemon.reloading import Reloader
from deltad.daemon.watching import watch
from deltad.errors import ConfigError
from deltad.figures import count
from deltad.limits import Limits
from deltad.local.binding import bind_tcp_once, bind_unix_socket, group_id
from deltad.local.server import LocalServer
from deltad.ops.health import health_app
from deltad.ops.history import Events
from deltad.ops.logs import configure
from deltad.ops.notify import Notifier
from deltad.ops.overview import status_line
from deltad.relay.server import RelayServer
from deltad.store.store import Store
from deltad.types import RunId

log = structlog.get_logger("deltad.daemon")

DRAIN_SECONDS = 20.0
RESTART_SECONDS = 1.0
CHORE_SECONDS = 2.0
_CLOSE_SECONDS = 10.0
"""How long it may take to close what listens, once all parts have stopped."""
_KEPT_SECONDS = 300.0
"""How long a connection on which nothing is asked stays open."""


def serve(config: Config) -> int:
    """Run the daemon in this process until SIGTERM or SIGINT; returns the exit code.

    Raises StoreError, FormatError or ConfigError if it cannot start.
    """
    events = Events()
    configure()
    logging.getLogger().addHandler(events)
    for doubt in warnings(config):
        log.warning("config_warning", warning=doubt)
    if not os.path.exists(config.daemon.store / "FORMAT"):
        prove_addresses(config)  # a typing error in one of them must leave no empty store behind
    store = Store.open(config.daemon.store)
    try:
        return uvloop.run(_serve(config, store, events))
    finally:
        store.close()


def prove_addresses(config: Config) -> None:
    """See that every address can be listened on, and let go of it again. Raises ConfigError."""
    for section, part in (("relay", config.relay), ("local", config.local), ("metrics", config.metrics)):
        if part is not None:
            try:
                bind_tcp_once(part.listen.host, part.listen.port)
            except OSError as error:
                raise _cannot_listen(section, part.listen, error) from None
    bind_unix_socket(config.daemon.socket).close()
    config.daemon.socket.unlink(missing_ok=True)


def _cannot_listen(section: str, listen: Address, error: OSError) -> ConfigError:
    return ConfigError(
        f"[{section}] listen = '{listen}'",
        expected="an address that this host can listen on",
        found=error.strerror or str(error),
        hint="`ss -ltnp` names the process that has it" if error.errno == errno.EADDRINUSE else "",
    )


async def _serve(config: Config, store: Store, events: Events) -> int:
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    notifier = Notifier()
    node = Node(config, store)
    pulse = Pulse(notifier, lambda: status_line(node.status()))

    def reloaded() -> None:
        pulse.ready()
        node.look_again()

    reloader = Reloader(
        config, on_reload=node.metrics.reloaded, before=lambda: notifier.reloading(time.monotonic()), after=reloaded
    )
    reloader.then(node.take_up)
    loop.add_signal_handler(signal.SIGHUP, reloader.ask)
    await asyncio.to_thread(node.describe_all)
    async with AsyncExitStack() as stack:
        addresses = await _listen(stack, node, reloader, events)
        parts = [*_parts(node), ("reload", reloader.run), ("pulse", pulse.run)]
        tasks = [asyncio.create_task(_supervise(name, part), name=name) for name, part in parts]
        stack.push_async_callback(_drain, node, tasks, hurry, notifier)
        pulse.ready()
        log.info(
            "daemon_ready",
            daemon=config.daemon.name,
            store=str(store.path),
            backend=node.backend.name,
            backend_reason=node.backend_reason,
            **addresses,
        )
        if node.backend.name == "numpy" and config.backend.kind == "auto":
            log.warning("backend_slow", backend="numpy", backend_reason=node.backend_reason)
        await stop.wait()
        notifier.stopping()
        log.info("daemon_stopping", daemon=config.daemon.name)
    log.info("daemon_stopped", daemon=config.daemon.name)
    if node.deeds() or node.deriving.busy:
        # A worker thread cannot be stopped, and the interpreter would wait for it to the end.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return 0


async def _listen(stack: AsyncExitStack, node: Node, reloader: Reloader, events: Events) -> dict[str, str]:
    """Bind every face of the daemon; each is closed when the stack is. Returns what listens where."""
    config = node.config
    addresses = {"socket": str(config.daemon.socket)}
    group, callers = group_id(config.daemon.group), local_door(config)
    reloader.then(lambda found: callers.replace(local_door(found)))
    local = LocalServer(
        node.store,
        node,
        node.fleet,
        node.announcements,
        node.limits,
        door=callers,
        faces=hot_load_routes(node.hot_loads),
        group=group,
    )
    runner = await _start(stack, local.app(), node.limits, "local")
    await web.SockSite(runner, bind_unix_socket(config.daemon.socket, group)).start()
    stack.callback(config.daemon.socket.unlink, missing_ok=True)
    if config.local is not None:
        addresses["local"] = await _bind(
            runner, config.local.listen, "local", _context(reloader, config.local.tls, lambda found: found.local)
        )
    if config.relay is not None:
        door = relay_door(config)
        reloader.then(lambda found: door.replace(relay_door(found)))
        relay = RelayServer(
            node.store,
            daemon=config.daemon.name,
            boot=node.boot,
            door=door,
            announcements=node.announcements,
            on_report=node.on_report,
            heartbeat=node.heartbeats.give,
            limits=node.limits,
            on_sent=node.metrics.sent,
        )
        context = None if config.relay.tls is None else _context(reloader, config.relay.tls, lambda found: found.relay)
        addresses["relay"] = await _bind(
            await _start(stack, relay.app(), node.limits, "relay"), config.relay.listen, "relay", context
        )
    if config.metrics is not None:
        app = health_app(
            node.metrics,
            reasons=node.reasons,
            status=node.status,
            versions=lambda run: node.versions(RunId(run)),
            history=node.history,
            events=events.last,
        )
        addresses["metrics"] = await _bind(
            await _start(stack, app, node.limits, "metrics"), config.metrics.listen, "metrics"
        )
    return addresses


async def _start(stack: AsyncExitStack, app: web.Application, limits: Limits, face: str) -> web.AppRunner:
    porch = Porch(limits, face=face)
    porch.guard(app)
    runner = web.AppRunner(
        app,
        access_log=None,
        handle_signals=False,
        shutdown_timeout=2.0,
        # Daemons that pull keep their connections from one version to the next.
        keepalive_timeout=_KEPT_SECONDS,
        max_line_size=limits.header_line_bytes,
        max_field_size=limits.header_line_bytes,
        max_headers=limits.headers,
    )
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    watching = asyncio.create_task(porch.watch(runner), name=f"porch {face}")
    stack.callback(watching.cancel)
    return runner


def _context(
    reloader: Reloader, files: TlsFiles, section: Callable[[Config], RelayConfig | LocalConfig | None]
) -> ssl.SSLContext:
    """What is listened with. A reload reads the certificate and the key of the `section` anew."""
    context = files.server()

    def renew(config: Config) -> None:
        found = section(config)
        if found is not None and found.tls is not None:
            found.tls.load(context)

    reloader.then(renew)
    return context


async def _bind(runner: web.AppRunner, listen: Address, section: str, context: ssl.SSLContext | None = None) -> str:
    """Listen there, and return where that is: port 0 has become another."""
    try:
        site = web.TCPSite(runner, listen.host, listen.port, ssl_context=context)
        await site.start()
    except OSError as error:
        raise _cannot_listen(section, listen, error) from None
    return str(Address(listen.host, next(a for a in runner.addresses if isinstance(a, tuple))[1]))


Part = Callable[[], Awaitable[None]]


def _parts(node: Node) -> Iterator[tuple[str, Part]]:
    """What runs for as long as the daemon does."""
    for config in node.config.watches:
        yield f"watch {config.run}", lambda config=config: watch(node, config)  # type: ignore[misc]
    for puller in node.pullers:
        yield f"pull {puller.view().url}", puller.run
    for twins in node.twins:
        yield f"bucket {twins.url}", twins.run
    for loads in node.hot_loads:
        yield f"hot loads {loads.deployment}", loads.work
    yield "scrub", node.scrubbing.run
    if node.config.daemon.derive_rate:
        yield "deriving", node.chores.derive
    yield "chores", lambda: _chores(node)


async def _supervise(name: str, part: Part) -> None:
    while True:
        try:
            await part()
        except Exception:
            log.exception("part_failed", part=name)
        await asyncio.sleep(RESTART_SECONDS)


async def _chores(node: Node) -> None:
    """What is done now and then: metrics, exports that nobody needs, mirrors that fell behind."""
    while True:
        await node.chores.do()
        if node.history.is_due(now := time.monotonic()):
            node.history.note(node.status(), now)
        await asyncio.sleep(CHORE_SECONDS)


async def _drain(node: Node, tasks: list[asyncio.Task[None]], hurry: asyncio.Event, notifier: Notifier) -> None:
    """Stop all parts. A publish that is under way may end, unless told to hurry: it is atomic in any case."""
    for task in tasks:
        task.cancel()
    deeds = len(node.deeds())
    notifier.extend(DRAIN_SECONDS + _CLOSE_SECONDS, f"draining: {count(deeds, 'publish', 'publishes')} may end")
    waiting = asyncio.gather(*tasks, *node.deeds(), return_exceptions=True)
    hurried = asyncio.ensure_future(hurry.wait())
    await asyncio.wait((waiting, hurried), timeout=DRAIN_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
