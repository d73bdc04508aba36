"""Entry point of `python -m lmhead` and of the command `lmhead`."""

import os
import sys

from lmhead.progress import exit_on_interrupt


def main() -> None:
    """Run the command line."""
    _open_closed_streams()
    with exit_on_interrupt():
        from lmhead.cli import main as command_line
    command_line(prog_name="lmhead")


def _open_closed_streams() -> None:
    """Open /dev/null in place of closed standard streams.

    Otherwise the next file that is opened gets the number of standard error, and error messages
    would be written into it. `sys.stdin` and `sys.stdout` stay None, so commands can tell.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:  # noqa: PERF203
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


if __name__ == "__main__":
    main()
