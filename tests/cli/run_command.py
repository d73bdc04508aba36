"""Run a command, and return its output as text or as JSON."""

import json
from typing import Any

from click.testing import CliRunner, Result

from lmhead.cli import main

TEXT = "hello ab 你 cab hello\n"


def run(*arguments: str, code: int = 0, **more: Any) -> Result:
    result = CliRunner().invoke(main, arguments, **more)
    assert result.exit_code == code, result.output
    return result


def document(*arguments: str, **more: Any) -> dict[str, Any]:
    result = run(*arguments, "--json", **more)
    assert result.stderr == ""
    parsed: dict[str, Any] = json.loads(result.stdout)
    assert parsed["schema"] == 1
    assert parsed["command"] == arguments[0]
    return parsed
