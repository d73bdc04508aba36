"""`lmhead score` on a long text: correct, and with bounded memory. Half an hour for WikiText-2.

The text is scored as `lmhead score` does it, in this fresh process; the goal is a growth of less
than 300 MiB beyond the model. The hidden states go to a file as they are made; afterwards torch
computes all logits of each window from them, in float32, and sums `F.cross_entropy`: the perplexity
must be the same to 1e-4.
"""

from __future__ import annotations

import math
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.report import MIB, Document
from benchmarks.runner import Run, benchmark
from lmhead.analysis import score
from lmhead.analysis.score import windows
from lmhead.analysis.token_text import stream_ids
from lmhead.cli._peak_memory import call_with_growth
from lmhead.models import LanguageModel, open_model

GROWTH_GOAL, PERPLEXITY_GOAL = 300 * 2**20, 1e-4


@dataclass(frozen=True)
class Recorded(LanguageModel):
    """A model that writes its hidden states to a file."""

    file: Any = None

    def hidden(
        self, ids: Tensor, cache: Any = None, *, use_cache: bool = True
    ) -> tuple[Tensor, Any]:
        """Compute hidden states and write them."""
        states, cache = super().hidden(ids, cache, use_cache=use_cache)
        self.file.write(states.detach().numpy().tobytes())
        return states, cache


def dense_perplexity(model: LanguageModel, text: str, file: Any, window: int, stride: int) -> float:
    """Return the perplexity from dense float32 logits of the hidden states in the file."""
    head, total, count = model.head, 0.0, 0
    bias = head.bias
    for ids, fresh in windows(stream_ids(model, [text]), window, stride):
        read = file.read((len(ids) - 1) * head.hidden_size * 4)
        hidden = torch.frombuffer(bytearray(read), dtype=torch.float32).view(-1, head.hidden_size)
        logits = F.linear(hidden[-fresh:], head.weight, bias)
        losses = F.cross_entropy(logits, torch.tensor(ids[-fresh:]), reduction="none")
        total, count = total + float(losses.double().sum()), count + fresh
    return math.exp(total / count)


def lines(document: Document, width: int) -> list[str]:  # noqa: ARG001
    """Return the figures."""
    tokens, growth = document["scored_tokens"], document["growth_bytes"] / MIB
    off = document["relative_difference"]
    return [
        f"{tokens:,} tokens in {document['seconds'] / 60:.1f} min, {growth:.0f} MiB of growth",
        f"perplexity {document['perplexity']:.6f}",
        f"dense      {document['dense_perplexity']:.6f}, relative difference {off:.1e}",
    ]


@benchmark("score", "perplexity of a long text", lines)
@click.argument("text", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--model", default="smollm2", help="Model to score with.", show_default=True)
@torch.no_grad()
def command(run: Run, text: Path, model: str) -> None:
    """Score a long TEXT: perplexity and memory, and the dense result for comparison.

    Ends with 1 if a goal is missed.
    """
    content, opened = text.read_text(encoding="utf-8"), open_model(model)
    head = opened.head
    if head.weight.dtype != torch.float32 or head.softcap is not None or head.scale != 1:
        raise ValueError("the model must be in float32, without softcap and scale")
    with tempfile.TemporaryFile() as file:
        recorded = Recorded(**vars(opened), file=file)
        score(opened, content[:20_000])  # loads what is loaded once
        start = time.perf_counter()
        result, growth = call_with_growth(lambda: score(recorded, content))
        seconds = time.perf_counter() - start
        file.seek(0)
        dense = dense_perplexity(opened, content, file, result.window, result.stride)
    off = abs(result.perplexity / dense - 1)
    run.document |= {"model": model, "text": text.name, **result.to_json(), "seconds": seconds}
    run.document |= {"growth_bytes": growth, "dense_perplexity": dense}
    run.document["relative_difference"] = off
    run.wrong = growth > GROWTH_GOAL or off > PERPLEXITY_GOAL
