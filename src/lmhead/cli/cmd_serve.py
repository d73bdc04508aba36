"""`lmhead serve`: an OpenAI-compatible server on this machine."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from lmhead.cli._command_group import importing_server, integer_option
from lmhead.cli._model_arguments import model_options, open_models

if TYPE_CHECKING:
    from lmhead.models import LanguageModel


@click.command("serve")
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@integer_option("--port", default=8000, low=0, high=65535, help="Port; 0 for any free one.")
@click.option(
    "--key",
    envvar="LMHEAD_KEY",
    help="API key that every request must carry; required unless --host is a loopback address.",
)
@click.option(
    "--allow-host",
    "also",
    multiple=True,
    help="Another allowed Host header, e.g. of a proxy; may repeat.",
)
@click.option(
    "--screen",
    is_flag=True,
    help="Make quantized copies of the heads, for requests with certified: true.",
)
@click.option("--log", is_flag=True, help="Print a line per request, without prompts.")
@model_options
def command(models: tuple[str, ...], screen: bool, log: bool, **options: Any) -> None:
    """Serve models with an OpenAI-compatible API.

    /v1/models, /v1/completions and /v1/chat/completions, with streaming, log-probabilities of
    prompt and completion, and every sampler option as a field of the request. See docs/serve.md.

    \b
    Examples:
      lmhead serve smollm2
      lmhead serve ./model ./other --port 8080 --log
      lmhead serve smollm2 --host 0.0.0.0 --key secret
      curl http://127.0.0.1:8000/v1/completions -H "Content-Type: application/json" \\
        -d '{"prompt": "Once upon a time", "max_tokens": 20}'
    """
    with importing_server("serve"):
        from lmhead.server import serve_api
    opened, _ = open_models(models)
    serve_api(
        opened,
        screened={name: screened_model(model) for name, model in opened.items()} if screen else {},
        log=(lambda record: click.echo(str(record), err=True)) if log else None,
        on_ready=_print_address,
        **options,
    )


def screened_model(model: LanguageModel) -> LanguageModel:
    """Return the model with a head that shares its weight and decides from a quantized copy."""
    head = copy(model.head)
    head.screen(cache=True)
    return replace(model, head=head)


def _print_address(address: str) -> None:
    click.echo(f"OpenAI-compatible API at {address}/v1")
    click.echo("Press Ctrl-C to stop.", err=True)
