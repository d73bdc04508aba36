"""`python -m benchmarks NAME`, and `lmhead bench NAME`: one command per benchmark.

Nothing here loads torch: a benchmark is imported when it runs.
"""

from __future__ import annotations

from importlib import import_module

import click

from lmhead.cli._command_group import LazyGroup

# Name -> one line of help. NAME runs `benchmarks.NAME:command`, with "_" for "-".
COMMANDS = {
    "loss": "Time cross-entropy and both gradients: lmhead, and every other way to get them.",
    "query": "Time log-probability, entropy, rank, argmax and top 20 at once.",
    "small-calls": "Time losses and log-probabilities of few rows, compared with torch.",
    "accuracy": "Measure errors of the gradient filter and work of certified decode.",
    "divergence": "Time the Jensen-Shannon divergence of two heads, compared with dense torch.",
    "sample": "Time one token from logits, compared with Hugging Face's processors.",
    "sample-batch": "Time a token per row of lazy logits: a batch compared with one row.",
    "decode": "Time one token from a hidden state: certified decode, and full products.",
    "memory": "Measure temporary memory against max_bytes, at every shape.",
    "scaling": "Measure how time grows with the vocabulary and the number of rows.",
    "train-speed": "Measure training steps per second, compared with a plain torch loop.",
    "trl-steps": "Measure SFT and GRPO steps of TRL, stock and patched: time and memory.",
    "prompt-to-token": "Time generate, score and the command, compared with transformers.",
    "score-text": "Score a long text: memory, and the dense result for comparison.",
    "shakespeare": "Train on characters of Shakespeare with three losses.",
    "wikitext-filter": "Train on WikiText-2 with and without the gradient filter.",
    "vocab-training": "Train heads for huge vocabularies on WikiText-2: perplexity, time, memory.",
    "vocab-parallel": "Time a loss with the vocabulary split over ranks, and loss_parallel.",
    "vocab-scaling": "Time heads for huge vocabularies of 10,000 to 1,000,000 tokens.",
    "explorer-speed": "Time the web page in a browser: slider to frame, address to first chart.",
    "eval-harness": "Measure lm-evaluation-harness with lmhead and with hf: time and memory.",
    "serve-throughput": "Time simultaneous requests to the server, and a loop of generate.",
    "standard": "Run the standard set and compare it with its goals.",
    "goals": "Compare the result files with their goals.",
}


class _Benchmarks(LazyGroup):
    """The benchmarks; a name may be written with "_" too."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import the benchmark."""
        name = cmd_name.replace("_", "-")
        if name not in self.lazy:
            return None
        command: click.Command = import_module(f"benchmarks.{name.replace('-', '_')}").command
        return command


@click.command(
    "bench",
    cls=_Benchmarks,
    lazy=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"]},
)
def command() -> None:
    """Measure speed, memory and errors of lmhead, compared with its alternatives.

    Every result is compared with float64 before it is timed. Rounds are interleaved, so that a
    ratio is taken between calls that were made one after the other.

    \b
    Examples:
      lmhead bench loss
      lmhead bench loss --shape gpt2 --only lmhead --only compile
      lmhead bench query --threads 2
      lmhead bench sample
      lmhead bench decode
      lmhead bench memory
      lmhead bench scaling --quick
    """
