"""Starts a program that cannot outlive the process which started it, however that one ends.

`python tether.py PARENT PROGRAM [ARGUMENT...]`, with PARENT the process id of the caller. It asks the kernel to
kill this process when PARENT is gone, then becomes PROGRAM. It imports nothing of the project, so that it
starts in a few milliseconds; where the kernel has no such request (it is one of Linux) it only becomes PROGRAM.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Never returns: becomes the program, or exits."""
    parent, program = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)  # it was gone before the request
    os.execvp(program[0], program)  # noqa: S606 - the caller's own list of arguments


if __name__ == "__main__":
    main()
