"""A small Transformer on the words of WikiText-2, V = 33,278, under each head in turn.

    python -m benchmarks.vocab_heads.training --data FOLDER     (35 minutes on two cores)

Same seed, same batches, same steps. The perplexity is that of the whole distribution on the whole
validation text, for all. When all are trained, they are timed side by side, each on what it has
learned and on the hidden states of its own model, with torch's full and adaptive softmax beside
them; the memory is that of one training step of the head in a fresh process.

What a head has learned is kept in `--work`, and the results are written after each: an interrupted
run goes on with the next head. FOLDER has `train.txt` and `valid.txt`.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.goals import VOCAB, lines_of
from benchmarks.vocab_heads.heads import HEADS, Output, check, questions
from benchmarks.vocab_heads.peers import PEERS, peer
from benchmarks.vocab_heads.report import plot_training, training_table
from benchmarks.vocab_heads.timing import memory, side_by_side
from benchmarks.wikitext import ROOT, Body, Settings, add_options, learn, mean_loss, read, windows
from lmhead.bench.machine import commit, describe
from lmhead.bench.report import Document, write_json
from lmhead.sweep import native
from lmhead.train.files import part_of

LAST_RATE = 0.1


@dataclass(frozen=True)
class HeadSettings(Settings):
    """Of the model, its training and the sampled loss."""

    samples: int


DEFAULTS = HeadSettings(500, 100, 16, 64, 256, 2, 2e-3, 20_000, 0, 1024)


def train(
    kind: str, train_ids: Tensor, valid_ids: Tensor, frequencies: Tensor, s: HeadSettings
) -> dict[str, Any]:
    """One training run: its result, what the head has learned, and hidden states to time it on."""
    torch.manual_seed(s.seed)
    body = Body(len(frequencies), s, shared=True)
    shared = body.words.weight if kind == "tied" else None
    output = Output(kind, s.width, frequencies, samples=s.samples, weight=shared)
    curve: list[dict[str, float]] = []
    taken: list[float] = []
    before = time.perf_counter()
    for step, loss in learn(body, output, output, train_ids, s, last_rate=LAST_RATE):
        taken.append(time.perf_counter() - before)
        if step % s.every == 0 or step == s.steps:
            tokens = len(valid_ids) if step == s.steps else s.valid_tokens
            valid = mean_loss(body, output.total, valid_ids, s, tokens)
            curve.append({"step": step, "train": loss, "valid": valid, "tokens": tokens})
            left = (s.steps - step) * median(taken) / 60
            print(
                f"  {kind:13s} step {step:5d}/{s.steps}   train {loss:.4f}   valid {valid:.4f}   "
                f"ppl {math.exp(valid):7.1f}   {median(taken):.3f} s a step, {left:.1f} min left",
                flush=True,
            )
        before = time.perf_counter()
    ids, targets = windows(valid_ids, s, s.tokens)[0]
    with torch.no_grad():
        hidden = body(ids)
    result = {
        "kind": kind,
        "head": repr(output.head),
        "parameters": 0 if kind == "tied" else sum(p.numel() for p in output.head.parameters()),
        "perplexity": math.exp(curve[-1]["valid"]),
        "step_seconds": median(taken),
        "commit": commit(),
        "curve": curve,
    }
    learned = {"head": output.state_dict(), "hidden": hidden, "targets": targets}
    return {"result": result, "frequencies": frequencies, "settings": asdict(s), **learned}


def save(made: dict[str, Any], file: Path) -> None:
    """Whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(made, part_of(file))
    os.replace(part_of(file), file)


def result_in(file: Path, frequencies: Tensor, s: HeadSettings) -> dict[str, Any] | None:
    """Of a head that was trained with these settings on this text; None where there is none."""
    if not file.is_file():
        return None
    found: dict[str, Any] = torch.load(file)
    if found["settings"] != asdict(s) or not torch.equal(found["frequencies"], frequencies):
        return None
    result: dict[str, Any] = found["result"]
    return result


def load(kind: str, file: Path) -> tuple[Output, Tensor, Tensor]:
    """A trained head, hidden states of its model (N, D) and targets (N,)."""
    made = torch.load(file)
    hidden, samples = made["hidden"], made["settings"]["samples"]
    output = Output(kind, hidden.shape[1], made["frequencies"], samples=samples)
    output.load_state_dict(made["head"])
    return output, hidden, made["targets"]


def time_all(document: Document, work: Path, *, seconds: float) -> None:
    """Times and memory of all heads of the document, side by side, into it."""
    calls = {}
    for result in document["results"]:
        kind = result["kind"]
        output, hidden, targets = load(kind, work / f"{kind}.pt")
        check(output, hidden[:4], targets[:4])
        calls[kind] = questions(output, hidden, targets)
        theirs = peer(output, hidden, targets) if kind in PEERS else None
        if theirs is not None:
            calls[PEERS[kind]] = theirs
    found = side_by_side(calls, seconds=seconds, least=3, most=50)
    for result in document["results"]:
        result["timing"] = found.pop(result["kind"])
    document["peers"] = [{"name": name, "timing": timing} for name, timing in found.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    out = ROOT / "benchmarks" / "results" / f"{VOCAB}.json"
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "vocab_heads")
    parser.add_argument("--fresh", action="store_true", help="train again what is in --work")
    parser.add_argument("--head", action="append", choices=HEADS, help="all by default")
    parser.add_argument("--timing-seconds", type=float, default=120.0, help="default 120")
    parser.add_argument("--threads", type=int)
    add_options(parser, DEFAULTS)
    given = parser.parse_args()
    s = HeadSettings(**{name: getattr(given, name) for name in asdict(DEFAULTS)})
    if given.threads:
        torch.set_num_threads(given.threads)
    train_ids, valid_ids, frequencies = read(parser, given.data)
    print(f"{len(train_ids):,} words to train on, V = {len(frequencies):,}")
    results: list[dict[str, Any]] = []
    document: Document = {
        "benchmark": VOCAB,
        "title": "heads for huge vocabularies, trained on WikiText-2",
        "native": native.core is not None,
        **describe(torch.get_num_threads()),
        "vocab": len(frequencies),
        "settings": {**asdict(s), "last_rate": LAST_RATE},
        "results": results,
        "peers": [],
    }
    for kind in given.head or HEADS:
        file = given.work / f"{kind}.pt"
        result = None if given.fresh else result_in(file, frequencies, s)
        if result is None:
            made = train(kind, train_ids, valid_ids, frequencies, s)
            save(made, file)
            result = made["result"]
        else:
            print(f"  {kind:13s} was trained before, at {result['commit']}: {file}")
        results.append(result)
        write_json(document, given.out)
    print("timing, side by side", flush=True)
    time_all(document, given.work, seconds=given.timing_seconds)
    for result in results:
        result["memory"] = memory(result["kind"], given.work / f"{result['kind']}.pt")
    write_json(document, given.out)
    plot_training(document, given.out.with_suffix(""))
    print("\n".join([*training_table(document), "", *lines_of(document, VOCAB)]))
    print(f"written to {given.out}")


if __name__ == "__main__":
    main()
