"""Heads and hidden states that are hard to screen, each made from a seed."""

from collections.abc import Callable

import torch
from torch import Tensor

from lmhead import LMHead

Maker = Callable[[int, int, torch.Generator], Tensor]


def normal(*shape: int, random: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=random)


def plain(vocab: int, size: int, random: torch.Generator) -> Tensor:
    return normal(vocab, size, random=random)


def duplicates(vocab: int, size: int, random: torch.Generator) -> Tensor:
    """Every row occurs about eight times."""
    rows = normal(max(1, vocab // 8), size, random=random)
    return rows[torch.randint(len(rows), (vocab,), generator=random)]


def one_ulp_apart(vocab: int, size: int, random: torch.Generator) -> Tensor:
    """Copies of a few rows with single entries moved to the next float."""
    weight = duplicates(vocab, size, random)
    column = torch.randint(size, (vocab, 1), generator=random)
    moved = torch.nextafter(weight.gather(1, column), torch.tensor(torch.inf))
    return weight.scatter(1, column, moved)


def outlier_columns(vocab: int, size: int, random: torch.Generator) -> Tensor:
    weight = plain(vocab, size, random)
    weight[:, torch.randint(size, (2,), generator=random)] *= 1e4
    return weight


def outlier_rows(vocab: int, size: int, random: torch.Generator) -> Tensor:
    weight = plain(vocab, size, random)
    weight[torch.randint(vocab, (2,), generator=random)] *= 1e6
    return weight


def zero_rows(vocab: int, size: int, random: torch.Generator) -> Tensor:
    weight = plain(vocab, size, random)
    return weight * (torch.rand(vocab, 1, generator=random) < 0.5)


def all_zero(vocab: int, size: int, random: torch.Generator) -> Tensor:  # noqa: ARG001
    return torch.zeros(vocab, size)


def shared_offset(vocab: int, size: int, random: torch.Generator) -> Tensor:
    """Rows that differ by a thousandth of what they share."""
    return normal(1, size, random=random) + 1e-3 * plain(vocab, size, random)


def subnormal(vocab: int, size: int, random: torch.Generator) -> Tensor:
    return plain(vocab, size, random) * 1e-40


def small(vocab: int, size: int, random: torch.Generator) -> Tensor:
    return plain(vocab, size, random) * 1e-25


def large(vocab: int, size: int, random: torch.Generator) -> Tensor:
    return plain(vocab, size, random) * 1e25


WEIGHTS: dict[str, Maker] = {
    maker.__name__: maker
    for maker in (
        plain,
        duplicates,
        one_ulp_apart,
        outlier_columns,
        outlier_rows,
        zero_rows,
        all_zero,
        shared_offset,
        subnormal,
        small,
        large,
    )
}


def states(rows: int, weight: Tensor, random: torch.Generator) -> Tensor:
    """Random ones; one of zeros, one along a row of the weight, one of huge and tiny entries."""
    hidden = normal(rows, weight.shape[1], random=random)
    if rows > 1:
        hidden[1] = 0.0
    if rows > 2:
        hidden[2] = weight[0].nan_to_num() / weight[0].abs().max().clamp(min=1e-30)
    if rows > 3:
        hidden[3] *= 10.0 ** torch.randint(-12, 12, (weight.shape[1],), generator=random)
    return hidden


BIASES = ("none", "small", "dominating", "masks", "ties")


def bias_of(kind: str, vocab: int, random: torch.Generator) -> Tensor | None:
    if kind == "none":
        return None
    bias = normal(vocab, random=random)
    if kind == "dominating":
        return bias * 1e4
    if kind == "ties":
        return bias.round() * 1e4
    if kind == "masks":
        return bias.masked_fill(torch.rand(vocab, generator=random) < 0.3, -torch.inf)
    return bias


def head_of(
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    softcap: float | None = None,
    scale: float = 1.0,
) -> LMHead:
    vocab, size = weight.shape
    head = LMHead(
        size, vocab, bias=bias is not None, softcap=softcap, scale=scale, dtype=weight.dtype
    )
    with torch.no_grad():
        head.weight.copy_(weight)
        if bias is not None:
            assert head.bias is not None
            head.bias.copy_(bias)
    return head.requires_grad_(False)
