"""Cases by which other projects test vocabulary-parallel losses, from their descriptions.

Cut Cross-Entropy: 252 rows, 507 tokens, width 123 on 4 ranks, a fifth of the targets ignored, half
precision. torchtitan: training with `loss_parallel` against training without. Megatron: its label
smoothing, which on several ranks is not that of one process (NVIDIA/Megatron-LM 737 and 7464).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import lmhead
from lmhead.parallel import VocabParallel
from lmhead.parallel.vocab_shard import VocabShard
from parallel.cases_styles import VOCAB, Model, batch
from parallel.cases_vocab import full, sharded
from parallel.ranks import case


@case(2, 4)
def cut_cross_entropy() -> None:
    """Their tolerances are 1e-3 (float16) and 1e-2 (bfloat16) for the gradient of the weight."""
    random = torch.Generator().manual_seed(0)
    hidden = (torch.randn(252, 123, generator=random) / 123**0.5).view(4, 63, 123)
    weight = torch.randn(507, 123, generator=random)
    targets = torch.randint(507, (4, 63), generator=random)
    ignored = targets.clone()
    ignored.view(-1)[torch.randperm(252, generator=random)[:50]] = -100
    for dtype, tolerance in ((torch.float16, 1e-3), (torch.bfloat16, 1e-2), (torch.float32, 1e-6)):
        for ids in (targets, ignored):
            h, w = hidden.to(dtype), weight.to(dtype)
            split = sharded(w).requires_grad_()
            own = h.clone().requires_grad_()
            loss = lmhead.linear_cross_entropy(own, split, ids)
            loss.backward()  # type: ignore[no-untyped-call]
            exact = [x.detach().double().requires_grad_() for x in (h, w)]
            expected = F.cross_entropy(F.linear(*exact).flatten(0, 1), ids.flatten())
            expected.backward()  # type: ignore[no-untyped-call]
            assert abs(loss.item() - expected.item()) < 1e-5 * expected.item()
            pairs: Any = ((split, exact[1]), (own, exact[0]))
            for ours, theirs in pairs:
                error = (full(ours.grad).double() - theirs.grad).abs().max()
                assert error < tolerance / 10, (dtype, error)


@case(2, 3, 4)
def cut_cross_entropy_slices() -> None:
    """Slices cover the vocabulary once, in order.

    Theirs differ by one token at most (1023 on 4: 256, 256, 256, 255); ours are those of a DTensor,
    ⌈V / n⌉ tokens, the last ones shorter or empty.
    """
    for vocab in (1023, 2048, 5, 1):
        shard = VocabShard(dist.group.WORLD, vocab)
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (shard.start, shard.size))
        assert [start for start, size in found for _ in range(size)] == [
            start for start, size in found if size for _ in range(size)
        ]
        assert sum(size for _, size in found) == vocab
        assert sharded(torch.zeros(vocab, 2)).to_local().shape[0] == shard.size
        ends = [start + size for start, size in found]
        assert [start for start, _ in found[1:]] == ends[:-1]


def losses_of(model: Any, steps: int = 5) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)
    ids, targets = batch()
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        found.append(full(loss.detach()).item())
    return found


@case(2, 4)
def torchtitan_loss_parallel() -> None:
    """The losses of five steps: one process, `loss_parallel`, `VocabParallel`."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
    }
    colwise = ColwiseParallel(
        input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
    )
    expected = losses_of(Model("linear"))
    with loss_parallel():
        theirs = losses_of(parallelize_module(Model("linear"), mesh, {**plan, "head": colwise}))
    ours = losses_of(parallelize_module(Model("lmhead"), mesh, {**plan, "head": VocabParallel()}))
    assert expected[-1] < 0.9 * expected[0]
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(expected), rtol=1e-5, atol=0)
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-5, atol=0)


def megatron(logits: Tensor, targets: Tensor, alpha: float, slices: int) -> Tensor:
    """Its loss per row: α K / (K - 1) over the mean of a slice of K tokens, that of the rank."""
    log_probs = logits.log_softmax(-1)
    parts = log_probs.chunk(slices, -1)
    k = parts[0].shape[-1]
    s = alpha * k / (k - 1)
    nll = -log_probs.gather(-1, targets[:, None])[:, 0]
    return (1 - s) * nll - s * parts[0].mean(-1)


@case(2, 4)
def megatron_label_smoothing() -> None:
    """α for all other tokens together, α / (V - 1) each: ours with α V / (V - 1).

    Megatron has that on one rank. On several its K is the size of a slice: another loss, different
    on every rank. Ours is the same for any number of ranks.
    """
    vocab, alpha, n = 40, 0.1, dist.get_world_size()
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 8).double(), torch.randn(vocab, 8).double()
    targets = torch.randint(vocab, (6,))
    logits = F.linear(hidden, weight)
    others = torch.full((6, vocab), alpha / (vocab - 1), dtype=torch.float64)
    right = others.scatter(1, targets[:, None], 1 - alpha)
    expected = F.cross_entropy(logits, right, reduction="none")
    torch.testing.assert_close(megatron(logits, targets, alpha, 1), expected)
    asked: Any = {"reduction": "none", "label_smoothing": alpha * vocab / (vocab - 1)}
    ours = lmhead.linear_cross_entropy(hidden, sharded(weight), targets, **asked)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=0)
    soft = lmhead.linear_cross_entropy(hidden, sharded(weight), right, reduction="none")
    torch.testing.assert_close(soft, expected, rtol=1e-12, atol=0)
    assert (megatron(logits, targets, alpha, n) - expected).abs().max() > 1e-3
    plain = lmhead.linear_cross_entropy(hidden, sharded(weight), targets, label_smoothing=alpha)
    torch.testing.assert_close(plain, F.cross_entropy(logits, targets, label_smoothing=alpha))


@case(2)
def padded_vocabulary() -> None:
    """A vocabulary padded to a multiple, as Megatron's: padding is masked and never wins."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 8), torch.randn(64, 8)
    weight[50:] = 100.0 * hidden.sum(0)  # what is in the padding does not matter
    bias = torch.zeros(64)
    bias[50:] = -torch.inf
    head: Any = lmhead.LMHead(8, 64, bias=True)
    head.weight, head.bias = nn.Parameter(sharded(weight)), nn.Parameter(sharded(bias))
    targets = torch.randint(50, (5,))
    dense = F.linear(hidden, weight[:50])
    plain = F.cross_entropy(head(hidden), targets)
    torch.testing.assert_close(plain, F.cross_entropy(dense, targets))
    smooth: Any = {"bias": bias, "label_smoothing": 0.1}  # ε / V each, for tokens not masked
    ours = F.cross_entropy(head(hidden), targets, label_smoothing=0.1)
    whole = lmhead.linear_cross_entropy(hidden, weight, targets, **smooth)
    torch.testing.assert_close(ours, whole)
    assert torch.equal(head(hidden).argmax(-1), dense.argmax(-1))
    assert torch.equal(head(hidden).topk(50).indices, dense.topk(50).indices)
    for seed in range(20):
        assert lmhead.Sampler(temperature=5.0, seed=seed)(head(hidden)).token.max() < 50


assert VOCAB % 2  # does not divide evenly
