"""`lmhead explore`: a page in the browser, on this machine alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lmhead.cli._model import model_options, open_model
from lmhead.interrupt import leaving_at_once

if TYPE_CHECKING:
    from lmhead.models import LanguageModel


@click.command()
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@click.option("--lang", type=click.Choice(["en", "zh"]), help="Language.  [default: the browser's]")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="Port.  [default: a free one]"
)
@click.option(
    "--key",
    envvar="LMHEAD_KEY",
    help="What every request must show; needed for a host that other machines can reach.",
)
@click.option(
    "--run",
    metavar="FOLDER",
    type=click.Path(file_okay=False, path_type=Path),
    help="Watch the run of `lmhead train --out FOLDER`, begun or not.",
)
@click.option("--no-browser", is_flag=True, help="Only say the address.")
@click.option("--no-model", is_flag=True, help="Open no model: the story alone.")
@model_options
def command(
    models: tuple[str, ...],
    lang: str | None,
    host: str,
    port: int,
    key: str | None,
    run: Path | None,
    no_browser: bool,
    no_model: bool,
    download: bool,
    threads: int | None,
) -> None:
    """Watch a vector become a word, in the browser.

    How the last step works, on a model small enough to check by hand; then what a real one would
    say next. The page needs no network: it comes from this machine, and asks nothing but this
    machine.

    \b
    Examples:
      lmhead explore
      lmhead explore --lang zh
      lmhead explore ./model ./other --port 8000 --no-browser
      lmhead explore --run ./run
      lmhead explore --no-model
    """
    if no_model and models:
        raise click.UsageError(f"--no-model opens none, and {models[0]} is one: give one of them.")
    try:
        with leaving_at_once():
            from lmhead.server import serve
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("starlette", "uvicorn", "anyio"):
            raise
        raise click.ClickException(
            f"{error.name} is not installed; pip install 'lmhead[explore]' brings it."
        ) from None
    opened: dict[str, LanguageModel] = {}
    given: dict[str, str] = {}
    for where in () if no_model else models or (None,):
        model = open_model(where, download=download, threads=threads)
        name = _name(model.name or Path(where or "model").name, opened)
        opened[name], given[name] = model, where or name
    try:
        serve(
            opened,
            host=host,
            port=port,
            key=key,
            lang=lang,
            browser=not no_browser,
            run=run,
            given=given,
            said=_say,
        )
    except FileNotFoundError as error:
        raise click.ClickException(f"{error}.") from None


def _name(wanted: str, taken: dict[str, LanguageModel]) -> str:
    """A name that no other model has, and that is no path."""
    wanted = os.path.basename(wanted) or "model"
    names = [wanted, *(f"{wanted} ({n})" for n in range(2, len(taken) + 2))]
    return next(name for name in names if name not in taken)


def _say(address: str) -> None:
    click.echo(f"The page is at {address}")
    click.echo("Ctrl-C ends it.", err=True)
