"""The command line: `lmhead COMMAND`. One file per command, loaded when it is called."""

import click

from lmhead import __version__
from lmhead.cli._frame import LazyGroup

# Command name -> what `lmhead --help` says of it. `lmhead NAME` runs `lmhead.cli.NAME:command`.
_COMMANDS = {
    "demo": "What lmhead does, on a real model, in under a minute.",
    "next": "The most probable next words behind a prompt, as a table.",
    "score": "How well a model expects a text: perplexity, bits per byte, every token.",
    "generate": "Go on from a prompt.",
    "lens": "What the model would say after each layer: the logit lens.",
    "compare": "How far apart two models, or two samplers, are on a text.",
    "train": "Train a model: a language model on text files, or translation on pairs.",
    "translate": "Translate sentences with a model that was trained on pairs.",
    "inspect": "What a model's head is: sizes, type, memory, advice.",
    "check": "A model's head against the textbook: loss, gradients, decoding.",
    "models": "Models that have a name: list them, add one, ask where one is.",
    "explore": "The same in the browser: a page to play with, on this machine alone.",
    "doctor": "Versions, threads, instruction sets, compiled core or fallback.",
    "bench": "Speed, memory and errors, beside everything else a user could pick.",
}


@click.command(
    cls=LazyGroup, lazy=_COMMANDS, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(__version__, prog_name="lmhead")
def main() -> None:
    """The last step of a language model.

    Hidden state in; loss, log-probabilities and next token out, with no logits tensor in memory.
    """
