"""`python -m benchmarks NAME`, and `lmhead bench NAME`: one command per benchmark.

Nothing here loads torch: a benchmark is imported when it runs.
"""

from __future__ import annotations

from importlib import import_module

import click

from lmhead.cli._command_group import LazyGroup

# Name -> one line of help. NAME runs `benchmarks.NAME:command`, with "_" for "-".
COMMANDS = {
    "loss": "Cross-entropy and both gradients: lmhead, and every other way to get them.",
    "query": "Log-probability, entropy, rank, argmax and top 20 at once.",
    "small-calls": "Losses and log-probabilities of few rows: time per call beside torch.",
    "accuracy": "Errors of the gradient filter, work of certified decode, bounds of stored states.",
    "divergence": "Jensen-Shannon divergence of two heads, beside dense torch.",
    "sample": "Time one token from logits, beside Hugging Face's processors.",
    "sample-batch": "Time a token per row of lazy logits: a batch beside one row.",
    "decode": "One token from a hidden state: certified decode beside full products.",
    "memory": "Temporary memory against max_bytes, at every shape.",
    "scaling": "Time against the vocabulary and against the number of rows.",
    "train-speed": "Training steps per second, beside a plain torch loop.",
    "trl-steps": "SFT and GRPO steps of TRL, stock and patched: time and memory.",
    "prompt-to-token": "From a prompt to tokens, beside transformers: generate, score, command.",
    "score-text": "Perplexity of a long text: memory, and the dense result.",
    "shakespeare": "Train on characters of Shakespeare with three losses.",
    "wikitext-filter": "Train on WikiText-2 with and without the gradient filter.",
    "vocab-training": "Heads for huge vocabularies: perplexity, time, memory on WikiText-2.",
    "vocab-parallel": "A loss with the vocabulary split over ranks, beside loss_parallel.",
    "vocab-scaling": "Heads for huge vocabularies: cost for 10,000 to 1,000,000 tokens.",
    "explorer-speed": "Time the web page in a browser: slider to frame, address to first chart.",
    "eval-harness": "Log-likelihoods of lm-evaluation-harness: time and memory beside hf.",
    "serve-throughput": "Requests to the server at once, beside a loop of generate.",
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
    """Measure speed, memory and errors of lmhead beside its alternatives.

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
