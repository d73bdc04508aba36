"""`score` on a long text: is it right, and is its memory bounded.

    python -m benchmarks.score_text TEXT [--model smollm2]    (half an hour for WikiText-2's test)

The text is scored as `lmhead score` does it, and the process's memory is watched: the goal is less
than 300 MiB beyond the model. The hidden states go to a file as they are made; afterwards torch
makes all logits of each window from them, in float32, and adds up `F.cross_entropy`: the perplexity
must be the same to 1e-4. Ends with 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.wikitext import ROOT
from lmhead.analysis import score
from lmhead.analysis.reading import stream_ids
from lmhead.analysis.score import windows
from lmhead.bench.machine import describe
from lmhead.bench.report import write_json
from lmhead.models import LanguageModel, open_model

GROWTH_GOAL, PERPLEXITY_GOAL = 300 * 2**20, 1e-4


@dataclass(frozen=True)
class Recorded(LanguageModel):
    """The model, which writes all hidden states that it makes to a file."""

    file: Any = None

    def hidden(self, ids: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        """As the model, and kept."""
        made, cache = super().hidden(ids, cache)
        self.file.write(made.detach().numpy().tobytes())
        return made, cache


def memory(name: str) -> int:
    """VmRSS or VmHWM, in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def dense_perplexity(model: LanguageModel, text: str, file: Any, window: int, stride: int) -> float:
    """From all logits, in float32, of the hidden states in the file."""
    head, total, count = model.head, 0.0, 0
    bias = head.bias
    for ids, fresh in windows(stream_ids(model, [text]), window, stride):
        read = file.read((len(ids) - 1) * head.hidden_size * 4)
        hidden = torch.frombuffer(bytearray(read), dtype=torch.float32).view(-1, head.hidden_size)
        logits = F.linear(hidden[-fresh:], head.weight, bias)
        losses = F.cross_entropy(logits, torch.tensor(ids[-fresh:]), reduction="none")
        total, count = total + float(losses.double().sum()), count + fresh
    return math.exp(total / count)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/score.json")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    text = given.text.read_text(encoding="utf-8")
    opened = open_model(given.model)
    head = opened.head
    if head.weight.dtype != torch.float32 or head.softcap is not None or head.scale != 1:
        sys.exit("the model must be in float32, without soft cap and scale")
    with tempfile.TemporaryFile() as file:
        model = Recorded(**vars(opened), file=file)
        score(opened, text[:20_000])  # what is loaded once is loaded now
        Path("/proc/self/clear_refs").write_text("5")
        before, began = memory("VmRSS"), time.perf_counter()
        made = score(model, text)
        seconds, growth = time.perf_counter() - began, memory("VmHWM") - before
        print(f"{made.tokens:,} tokens in {seconds / 60:.1f} min, {growth / 2**20:.0f} MiB beyond")
        print(f"perplexity {made.perplexity:.6f}", flush=True)
        file.seek(0)
        dense = dense_perplexity(opened, text, file, made.window, made.stride)
    off = abs(made.perplexity / dense - 1)
    print(f"dense      {dense:.6f}, relative difference {off:.1e}")
    document = {
        "benchmark": "score",
        **describe(torch.get_num_threads()),
        "model": given.model,
        "text": given.text.name,
        **made.to_json(),
        "seconds": seconds,
        "growth_bytes": growth,
        "dense_perplexity": dense,
        "relative_difference": off,
    }
    write_json(document, given.out)
    sys.exit(int(growth > GROWTH_GOAL or off > PERPLEXITY_GOAL))


if __name__ == "__main__":
    main()
