"""Random programs on logits: lines of Python that run on dense and on lazy logits alike.

Hypothesis draws templates and operands; a line is kept if dense torch accepts it. Every program
prints as source, and shrinks to the lines that matter.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from lmhead import LMHead

# {a} and {b} are variables of the same shape, {n} is a small number, {o} a new variable.
POINTWISE = [
    "{o} = {a} * 0.7",
    "{o} = {a} / 1.3",
    "{o} = {a} + token({a}, {n})",
    "{o} = {a} - row({a}, {n})",
    "{o} = {a} * full({a}, {n})",
    "{o} = {a} * number({n})",
    "{o} = 2 - {a}",
    "{o} = -{a}",
    "{o} = {a}.tanh()",
    "{o} = torch.sigmoid({a})",
    "{o} = {a}.clamp(-1.5, 1.0)",
    "{o} = (-{a}.abs()).exp()",
    "{o} = torch.log1p({a}.abs())",
    "{o} = torch.sqrt({a}.abs() + 1)",
    "{o} = 0.1 * {a} ** 2",
    "{o} = F.relu({a})",
    "{o} = F.softplus({a})",
    "{o} = torch.maximum({a}, {b})",
    "{o} = torch.minimum({a}, token({a}, {n}))",
    "{o} = {a} + {b}",
    "{o} = {a} - 0.5 * {b}",
    "{o} = 0.1 * {a} * {b}",
    "{o} = torch.where(mask({a}, {n}), {a}, {b})",
    "{o} = torch.where(token_mask({a}, {n}), {a}, -1.0)",
    "{o} = torch.where({a} > 0, {a}, 0.1 * {a})",
    "{o} = {a}.masked_fill(mask({a}, {n}), -2.0)",
    "{o} = {a}.masked_fill(token_mask({a}, {n}), float('-inf'))",
    "{o} = {a}.masked_fill(row_mask({a}, {n}), 0.0)",
    "{o} = {a}.masked_fill({a} < {a}.mean(-1, keepdim=True), -3.0)",
    "{o} = {a}.softmax(-1)",
    "{o} = F.log_softmax({a}, dim=-1)",
    "{o} = {a}.log_softmax(-1).exp()",
    "{o} = torch.logaddexp({a}, {b})",
    "{o} = {a} - {a}.amax(-1, keepdim=True)",
    "{o} = {a} - {a}.logsumexp(-1, keepdim=True)",
    "{o} = {a} / ({a}.norm(dim=-1, keepdim=True) + 1)",
    "{o} = ({a} - {a}.mean(-1, keepdim=True)) / ({a}.std(-1, keepdim=True) + 1)",
    "{o} = torch.stack([{a}, {b}]).logsumexp(0)",
    "{o} = torch.lerp({a}, {b}, 0.3)",
    "{o} = F.kl_div({a}.log_softmax(-1), {b}.softmax(-1), reduction='none')",
    "{o} = {a}.detach()",
    "{o} = {a}.clone()",
    "{o} = {a}.scatter(-1, index({a}, {n}, 2), -1.0)",
    "{o} = {a}.double()",
]
VIEWS = [
    "{o} = {a}[1:]",
    "{o} = {a}[:, :-1]",
    "{o} = {a}[0]",
    "{o} = {a}[..., -1, :]",
    "{o} = {a}[::2]",
    "{o} = {a}.view(-1, {a}.shape[-1])",
    "{o} = {a}.reshape(-1, {a}.shape[-1])",
    "{o} = {a}.flatten(0, -2)",
    "{o} = {a}.transpose(0, -2)",
    "{o} = {a}.flip(0)",
    "{o} = {a}.roll(1, 0)",
    "{o} = {a}[rows({a}, {n})]",
    "{o} = {a}[row_mask({a}, {n}).squeeze(-1)]",
    "{o} = {a}.unsqueeze(0)",
    "{o} = {a}[None].squeeze(0)",
    "{o} = {a}.split(2)[0]",
    "{o} = {a}.chunk(2)[-1]",
    "{o} = {a}.unbind(0)[-1]",
    "{o} = torch.cat([{a}, {b}])",
    "{o} = torch.stack([{a}, {b}])",
    "{o} = torch.stack([{a}, {b}], dim=1)",
    "{o} = {a}.index_select(0, rows({a}, {n}))",
    "{o} = {a}.narrow(0, 0, 1)",
    "{o} = {a}.unsqueeze(0).expand(2, *{a}.shape)",
    "{o} = {a}.repeat_interleave(2, dim=0)",
    "{o} = {a}.contiguous()",
]
WRITES = [
    "{a}.mul_(0.8)",
    "{a} /= 1.2",
    "{a}.add_(token({a}, {n}))",
    "{a}.div_(row({a}, {n}))",
    "{a}.sub_(full({a}, {n}))",
    "{a}.add_({b}, alpha=0.5)",
    "{a} -= {a}.amax(-1, keepdim=True).detach()",
    "{a}.masked_fill_(mask({a}, {n}), -3.0)",
    "{a}.masked_fill_(token_mask({a}, {n}), float('-inf'))",
    "{a}.clamp_(-2, 2)",
    "{a}.tanh_()",
    "{a}.zero_()",
    "{a}.copy_(full({a}, {n}))",
    "{a}[..., ids({a}, {n})] = -1.0",
    "{a}[..., 1:3] = token({a}, {n})[1:3]",
    "{a}[0] = 0.5",
    "{a}[..., -1, :] = token({a}, {n})",
    "{a}[row_mask({a}, {n}).squeeze(-1)] = 0.25",
    "{a}[{a} < 0] = -1.0",
    "{a}.scatter_(-1, index({a}, {n}, 1), 1.0)",
    "{a}.scatter_add_(-1, index({a}, {n}, 1), row({a}, {n}))",
    "{a}.index_fill_(-1, ids({a}, {n}), 0.3)",
    "{a}[1:].mul_(0.5)",
]
REDUCTIONS = [
    "out({a}.sum(-1))",
    "out({a}.mean(-1, keepdim=True))",
    "out({a}.sum())",
    "out({a}.mean())",
    "out({a}.sum(dim=(0, -1)))",
    "out({a}.logsumexp(-1))",
    "out({a}.amax(-1))",
    "out({a}.amin(-1))",
    "out({a}.norm(dim=-1))",
    "out({a}.var(-1))",
    "out({a}.gather(-1, index({a}, {n}, 2)))",
    "out(torch.take_along_dim({a}, index({a}, {n}, 1), -1))",
    "out({a}.log_softmax(-1).gather(-1, index({a}, {n}, 1)))",
    "out({a}[..., ids({a}, {n})])",
    "out({a}[..., 2].clone())",
    "out(F.cross_entropy({a}.reshape(-1, {a}.shape[-1]), targets({a}, {n}), reduction='none'))",
    "out(F.cross_entropy({a}.reshape(-1, {a}.shape[-1]), targets({a}, {n}), label_smoothing=0.1))",
    "out(({a}.softmax(-1) * {a}).sum(-1))",
    "out(({a}.softmax(-1) * {b}).sum(-1))",
    "out(({a} > {b}).sum(-1))",
    "out(({a} > 0).any(-1))",
    "out({a}.isfinite().all())",
    "out(torch.count_nonzero({a} > 0.5, dim=-1))",
    "out({a}.amax(-1) - {a}.gather(-1, {a}.argmax(-1, keepdim=True)).squeeze(-1))",
]
# Only where all logits of a row differ: else the order, and the gradient, is a choice.
DISTINCT = [
    "out({a}.topk(3).values)",
    "out({a}.max(-1).values)",
    "out({a}.min(dim=-1, keepdim=True).values)",
    "out({a}.argmax(-1))",
    "out({a}.topk(2, dim=-1).indices)",
    "out({a}.log_softmax(-1).topk(2).values)",
]


@dataclass
class Program:
    """Lines of source on z and y, the logits of two heads.

    Attributes:
        lines: the source.
        shape: (..., D) of the hidden states of both heads.
        vocab: V.
        max_bytes: bound on temporary memory of the lazy heads.
        softcap: of the first head.
        aliased: whether a line writes into memory that another variable shares.
    """

    lines: list[str]
    shape: tuple[int, ...]
    vocab: int
    max_bytes: int | None
    softcap: float | None
    aliased: bool

    def __repr__(self) -> str:
        head = (
            f"# z, y: lazy logits ({', '.join(map(str, self.shape[:-1]))}, {self.vocab}), "
            f"max_bytes={self.max_bytes}, softcap={self.softcap}, aliased={self.aliased}"
        )
        return "\n".join(["", head, *self.lines])


class Environment:
    """Names that a program may use: z, y, operands of the right shape, and `out`."""

    def __init__(
        self,
        shape: tuple[int, ...],
        vocab: int,
        *,
        lazy: bool = False,
        max_bytes: int | None = None,
        softcap: float | None = None,
        nudge: float = 0.0,
    ) -> None:
        self.leaves: dict[str, Tensor] = {}
        self.outputs: list[Any] = []
        self.nudge = nudge
        heads = []
        for name, cap in (("z", softcap), ("y", None)):
            hidden = self.leaf(f"{name}.hidden", shape)
            weight = self.leaf(f"{name}.weight", (vocab, shape[-1]))
            bias = self.leaf(f"{name}.bias", (vocab,))
            if lazy:
                head = LMHead(shape[-1], vocab, bias=True, softcap=cap, dtype=torch.float64)
                head.max_bytes = max_bytes
                parameters = {"weight": weight, "bias": bias}
                heads.append(torch.func.functional_call(head, parameters, (hidden,)))
            else:
                z = F.linear(hidden, weight, bias)
                heads.append(z if cap is None else cap * torch.tanh(z / cap))
        self.names: dict[str, Any] = {
            "torch": torch,
            "F": F,
            "z": heads[0],
            "y": heads[1],
            "out": self.outputs.append,
            "number": lambda n: self.leaf(f"number {n}", ()),
            "token": lambda a, n: self.leaf(f"token {n}", (a.shape[-1],)),
            "row": lambda a, n: self.leaf(f"row {n}", (*a.shape[:-1], 1)).abs() + 0.5,
            "full": lambda a, n: self.leaf(f"full {n}", tuple(a.shape)),
            "mask": lambda a, n: self.random(f"mask {n}", tuple(a.shape)) > 0.7,
            "token_mask": lambda a, n: _not_all(self.random(f"tokens {n}", (a.shape[-1],)) > 0.7),
            "row_mask": lambda a, n: self.random(f"rows {n}", (*a.shape[:-1], 1)) > 0.0,
            "rows": lambda a, n: self.integers(f"index {n}", (3,), a.shape[0]),
            "ids": lambda a, n: self.integers(f"ids {n}", (2,), a.shape[-1]).unique(),  # type: ignore[no-untyped-call]
            "index": lambda a, n, k: self.integers(f"{n} {k}", (*a.shape[:-1], k), a.shape[-1]),
            "targets": lambda a, n: self.integers(
                f"targets {n}", (a[..., 0].numel(),), a.shape[-1]
            ),
        }

    def random(self, name: str, shape: tuple[int, ...]) -> Tensor:
        seed = zlib.crc32(f"{name} {shape}".encode())
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def integers(self, name: str, shape: tuple[int, ...], high: int) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {shape} {high}".encode()))
        return torch.randint(high, shape, generator=generator)

    def leaf(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor that collects a gradient; the same numbers in every run."""
        key = f"{name} {shape}"
        if key not in self.leaves:
            value = self.random(name, shape)
            value = value + self.nudge * value * self.random(f"nudge {name}", shape)
            self.leaves[key] = value.requires_grad_()
        return self.leaves[key]

    def run(self, line: str) -> None:
        exec(line, self.names)


def _not_all(mask: Tensor) -> Tensor:
    """A mask that leaves at least one token."""
    mask[0] = False
    return mask


def shares_memory(a: Tensor, b: Tensor) -> bool:
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    shape = (*draw(st.sampled_from([(3, 2), (5,), (2, 3, 1), (4, 1), (1, 1)])), 4)
    vocab = draw(st.sampled_from([11, 5, 8]))
    softcap = draw(st.sampled_from([None, None, 3.0]))
    max_bytes = draw(st.sampled_from([None, 8 * vocab * 2, 1]))
    environment = Environment(shape, vocab, softcap=softcap)
    variables, lines, aliased = ["z", "y"], [], False
    kinds = st.sampled_from([POINTWISE, POINTWISE, VIEWS, WRITES, REDUCTIONS, DISTINCT])
    for _ in range(draw(st.integers(1, 9))):
        template = draw(kinds.flatmap(st.sampled_from))
        a = draw(st.sampled_from(variables))
        names = environment.names
        same = [v for v in variables if names[v].shape == names[a].shape]
        b, new = draw(st.sampled_from(same)), f"v{len(variables)}"
        line = template.format(a=a, b=b, o=new, n=draw(st.integers(0, 2)))
        if template in DISTINCT and not _distinct(names[a]):
            continue
        shared = template in WRITES and any(
            v != a and shares_memory(names[v], names[a]) for v in variables
        )
        if template in WRITES and 0 in names[a].stride():
            continue  # expanded: torch refuses, or warns
        try:
            environment.run(line)
        except (RuntimeError, IndexError, TypeError, ValueError):
            continue
        if new in names:
            made = names[new]
            if made.numel() == 0 or made.dim() == 0 or made.numel() > 2000:
                del names[new]
                continue
            variables.append(new)
        lines.append(line)
        aliased |= shared
    for name in variables:  # what was written must be seen through every name
        try:
            environment.run(line := f"out({name}.mean(-1))")
        except RuntimeError:  # `split` and `unbind` give views that end with a write to their base
            continue
        lines.append(line)
    return Program(lines, shape, vocab, max_bytes, softcap, aliased)


def _distinct(a: Tensor) -> bool:
    """Whether no two logits of a row are (almost) the same."""
    ordered = a.detach().sort(-1).values
    return bool((ordered.diff(dim=-1) > 1e-9).all())
