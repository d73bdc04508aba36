"""`sampler.explain`: the effect of each stage, as an object, a table and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from lmhead.sampling.distribution import Distribution, FullDistribution
from lmhead.sampling.run_stages import choose
from lmhead.sampling.stage import Call, Stage

SHOWN = 8


@dataclass(frozen=True)
class Step:
    """One row of logits after one stage.

    Attributes:
        row: of the batch.
        stage: its name; "logits" before the first one.
        settings: the stage with its parameters, as text.
        kept: number of tokens left.
        mass: their probability in softmax(logits).
        cut: number of tokens that this stage removed.
        cut_mass: their probability before this stage.
        cut_ids: the most probable of them.
        entropy: of the remaining tokens, in nats.
        best: the most probable remaining token.
        best_prob: its probability among the remaining tokens.
    """

    row: int
    stage: str
    settings: str
    kept: int
    mass: float
    cut: int
    cut_mass: float
    cut_ids: list[int]
    entropy: float
    best: int
    best_prob: float

    def cells(self) -> list[str]:
        """Return this as a line of a table."""
        return [
            self.stage, f"{self.kept:,}", f"{self.mass:.4f}", f"{self.cut:,}",
            f"{self.cut_mass:.4f}", f"{self.entropy:.3f}", str(self.best), f"{self.best_prob:.4f}",
        ]  # fmt: skip

    @property
    def words(self) -> int:  # english: word
        """`kept`, by its former name."""
        return self.kept


@dataclass(frozen=True)
class Explanation:
    """The steps of each row, and the token that the chain would give."""

    steps: tuple[tuple[Step, ...], ...]
    tokens: tuple[int, ...]

    def __str__(self) -> str:
        head = ("stage", "tokens", "mass", "cut", "cut mass", "entropy", "best", "p(best)")
        tables = []
        for steps, token in zip(self.steps, self.tokens, strict=True):
            title = f"row {steps[0].row}, token {token}"
            tables.append("\n".join([title, *_table([head, *(step.cells() for step in steps)])]))
        return "\n\n".join(tables)

    @classmethod
    def join(cls, parts: Sequence[Explanation]) -> Explanation:
        """Join the rows of several parts of a batch."""
        rows = sorted(
            (steps[0].row, steps, token)
            for part in parts
            for steps, token in zip(part.steps, part.tokens, strict=True)
        )
        return cls(tuple(steps for _, steps, _ in rows), tuple(token for _, _, token in rows))

    def to_json(self) -> str:
        """Return all steps and the tokens as JSON."""
        rows = [[asdict(s) for s in steps] for steps in self.steps]
        return json.dumps({"rows": rows, "tokens": list(self.tokens)}, indent=2)


def _table(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def explain(
    raw: FullDistribution, stages: Sequence[Stage], call: Call, *, greedy: bool, shown: int = SHOWN
) -> Explanation:
    """Run the stages one by one and record the remaining tokens after each."""
    distribution: Distribution = raw
    model = _log_probs(raw, call.vocab)
    before = model
    numbers = call.rows.tolist()
    steps = [_steps(numbers, model, model, model, "logits", "", shown)]
    for stage in stages:
        distribution = stage(distribution, call)
        after = _log_probs(distribution, call.vocab)
        has_token = (after > -math.inf).any(1)  # NaN if no token remains
        if not bool(has_token.all()):
            row = numbers[int((~has_token).nonzero()[0])]
            raise ValueError(f"{stage.name} removed the last token of row {row}")
        steps.append(_steps(numbers, model, before, after, stage.name, repr(stage), shown))
        before = after
    tokens, _ = choose(distribution, call, greedy=greedy)
    rows = tuple(tuple(step[i] for step in steps) for i in range(len(model)))
    return Explanation(rows, tuple(tokens.tolist()))


def _log_probs(distribution: Distribution, vocab: int) -> Tensor:
    full = distribution.to_full(vocab)
    return (full.z.double() * full.beta[:, None]).log_softmax(1)


def _steps(
    numbers: list[int],
    model: Tensor,
    before: Tensor,
    after: Tensor,
    stage: str,
    settings: str,
    shown: int,
) -> list[Step]:
    steps = []
    for row in range(len(model)):
        remaining = after[row] > -math.inf
        removed = ~remaining & (before[row] > -math.inf)
        ids = removed.nonzero()[:, 0]
        likely = before[row, ids].argsort(descending=True)[:shown]
        p = after[row, remaining].exp()
        best = int(after[row].argmax())
        steps.append(
            Step(
                row=numbers[row],
                stage=stage,
                settings=settings,
                kept=int(remaining.sum()),
                mass=float(model[row, remaining].exp().sum().clamp(max=1.0)),
                cut=len(ids),
                cut_mass=float(before[row, ids].exp().sum()),
                cut_ids=ids[likely].tolist(),
                entropy=float(-torch.xlogy(p, p).sum()) + 0.0,
                best=best,
                best_prob=float(after[row, best].exp()),
            )
        )
    return steps
