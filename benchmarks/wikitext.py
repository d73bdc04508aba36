"""WikiText-2 and a small Transformer: shared by the benchmarks that train.

In:  a folder with `train.txt` and `valid.txt`, tokens separated by spaces.
Out: ids, hidden states for the caller's head, a training loop, a mean loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn

from benchmarks.machine import DATA
from benchmarks.runner import FOLDER, Option
from benchmarks.timing import Progress
from lmhead.cli._command_group import combine_options

WARM_UP = 50  # steps
_HELP = {
    "steps": "Training steps.",
    "every": "Steps between two validations.",
    "batch": "Windows per step.",
    "window": "Tokens per window.",
    "width": "Hidden size D.",
    "layers": "Transformer layers.",
    "rate": "Learning rate.",
    "valid_tokens": "Tokens of a validation during training.",
    "seed": "Seed of weights and batches.",
    "samples": "Negative samples K of the sampled loss.",
}

# Of hidden states (N, D) and targets (N,).
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Settings:
    """Sizes of the model, and its training."""

    steps: int
    every: int
    batch: int
    window: int
    width: int
    layers: int
    rate: float
    valid_tokens: int
    seed: int

    @property
    def tokens(self) -> int:
        """Number of tokens of a training step."""
        return self.batch * self.window


def training_options(defaults: Settings) -> Option:
    """Return the options --data, and one per setting."""
    given = [
        click.option(
            f"--{name.replace('_', '-')}",
            type=type(value),
            default=value,
            show_default=True,
            help=_HELP[name],
        )
        for name, value in asdict(defaults).items()
    ]
    text = click.option(
        "--data",
        type=FOLDER,
        default=DATA / "wikitext-2",
        help="Folder with train.txt and valid.txt.  [default: wikitext-2 in LMHEAD_DATA]",
    )
    return combine_options(text, *given)


@dataclass(frozen=True)
class Text:
    """Ids for training and for validation, and the count of each token (V,) in the former."""

    train: Tensor
    valid: Tensor
    counts: Tensor

    @property
    def vocab(self) -> int:
        """V."""
        return len(self.counts)


def read_text(folder: Path) -> Text:
    """Read train.txt and valid.txt."""
    if not (folder / "train.txt").is_file() or not (folder / "valid.txt").is_file():
        raise ValueError(f"--data must be a folder with train.txt and valid.txt; got {folder}")
    ids: dict[str, int] = {}

    def encode(name: str) -> Tensor:
        text = (folder / name).read_text(encoding="utf-8")
        lines = ([*line.split(), "<eos>"] for line in text.splitlines())
        return torch.tensor([ids.setdefault(token, len(ids)) for line in lines for token in line])

    train, valid = encode("train.txt"), encode("valid.txt")
    return Text(train, valid, torch.bincount(train, minlength=len(ids)))


class Body(nn.Module):
    """Token and position embeddings, and a causal Transformer.

    Args:
        vocab: V.
        s: its sizes.
        shared: whether a head may share the weight of the token embedding: the weight is then of
            the size that a head needs, and looked-up rows are scaled up.
    """

    mask: Tensor

    def __init__(self, vocab: int, s: Settings, *, shared: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, s.width)
        self.positions = nn.Embedding(s.window, s.width)
        self.scale = s.width**0.5 if shared else 1.0
        if shared:
            for table in (self.tokens, self.positions):
                nn.init.normal_(table.weight, std=1 / self.scale)
        layer = nn.TransformerEncoderLayer(
            s.width, max(1, s.width // 32), 4 * s.width, 0.0, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, s.layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(s.width)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(s.window))

    def forward(self, ids: Tensor) -> Tensor:
        """Map (batch, window) ids to (batch · window, width) hidden states."""
        x = (self.tokens(ids) + self.positions.weight) * self.scale
        hidden: Tensor = self.norm(self.body(x, mask=self.mask, is_causal=True))
        return hidden.flatten(0, 1)


def learn(
    body: Body, head: nn.Module, loss: Loss, ids: Tensor, s: Settings, *, last_rate: float = 1.0
) -> Iterator[tuple[int, float]]:
    """Train body and head with AdamW; yield each step and its loss.

    After a warm-up the rate falls linearly to `last_rate` of itself.
    """
    # A head and the body may share a weight.
    parameters = {id(p): p for module in (body, head) for p in module.parameters()}
    optimizer = torch.optim.AdamW(list(parameters.values()), lr=s.rate, weight_decay=0.0)

    def factor(i: int) -> float:
        return min(1.0, (i + 1) / WARM_UP) * (1 - (1 - last_rate) * i / s.steps)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    order = torch.Generator().manual_seed(s.seed)
    for step in range(1, s.steps + 1):
        first = torch.randint(len(ids) - s.window, (s.batch, 1), generator=order)
        rows = ids[first + torch.arange(s.window + 1)]
        value = loss(body(rows[:, :-1]), rows[:, 1:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(value)
        optimizer.step()
        schedule.step()
        yield step, float(value.detach())


def windows(ids: Tensor, s: Settings, tokens: int) -> list[tuple[Tensor, Tensor]]:
    """Return inputs (batch, window) and targets (batch · window,) over the first `tokens`."""
    rows = min(tokens, len(ids) - 1) // s.window
    inputs = ids[: rows * s.window].view(rows, s.window)
    targets = ids[1 : rows * s.window + 1].view(rows, s.window)
    pairs = zip(torch.split(inputs, s.batch), torch.split(targets, s.batch), strict=True)
    return [(x, y.flatten()) for x, y in pairs]


@torch.no_grad()
def mean_loss(body: Body, total: Loss, ids: Tensor, s: Settings, tokens: int) -> float:
    """Return the mean loss over the first `tokens`; `total` is a sum over rows."""
    pairs: list[Any] = windows(ids, s, tokens)
    return sum(float(total(body(x), y)) for x, y in pairs) / sum(len(y) for _, y in pairs)


def train_curve(
    body: Body,
    head: nn.Module,
    loss: Loss,
    total: Loss,
    text: Text,
    s: Settings,
    progress: Progress,
    *,
    last_rate: float = 1.0,
    validate_all: bool = False,
) -> list[dict[str, Any]]:
    """Train and validate; return losses by steps, and the seconds of training until then.

    Args:
        body: makes the hidden states.
        head: whose parameters are trained with the body's.
        loss: mean loss that is trained on.
        total: sum of the exact loss, for validation.
        text: to train and validate on.
        s: settings.
        progress: called at each validation.
        last_rate: of the learning rate at the end, relative to the rate after the warm-up.
        validate_all: use the whole validation text at the end.
    """
    curve, seconds, start = [], 0.0, time.perf_counter()
    for step, value in learn(body, head, loss, text.train, s, last_rate=last_rate):
        if step % s.every == 0 or step == s.steps:
            seconds += time.perf_counter() - start
            tokens = len(text.valid) if validate_all and step == s.steps else s.valid_tokens
            valid = mean_loss(body, total, text.valid, s, tokens)
            curve.append({"step": step, "train": value, "valid": valid, "tokens": tokens})
            curve[-1]["seconds"] = seconds
            left = (s.steps - step) * seconds / step / 60
            progress(
                f"step {step:5d}/{s.steps}   train {value:.4f}   valid {valid:.4f}   "
                f"{seconds / step:.3f} s per step, {left:.1f} min left"
            )
            start = time.perf_counter()
    return curve
