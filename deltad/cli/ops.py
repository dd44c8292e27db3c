"""`deltad ops`: what a host needs to run the daemon as a service: units, warm kernels, completion, shipped files."""

from __future__ import annotations

import os
from pathlib import Path

import click

from deltad.cli.connect import help_if_alone, json_option
from deltad.cli.output import show, show_json
from deltad.errors import StoreError
from deltad.ops.blocks import Facts, Line

_CACHE = "var/cache/deltad/numba"
_DTYPES = ("U8", "BF16", "F32", "F64")
"""One for each width of lanes, which is what kernels are compiled for."""

_NEXT = (
    "systemd-sysusers && systemd-tmpfiles --create",
    "edit /etc/deltad/deltad.toml, then: deltad config check /etc/deltad/deltad.toml",
    "systemctl daemon-reload && systemctl enable --now deltad",
)
_NEXT_USER = (
    "edit ~/.config/deltad/deltad.toml, then: deltad config check ~/.config/deltad/deltad.toml",
    "systemctl --user daemon-reload && systemctl --user enable --now deltad",
)


@click.group(invoke_without_command=True, short_help="Install as a service; show what is shipped; completion.")
@click.pass_context
def ops(context: click.Context) -> int | None:
    """Install the daemon as a service, and show the files that come with deltad for those who operate it.

    \b
    Examples:
      sudo deltad ops install
      deltad ops show deltad.service
      deltad ops completion bash > ~/.local/share/bash-completion/completions/deltad
    """
    return help_if_alone(context)


@ops.command(short_help="Write the units and an example configuration.")
@click.option("--root", type=click.Path(path_type=Path), default="/", show_default=True, help="Write below it.")
@click.option("--gpu", is_flag=True, help="With the drop-in for hosts with an NVIDIA GPU.")
@click.option("--user", is_flag=True, help="For `systemctl --user`, where nobody is root.")
@click.option("--no-warm", is_flag=True, help="Compile no kernels now; the unit does at its first start.")
@json_option
def install(root: Path, gpu: bool, user: bool, no_warm: bool, as_json: bool) -> None:
    """Write the units, and a configuration where there is none, and compile kernels into the unit's cache.

    Units are written anew, so that an upgrade is the same command; your own changes belong into drop-ins. Nothing is
    started: what is left to do is printed.

    \b
    Examples:
      sudo deltad ops install
      deltad ops install --user
    """
    from deltad.ops import shipped

    if user:
        placed = shipped.user_files(_home("XDG_CONFIG_HOME", ".config"), _home("XDG_STATE_HOME", ".local/state"))
        cache = _home("XDG_CACHE_HOME", ".cache") / "deltad" / "numba"
    else:
        placed = shipped.system_files(root, gpu=gpu)
        cache = root / _CACHE
    rows = [(str(file.path), _write(file.path, file.text, kept=file.kept)) for file in placed]
    if not no_warm:
        rows.append((str(cache), _warm(cache)))
    steps = _NEXT_USER if user else _NEXT
    if as_json:
        show_json({"files": dict(rows), "next": steps})
    else:
        show([Facts("", rows), Facts("what is left to do", [(str(i), step) for i, step in enumerate(steps, 1)])])


@ops.command(name="show", short_help="Print a shipped file; without a name, list them.")
@click.argument("name", required=False)
@json_option
def show_file(name: str | None, as_json: bool) -> None:
    """Print the shipped file NAME; without one, list all names.

    \b
    Examples:
      deltad ops show
      deltad ops show rules.yml > /etc/prometheus/deltad.yml
    """
    from deltad.ops import shipped

    if name is None:
        known = shipped.names()
        if as_json:
            show_json({"files": known})
        else:
            click.echo("\n".join(known))
        return
    text = shipped.read(name)
    if as_json:
        show_json({"name": name, "text": text})
    else:
        click.echo(text, nl=False)


@ops.command(short_help="Compile kernels now, so that no version waits for it.")
@click.option("--cache", type=click.Path(path_type=Path), help="The directory to keep them in; else $NUMBA_CACHE_DIR.")
@json_option
def warm(cache: Path | None, as_json: bool) -> None:
    """Compile every kernel of the numba backend and prove each against the reference, or load it from the cache.

    Where machine code may not be made it says so and exits with 0: the daemon computes with numpy there, slower.

    \b
    Example:
      sudo -u deltad NUMBA_CACHE_DIR=/var/cache/deltad/numba deltad ops warm
    """
    found = _warm(cache)
    if as_json:
        show_json({"cache": str(cache or os.environ.get("NUMBA_CACHE_DIR", "")), "found": found})
    else:
        show([Line(found)])


@ops.command(short_help="Print the completion script of a shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@json_option
def completion(shell: str, as_json: bool) -> None:
    """Print the script by which SHELL completes commands and options.

    \b
    Examples:
      deltad ops completion bash > ~/.local/share/bash-completion/completions/deltad
      deltad ops completion zsh > "${fpath[1]}/_deltad"
      deltad ops completion fish > ~/.config/fish/completions/deltad.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    command = click.get_current_context().find_root().command
    text = kind(command, {}, "deltad", "_DELTAD_COMPLETE").source()
    if as_json:
        show_json({"shell": shell, "text": text})
    else:
        click.echo(text)


def _home(variable: str, below: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / below)


def _write(path: Path, text: str, *, kept: bool) -> str:
    """Write a file, and say what became of it. Raises StoreError."""
    try:
        before = path.read_text(encoding="utf-8") if path.exists() else None
        if before is not None and (kept or before == text):
            return "left as it is"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StoreError(
            str(path), expected="a file that can be written", found=error.strerror or "", hint="run it as root"
        ) from None
    return "written" if before is None else "written anew"


def _warm(cache: Path | None) -> str:
    """Compile or load all kernels, and say how that went."""
    from deltad.delta.backend.choice import machine_code_forbidden

    if forbidden := machine_code_forbidden():
        return f"no kernel compiled: {forbidden}; the daemon computes with numpy"
    if cache is not None:
        cache.mkdir(parents=True, exist_ok=True)
        os.environ["NUMBA_CACHE_DIR"] = str(cache)  # before numba is imported
    try:
        from deltad.delta.backend.numba.proof import warm as compile_all
    except ImportError as error:
        return f"no kernel compiled: numba cannot be imported ({error}); the daemon computes with numpy"
    compile_all(_DTYPES)
    return f"kernels for {', '.join(_DTYPES)} compiled or in the cache, and right"
