"""`python -m rollout_plugin`: one replica as a process, from registration to SIGTERM.

Main thread: signals. Threads: the replica loop, the endpoint and its workers. Exit code 0 after
SIGTERM or SIGINT, 70 if the loop died of a bug, the error's own code if it could not start.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deltad.errors import ConfigError, DeltadError, MissingPackageError
from deltad.types import Version
from rollout_plugin.log import Log
from rollout_plugin.options import Options, parse_options

if TYPE_CHECKING:
    from rollout_plugin.engines import Loader

_PACKAGES = ("torch", "transformers", "safetensors", "aiohttp")


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM; a second one ends the process where it stands."""
    options = parse_options(arguments)
    log = Log(sys.stderr, replica=options.name, run=options.run)
    try:
        return _serve(options, log)
    except DeltadError as error:
        log.write("failed", kind=error.kind, error=str(error))
        return error.exit_code


def _loader(options: Options) -> Loader:
    if options.engine == "vllm":
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # standard error holds JSON lines alone
        from rollout_plugin.engines.vllm.engine import CachePolicy, VllmLoader

        return VllmLoader(options.engine_arguments, CachePolicy(options.cache))
    from rollout_plugin.engines.transformers import load

    return load


def _serve(options: Options, log: Log) -> int:
    _forget(options.ready_file)
    stop = threading.Event()

    def on_signal(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        stop.set()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)

    _check_packages(options.engine)
    from transformers.utils import logging as transformers_log

    from deltad.delta.backend import choose, warm
    from rollout_plugin.replica import Replica
    from rollout_plugin.server import Endpoint
    from rollout_plugin.serving import Serving

    # Standard error holds JSON lines alone.
    transformers_log.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_log.disable_progress_bar()  # type: ignore[no-untyped-call]
    serving = Serving()
    endpoint = Endpoint(
        serving,
        replica=options.name,
        run=options.run,
        variant=options.variant,
        host=options.host,
        port=options.port,
        log=log,
    )
    url = endpoint.start()
    log.write("listening", url=url)

    told = threading.Event()

    def on_verified(version: Version) -> None:
        if options.ready_file is not None and not told.is_set():
            told.set()
            _write_atomically(options.ready_file, url + "\n")

    backend = choose()
    replica = Replica(
        options.door.client(),
        run=options.run,
        variant=options.variant,
        name=options.name,
        address=url,
        load=_loader(options),
        serving=serving,
        backend=backend,
        log=log,
        on_verified=on_verified,
    )
    died = threading.Event()

    def live() -> None:
        try:
            warm(backend)
            replica.run()
        except BaseException:
            log.write("died", error=traceback.format_exc())
            died.set()
        stop.set()

    threading.Thread(target=live, name="replica", daemon=True).start()
    stop.wait()
    log.write("stopping")
    replica.finish()
    endpoint.stop()
    log.write("stopped")
    return 70 if died.is_set() else 0


def _check_packages(engine: str) -> None:
    """Raises MissingPackageError before one of them says so in a traceback of its own."""
    for package in (*_PACKAGES, *(("vllm",) if engine == "vllm" else ())):
        if importlib.util.find_spec(package) is None:
            hint = "start it in vLLM's environment" if package == "vllm" else "`pip install 'deltad[transformers]'`"
            raise MissingPackageError(
                "python -m rollout_plugin", expected=f"the Python package {package}", found="none", hint=hint
            )


def _forget(ready_file: Path | None) -> None:
    """Remove what an earlier process of this name left, which would vouch for this one. Raises ConfigError."""
    if ready_file is None:
        return
    try:
        ready_file.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"--ready-file {ready_file}", found=error.strerror or str(error)) from None


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # The loop may sit in a long poll or inside native code; an interpreter that tears down under it can crash.
    os._exit(code)
