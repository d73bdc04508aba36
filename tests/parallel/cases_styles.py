"""Vocabulary-parallel heads in models: styles, meshes, checkpoints, Hugging Face, decoding."""

from __future__ import annotations

import itertools
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lmhead
from lmhead import LMHead, Sampler
from lmhead.parallel import VocabParallel, plan
from parallel.cases_vocab import assert_close, full, problem, sharded
from parallel.ranks import case

VOCAB, HIDDEN = 37, 8


class Model(nn.Module):
    """Embedding, norm and head; the same numbers on every rank."""

    def __init__(self, head: str, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        linear = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head: Any = linear if head == "linear" else LMHead.from_linear(linear)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Any:
        return self.head(self.norm(self.embedding(ids)))


def batch() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(5)
    return torch.randint(VOCAB, (2, 8), generator=random), torch.randint(
        VOCAB, (2, 8), generator=random
    )


def step(model: Any) -> dict[str, Tensor]:
    """Return the loss and all gradients of one step."""
    ids, targets = batch()
    loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    grads = {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": full(loss.detach()), **grads}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], rtol: float = 1e-5) -> None:
    assert ours.keys() == theirs.keys()
    for name, right in theirs.items():
        torch.testing.assert_close(
            ours[name], right, rtol=rtol, atol=1e-6, msg=f"{name}: {ours[name]} is not {right}"
        )


@case(2, 4)
def vocab_parallel_beside_sequence_parallel_and_loss_parallel() -> None:
    """The comparison of torchtitan: the loss of `loss_parallel`, and that of one process."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    expected = step(Model("linear"))
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
    }
    ours = parallelize_module(Model("lmhead"), mesh, {**plan, "head": VocabParallel()})
    assert_same(step(ours), expected)
    head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
    theirs = parallelize_module(Model("linear"), mesh, {**plan, "head": head})
    with loss_parallel():
        assert_same(step(theirs), expected)
    with pytest.raises(TypeError, match="must be applied to an LMHead; got Linear"):
        parallelize_module(Model("linear"), mesh, {"head": VocabParallel()})


@case(2)
def plain_parts_of_a_sequence() -> None:
    """Hidden states as plain tensors, a part of the sequence on each rank."""
    mesh = init_device_mesh("cpu", (2,))
    made = problem(VOCAB)
    hidden = torch.stack([made.hidden[:6]] * 2)  # (2, 6, D)
    whole = LMHead(6, VOCAB, dtype=torch.float64)
    split: Any = LMHead(6, VOCAB, dtype=torch.float64)
    split.load_state_dict(whole.state_dict())
    split = parallelize_module(split, mesh, VocabParallel(input_layouts=Shard(1)))
    part = hidden.chunk(2, 1)[dist.get_rank()].clone().requires_grad_()
    split(part).logsumexp(-1).sum().backward()
    hidden.requires_grad_()
    whole(hidden).logsumexp(-1).sum().backward()
    assert hidden.grad is not None
    assert_close(part.grad, hidden.grad.chunk(2, 1)[dist.get_rank()], "hidden")
    assert_close(split.weight.grad, whole.weight.grad, "weight")  # type: ignore[arg-type]


@case(2)
def a_tied_embedding() -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = Model("lmhead", tied=True)
    style = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    parallelize_module(model, mesh, {"embedding": style})
    model.head = LMHead.tied(model.embedding)
    assert_same(step(model), step(Model("linear", tied=True)))


@case(4)
def fsdp_beside_vocab_parallel() -> None:
    """2-D mesh: two groups of data, each with the vocabulary on two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "vocab"))
    expected = step(Model("linear"))
    for own, reshard in itertools.product((True, False), (True, False)):
        model: Any = parallelize_module(Model("lmhead"), mesh["vocab"], {"head": VocabParallel()})
        options: Any = {"mesh": mesh["data"], "reshard_after_forward": reshard}
        if own:
            fully_shard(model.head, **options)
        fully_shard(model, **options)
        assert_same(step(model), expected)
        with torch.no_grad():
            ids, _ = batch()
            assert torch.equal(model(ids).argmax(-1), Model("linear")(ids).argmax(-1))


@case(4)
def checkpoints_move_between_numbers_of_ranks() -> None:
    """Save on 4, 2 and 1 ranks, load on each of them."""
    world = dist.get_world_size()
    meshes = [
        init_device_mesh("cpu", (world // n, n), mesh_dim_names=("copy", "vocab"))
        for n in (1, 2, 4)
    ]
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    folder = Path(str(box[0]))
    original = Model("lmhead").state_dict()
    for saving, loading in itertools.product(meshes, meshes):
        path = folder / f"{saving.size(1)}-{loading.size(1)}"
        model = parallelize_module(Model("lmhead"), saving["vocab"], {"head": VocabParallel()})
        save(get_model_state_dict(model), checkpoint_id=path)
        other: Any = Model("lmhead")
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        other = parallelize_module(other, loading["vocab"], {"head": VocabParallel()})
        state = get_model_state_dict(other)
        load(state, checkpoint_id=path)
        set_model_state_dict(other, state)
        for name, tensor in other.state_dict().items():
            assert torch.equal(full(tensor), original[name]), (path.name, name)
        ids, _ = batch()
        expected = Model("linear")(ids).argmax(-1)
        assert torch.equal(other(ids).argmax(-1), expected)


@case(2)
def huggingface_tensor_parallel_plan() -> None:
    """`from_pretrained(tp_plan=...)`: loss, gradient and greedy tokens of one process."""
    import transformers
    from zoo.tiny_llama import llama

    from lmhead.integrations import tensor_parallel

    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    whole = llama("dense")
    if dist.get_rank() == 0:
        whole.save_pretrained(box[0])
    dist.barrier()
    plan = {"lm_head": tensor_parallel.register()}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = llama("dense")
    from transformers.integrations.tensor_parallel import apply_tensor_parallelism

    apply_tensor_parallelism(model, mesh, plan)
    ids = torch.tensor([[1, 5, 9, 7], [1, 7, 3, 2]])
    for each in (model, whole):
        each.zero_grad()
        each(input_ids=ids, labels=ids).loss.backward()
    assert_close(model.lm_head.weight.grad, whole.lm_head.weight.grad, "weight", rtol=1e-4)
    options: Any = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), whole.generate(ids, **options))
    assert type(model(input_ids=ids).logits) is lmhead.LazyLogits
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        box[0], tp_plan=plan, device_mesh=mesh
    )
    with torch.no_grad():
        assert torch.equal(
            loaded(input_ids=ids).logits.argmax(-1), whole(input_ids=ids).logits.argmax(-1)
        )


SAMPLERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"do_sample": False},
    "top_k": {"top_k": 5, "temperature": 0.7},
    "dynamic temperature": {"dynatemp_range": 0.3, "dynatemp_exponent": 1.5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.05},
    "top_h": {"top_h": 0.4},
    "typical": {"typical_p": 0.7},
    "cutoffs": {"epsilon_cutoff": 0.01, "eta_cutoff": 0.02},
    "top_n_sigma": {"top_n_sigma": 1.2},
    "xtc": {"xtc_probability": 0.9, "xtc_threshold": 0.05},
    "mirostat 1": {"mirostat": 1},
    "mirostat 2": {"mirostat": 2, "mirostat_tau": 3.0},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.3},
    "dry": {"dry_multiplier": 1.0, "dry_allowed_length": 1},
    "n-grams": {"no_repeat_ngram_size": 2},
    "bias": {"logit_bias": {3: 4.0, 30: 5.0}, "sequence_bias": {(1, 2): 3.0}},
    "words": {"bad_words_ids": [[3], [4, 5]], "suppress_tokens": [7, 36]},
    "allowed": {"allowed_token_ids": [0, 9, 20, 36]},
    "last token": {"allowed_token_ids": [36]},
    "end": {"eos_token_id": 36, "min_new_tokens": 2},
    "chain": {"temperature": 1.4, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.95},
    "llama.cpp": {"order": "llama.cpp", "temperature": 1.4, "top_k": 20, "top_p": 0.9},
    "rows": {"top_p": [0.3, 0.5, 0.7, 0.9, 1.0, 0.8, 0.6]},
}


@case(1, 2, 3, 4)
def sampling_and_beam_search() -> None:
    """The tokens of one process: seeded samples by every kind of stage, beams, screened top-k."""
    made = problem(VOCAB, torch.float32)
    context = made.ids[:, None]
    split, whole = (LMHead(6, VOCAB) for _ in range(2))
    with torch.no_grad():
        whole.weight.copy_(made.weight)
    split.weight = nn.Parameter(sharded(made.weight))
    for name, options in SAMPLERS.items():
        samplers = [Sampler(seed=3, **options) for _ in range(2)]  # mirostat has a state
        with torch.no_grad():
            ours, theirs = (
                sampler(head(made.hidden), context)
                for sampler, head in zip(samplers, (split, whole), strict=True)
            )
        assert torch.equal(ours.token, theirs.token), (name, ours.token, theirs.token)
        torch.testing.assert_close(ours.log_prob, theirs.log_prob, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours.raw_log_prob, theirs.raw_log_prob, rtol=1e-5, atol=1e-5)
    lookup = torch.randn(VOCAB, 6, generator=torch.Generator().manual_seed(1))
    chains = [Chain(lookup, head) for head in (split, whole)]
    prompt = [[1, 2], [3, 4, 5]]
    search: Any = {"num_beams": 3, "max_new_tokens": 5, "num_return_sequences": 2}
    beams = [lmhead.beam_search(chain, prompt, **search) for chain in chains]
    assert beams[0].sequences == beams[1].sequences
    texts = [lmhead.generate(chain, prompt, Sampler(seed=4), max_new_tokens=6) for chain in chains]
    ids = [[[event.token for event in made.events] for made in each] for each in texts]
    assert ids[0] == ids[1]


class Chain:
    """A model whose next token depends on the last one only."""

    eos_token_ids, tokenizer = (0,), None

    def __init__(self, lookup: Tensor, head: LMHead) -> None:
        self.lookup, self.head = lookup, head

    def body(self, ids: Tensor, cache: Any, mask: Any) -> tuple[Tensor, Any]:  # noqa: ARG002
        return self.lookup[ids], self

    def select(self, rows: Any) -> Any:  # noqa: ARG002
        return self


@case(2, 3, 4)
def screened_decisions() -> None:
    """A quantized copy of each slice; after a change of the weight it is not used."""
    torch.manual_seed(0)
    weight, hidden = torch.randn(301, 32), torch.randn(9, 32)
    weight[200] = weight[7]
    hidden[0] = 5 * weight[7]
    split, whole = LMHead(32, 301), LMHead(32, 301)
    with torch.no_grad():
        whole.weight.copy_(weight)
    split.weight = nn.Parameter(sharded(weight))
    screened = split.screen()
    for change in (False, True):
        with torch.no_grad():
            if change:
                split.weight.mul_(torch.tensor(-1.0))
                whole.weight.mul_(-1.0)
            ours, theirs = (head(hidden).topk(5) for head in (split, whole))
            assert torch.equal(ours.indices, theirs.indices)
            assert torch.equal(split(hidden).argmax(-1), whole(hidden).argmax(-1))
        assert screened.report.choices == 18, "the copy must decide before the change, not after"
    for options in ({"top_k": 7}, {"min_p": 0.1}, {"top_p": 0.7}, {"do_sample": False}):
        sampler = Sampler(seed=5, **options)
        assert torch.equal(sampler(split(hidden)).token, sampler(whole(hidden)).token), options


class Sent(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up what this rank sends in collectives, by the formulas of `lmhead.parallel.plan`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        n, name = dist.get_world_size(), func.overloadpacket.__name__
        if func.namespace == "_c10d_functional" and name == "all_gather_into_tensor":
            self.bytes += (n - 1) * args[0].numel() * args[0].element_size()
        if func.namespace == "c10d":
            tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
            sizes = [t.numel() * t.element_size() for t in tensors]
            if name in ("allgather_", "_allgather_base_"):
                self.bytes += (n - 1) * min(sizes)
            elif name == "allreduce_":
                self.bytes += 2 * (n - 1) / n * sizes[0]
            elif name == "_reduce_scatter_base_":
                self.bytes += (n - 1) / n * max(sizes)
            elif name not in ("barrier", "broadcast_"):
                raise AssertionError(f"unknown collective {name}")
        return func(*args, **(kwargs or {}))


@case(2, 4)
def the_plan_is_what_is_sent() -> None:
    """`lmhead.parallel.plan` against the bytes that collectives are given."""
    n, (vocab, width, tokens) = dist.get_world_size(), (64, 16, 12)
    mesh = init_device_mesh("cpu", (n,))
    hidden, targets = torch.randn(tokens, width), torch.randint(vocab, (tokens,))
    settings: Any = {"ranks": n, "itemsize": 4}
    head: Any = LMHead(width, vocab)
    split = parallelize_module(LMHead(width, vocab), mesh, VocabParallel())
    with Sent() as sent:
        F.cross_entropy(split(hidden.clone().requires_grad_()), targets).backward()  # type: ignore[no-untyped-call]
    assert sent.bytes == plan(vocab, width, tokens, shard="vocab", **settings).sent
    for reshard in (True, False):
        head = fully_shard(LMHead(width, vocab), mesh=mesh, reshard_after_forward=reshard)
        with Sent() as sent:
            F.cross_entropy(head(hidden), targets).backward()  # type: ignore[no-untyped-call]
        found = plan(vocab, width, tokens, shard="full", reshard=reshard, **settings)
        assert sent.bytes == found.sent, (reshard, sent.bytes, found.sent)
