"""`python -m deltad`: the same as the `deltad` command."""

from __future__ import annotations

from deltad.cli.main import main

main()
