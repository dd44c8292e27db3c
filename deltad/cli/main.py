"""The command `deltad`: the group of all commands, and the one place where an error becomes an exit code.

Whatever fails ends as one line on standard error (an ErrorReply object with `--json`) and a documented
exit code; a traceback is shown only where `DELTAD_DEBUG=1` asks for one.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

import click

from deltad import __version__
from deltad.cli.config import config
from deltad.cli.connect import help_if_alone
from deltad.cli.demo import demo
from deltad.cli.diff import diff
from deltad.cli.doctor import doctor
from deltad.cli.export import export
from deltad.cli.gc import gc
from deltad.cli.inspect import inspect
from deltad.cli.keys import keys
from deltad.cli.ops import ops
from deltad.cli.pin import pin, unpin
from deltad.cli.plan import plan
from deltad.cli.publish import publish, pull
from deltad.cli.serve import serve
from deltad.cli.status import status
from deltad.cli.support import support_bundle
from deltad.cli.target import hold, release, rollback
from deltad.cli.verify import verify
from deltad.cli.versions import log
from deltad.errors import DeltadError, MissingPackageError, NotFoundError, StoreError, UsageError
from deltad.figures import clean

INTERRUPTED = 130
INTERNAL = 70

_EPILOG = """\b
Versions:
  RUN/v000012, v000012, 12 or latest; v000012@e2 names the epoch, and without
  one the newest epoch that has the number is meant

\b
Exit codes:
    0  done
    1  `demo` ended, but not every version that was served is the published one; `doctor` found an error
   64  the command line cannot work, or a name is malformed
   65  bad data: a checkpoint, file or version is not what it should be
   66  a file, run or version that was named does not exist
   69  the daemon cannot be reached, or does not answer in time; try again. Or a package is not installed
   70  a replica refused, or deltad itself has a fault
   74  the disk or store cannot be read or written
   75  try again later: the store is held by another daemon, or the disk is full
   76  another daemon answered with something that the protocol does not allow
   77  the token, key or file permissions do not allow this
   78  the configuration cannot be used
  130  interrupted; 143 terminated

\b
Environment:
  DELTAD_SOCKET   the daemon's socket, where neither --socket nor --config is given
  DELTAD_DEBUG=1  show where an error came from
  NO_COLOR=1      no colours
"""


class _Deltad(click.Group):
    """Lists the commands in the order of a day's work, not of the alphabet."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(
    cls=_Deltad,
    epilog=_EPILOG,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="deltad", message="%(prog)s %(version)s")
@click.pass_context
def deltad(context: click.Context) -> int | None:
    """Move an RL policy from the cluster that trains it to rollout fleets in other regions, as a small
    lossless delta, and prove bit for bit what is served there.

    `deltad demo` shows all of it on one machine. On a real one, `deltad serve` runs the daemon and the
    other commands talk to it over its Unix socket.
    """
    return help_if_alone(context)


_DAILY = (serve, publish, pull, status, log, hold, release, rollback, diff, inspect, verify, export)
_NOW_AND_THEN = (pin, unpin, gc, plan, doctor, keys, config, ops, support_bundle, demo)
for _command in (*_DAILY, *_NOW_AND_THEN):
    deltad.add_command(_command)


def main() -> None:
    """The entry point of the `deltad` script."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal or pipe that cannot show a character gets an escape instead of a failure.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has left; Python's own flush at exit must not complain about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code. Prints the error, if there is one; raises nothing."""
    try:
        result = deltad.main(list(arguments), prog_name="deltad", standalone_mode=False)
    except click.Abort:
        return INTERRUPTED
    except SystemExit as error:
        # click ends this way when nobody reads its output any more.
        return error.code if isinstance(error.code, int) else 1
    except Exception as error:
        if os.environ.get("DELTAD_DEBUG") == "1":
            traceback.print_exc()
        return _report(_explained(error), as_json="--json" in arguments)
    return result if isinstance(result, int) else 0


def _explained(error: Exception) -> DeltadError:
    """Any failure as an error of the tree."""
    match error:
        case DeltadError():
            return error
        case click.UsageError():
            command = error.ctx.command_path if error.ctx else "deltad"
            return UsageError(error.format_message().rstrip("."), hint=f"see `{command} --help`")
        case click.ClickException():
            return UsageError(error.format_message())
        case ModuleNotFoundError(name=str(package)) if package.partition(".")[0] != "deltad":
            return MissingPackageError(
                "deltad",
                expected=f"the Python package {package}",
                found="none",
                hint="`pip install 'deltad[daemon]'`",
            )
        case OSError():
            return _of_the_system(error)
    return _InternalError(
        f"internal error: {type(error).__name__}: {error}", hint="set DELTAD_DEBUG=1 to see where, and report it"
    )


def _of_the_system(error: OSError) -> DeltadError:
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return NotFoundError(str(error.filename or error), found=error.strerror or "")
    return StoreError(str(error.filename or "input or output"), found=error.strerror or str(error))


class _InternalError(DeltadError):
    """A fault of deltad itself."""

    exit_code = INTERNAL


def _report(error: DeltadError, *, as_json: bool) -> int:
    if as_json:
        import msgspec

        from deltad.client.messages import ErrorReply

        reply = ErrorReply(error.kind.removeprefix("_"), str(error), error.retryable, error.exit_code)
        click.echo(msgspec.json.encode(reply), err=True)
    else:
        click.echo(f"deltad: {clean(str(error))}", err=True)
    return error.exit_code
