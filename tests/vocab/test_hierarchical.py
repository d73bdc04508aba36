"""`HierarchicalHead`: what a user sees. Losses, types, samples, checkpoints, errors."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from compare import assert_as_good_as, assert_close
from safetensors.torch import load_file, save_file
from torch import Tensor

from lmhead import Sampler
from lmhead.vocab import HierarchicalHead, Tree, balanced, huffman
from lmhead.vocab.tree_paths import Forks

VOCAB, DIM, TOKENS = 50, 8, 12
ZIPF = 1 / torch.arange(1, VOCAB + 1).double()
KINDS: dict[str, dict[str, Any]] = {
    "huffman": {"frequencies": ZIPF},
    "huffman of 4": {"frequencies": ZIPF, "arity": 4},
    "balanced": {"tree": "balanced", "bias": False},
    "given": {"tree": [list(range(20)), list(range(20, 30)), [list(range(30, 49)), 49]]},
}
EVERY = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)


def make(dtype: torch.dtype = torch.float64, **options: Any) -> HierarchicalHead:
    torch.manual_seed(0)
    head = HierarchicalHead(DIM, VOCAB, **options)
    torch.nn.init.normal_(head.weight, std=0.5)
    return head.to(dtype)


def given(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, DIM, generator=random, dtype=torch.float64).to(dtype)
    targets = torch.randint(VOCAB, (TOKENS,), generator=random)
    targets[[2, 7]] = -100
    return hidden.requires_grad_(), targets


def log_probs(head: HierarchicalHead, hidden: Tensor) -> Tensor:
    return head.factors().log_probs(hidden)


LOSSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothing": {"label_smoothing": 0.1},
    "class weight": {"weight": torch.rand(VOCAB, dtype=torch.float64) + 0.5},
    "all": {
        "weight": torch.rand(VOCAB, dtype=torch.float64) + 0.5,
        "label_smoothing": 0.2,
        "reduction": "none",
    },
    "other index": {"ignore_index": 3},
}


@EVERY
@pytest.mark.parametrize("soft", [False, True], ids=["ids", "probabilities"])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_losses_are_those_of_the_built_tensor(
    options: dict[str, Any], loss: dict[str, Any], soft: bool
) -> None:
    head = make(**options)
    hidden, targets = given()
    if soft:
        targets = torch.rand(TOKENS, VOCAB, dtype=torch.float64).softmax(1)
        loss = {k: v for k, v in loss.items() if k != "ignore_index"}
    elif "ignore_index" in loss:
        targets = targets.masked_fill(targets == -100, 3)
    tensors = [hidden, *head.parameters()]
    ours = F.cross_entropy(head(hidden), targets, **loss)
    plain = F.cross_entropy(log_probs(head, hidden), targets, **loss)
    upstream = torch.randn(ours.shape, dtype=torch.float64)
    assert_close(ours, plain.detach(), atol=1e-12)
    got = torch.autograd.grad(ours, tensors, upstream)
    want = torch.autograd.grad(plain, tensors, upstream)
    for x, y in zip(got, want, strict=True):
        assert_close(x, y, atol=1e-12)


def test_every_token_ignored() -> None:
    head, hidden = make(**KINDS["huffman"]), given()[0]
    targets = torch.full((TOKENS,), -100)
    assert F.cross_entropy(head(hidden), targets).isnan()
    total = F.cross_entropy(head(hidden), targets, reduction="sum")
    assert_close(total, 0.0)
    total.backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None
    assert not hidden.grad.any()


@pytest.mark.both_cores
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@EVERY
def test_float32_and_half_precision(options: dict[str, Any], dtype: torch.dtype) -> None:
    head = make(dtype, **options)
    hidden, targets = given(dtype)
    ours = F.cross_entropy(head(hidden).float(), targets)
    grads = torch.autograd.grad(ours, [hidden, head.weight])
    tensors = [t.detach().float().requires_grad_() for t in (hidden, head.weight)]
    wide = [t.detach().double().requires_grad_() for t in (hidden, head.weight)]

    def plain(hidden: Tensor, weight: Tensor) -> Tensor:
        bias = None if head.bias is None else head.bias.to(weight.dtype)
        return F.cross_entropy(Forks(weight, bias, head.tree).all_log_probs(hidden), targets)

    loss, truth = plain(*tensors), plain(*wide)
    assert_as_good_as(ours, loss, truth, 1e-6, dtype=torch.float32)
    for x, y, true in zip(
        grads, torch.autograd.grad(loss, tensors), torch.autograd.grad(truth, wide), strict=True
    ):
        assert_as_good_as(x, y.to(dtype), true, 1e-6, dtype=dtype)


def test_autocast() -> None:
    head = make(torch.float32, **KINDS["huffman"])
    hidden, targets = given(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(head(hidden).float(), targets)
    half = make(torch.float32, **KINDS["huffman"]).bfloat16()
    assert_close(
        loss, F.cross_entropy(half(hidden.bfloat16()).float(), targets).detach(), rtol=1e-6
    )
    loss.backward()  # type: ignore[no-untyped-call]
    assert head.weight.grad is not None
    assert head.weight.grad.dtype == torch.float32


def test_it_starts_at_the_frequencies() -> None:
    counts = torch.tensor([900.0, 50.0, 30.0, 0.0, 20.0])
    for options in ({}, {"arity": 3}, {"tree": "balanced"}):
        head = HierarchicalHead(4, 5, frequencies=counts, **options)
        torch.nn.init.zeros_(head.weight)
        p = log_probs(head, torch.randn(1, 4)).exp()[0]
        assert_close(p, (counts + 10) / (counts + 10).sum(), rtol=1e-5)
    head = HierarchicalHead(64, 5, frequencies=counts)
    spread = log_probs(head, torch.randn(200, 64)).exp() - p
    assert 0 < float(spread.detach().abs().max()) < 0.2


@EVERY
def test_it_learns(options: dict[str, Any]) -> None:
    head = make(torch.float32, **options)
    hidden = torch.randn(64, DIM)
    targets = (hidden[:, :4] > 0).long() @ torch.tensor([1, 2, 4, 8])
    optimizer = torch.optim.Adam(head.parameters(), lr=0.1)
    first = None
    for _ in range(60):
        loss = F.cross_entropy(head(hidden), targets)
        first = float(loss.detach()) if first is None else first
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert float(loss.detach()) < 0.3 * first  # type: ignore[operator]


def test_sparse_gradients_train_the_same() -> None:
    states = []
    for sparse in (False, True):
        head = make(torch.float32, frequencies=ZIPF, sparse=sparse, bias=False)
        optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
        hidden, targets = given(torch.float32)
        F.cross_entropy(head(hidden), targets).backward()  # type: ignore[no-untyped-call]
        assert head.weight.grad is not None
        assert head.weight.grad.is_sparse == sparse
        optimizer.step()
        states.append(head.weight.detach())
    assert_close(states[0], states[1], atol=1e-7)


@EVERY
@pytest.mark.both_cores
def test_best_tokens_and_samplers(options: dict[str, Any]) -> None:
    head = make(torch.float32, **options)
    hidden = given(torch.float32)[0].detach()
    exact = head.factors().log_probs(hidden, exact=True)
    order = exact.sort(dim=1, descending=True, stable=True)[1]
    logits = head(hidden)
    assert torch.equal(logits.argmax(-1), order[:, 0])
    assert torch.equal(logits.topk(7).indices, order[:, :7])
    for sampler in (Sampler(do_sample=False), Sampler(top_k=5, seed=3), Sampler(top_p=0.9, seed=4)):
        ours, plain = sampler(logits), sampler(exact.float())
        assert torch.equal(ours.token, plain.token)
        assert_close(ours.raw_log_prob, plain.raw_log_prob, atol=1e-5)


@EVERY
def test_samples_have_the_distribution(options: dict[str, Any]) -> None:
    head = make(torch.float32, **options)
    hidden = given(torch.float32)[0][:1].detach()
    n = 40_000
    drawn = head.sample(hidden.expand(n, -1), seed=7, position=torch.arange(n))
    expected = n * log_probs(head, hidden.double().float())[0].detach().double().exp()
    counts = torch.bincount(drawn, minlength=VOCAB).double()
    chi = float(((counts - expected) ** 2 / expected).sum())
    # 49 degrees of freedom: 49 ± 10, and beyond 100 once in 30,000 draws of 40,000.
    assert 15 < chi < 100


@pytest.mark.both_cores
def test_a_sample_depends_on_seed_position_and_state_alone() -> None:
    head = make(torch.float32, **KINDS["huffman of 4"])
    hidden = torch.randn(30, DIM)
    position = torch.arange(30)
    together = head.sample(hidden, seed=5, position=position)
    alone = [head.sample(hidden[i], seed=5, position=i) for i in range(30)]
    assert together.tolist() == [int(token) for token in alone]
    backwards = head.sample(hidden.flip(0), seed=5, position=position.flip(0))
    assert torch.equal(backwards.flip(0), together)
    assert not torch.equal(head.sample(hidden, seed=6, position=position), together)
    assert head.sample(hidden.reshape(5, 6, DIM), seed=5, position=position).shape == (5, 6)


def test_a_token_of_probability_0_is_never_drawn() -> None:
    head = HierarchicalHead(2, 4, tree="balanced")
    torch.nn.init.zeros_(head.weight)
    with torch.no_grad():
        head.bias.copy_(torch.tensor([-math.inf, 0.0, math.inf]))  # type: ignore[union-attr]
    drawn = head.sample(torch.ones(500, 2), seed=0, position=torch.arange(500))
    assert set(drawn.tolist()) == {2}


@EVERY
def test_checkpoints_bring_their_tree(options: dict[str, Any], tmp_path: Path) -> None:
    head, hidden = make(torch.float32, **options), given(torch.float32)[0].detach()
    save_file(head.state_dict(), tmp_path / "head.safetensors")
    other = HierarchicalHead(DIM, VOCAB, tree="balanced", bias=options.get("bias", True))
    other.load_state_dict(load_file(tmp_path / "head.safetensors"))
    assert other.tree == head.tree
    assert torch.equal(log_probs(other, hidden), log_probs(head, hidden))
    with torch.device("meta"):
        empty = HierarchicalHead(DIM, VOCAB, tree="balanced", bias=options.get("bias", True))
    empty.load_state_dict(head.state_dict(), assign=True)
    assert torch.equal(empty(hidden).argmax(-1), head(hidden).argmax(-1))
    inside = torch.nn.ModuleDict({"lm_head": other})
    inside.load_state_dict({f"lm_head.{k}": v for k, v in head.state_dict().items()})
    assert other.tree == head.tree


def test_a_damaged_tree_in_a_checkpoint_is_named() -> None:
    head = make(**KINDS["huffman"])
    state = head.state_dict()
    state["parents"] = state["parents"].clone()
    state["parents"][3, 0] = 999
    with pytest.raises(RuntimeError, match=r"parents: parents must be forks in \[0, 49\); got 999"):
        make(**KINDS["huffman"]).load_state_dict(state)


def test_one_token_and_two() -> None:
    for vocab in (1, 2):
        head = HierarchicalHead(DIM, vocab, tree="balanced")
        hidden = torch.randn(3, DIM, requires_grad=True)
        targets = torch.tensor([0, vocab - 1, -100])
        loss = F.cross_entropy(head(hidden), targets, label_smoothing=0.1)
        loss.backward()  # type: ignore[no-untyped-call]
        assert hidden.grad is not None
        assert hidden.grad.isfinite().all()
        assert_close(head(hidden).ask(entropy=True).entropy.exp() <= vocab, torch.ones(3).bool())
        assert head.sample(hidden, seed=1).max() < vocab
        assert set(head(hidden).topk(vocab).indices.unique().tolist()) == set(range(vocab))
        assert "HierarchicalHead" in head.explain()
    assert_close(
        F.cross_entropy(HierarchicalHead(DIM, 1, tree=0)(hidden), torch.zeros(3).long()), 0.0
    )


def test_tokens_that_were_never_met_can_be_learnt() -> None:
    frequencies = ZIPF.clone()
    frequencies[30:] = 0
    head = HierarchicalHead(DIM, VOCAB, frequencies=frequencies)
    loss = F.cross_entropy(head(torch.randn(3, DIM)), torch.tensor([30, 40, 49]))
    assert loss.isfinite()
    assert int(head.tree.depths[30:].max()) - int(head.tree.depths[30:].min()) <= 1


def test_looks() -> None:
    head = make(**KINDS["huffman"])
    assert repr(head) == "HierarchicalHead(8, 50, arity=2, depth=8, bias=True)"
    text = head.explain()
    assert "Tree(50 tokens, 49 forks, paths of 2 to 8 decisions)" in text
    mean = float((head.tree.depths * ZIPF).sum() / ZIPF.sum())
    assert head.expected_path == pytest.approx(mean)
    assert f"{mean:.1f} rows of 64 bytes a token" in text
    assert head(given()[0]).explain().startswith("LazyLogits(shape=(12, 50)")
    even = make(tree="balanced", arity=8)
    assert even.expected_path == pytest.approx(7 + 7 * 48 / 56, abs=1)


def test_what_it_is_given() -> None:
    tree = huffman(ZIPF)
    assert make(tree=tree).tree is tree
    assert make(tree=tree, frequencies=ZIPF).bias is not None
    assert isinstance(make(**KINDS["given"]).tree, Tree)
    assert make(**KINDS["given"]).weight.shape == (VOCAB - 1, DIM)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no frequencies": ({}, ValueError, "frequencies must be given for tree='huffman'"),
    "too few": ({"frequencies": [1.0]}, ValueError, r"one entry per token, \(50,\); got \(1,\)"),
    "nan": ({"frequencies": [math.nan] * VOCAB}, ValueError, "finite and at least 0; got nan"),
    "all zero": ({"frequencies": [0] * VOCAB}, ValueError, "must not all be 0"),
    "unknown tree": ({"tree": "splay"}, ValueError, "'balanced', or an existing file"),
    "tree of others": ({"tree": balanced(49)}, ValueError, "over 50 tokens; got one over 49"),
    "not a tree": ({"tree": [0, 1]}, ValueError, "it misses 48, the first is 2"),
    "arity": ({"tree": "balanced", "arity": 1}, ValueError, "arity must be at least 2; got 1"),
    "arity and a tree": ({"tree": balanced(50), "arity": 3}, ValueError, "got 3 with a given tree"),
}


@pytest.mark.parametrize(("options", "error", "message"), BAD.values(), ids=BAD)
def test_bad_input(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        HierarchicalHead(DIM, VOCAB, **options)


def test_bad_calls() -> None:
    head = make(**KINDS["huffman"])
    hidden, targets = given()
    with pytest.raises(ValueError, match=r"must be in \[0, 50\).*got 50 at index 1"):
        F.cross_entropy(head(hidden[:2]), torch.tensor([0, 50]))
    with pytest.raises(ValueError, match=r"must be in \[0, 50\); got -1"):
        head.log_prob(hidden, torch.full_like(targets, -1))
    with pytest.raises(ValueError, match=r"hidden must have shape \(\.\.\., 8\)"):
        head(torch.randn(3, 9, dtype=torch.float64))
    with pytest.raises(TypeError, match="float32"):
        head(hidden.float())
    with pytest.raises(ValueError, match="NaN"):
        head.sample(torch.full((2, DIM), math.nan, dtype=torch.float64), seed=0)
    broken = make(**KINDS["huffman"])
    torch.nn.init.constant_(broken.weight, math.nan)
    with pytest.raises(ValueError, match="NaN"):
        broken.sample(hidden, seed=0)


@pytest.mark.both_cores
def test_log_prob_of_many_ids_and_rows() -> None:
    head = make(torch.float32, **KINDS["huffman"])
    hidden = torch.randn(3, 4, DIM)
    ids = torch.randint(VOCAB, (3, 4, 6))
    every = log_probs(head, hidden.reshape(-1, DIM)).reshape(3, 4, VOCAB).detach()
    assert_close(head.log_prob(hidden, ids), every.gather(-1, ids), atol=1e-5)
    alone = head.log_prob(hidden[1, 2], ids[1, 2])
    assert torch.equal(alone, head.log_prob(hidden, ids)[1, 2]), "the same in any batch"
    p = every.double().exp()
    entropy = head(hidden).ask(entropy=True).entropy
    assert_close(entropy, -(p * every).sum(-1), rtol=1e-5)
    assert np.isfinite(entropy.detach().numpy()).all()
