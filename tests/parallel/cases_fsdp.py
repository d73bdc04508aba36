"""FSDP2 and DDP around an `LMHead`: the numbers of `nn.Linear`, whatever the layout.

Each rank has its own rows. Losses and (reduced) gradients are compared with the same model around
`nn.Linear` that is wrapped in the same way.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lmhead import LMHead
from parallel.ranks import case

VOCAB, HIDDEN = 37, 8
HEADS = ("lmhead", "linear")


class Model(nn.Module):
    """An embedding, a layer, a norm and a head; the loss inside forward or outside."""

    def __init__(self, head: str, *, tied: bool, inside: bool, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layer = nn.Linear(HIDDEN, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        linear = nn.Linear(HIDDEN, VOCAB, bias=not tied)
        if tied:
            linear.weight = self.embedding.weight
        self.head: Any = linear if head == "linear" else LMHead.from_linear(linear)
        self.inside, self.recompute = inside, recompute

    def forward(self, ids: Tensor, targets: Tensor) -> Any:
        hidden = self.embedding(ids)
        if self.recompute:
            hidden = checkpoint(lambda h: torch.tanh(self.layer(h)), hidden, use_reentrant=False)
        else:
            hidden = torch.tanh(self.layer(hidden))
        logits = self.head(self.norm(hidden))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) if self.inside else logits


def batch(step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(100 * dist.get_rank() + step)
    return tuple(torch.randint(VOCAB, (2, 5), generator=random) for _ in range(2))  # type: ignore[return-value]


def loss_of(model: Any, step: int) -> Tensor:
    ids, targets = batch(step)
    out = model(ids, targets)
    return out if out.dim() == 0 else F.cross_entropy(out.flatten(0, 1), targets.flatten())


def wrapped(head: str, group: str, *, reshard: bool, tied: bool, inside: bool, **more: Any) -> Any:
    """Shard the model; the head in a group of its own, with the norm, or in the root group."""
    model = Model(head, tied=tied, inside=inside, recompute=more.pop("recompute", False))
    mesh = more.pop("mesh", None) or init_device_mesh("cpu", (dist.get_world_size(),))
    if group == "own":
        modules = [model.embedding, model.head] if tied else [model.head]
        fully_shard(
            modules if tied else model.head, mesh=mesh, reshard_after_forward=reshard, **more
        )
    elif group == "norm":
        modules = [model.norm, model.head, *([model.embedding] if tied else [])]
        fully_shard(modules, mesh=mesh, reshard_after_forward=reshard, **more)
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshard, **more)


def layouts() -> Iterator[dict[str, Any]]:
    combinations = itertools.product(("own", "norm", "root"), *[(True, False)] * 3)
    for group, reshard, tied, inside in combinations:
        yield {"group": group, "reshard": reshard, "tied": tied, "inside": inside}


def full(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def assert_same(
    what: object, results: list[dict[str, Tensor]], rtol: float = 1e-5, atol: float = 1e-6
) -> None:
    """Both have the same entries with the same values: ours, and those around `nn.Linear`."""
    ours, theirs = results
    assert ours.keys() == theirs.keys(), (what, ours.keys(), theirs.keys())
    for name, right in theirs.items():
        message = f"{what} {name}: {ours[name]} is not {right}"
        torch.testing.assert_close(ours[name], right, rtol=rtol, atol=atol, msg=message)


def train(model: Any, steps: int = 3) -> dict[str, Tensor]:
    """Return losses and gradients of a few steps of AdamW, and the weights after them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    values: dict[str, Tensor] = {}
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()  # type: ignore[no-untyped-call]
        values[f"loss {step}"] = loss.detach()
        values |= {f"{n} {step}": g for n, g in gradients(model).items()}
        optimizer.step()
    return values | {n: full(p.detach()) for n, p in model.named_parameters()}


@case(2)
def all_layouts() -> None:
    for layout in layouts():
        assert_same(layout, [train(wrapped(head, **layout)) for head in HEADS])


@case(2)
def mixed_precision() -> None:
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
    for group, inside in itertools.product(("own", "root"), (True, False)):
        layout: dict[str, Any] = {"group": group, "reshard": True, "tied": False, "inside": inside}
        results = [train(wrapped(head, mp_policy=policy, **layout), steps=1) for head in HEADS]
        steps = [{n: t for n, t in each.items() if n.endswith("0")} for each in results]
        assert_same(layout, steps, rtol=0.03, atol=0.003)


@case(2)
def accumulation_and_recomputation() -> None:
    """Gradients of three micro-batches, reduced with the last; activations computed again."""
    for group, inside in itertools.product(("own", "root"), (True, False)):
        results = []
        for head in HEADS:
            layout: dict[str, Any] = {
                "reshard": True,
                "tied": False,
                "inside": inside,
                "recompute": True,
            }
            model = wrapped(head, group, **layout)
            for step in range(3):
                model.set_requires_gradient_sync(step == 2)
                loss_of(model, step).backward()  # type: ignore[no-untyped-call]
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            results.append({**gradients(model), "norm": full(norm)})
        assert_same((group, inside), results)


@case(4)
def shards_within_replicas() -> None:
    """HSDP: two replicas, each sharded over two ranks."""
    results = []
    for head in HEADS:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        layout: dict[str, Any] = {"reshard": True, "tied": False, "inside": False, "mesh": mesh}
        results.append(train(wrapped(head, "own", **layout)))
    assert_same("HSDP", results)


@case(2)
def questions_after_the_weight_was_freed() -> None:
    """Every kind of question, with gradients where there are any, and again after backward."""
    ids, targets = batch(0)
    for group in ("own", "root"):
        layout: dict[str, Any] = {"group": group, "reshard": True, "tied": False, "inside": False}
        results = []
        for model in [wrapped(head, **layout) for head in HEADS]:
            logits = model(ids, targets)
            log_p = logits.log_softmax(-1)
            picked = log_p.gather(-1, targets[..., None])
            entropy = torch.distributions.Categorical(logits=logits).entropy()  # type: ignore[no-untyped-call]
            recorded = (logits.sigmoid() * 2).sum(-1)
            values = {"picked": picked, "entropy": entropy, "recorded": recorded}
            (picked.sum() + entropy.sum() + recorded.sum()).backward()
            top = logits.topk(3, -1)
            values |= {"top": top.values, "ids": top.indices, "argmax": logits.argmax(-1)}
            values |= {n: v.detach() for n, v in values.items()} | gradients(model)
            results.append(values)
            with torch.no_grad():
                values["greedy"] = model(ids, targets).argmax(-1)
        assert_same(group, results)


@case(2)
def an_optimizer_step_is_noticed() -> None:
    """FSDP2 refills the same tensor: old logits must not be computed from new weights."""
    for group, reshard in itertools.product(("own", "root"), (True, False)):
        model = wrapped("lmhead", group, reshard=reshard, tied=False, inside=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ids, targets = batch(0)
        logits = model(ids, targets)
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()  # type: ignore[no-untyped-call]
        before = logits.argmax(-1)
        optimizer.step()
        again = model(ids, targets)  # the weight is in memory again, with other values
        assert again.argmax(-1).shape == before.shape
        with pytest.raises(RuntimeError, match="was modified in place after the head was called"):
            logits.argmax(-1)


@case(2)
def zero_redundancy_optimizer_with_ddp() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    results = []
    for head in HEADS:
        model = DistributedDataParallel(Model(head, tied=False, inside=False))
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.05)
        losses = {}
        for step in range(3):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses[f"loss {step}"] = loss.detach()
        results.append({**losses, **{n: p.detach() for n, p in model.named_parameters()}})
    assert_same("ZeRO", results)


@case(2)
def accelerate_on_two_processes() -> None:
    import accelerate

    rank = str(dist.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # as launched; joined already
    results = []
    for head in HEADS:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        assert accelerator.num_processes == 2
        model = Model(head, tied=True, inside=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        model, optimizer = accelerator.prepare(model, optimizer)
        losses = {}
        for step in range(4):
            with accelerator.accumulate(model):
                loss = loss_of(model, step)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses[f"loss {step}"] = loss.detach()
        results.append({**losses, **{n: p.detach() for n, p in model.named_parameters()}})
    assert_same("accelerate", results)


@case(2)
def generate_with_transformers() -> None:
    """Greedy tokens of a sharded Llama are those of one process."""
    from zoo.tiny_llama import llama

    prompt = torch.tensor([[1, 5, 9], [1, 7, 3]])
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = llama("dense").generate(prompt, **options)
    for own in (True, False):
        model = llama("lazy")
        mesh = init_device_mesh("cpu", (2,))
        if own:
            fully_shard(model.lm_head, mesh=mesh, reshard_after_forward=True)
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
        assert torch.equal(model.generate(prompt, **options), expected)
