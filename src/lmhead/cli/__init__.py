"""The command line: `lmhead NAME` runs `cli/cmd_NAME.py`, imported when it is called."""

import click

from lmhead import __version__
from lmhead.cli._command_group import LazyGroup

# Command name -> its line in `lmhead --help`.
_COMMANDS = {
    "demo": "Show what lmhead does, on a real model, in under a minute.",
    "next": "Show the most probable next tokens after a prompt.",
    "score": "Score a text: perplexity, bits per byte, every token.",
    "eval": "Evaluate a model on tasks of lm-evaluation-harness.",
    "generate": "Generate text from a prompt.",
    "lens": "Show what the model predicts after each layer (logit lens).",
    "compare": "Compare two models, or two samplers, on a text.",
    "train": "Train a language model on text, or a translation model on pairs.",
    "translate": "Translate sentences with a translation model.",
    "inspect": "Show a model's head: sizes, dtype, memory, advice.",
    "check": "Check a model's head against the float64 reference.",
    "models": "List, install and locate models that have a name.",
    "serve": "Serve models with an OpenAI-compatible API.",
    "explore": "Explore models in the browser, on this machine only.",
    "doctor": "Show versions, threads, instruction sets, compiled core.",
    "bench": "Measure speed, memory and errors against alternatives (needs a clone).",
}


@click.command(
    cls=LazyGroup, lazy=_COMMANDS, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(__version__, prog_name="lmhead")
def main() -> None:
    """The output layer of a language model.

    Hidden states in; loss, log-probabilities and next token out, without a logits tensor in memory.
    """
