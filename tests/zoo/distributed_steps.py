"""A few SGD steps on two ranks under DDP: do both ranks end with the right weights?

Argument: a folder. Every mode of DDP is tried with the loss inside and outside of the wrapped
module, on a dense and on a lazy head; dense0.json to lazy1.json say what is wrong on each rank.
The right weights are those of one process that averages the gradients of both batches on an
`nn.Linear`.
"""

from __future__ import annotations

import json
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

from lmhead import LMHead

VOCAB, HIDDEN = 23, 8
MODES = ("plain", "static_graph", "find_unused_parameters")


class Model(nn.Module):
    def __init__(self, kind: str, loss_inside: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
        linear = nn.Linear(HIDDEN, VOCAB, dtype=torch.float64)
        self.lm_head: Any = linear
        if kind == "lazy":
            self.lm_head = LMHead(HIDDEN, VOCAB, bias=True, dtype=torch.float64)
            self.lm_head.load_state_dict(linear.state_dict())
        self.loss_inside = loss_inside

    def forward(self, x: Tensor, targets: Tensor) -> Any:
        logits = self.lm_head(torch.tanh(self.body(x)))
        return F.cross_entropy(logits, targets) if self.loss_inside else logits


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(100 * rank + step)
    x = torch.randn(6, HIDDEN, generator=random, dtype=torch.float64)
    return x, torch.randint(VOCAB, (6,), generator=random)


def loss_of(model: Any, x: Tensor, targets: Tensor, inside: bool) -> Tensor:
    out = model(x, targets)
    loss: Tensor = out if inside else F.cross_entropy(out, targets)
    return loss


def expected(steps: int) -> dict[str, Tensor]:
    model = Model("dense", loss_inside=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in (0, 1):
            (loss_of(model, *batch(rank, step), inside=True) / 2).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model.state_dict()


def check(rank: int, kind: str, mode: str, inside: bool, steps: int) -> str:
    """Train on this rank; return what is wrong with the weights, or nothing."""
    options: dict[str, Any] = {} if mode == "plain" else {mode: True}
    model = DistributedDataParallel(Model(kind, inside), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, *batch(rank, step), inside=inside).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for name, right in expected(steps).items():
        found = model.module.state_dict()[name]
        if not torch.allclose(found, right, rtol=1e-9, atol=1e-11):
            return f"rank {rank}: {name} is off by {float((found - right).abs().max()):.3g}"
    return ""


def work(rank: int, folder: str, kind: str, steps: int) -> None:
    """All modes, one after the other, each in a process group of its own."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = {}
    for mode in MODES:
        for inside in (True, False):
            name = f"{mode} {'inside' if inside else 'outside'}"
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/{kind}-{name.replace(' ', '-')}",
                rank=rank,
                world_size=2,
                timeout=timedelta(seconds=60),
            )
            try:
                found[name] = check(rank, kind, mode, inside, steps)
            except RuntimeError as error:
                found[name] = f"rank {rank}: {error}"
            dist.destroy_process_group()
    Path(folder, f"{kind}{rank}.json").write_text(json.dumps(found))


def main() -> None:
    for kind in ("dense", "lazy"):  # forked, so that torch is loaded once
        start_processes(work, (sys.argv[1], kind, 3), nprocs=2, start_method="fork")  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
