"""`lmhead explore`: a web page on this machine."""

from __future__ import annotations

from typing import Any

import click

from lmhead.cli._command_group import FOLDER, choice_option, importing_server
from lmhead.cli._model_arguments import model_options, open_models


@click.command()
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@choice_option(
    "--lang", choices=("en", "zh"), help="Language of the page.  [default: the browser's]"
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help="Port; 0 for any free one.  [default: 8629, or the next free one]",
)
@click.option(
    "--key",
    envvar="LMHEAD_KEY",
    help="Key that every request must carry; required unless --host is a loopback address.",
)
@click.option(
    "--run",
    metavar="FOLDER",
    type=FOLDER,
    help="Show the training run in FOLDER (`lmhead train --out FOLDER`), started or not.",
)
@click.option("--no-browser", is_flag=True, help="Print the address only; open no browser.")
@click.option("--no-model", is_flag=True, help="Tutorial page only.")
@model_options
def command(models: tuple[str, ...], no_browser: bool, no_model: bool, **options: Any) -> None:
    """Explore models in the browser, on this machine only.

    A tutorial on the output layer with a model small enough to check by hand; then next tokens,
    scores, logit lens and comparisons of real models. The page works offline. The address with /v1
    is an OpenAI-compatible API, as that of lmhead serve.

    \b
    Examples:
      lmhead explore
      lmhead explore --lang zh
      lmhead explore ./model ./other --port 8000 --no-browser
      lmhead explore --run ./run
      lmhead explore --no-model
    """
    if no_model and models:
        raise click.UsageError(f"--no-model and the model {models[0]} cannot be combined.")
    with importing_server("explore"):
        from lmhead.server import serve
    if not no_model:
        click.echo(f"Opening {', '.join(models) or 'the default model'} ...", err=True)
    opened, given = ({}, {}) if no_model else open_models(models)
    try:
        serve(opened, given=given, browser=not no_browser, on_ready=_print_address, **options)
    except FileNotFoundError as error:
        raise click.ClickException(f"{error}.") from None


def _print_address(address: str) -> None:
    click.echo(f"The page is at {address}")
    click.echo("Press Ctrl-C to stop.", err=True)
