"""`lmhead doctor`: versions, threads, and whether the compiled core is in use."""

from __future__ import annotations

import platform
import re
from importlib import metadata
from typing import Any

import click

from lmhead.cli import _json


@click.command("doctor")
@_json.json_option
def command(as_json: bool) -> None:
    """Show versions, threads, instruction sets, compiled core.

    \b
    Examples:
      lmhead doctor
      lmhead doctor --json
    """
    facts = examine()
    if as_json:
        named: dict[str, Any] = {re.sub("'s | ", "_", name): value for name, value in facts.items()}
        _json.write("doctor", **named)
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else value
        click.echo(f"{name:<{width}}  {shown}")
    if facts["core"] != "native":
        click.echo(
            "\nThe compiled core is not in use: results are the same, but slower. Install a C++ "
            "compiler\n(Debian: apt-get install g++) and reinstall lmhead, or unset LMHEAD_NATIVE."
        )


def examine() -> dict[str, str | int | list[str]]:
    """Return the facts by name."""
    import torch

    from lmhead.models import llama_cpp
    from lmhead.screen import memory_reading
    from lmhead.sweep import kernels
    from lmhead.sweep.source import core_is_faster

    core = kernels.core
    facts: dict[str, str | int | list[str]] = {
        "lmhead": metadata.version("lmhead"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": metadata.version("numpy"),
        "machine": f"{platform.system()} {platform.machine()}",
        "threads": torch.get_num_threads(),
        "core": "torch operations (fallback)" if core is None else "native",
    }
    if core is not None:
        facts["instruction set"] = core.instruction_set()
        facts["also usable"] = core.instruction_sets()[1:]
        facts["threads from"] = core.thread_runtime()
        facts["large products"] = "core" if core_is_faster() else "torch"
        eight_bit, nibbles = memory_reading.choose()
        facts["streams"] = f"{eight_bit.streams} with 8 bits, {nibbles.streams} with 4"
        facts["prefetch"] = f"{eight_bit.prefetch} bytes with 8 bits, {nibbles.prefetch} with 4"
    engines = ["core"] if core is not None else []
    facts["engines"] = [*engines, "torch", *(["llama.cpp"] if llama_cpp.is_available() else [])]
    facts["torch's instruction set"] = torch.backends.cpu.get_cpu_capability()
    return facts
