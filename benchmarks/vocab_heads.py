"""Heads for huge vocabularies: what they learn, what a step costs, how the cost grows with V.

    python benchmarks/vocab_heads.py --data FOLDER         (about an hour and a half on two cores)
    python benchmarks/vocab_heads.py --only scaling        (a quarter of an hour)

Training: a small Transformer on the words of WikiText-2 (V = 33,278), same seed, same batches:

    full           every word, exact gradients
    filter         the same with grad_filter=0.02
    tied           full, sharing the weight of the embedding
    adaptive       frequent words in full width, rare ones in clusters; cut-offs by the cost model
    hierarchical   a Huffman tree of decisions
    sampled        full, trained against `--samples` log-uniform negatives

Every head has a bias that starts at the log of the words' frequencies, so that none is ahead for
knowing them. The perplexity is that of the full distribution for all. The time is that of loss and
gradients of the head alone, taken in every step; the memory that of one such step in a fresh
process.

Scaling: a training step, the log-probability of one word and the best word of one state, for V from
10,000 to 1,000,000 words that follow Zipf's law. FOLDER has `train.txt` and `valid.txt`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lmhead
from lmhead.bench.machine import describe
from lmhead.bench.memory import ENVIRONMENT, peak_growth
from lmhead.bench.report import write_json
from lmhead.sweep import native
from lmhead.vocab import AdaptiveHead, HierarchicalHead, SampledLoss
from lmhead.vocab.frequencies import zipf

TAIL_MASS = 0.02
HEADS = ("full", "filter", "tied", "adaptive", "hierarchical", "sampled")
SIZES = (10_000, 33_278, 100_000, 333_333, 1_000_000)
QUESTIONS = ("training step", "log_prob of one id", "argmax")
GOALS = {"adaptive": 2.5, "hierarchical": 5.0}  # times faster than full
COLORS = ("#0f766e", "#d97706", "#64748b", "#4f46e5", "#be123c", "#65a30d")


@dataclass(frozen=True)
class Settings:
    """Of the model and its training."""

    steps: int
    every: int
    batch: int
    window: int
    width: int
    layers: int
    rate: float
    valid_tokens: int
    samples: int
    seed: int


class Output(nn.Module):
    """A head under the name of its kind: the loss to train on, and the one to be judged by."""

    def __init__(
        self,
        kind: str,
        width: int,
        frequencies: Tensor,
        *,
        samples: int,
        embedding: nn.Embedding | None = None,
    ) -> None:
        super().__init__()
        vocab = len(frequencies)
        self.sampled: SampledLoss | None = None
        self.head: nn.Module
        if kind == "adaptive":
            self.head = AdaptiveHead(width, vocab, frequencies=frequencies, bias=True)
        elif kind == "hierarchical":
            self.head = HierarchicalHead(width, vocab, frequencies=frequencies)
        elif kind == "tied":
            assert embedding is not None
            self.head = lmhead.LMHead.tied(embedding, bias=True)
        else:
            tau = TAIL_MASS if kind == "filter" else None
            self.head = lmhead.LMHead(width, vocab, bias=True, grad_filter=tau)
        if isinstance(self.head, lmhead.LMHead):
            start = frequencies.double().clamp(min=0.5 * float(frequencies[frequencies > 0].min()))
            with torch.no_grad():
                self.head.bias.copy_((start / start.sum()).log())  # type: ignore[union-attr]
        if kind == "sampled":
            self.sampled = SampledLoss(
                self.head,  # type: ignore[arg-type]
                num_samples=samples,
                frequencies=frequencies,
                seed=0,
            )

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """The loss that is trained on."""
        if self.sampled is not None:
            return self.sampled(hidden, targets)  # type: ignore[no-any-return]
        return F.cross_entropy(self.head(hidden), targets)

    def total(self, hidden: Tensor, targets: Tensor) -> float:
        """The sum of the full loss."""
        return float(F.cross_entropy(self.head(hidden), targets, reduction="sum"))


class Model(nn.Module):
    """Words and places, a causal Transformer, a head."""

    def __init__(self, kind: str, frequencies: Tensor, s: Settings) -> None:
        super().__init__()
        self.words = nn.Embedding(len(frequencies), s.width)
        # Of the size that a head wants its weight to have, since one of them shares it.
        nn.init.normal_(self.words.weight, std=s.width**-0.5)
        self.places = nn.Embedding(s.window, s.width)
        nn.init.normal_(self.places.weight, std=s.width**-0.5)
        layer = nn.TransformerEncoderLayer(
            s.width, max(1, s.width // 32), 4 * s.width, 0.0, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, s.layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(s.width)
        self.output = Output(kind, s.width, frequencies, samples=s.samples, embedding=self.words)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(s.window))

    def forward(self, ids: Tensor) -> Tensor:
        """(batch, window) ids to (batch · window, width) hidden states."""
        x = (self.words(ids) + self.places.weight) * self.words.embedding_dim**0.5
        hidden: Tensor = self.norm(self.body(x, mask=self.mask, is_causal=True))
        return hidden.flatten(0, 1)


def read(folder: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Ids of the training and of the validation words, and how often each word is trained on."""
    ids: dict[str, int] = {}

    def words(name: str) -> list[int]:
        text = (folder / name).read_text(encoding="utf-8")
        lines = ([*line.split(), "<eos>"] for line in text.splitlines())
        return [ids.setdefault(word, len(ids)) for line in lines for word in line]

    train, valid = torch.tensor(words("train.txt")), torch.tensor(words("valid.txt"))
    return train, valid, torch.bincount(train, minlength=len(ids))


def train(
    kind: str, train_ids: Tensor, valid_ids: Tensor, frequencies: Tensor, s: Settings
) -> dict[str, Any]:
    """One training run: validation losses by steps, seconds of the head and of the whole step."""
    torch.manual_seed(s.seed)
    model = Model(kind, frequencies, s)
    optimizer = torch.optim.AdamW(model.parameters(), lr=s.rate, weight_decay=0.0)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 50))
    order = torch.Generator().manual_seed(s.seed)
    curve, in_head, in_step = [], [], []
    for step in range(1, s.steps + 1):
        first = torch.randint(len(train_ids) - s.window, (s.batch, 1), generator=order)
        rows = train_ids[first + torch.arange(s.window + 1)]
        start = time.perf_counter()
        optimizer.zero_grad()
        hidden = model(rows[:, :-1])
        leaf = hidden.detach().requires_grad_()
        before = time.perf_counter()
        loss = model.output(leaf, rows[:, 1:].flatten())
        loss.backward()
        in_head.append(time.perf_counter() - before)
        hidden.backward(leaf.grad)
        optimizer.step()
        warm_up.step()
        in_step.append(time.perf_counter() - start)
        if step % s.every == 0 or step == s.steps:
            valid = validate(model, valid_ids, s)
            curve.append({"step": step, "train": float(loss.detach()), "valid": valid})
            print(
                f"  step {step:5d}   train {curve[-1]['train']:.4f}   valid {valid:.4f}   "
                f"ppl {math.exp(valid):7.1f}   head {1e3 * median(in_head):.1f} ms",
                flush=True,
            )
    return {
        "kind": kind,
        "head": str(model.output.head),
        "parameters": sum(p.numel() for p in model.output.head.parameters()),
        "perplexity": math.exp(curve[-1]["valid"]),
        "head_seconds": median(in_head),
        "step_seconds": median(in_step),
        "curve": curve,
    }


@torch.no_grad()
def validate(model: Model, ids: Tensor, s: Settings) -> float:
    """Mean loss of the validation words, the same for all."""
    windows = min(s.valid_tokens, len(ids) - 1) // s.window
    inputs = ids[: windows * s.window].view(windows, s.window)
    targets = ids[1 : windows * s.window + 1].view(windows, s.window)
    pairs = zip(torch.split(inputs, s.batch), torch.split(targets, s.batch), strict=True)
    return sum(model.output.total(model(x), y.flatten()) for x, y in pairs) / targets.numel()


def step_of(kind: str, frequencies: Tensor, width: int, tokens: int, samples: int) -> Any:
    """A head, and a training step on random states as a function."""
    torch.manual_seed(0)
    embedding = nn.Embedding(len(frequencies), width) if kind == "tied" else None
    output = Output(kind, width, frequencies, samples=samples, embedding=embedding)
    hidden = torch.randn(tokens, width)
    targets = frequencies.double().multinomial(tokens, replacement=True)

    def step() -> dict[str, Tensor]:
        leaf = hidden.clone().requires_grad_()
        for p in output.parameters():
            p.grad = None
        output(leaf, targets).backward()
        grads = {n: p.grad for n, p in output.named_parameters() if p.grad is not None}
        assert leaf.grad is not None
        return {**grads, "hidden": leaf.grad}

    return step


def memory(kind: str, frequencies_file: Path, s: Settings, threads: int) -> dict[str, Any] | None:
    """Peak growth of a training step of the head, measured in a fresh process."""
    call = [sys.executable, __file__, "--measure-memory", kind, "--out", str(frequencies_file)]
    call += ["--width", str(s.width), "--batch", str(s.batch), "--window", str(s.window)]
    call += ["--samples", str(s.samples), "--threads", str(threads)]
    done = subprocess.run(
        call, capture_output=True, text=True, check=True, env={**os.environ, **ENVIRONMENT}
    )
    found: dict[str, Any] | None = json.loads(done.stdout.splitlines()[-1])
    return found


def measure_memory(kind: str, frequencies_file: Path, s: Settings) -> None:
    """What the fresh process does."""
    frequencies = torch.load(frequencies_file)
    growth = peak_growth(step_of(kind, frequencies, s.width, s.batch * s.window, s.samples))
    print(json.dumps(None if growth is None else {**asdict(growth), "temporary": growth.temporary}))


def scaling(sizes: list[int], width: int, tokens: int, samples: int) -> list[dict[str, Any]]:
    """Seconds of each question to each head, by V."""
    points = []
    for vocab in sizes:
        for kind in HEADS:
            if kind == "tied":  # the same products as full
                continue
            print(f"  V {vocab:9,}  {kind}", end="", flush=True)
            try:
                for question, seconds in costs(kind, vocab, width, tokens, samples).items():
                    point = {"vocab": vocab, "kind": kind, "question": question}
                    points.append({**point, "seconds": seconds})
                    print(f"   {question} {1e3 * seconds:.3g} ms", end="", flush=True)
            except (MemoryError, RuntimeError) as error:
                if "memory" not in str(error).lower():
                    raise
                print("   not enough memory", end="")
            print()
    return points


def costs(kind: str, vocab: int, width: int, tokens: int, samples: int) -> dict[str, float]:
    """Seconds of each question."""
    frequencies = zipf(vocab)
    torch.manual_seed(0)
    output = Output(kind, width, frequencies, samples=samples)
    hidden = torch.randn(tokens, width)
    targets = frequencies.multinomial(tokens, replacement=True)
    one, word = hidden[:1], targets[:1]

    def step() -> None:
        output.zero_grad()
        output(hidden.requires_grad_(), targets).backward()

    @torch.no_grad()
    def log_prob() -> None:
        output.head(one.detach()).ask(log_prob=word)

    @torch.no_grad()
    def argmax() -> None:
        output.head(one.detach()).argmax(-1)

    calls = dict(zip(QUESTIONS, (step, log_prob, argmax), strict=True))
    check(output.head, one.detach(), word)
    return {name: seconds(call) for name, call in calls.items()}


@torch.no_grad()
def check(head: Any, hidden: Tensor, word: Tensor) -> None:
    """The answers that are timed are those of the whole distribution."""
    logits = head(hidden)
    ids = torch.arange(logits.shape[-1])
    log_p = logits.log_softmax(-1)[..., ids]
    assert abs(float(log_p.double().exp().sum()) - 1) < 1e-4
    assert abs(float(logits.ask(log_prob=word).log_prob[0] - log_p[0, word[0]])) < 1e-3
    best = int(logits.argmax(-1)[0])
    assert float(log_p[0, best]) >= float(log_p.max()) - 1e-4


def seconds(call: Callable[[], None], *, budget: float = 2.0, most: int = 30) -> float:
    """The median of as many calls as fit, at least three."""
    call()
    taken: list[float] = []
    end = time.perf_counter() + budget
    while len(taken) < 3 or (time.perf_counter() < end and len(taken) < most):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return median(taken)


def table(results: list[dict[str, Any]]) -> str:
    """The training runs side by side."""
    full = next((r for r in results if r["kind"] == "full"), None)
    lines = [
        f"{'head':13s} {'parameters':>11s} {'perplexity':>11s} {'of full':>8s} {'head':>9s} "
        f"{'faster':>7s} {'step':>9s} {'memory':>9s} {'temporary':>10s}"
    ]
    for r in results:
        worse = faster = "-"
        if full is not None:
            worse = f"{r['perplexity'] / full['perplexity'] - 1:+.1%}"
            faster = f"{full['head_seconds'] / r['head_seconds']:.1f}x"
        grown = r["memory"] and r["memory"]["later"]
        sizes = [
            "-" if not grown else f"{r['memory'][key] / 2**20:,.0f} MiB"
            for key in ("later", "temporary")
        ]
        lines.append(
            f"{r['kind']:13s} {r['parameters']:11,} {r['perplexity']:11.1f} {worse:>8s} "
            f"{1e3 * r['head_seconds']:6.1f} ms {faster:>7s} {1e3 * r['step_seconds']:6.1f} ms "
            f"{sizes[0]:>9s} {sizes[1]:>10s}"
        )
    return "\n".join(lines)


def judge(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The goals, and whether they are met."""
    by_kind = {r["kind"]: r for r in results}
    if "full" not in by_kind:
        return []
    full, goals = by_kind["full"], []
    for kind, times in GOALS.items():
        if kind in by_kind:
            reached = full["head_seconds"] / by_kind[kind]["head_seconds"]
            goals.append({"goal": f"{kind} at least {times:g}x faster", "reached": reached})
            goals[-1]["met"] = reached >= times
    if "adaptive" in by_kind:
        worse = by_kind["adaptive"]["perplexity"] / full["perplexity"] - 1
        goals.append({"goal": "adaptive within 5 % of full's perplexity", "reached": worse})
        goals[-1]["met"] = worse <= 0.05
    return goals


def plot(document: dict[str, Any], stem: Path) -> None:
    """Seconds against V, a panel per question, as PNG and SVG."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update({"svg.hashsalt": "lmhead", "svg.fonttype": "none"})
    points = document["scaling"]["points"]
    figure = Figure(figsize=(13, 4.4), layout="constrained")
    for ax, question in zip(figure.subplots(1, 3), QUESTIONS, strict=True):
        for kind, color in zip(HEADS, COLORS, strict=True):
            some = [p for p in points if (p["kind"], p["question"]) == (kind, question)]
            if some:
                x, y = [p["vocab"] for p in some], [p["seconds"] for p in some]
                ax.loglog(x, y, "o-", color=color, label=kind, markersize=4)
        ax.set_title(question, fontsize=10, loc="left")
        ax.set_xlabel("words", fontsize=8)
        ax.set_ylabel("seconds", fontsize=8)
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25)
        ax.legend(fontsize=8, frameon=False)
    s = document["scaling"]
    figure.suptitle(
        f"cost against the vocabulary: D {s['width']}, N {s['tokens']:,} in training and 1 in "
        f"questions; {document['machine']['processor']}, threads: {document['threads']}",
        fontsize=9,
    )
    for kind in ("png", "svg"):
        metadata = {"Date": None} if kind == "svg" else {"Software": None}
        figure.savefig(stem.with_suffix(f".{kind}"), dpi=160, metadata=metadata)


def main() -> None:
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=here.parents[1] / "shared/data/wikitext-2")
    parser.add_argument("--out", type=Path, default=here / "results" / "vocab-heads.json")
    parser.add_argument("--only", choices=("training", "scaling"), help="both by default")
    parser.add_argument("--head", action="append", choices=HEADS, help="all by default")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="V of scaling")
    parser.add_argument("--scaling-width", type=int, default=128, help="D of scaling")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--measure-memory", choices=HEADS, help=argparse.SUPPRESS)
    defaults = Settings(1000, 250, 16, 64, 256, 2, 1e-3, 40_000, 1024, 0)
    for name, value in asdict(defaults).items():
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=type(value), default=value, help=f"default {value}")
    given = vars(parser.parse_args())
    s = Settings(**{name: given[name] for name in asdict(defaults)})
    if given["threads"]:
        torch.set_num_threads(given["threads"])
    out: Path = given["out"]
    if given["measure_memory"]:
        measure_memory(given["measure_memory"], out, s)
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = json.loads(out.read_text()) if out.is_file() else {}
    document |= {
        "benchmark": "vocab-heads",
        "title": "heads for huge vocabularies: WikiText-2, and cost against V",
        "native": native.core is not None,
        **describe(torch.get_num_threads()),
    }
    if given["only"] != "scaling":
        folder = given["data"]
        if not (folder / "train.txt").is_file() or not (folder / "valid.txt").is_file():
            parser.error(f"--data must be a folder with train.txt and valid.txt; got {folder}")
        train_ids, valid_ids, frequencies = read(folder)
        print(f"{len(train_ids):,} words to train on, V = {len(frequencies):,}")
        counts_file = out.with_suffix(".counts")
        torch.save(frequencies, counts_file)
        results: list[dict[str, Any]] = []
        try:
            for kind in given["head"] or HEADS:
                print(kind)
                result = train(kind, train_ids, valid_ids, frequencies, s)
                result["memory"] = memory(kind, counts_file, s, torch.get_num_threads())
                results.append(result)
                document["training"] = {
                    "vocab": len(frequencies),
                    "settings": asdict(s),
                    "results": results,
                    "goals": judge(results),
                }
                write_json(document, out)
        finally:
            counts_file.unlink()
        print(table(results))
        for goal in judge(results):
            print(f"{'met   ' if goal['met'] else 'MISSED'} {goal['goal']}: {goal['reached']:.3g}")
    if given["only"] != "training":
        print("scaling")
        tokens, width = s.batch * s.window, given["scaling_width"]
        points = scaling(given["sizes"], width, tokens, s.samples)
        document["scaling"] = {"tokens": tokens, "width": width, "points": points}
        write_json(document, out)
        plot(document, out.with_suffix(""))
    print(f"written to {out}")


if __name__ == "__main__":
    main()
