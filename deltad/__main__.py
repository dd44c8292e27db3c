"""The `deltad` command, also as `python -m deltad`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, or say in one line what has to be installed for it."""
    try:
        from deltad.cli.main import main as command
    except ModuleNotFoundError as error:
        sys.exit(f"deltad: the command line needs {error.name}; install it with `pip install 'deltad[daemon]'`")
    command()


if __name__ == "__main__":
    main()
