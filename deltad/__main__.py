"""The `deltad` command, also as `python -m deltad`."""

from __future__ import annotations

import sys

from deltad.errors import MissingPackageError


def main() -> None:
    """Run the command line, or say in one line what has to be installed for it."""
    try:
        from deltad.cli.main import main as command
    except ModuleNotFoundError as error:
        print(f"deltad: {_missing(error.name)}", file=sys.stderr)
        sys.exit(MissingPackageError.exit_code)
    command()


def _missing(package: str | None) -> MissingPackageError:
    return MissingPackageError(
        "the command line",
        expected=f"the Python package {package}",
        found="none",
        hint="`pip install 'deltad[daemon]'`",
    )


if __name__ == "__main__":
    main()
