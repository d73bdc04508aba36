"""The command line: `lmhead NAME` runs `cli/cmd_NAME.py`, imported when it is called."""

from lmhead.cli._command_group import main

__all__ = ["main"]
