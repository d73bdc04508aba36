"""The words of WikiText-2 and a small Transformer on them: what benchmarks that train share.

In:  a folder with `train.txt` and `valid.txt`, words between spaces.
Out: ids, hidden states for a head of the caller's, a training loop, a mean loss.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared/data/wikitext-2"
WARM_UP = 50  # steps

# Of hidden states (N, D) and targets (N,).
Loss = Callable[[Tensor, Tensor], Tensor]


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
    seed: int

    @property
    def tokens(self) -> int:
        """Of a training step."""
        return self.batch * self.window


def add_options(parser: argparse.ArgumentParser, defaults: Settings) -> None:
    """`--steps` and so on, and `--data`."""
    parser.add_argument("--data", type=Path, default=DATA)
    for name, value in asdict(defaults).items():
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=type(value), default=value, help=f"default {value}")


def read(parser: argparse.ArgumentParser, folder: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Ids of the training and of the validation words, and how often each word is trained on."""
    if not (folder / "train.txt").is_file() or not (folder / "valid.txt").is_file():
        parser.error(f"--data must be a folder with train.txt and valid.txt; got {folder}")
    ids: dict[str, int] = {}

    def words(name: str) -> list[int]:
        text = (folder / name).read_text(encoding="utf-8")
        lines = ([*line.split(), "<eos>"] for line in text.splitlines())
        return [ids.setdefault(word, len(ids)) for line in lines for word in line]

    train, valid = torch.tensor(words("train.txt")), torch.tensor(words("valid.txt"))
    return train, valid, torch.bincount(train, minlength=len(ids))


class Body(nn.Module):
    """Words and places, and a causal Transformer.

    Args:
        vocab: V.
        s: its sizes.
        shared: whether a head may share the weight of the words: it is then of the size that a
            head wants, and is scaled up where it is looked up.
    """

    mask: Tensor

    def __init__(self, vocab: int, s: Settings, *, shared: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab, s.width)
        self.places = nn.Embedding(s.window, s.width)
        self.scale = s.width**0.5 if shared else 1.0
        if shared:
            for table in (self.words, self.places):
                nn.init.normal_(table.weight, std=1 / self.scale)
        layer = nn.TransformerEncoderLayer(
            s.width, max(1, s.width // 32), 4 * s.width, 0.0, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, s.layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(s.width)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(s.window))

    def forward(self, ids: Tensor) -> Tensor:
        """(batch, window) ids to (batch · window, width) hidden states."""
        x = (self.words(ids) + self.places.weight) * self.scale
        hidden: Tensor = self.norm(self.body(x, mask=self.mask, is_causal=True))
        return hidden.flatten(0, 1)


def learn(
    body: Body, head: nn.Module, loss: Loss, ids: Tensor, s: Settings, *, last_rate: float = 1.0
) -> Iterator[tuple[int, float]]:
    """Train body and head, AdamW; gives each step and its loss.

    After a warm-up the rate falls in a line to `last_rate` of itself.
    """
    # A head that shares the weight of the words has it in common with the body.
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
    """Inputs (batch, window) and targets (batch · window,) that go through the first `tokens`."""
    rows = min(tokens, len(ids) - 1) // s.window
    inputs = ids[: rows * s.window].view(rows, s.window)
    targets = ids[1 : rows * s.window + 1].view(rows, s.window)
    pairs = zip(torch.split(inputs, s.batch), torch.split(targets, s.batch), strict=True)
    return [(x, y.flatten()) for x, y in pairs]


@torch.no_grad()
def mean_loss(body: Body, total: Loss, ids: Tensor, s: Settings, tokens: int) -> float:
    """Of the first words; `total` is a sum over tokens."""
    pairs: list[Any] = windows(ids, s, tokens)
    return sum(float(total(body(x), y)) for x, y in pairs) / sum(len(y) for _, y in pairs)
