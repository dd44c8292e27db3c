"""`deltad keys`: make, show, trust and rotate the keys that sign versions. Talks to no daemon."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deltad.cli.connect import existing, help_if_alone, json_option
from deltad.cli.output import show, show_json
from deltad.errors import ConfigError, UsageError
from deltad.ops.blocks import Facts, Line, Table, columns

if TYPE_CHECKING:
    from deltad.delta.keys import PublicKey, SigningKey

_FILE = click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
_CONFIG = click.option(
    "--config", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="The daemon's configuration."
)


@click.group(invoke_without_command=True, short_help="Make, show, trust and rotate the keys that sign versions.")
@click.pass_context
def keys(context: click.Context) -> int | None:
    """Make, show, trust and rotate the keys that sign versions.

    A daemon with a `[signing]` key signs every version that it publishes. A daemon with a `[[trust]]` key for a run
    takes nothing of that run which no such key has signed.

    \b
    Examples:
      deltad keys new /etc/deltad/trainer.key
      deltad keys trust ed25519:11qY…URo= --config /etc/deltad/deltad.toml --run my-run --name trainer
    """
    return help_if_alone(context)


@keys.command(short_help="Make a private key.")
@_FILE
@json_option
def new(file: Path, as_json: bool) -> None:
    """Make a private key in FILE, which must not exist, readable by its owner alone; print the public key.

    \b
    Example:
      deltad keys new /etc/deltad/trainer.key
    """
    from deltad.delta.keys import SigningKey

    key = SigningKey.new()
    _write(file, key)
    _tell(file, key.public, as_json, f'sign with it: [signing] key_file = "{file}"')


@keys.command(name="show", short_help="Show a key, or those that a configuration names.")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), required=False)
@_CONFIG
@json_option
def show_keys(file: Path | None, config: Path | None, as_json: bool) -> None:
    """Show the public half of the private key in FILE, or the keys that a configuration signs with and trusts.

    \b
    Examples:
      deltad keys show /etc/deltad/trainer.key
      deltad keys show --config /etc/deltad/deltad.toml
    """
    from deltad.config import KeyFile, load_config

    if (file is None) == (config is None):
        raise UsageError("deltad keys show", expected="the file of a private key, or --config")
    if file is not None:
        _tell(file, KeyFile(existing(file)).read().public, as_json, "")
        return
    assert config is not None
    loaded = load_config(config)
    signing = loaded.signing.key_file.read().public if loaded.signing else None
    if as_json:
        trusted = [
            {"id": t.key.id, "key": str(t.key), "scope": t.scope, "runs": t.runs, "name": t.name} for t in loaded.trusts
        ]
        show_json({"signs_with": signing and {"id": signing.id, "key": str(signing)}, "trusted": trusted})
        return
    rows = [(t.name or "-", t.key.id, ", ".join(t.scope), ", ".join(t.runs), str(t.key)) for t in loaded.trusts]
    show(
        [
            Line(f"signs with {signing.id}, {signing}" if signing else "signs nothing: there is no [signing] key_file"),
            Table(
                "trusted",
                columns("name", "id", "scope", "runs", "key"),
                rows,
                empty="no key, so nothing needs a signature here",
            ),
        ]
    )


@keys.command(short_help="Trust a public key.")
@click.argument("key")
@_CONFIG
@click.option("--scope", type=click.Choice(["publish", "derive", "none"]), multiple=True, help="What it may vouch for.")
@click.option("--run", "runs", multiple=True, metavar="RUN", help="The runs that it speaks for; all, if none is given.")
@click.option("--name", default="", help="What it is called in messages.")
@json_option
def trust(
    *, key: str, config: Path | None, scope: tuple[str, ...], runs: tuple[str, ...], name: str, as_json: bool
) -> None:
    """Add a [[trust]] section for KEY to the end of a configuration; the rest of the file stays as it is.

    A running daemon takes it up on SIGHUP. Without --config the section is only printed.

    \b
    Example:
      deltad keys trust ed25519:11qY…URo= --config /etc/deltad/deltad.toml --run my-run --name trainer
    """
    from deltad.config import toml_value
    from deltad.delta.keys import parse_public_key

    parsed = parse_public_key(key)
    values = {"key": str(parsed), "scope": list(scope) or ["publish"], "runs": list(runs) or ["*"], "name": name}
    section = "\n".join(["[[trust]]", *(f"{name} = {toml_value(value)}" for name, value in values.items())]) + "\n"
    if config is not None:
        _append(existing(config), section)
    if as_json:
        show_json({"config": config and str(config), "id": parsed.id, "trust": values})
    elif config is None:
        click.echo(section, nl=False)
    else:
        show([Line(f"{config} trusts {parsed.id} now; a daemon that runs takes it up on SIGHUP")])


@keys.command(short_help="Replace a private key by a new one.")
@_FILE
@json_option
def rotate(file: Path, as_json: bool) -> None:
    """Put a new private key in FILE, and keep the old one beside it under its id.

    Before the daemon is restarted with it, every daemon that trusts the old key has to trust the new one too; once no
    version that the old one signed is needed any more, its [[trust]] section can go.

    \b
    Example:
      deltad keys rotate /etc/deltad/trainer.key
    """
    from deltad.config import KeyFile
    from deltad.delta.keys import SigningKey

    old = KeyFile(existing(file)).read().public
    kept, fresh = file.with_name(f"{file.name}.{old.id}"), file.with_name(f"{file.name}.new")
    key = SigningKey.new()
    _write(fresh, key)
    os.link(file, kept)
    os.replace(fresh, file)
    advice = f"the old key {old.id} is kept in {kept}; trust the new one everywhere before this daemon starts again"
    _tell(file, key.public, as_json, advice)


def _tell(file: Path, key: PublicKey, as_json: bool, advice: str) -> None:
    if as_json:
        show_json({"file": str(file), "id": key.id, "key": str(key)})
        return
    show(
        [
            Facts("", [("file", str(file)), ("id", key.id), ("public key", str(key))]),
            *([Line(advice)] if advice else []),
        ]
    )


def _write(file: Path, key: SigningKey) -> None:
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise UsageError(
            f"{file}",
            expected="a file that does not exist yet",
            found="one",
            hint="`deltad keys rotate` replaces a key and keeps the old one",
        ) from None
    with open(descriptor, "wb") as opened:
        opened.write(key.pem())
        opened.flush()
        os.fsync(descriptor)


def _append(config: Path, section: str) -> None:
    """Add a section to a configuration that can be used before and after. Raises ConfigError, and changes nothing."""
    from deltad.config import load_config

    load_config(config)
    before = config.read_bytes()
    after = before + (b"" if not before or before.endswith(b"\n") else b"\n") + b"\n" + section.encode()
    trial = config.with_name(f".{config.name}.new")
    try:
        trial.write_bytes(after)
        os.chmod(trial, config.stat().st_mode & 0o7777)
        try:
            load_config(trial)
        except ConfigError as error:
            raise ConfigError(
                f"configuration {config} with the new section", expected=error.expected, found=error.found
            ) from None
        os.replace(trial, config)
    finally:
        trial.unlink(missing_ok=True)
