"""Vocabulary-parallel scores: the answers of one process, on every rank, for any number of ranks.

Vocabularies do not divide evenly; with 5 tokens on 4 ranks the last rank has none at all.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import peft
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import parallelize_module

import lmhead
from lmhead import LMHead
from lmhead.parallel import VocabParallel
from parallel.ranks import case

WORLDS = (1, 2, 3, 4)
VOCABS = (5, 37)


class Problem(NamedTuple):
    hidden: Tensor  # (7, 6)
    weight: Tensor  # (V, 6)
    bias: Tensor  # (V,)
    ids: Tensor  # (7,)


def problem(vocab: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Problem:
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(7, 6, generator=random, dtype=torch.float64)
    hidden *= torch.linspace(0.2, 3.0, 7).view(7, 1)
    drawn = torch.randn(vocab, 7, generator=random, dtype=torch.float64)
    weight, bias = torch.split(drawn, [6, 1], 1)
    ids = torch.randint(vocab, (7,), generator=random)
    return Problem(hidden.to(dtype), weight.to(dtype).contiguous(), bias[:, 0].to(dtype), ids)


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def sharded(tensor: Tensor, over: DeviceMesh | None = None) -> Any:
    return distribute_tensor(tensor.detach(), over or mesh(), [Shard(0)])


def full(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_close(ours: Any, theirs: Tensor, what: object, rtol: float = 1e-10) -> None:
    ours_full = full(ours)
    message = f"{what}: {ours_full} is not {theirs}"
    torch.testing.assert_close(
        ours_full, theirs, rtol=rtol, atol=rtol / 100, equal_nan=True, msg=message
    )


def assert_everywhere(values: Tensor, what: object) -> None:
    """Every rank has the very same numbers."""
    of_ranks = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, values.contiguous())
    assert all(torch.equal(x, values) for x in of_ranks), (what, of_ranks)


def losses() -> Iterator[dict[str, Any]]:
    yield {}
    yield {"reduction": "none"}
    yield {"label_smoothing": 0.1, "reduction": "sum"}
    yield {"label_smoothing": 0.2, "class_weight": True}
    yield {"z_loss": 1e-2, "softcap": 2.0, "scale": 0.7}
    yield {"ignore": True, "num_items": 11}
    yield {"soft": True, "label_smoothing": 0.1, "class_weight": True}
    yield {"max_bytes": 512, "label_smoothing": 0.1}
    yield {"mask": True, "label_smoothing": 0.1}


@case(*WORLDS)
def the_loss_and_its_gradients() -> None:
    for vocab, options in itertools.product(VOCABS, losses()):
        tensors_of = problem(vocab)
        targets, asked, bias = tensors_of.ids.clone(), dict(options), tensors_of.bias.clone()
        if asked.pop("ignore", False):
            targets[2:4] = -100
        if asked.pop("mask", False):
            bias[targets.max() - 1] = -math.inf
            targets[:] = targets.max()
        if asked.pop("soft", False):
            targets = torch.randn(7, vocab, generator=torch.Generator().manual_seed(3)).softmax(-1)
            targets = targets.double()
        if asked.pop("class_weight", False):
            asked["class_weight"] = torch.linspace(0.5, 2.0, vocab, dtype=torch.float64)
        found: list[list[Any]] = []
        for split in (True, False):
            tensors = [tensors_of.weight, bias]
            weight, own_bias = [sharded(t) if split else t.clone() for t in tensors]
            leaves = [t.requires_grad_() for t in (tensors_of.hidden.clone(), weight, own_bias)]
            loss = lmhead.linear_cross_entropy(
                leaves[0], leaves[1], targets, bias=leaves[2], **asked
            )
            loss.sum().backward()  # type: ignore[no-untyped-call]
            found.append([loss.detach(), *(leaf.grad for leaf in leaves)])
        for name, ours, theirs in zip(("loss", "hidden", "weight", "bias"), *found, strict=True):
            assert_close(ours, theirs, (vocab, options, name))
        assert_everywhere(found[0][0], options)


@case(*WORLDS)
def every_answer_and_its_gradient() -> None:
    for vocab, masked in itertools.product(VOCABS, (False, True)):
        made, other = problem(vocab), problem(vocab, seed=1)
        bias = made.bias.clone()
        if masked:
            bias[: vocab - 2] = -math.inf  # all but the last two tokens: whole slices are masked
        ids = torch.stack([made.ids, (made.ids + 1) % vocab], 1)
        found = []
        for split in (True, False):
            weight, own, second = [
                sharded(t) if split else t.clone() for t in (made.weight, bias, other.weight)
            ]
            leaves = [t.requires_grad_() for t in (made.hidden.clone(), weight, second)]
            answers = lmhead.query(
                leaves[0],
                leaves[1],
                bias=own,
                softcap=9.0,
                log_prob=ids,
                rank=ids,
                entropy=True,
                logsumexp=True,
                log_sum_sq=True,
                mean_logit=True,
                temperature=torch.linspace(0.5, 2.0, 7, dtype=torch.float64),
                argmax=True,
                top_k=min(vocab, 4),
                kl_to=(other.hidden, leaves[2]),
            )
            total = answers.entropy.sum() + answers.logsumexp.sum() + answers.kl.sum()
            total = total + answers.log_sum_sq.sum() + answers.mean_logit.sum()
            if not masked:
                total = total + (answers.log_prob * torch.arange(14).view(7, 2)).sum()
            total.backward()
            values = {
                "log_prob": answers.log_prob,
                "rank": answers.rank,
                "entropy": answers.entropy,
                "logsumexp": answers.logsumexp,
                "log_sum_sq": answers.log_sum_sq,
                "mean_logit": answers.mean_logit,
                "argmax": answers.argmax,
                "ids": answers.top_k.indices,
                "values": answers.top_k.values,
                "kl": answers.kl,
            }
            values |= {f"gradient {i}": leaf.grad for i, leaf in enumerate(leaves)}
            found.append({name: value.detach() for name, value in values.items()})
        for name, theirs in found[1].items():
            assert_close(found[0][name], theirs, (vocab, masked, name))
            if theirs.dtype == torch.int64:
                assert torch.equal(found[0][name], theirs), (vocab, masked, name)
        assert_everywhere(found[0]["entropy"], "entropy")


@case(*WORLDS)
def decisions_in_float32_with_ties() -> None:
    """Equal and nearly equal rows of the weight on different ranks, a NaN, a row of -inf."""
    torch.manual_seed(0)
    weight = torch.randn(41, 16)
    weight[30] = weight[3]
    weight[20] = weight[3] * (1 + 1e-7)
    hidden = torch.randn(9, 16)
    hidden[0] = weight[3] * 4
    hidden[1] = math.nan
    bias = torch.zeros(41)
    bias[[5, 40]] = -math.inf
    ids = torch.tensor([[3, 30, 20]] * 9)
    for own in (None, bias, torch.full((41,), -math.inf)):
        asked: Any = {"rank": ids, "argmax": True, "top_k": 41}
        ours = lmhead.query(
            hidden, sharded(weight), bias=None if own is None else sharded(own), **asked
        )
        theirs = lmhead.query(hidden, weight, bias=own, **asked)
        assert torch.equal(ours.rank, theirs.rank)
        assert torch.equal(ours.argmax, theirs.argmax)
        assert torch.equal(ours.top_k.indices, theirs.top_k.indices)
        torch.testing.assert_close(
            ours.top_k.values, theirs.top_k.values, rtol=0, atol=0, equal_nan=True
        )


def heads(vocab: int, **options: Any) -> tuple[LMHead, LMHead]:
    """The same head twice: sharded, and whole."""
    made = problem(vocab)
    pair = []
    for split in (True, False):
        head = LMHead(6, vocab, bias=True, dtype=torch.float64, **options)
        with torch.no_grad():
            head.weight.copy_(made.weight)
            head.bias.copy_(made.bias)  # type: ignore[union-attr]
        if split:
            head.weight = nn.Parameter(sharded(head.weight))
            head.bias = nn.Parameter(sharded(head.bias))  # type: ignore[arg-type]
        pair.append(head)
    return pair[0], pair[1]


PROGRAMS: dict[str, Any] = {
    "cross_entropy": lambda z, _y: F.cross_entropy(z, _y, label_smoothing=0.1),
    "log_softmax": lambda z, _y: z.log_softmax(-1).gather(-1, _y[:, None]),
    "categorical": lambda z, _y: torch.distributions.Categorical(logits=z).entropy(),  # type: ignore[no-untyped-call]
    "class weights": lambda z, _y: F.cross_entropy(
        z, _y, weight=torch.linspace(0.5, 2, z.shape[-1]).double(), reduction="sum"
    ),
    "temperature": lambda z, _y: F.cross_entropy(z / 0.7, _y),
    "bias": lambda z, _y: (z + torch.linspace(0, 1, z.shape[-1]).double()).logsumexp(-1),
    "mask": lambda z, _y: z.masked_fill(torch.arange(z.shape[-1]) == 1, -math.inf).logsumexp(-1),
    "row factor": lambda z, _y: (z * torch.linspace(1, 2, 7).double()[:, None]).logsumexp(-1),
    "recorded": lambda z, _y: (z.sigmoid() * z.softmax(-1)).sum(-1),
    "comparison": lambda z, _y: (z >= z.topk(2, -1).values[:, -1:]).sum(-1),
    "columns": lambda z, _y: z[:, [1, 3]],
    "range": lambda z, _y: z[:, 1:4].logsumexp(-1),
    "rows": lambda z, _y: z[2:5].logsumexp(-1),
    "top": lambda z, _y: z.topk(3, -1).values,
    "argmax": lambda z, _y: z.argmax(-1),
    "kl": lambda z, _y: F.kl_div(
        (z * 0.5).log_softmax(-1), z.log_softmax(-1), log_target=True, reduction="batchmean"
    ),
    "divergence": lambda z, _y: lmhead.divergence(z, z * 0.5, kind="jsd"),
    "few allowed": lambda z, _y: (
        z.masked_fill(torch.arange(z.shape[-1]) > 1, -math.inf).topk(2).values
    ),
    "two questions": lambda z, _y: z.logsumexp(-1) + z.max(-1).values,
}


@case(*WORLDS)
def recorded_programs() -> None:
    for vocab in VOCABS:
        made = problem(vocab)
        for name, program in PROGRAMS.items():
            found = []
            for head in heads(vocab, softcap=5.0):
                hidden = made.hidden.clone().requires_grad_()
                answer = program(head(hidden), made.ids)
                values = {"answer": answer.detach()}
                if answer.is_floating_point():
                    answer.sum().backward()
                    values |= {
                        "hidden": hidden.grad,
                        **{n: p.grad for n, p in head.named_parameters()},
                    }
                found.append(values)
            for key, theirs in found[1].items():
                assert_close(found[0][key], theirs, (vocab, name, key), rtol=1e-9)


@case(2, 3)
def a_low_rank_delta() -> None:
    """Of the head itself, and PEFT's LoRA around it, before and after the head is split."""
    made, found = problem(37), []
    for way in ("whole", "own", "split, then PEFT", "PEFT, then split"):
        model = nn.ModuleDict({"lm_head": LMHead(6, 37, dtype=torch.float64)})
        head: Any = model["lm_head"]
        random = torch.Generator().manual_seed(1)
        weight, a, b = (
            torch.randn(*shape, generator=random, dtype=torch.float64)
            for shape in ((37, 6), (2, 6), (37, 2))
        )
        head.weight.data = weight
        if way in ("whole", "own"):
            head.add_low_rank(2)
        elif way == "split, then PEFT":
            parallelize_module(model, mesh(), {"lm_head": VocabParallel()})
        if "PEFT" in way:
            config = peft.LoraConfig(target_modules=["lm_head"], r=2, lora_alpha=2)
            peft.inject_adapter_in_model(config, model)
            with pytest.raises(TypeError, match=r"lm_head\.base_layer"):
                parallelize_module(model, mesh(), {"lm_head": VocabParallel()})
            lora: Any = model["lm_head"]
            factors = (lora.lora_A["default"].weight, lora.lora_B["default"].weight)
        else:
            factors = (head.low_rank_a, head.low_rank_b)
        with torch.no_grad():
            for factor, value in zip(factors, (a, b), strict=True):
                factor.copy_(value)
        if way == "PEFT, then split":
            parallelize_module(model, mesh(), {"lm_head.base_layer": VocabParallel()})
        elif way == "own":
            parallelize_module(model, mesh(), {"lm_head": VocabParallel()})
            factors = (head.low_rank_a, head.low_rank_b)
        hidden = made.hidden.clone().requires_grad_()
        loss = F.cross_entropy(model["lm_head"](hidden), made.ids)
        loss.backward()  # type: ignore[no-untyped-call]
        found.append([loss.detach(), hidden.grad, *(f.grad for f in factors)])
        for ours, theirs in zip(found[-1], found[0], strict=True):
            assert_close(ours, full(theirs), way, rtol=1e-9)


@case(2, 4)
def an_optimizer_step_is_noticed() -> None:
    head, _ = heads(37)
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.1)
    logits = head(problem(37).hidden)
    logits.logsumexp(-1).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="was modified in place after the head was called"):
        logits.argmax(-1)


@case(2, 4)
def few_collectives() -> None:
    """One for all sums and candidates, one more for ranks; one for the hidden gradient."""
    made = problem(37, torch.float32)
    weight, ids = sharded(made.weight).requires_grad_(), made.ids

    def count(work: Any) -> int:
        with CommDebugMode() as counted:  # type: ignore[no-untyped-call]
            work()
        return counted.get_total_counts()  # type: ignore[no-any-return]

    def forward_and_backward() -> None:
        hidden = made.hidden.clone().requires_grad_()
        loss = lmhead.linear_cross_entropy(hidden, weight, ids, label_smoothing=0.1, z_loss=0.1)
        loss.backward()  # type: ignore[no-untyped-call]

    with torch.no_grad():
        asked: Any = {
            "log_prob": ids,
            "entropy": True,
            "logsumexp": True,
            "argmax": True,
            "top_k": 5,
        }
        assert count(lambda: lmhead.query(made.hidden, weight, **asked)) == 1
        assert count(lambda: lmhead.query(made.hidden, weight, rank=ids, **asked)) == 2
        assert count(lambda: lmhead.linear_cross_entropy(made.hidden, weight, ids)) == 1
    assert count(forward_and_backward) == 2


@case(*WORLDS)
def divergences_of_two_heads() -> None:
    """Every kind, in both heads, of other widths; the other head sharded or not."""
    for vocab, kind, other_split in itertools.product(
        VOCABS, ("kl", "reverse_kl", "jsd", "tvd"), (True, False)
    ):
        made = problem(vocab)
        random = torch.Generator().manual_seed(9)
        second = torch.randn(vocab, 4, generator=random, dtype=torch.float64)
        wide = torch.randn(7, 4, generator=random, dtype=torch.float64)
        found = []
        for split in (True, False):
            p = sharded(made.weight) if split else made.weight.clone()
            q = sharded(second) if split and other_split else second.clone()
            leaves = [t.requires_grad_() for t in (made.hidden.clone(), p, wide.clone(), q)]
            pairs = (leaves[0], leaves[1]), (leaves[2], leaves[3])
            answer = lmhead.divergence(*pairs, kind=kind, temperature=1.3)
            answer.sum().backward()  # type: ignore[no-untyped-call]
            found.append([answer.detach(), *(leaf.grad for leaf in leaves)])
        for i, (ours, theirs) in enumerate(zip(*found, strict=True)):
            assert_close(ours, theirs, (vocab, kind, other_split, i), rtol=1e-8)


@case(*WORLDS)
def filtered_gradients() -> None:
    """The filter sets aside the tail of each slice: the loss is exact, the error no larger."""
    random = torch.Generator().manual_seed(4)
    weight = torch.randn(301, 16, generator=random)
    hidden = weight[torch.randint(301, (64,), generator=random)] * 0.7
    targets = torch.randint(301, (64,), generator=random)
    found: dict[Any, list[Tensor]] = {}
    for split, tail in itertools.product((True, False), (None, 1e-9, 0.05)):
        leaves = [hidden.clone().requires_grad_(), sharded(weight) if split else weight.clone()]
        leaves[1].requires_grad_()
        loss = lmhead.linear_cross_entropy(
            leaves[0], leaves[1], targets, grad_filter=tail, label_smoothing=0.05
        )
        loss.backward()  # type: ignore[no-untyped-call]
        found[split, tail] = [loss.detach(), *(full(leaf.grad) for leaf in leaves)]
    exact = found[False, None]
    for split, tail in found:
        assert_close(found[split, tail][0], exact[0], (split, tail), rtol=1e-5)
    for i in (1, 2):
        size = exact[i].norm()
        errors = {key: ((made[i] - exact[i]).norm() / size).item() for key, made in found.items()}
        assert errors[True, None] < 1e-5, errors
        assert errors[True, 1e-9] < 1e-5, errors
        assert 1e-4 < errors[False, 0.05] < 0.2, errors  # it does approximate
        assert 1e-4 < errors[True, 0.05] < 1.2 * errors[False, 0.05], errors
        assert found[True, 0.05][i].sum(1).sub(exact[i].sum(1)).abs().max() < 0.1 * size


@case(2, 4)
def placements() -> None:
    """Weights, biases and hidden states of other placements: the right answer or an error."""
    made, over = problem(37), mesh()
    n = dist.get_world_size()
    expected = lmhead.query(made.hidden, made.weight, bias=made.bias, entropy=True, argmax=True)
    for wrong in (Shard(1), Partial()):
        weight = DTensor.from_local(made.weight, over, [wrong], run_check=False)
        message = "weight must be sharded over the vocabulary, .*" + re.escape(repr(wrong))
        with pytest.raises(ValueError, match=message):
            lmhead.query(made.hidden, weight, argmax=True)
        with pytest.raises(ValueError, match=message):
            lmhead.linear_cross_entropy(made.hidden, weight, made.ids)
        head = LMHead(weight.shape[1], 37, device="meta")
        head.weight = nn.Parameter(weight)
        with pytest.raises(ValueError, match=message):
            head(made.hidden)
    whole: Any = [distribute_tensor(t, over, [Replicate()]) for t in made]
    hidden, weight, bias, ids = whole
    wrongs: dict[str, Any] = {
        "hidden": lambda: lmhead.query(hidden, made.weight, argmax=True),
        "bias": lambda: lmhead.query(made.hidden, made.weight, bias=bias, argmax=True),
        "targets": lambda: lmhead.linear_cross_entropy(made.hidden, weight, ids),
        "target": lambda: F.cross_entropy(heads(37)[0](made.hidden), ids),
        "class_weight": lambda: lmhead.linear_cross_entropy(
            made.hidden, weight, made.ids, class_weight=bias.abs()
        ),
    }
    for name, work in wrongs.items():
        with pytest.raises(TypeError, match=f"{name}.* must be a plain tensor, .* got a DTensor"):
            work()
    ways: dict[str, Any] = {
        "plain": lambda t: t,
        "replicate": lambda t: distribute_tensor(t, over, [Replicate()]),
        "shard": lambda t: distribute_tensor(t, over, [Shard(0)]),
        "partial": lambda t: DTensor.from_local(t / n, over, [Partial()], run_check=False),
    }
    for weight_way, bias_way, hidden_way in itertools.product(
        ("replicate", "shard"), ways, (*ways, "columns")
    ):
        way = ways.get(hidden_way, lambda t: distribute_tensor(t, over, [Shard(1)]))
        leaves = [
            way(made.hidden.clone()).detach().requires_grad_(),
            ways[weight_way](made.weight.clone()).detach().requires_grad_(),
            ways[bias_way](made.bias.clone()).detach().requires_grad_(),
        ]
        what = (weight_way, bias_way, hidden_way)
        answers = lmhead.query(leaves[0], leaves[1], bias=leaves[2], entropy=True, argmax=True)
        assert torch.equal(answers.argmax, expected.argmax), what
        assert_close(answers.entropy, expected.entropy, what)
        loss = lmhead.linear_cross_entropy(leaves[0], leaves[1], made.ids, bias=leaves[2])
        loss.backward()  # type: ignore[no-untyped-call]
        dense = [t.clone().requires_grad_() for t in (made.hidden, made.weight, made.bias)]
        F.cross_entropy(F.linear(*dense), made.ids).backward()  # type: ignore[no-untyped-call]
        for ours, theirs in zip(leaves, dense, strict=True):
            assert_close(ours.grad, theirs.grad, what)  # type: ignore[arg-type]


@case(2)
def wrong_weights_are_refused() -> None:
    made = problem(37)
    over = mesh()
    columns = distribute_tensor(made.weight, over, [Shard(1)])
    with pytest.raises(
        ValueError, match=r"weight must be sharded over the vocabulary, .*Shard\(dim=1\)"
    ):
        lmhead.query(made.hidden, columns, argmax=True)
    with pytest.raises(ValueError, match=r"hidden must have shape \(..., 6\)"):
        lmhead.query(made.hidden[:, :5], sharded(made.weight, over), argmax=True)
    whole = distribute_tensor(made.weight, over, [Replicate()])
    assert torch.equal(
        lmhead.query(made.hidden, whole, argmax=True).argmax,
        lmhead.query(made.hidden, made.weight, argmax=True).argmax,
    )
