"""`python -m trainer_plugin.rl`: one training run as a process."""

from __future__ import annotations

import sys

from trainer_plugin.rl.options import parse_options


def main() -> int:
    """Exit code 0 once the last version was verified, else that of the error."""
    options = parse_options()

    from transformers.utils import logging as transformers_log

    from trainer_plugin.rl.train import train

    transformers_log.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_log.disable_progress_bar()  # type: ignore[no-untyped-call]
    return train(options, sys.stdout)


if __name__ == "__main__":
    sys.exit(main())
