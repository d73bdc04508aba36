"""Bad input raises an error: which argument, what it must be, what it was."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import assert_close
from torch import nn

from lmhead import AdaptiveHead, HierarchicalHead, LMHead, linear_cross_entropy, query

N, D, V = 4, 3, 7
HIDDEN = torch.randn(N, D, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.randn(V, D, generator=torch.Generator().manual_seed(1))
TARGETS = torch.tensor([0, 6, 3, 1])


@contextmanager
def refused(*words: str) -> Iterator[None]:
    """A ValueError or TypeError whose message has every one of `words`."""
    with pytest.raises((ValueError, TypeError)) as caught:
        yield
    message = str(caught.value)
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in {message!r}"


def loss(hidden: Any = HIDDEN, weight: Any = WEIGHT, targets: Any = TARGETS, **options: Any) -> Any:
    return linear_cross_entropy(hidden, weight, targets, **options)


# --- tensors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["loss", "query", "head"])
def test_wrong_hidden_size(call: str) -> None:
    wrong = torch.randn(N, 5)
    with refused("hidden", "5", "3"):
        if call == "loss":
            loss(wrong)
        elif call == "query":
            query(wrong, WEIGHT, entropy=True)
        else:
            LMHead(D, V)(wrong)


def test_hidden_must_be_a_floating_tensor() -> None:
    with refused("hidden", "float", "int64"):
        loss(torch.ones(N, D, dtype=torch.long), WEIGHT.long())
    with refused("hidden", "float", "int64"):
        query(torch.ones(N, D, dtype=torch.long), WEIGHT, entropy=True)
    with refused("hidden", "float", "int64"):
        LMHead(D, V)(torch.ones(N, D, dtype=torch.long))
    with refused("hidden", "list"):
        loss([[1.0, 2.0, 3.0]] * 4)
    with refused("hidden"):
        loss(torch.tensor(1.0))


def test_hidden_and_weight_must_have_one_dtype() -> None:
    with refused("hidden", "weight", "float64", "float32"):
        loss(HIDDEN.double())
    with refused("hidden", "weight", "bfloat16", "float32"):
        query(HIDDEN, WEIGHT.bfloat16(), entropy=True)
    with refused("hidden", "weight", "float64", "float32"):
        LMHead(D, V)(HIDDEN.double())


def test_weight_must_be_a_matrix() -> None:
    with refused("weight", "(7,)"):
        loss(weight=torch.randn(V))
    with refused("weight"):
        query(HIDDEN, torch.randn(2, V, D), entropy=True)


@pytest.mark.parametrize("where", ["weight", "targets", "bias", "class_weight"])
def test_tensors_on_two_devices(where: str) -> None:
    tensors = {"weight": WEIGHT, "targets": TARGETS, "bias": WEIGHT[:, 0], "class_weight": None}
    elsewhere = torch.ones(V) if where == "class_weight" else tensors[where]
    assert elsewhere is not None
    with refused(where, "device", "meta", "cpu"):
        loss(**{where: elsewhere.to("meta")})


def test_bias_of_wrong_length() -> None:
    with refused("bias", "6", "7"):
        loss(bias=torch.zeros(6))
    with refused("bias", "6", "7"):
        query(HIDDEN, WEIGHT, bias=torch.zeros(6), entropy=True)


def test_class_weight_of_wrong_length() -> None:
    with refused("class_weight", "6", "7"):
        loss(class_weight=torch.ones(6))


# --- targets and ids ------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [7, 50000, -1, -99])
def test_target_out_of_range_says_which_and_where(bad: int) -> None:
    targets = TARGETS.clone()
    targets[2] = bad
    with refused("targets must be in [0, 7)", "ignore_index", f"got {bad}", "index 2"):
        loss(targets=targets)
    with refused("target", str(bad), "2"):
        F.cross_entropy(LMHead(D, V)(HIDDEN), targets)


def test_target_out_of_range_in_two_dimensions() -> None:
    targets = torch.tensor([[0, 1], [9, 2]])
    with refused("targets", "[0, 7)", "9", "index"):
        loss(HIDDEN.view(2, 2, D), targets=targets)


def test_an_ignored_target_may_be_out_of_range() -> None:
    targets = torch.tensor([0, 99, 3, 99])
    expected = F.cross_entropy(F.linear(HIDDEN, WEIGHT)[[0, 2]], targets[[0, 2]])
    assert_close(loss(targets=targets, ignore_index=99), expected, rtol=1e-6)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.complex64, torch.uint16, torch.uint32, torch.uint64], ids=str
)
def test_wrong_dtype_of_targets(dtype: torch.dtype) -> None:
    with refused("targets", str(dtype).removeprefix("torch.")):
        loss(targets=TARGETS.to(dtype))
    with refused("targets", str(dtype).removeprefix("torch.")):
        F.cross_entropy(LMHead(D, V)(HIDDEN), TARGETS.to(dtype))
    with refused("log_prob", str(dtype).removeprefix("torch.")):
        query(HIDDEN, WEIGHT, log_prob=TARGETS.to(dtype))
    with refused("index", str(dtype).removeprefix("torch.")):
        LMHead(D, V)(HIDDEN).gather(-1, TARGETS[:, None].to(dtype))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
def test_short_integers_are_targets(dtype: torch.dtype) -> None:
    assert loss(targets=TARGETS.to(dtype)) == loss()


def test_a_hidden_size_of_zero() -> None:
    with refused("weight", "D > 0", f"({V}, 0)"):
        loss(torch.zeros(N, 0), torch.zeros(V, 0))
    with refused("weight", "D > 0", f"({V}, 0)"):
        query(torch.zeros(N, 0), torch.zeros(V, 0), argmax=True)


def test_meta_tensors_hold_no_numbers() -> None:
    hidden, weight, targets = (t.to("meta") for t in (HIDDEN, WEIGHT, TARGETS))
    with refused("hidden", "numbers", "meta"):
        loss(hidden, weight, targets)
    with refused("hidden", "numbers", "meta"):
        query(hidden, weight, argmax=True)
    for head in (
        LMHead(D, V, device="meta"),
        AdaptiveHead(D, V, cutoffs=[3], device="meta"),
        HierarchicalHead(D, V, tree="balanced", device="meta"),
    ):
        logits = head(hidden)
        assert logits.shape == (N, V)
        for question in (
            lambda z: z.argmax(-1),
            lambda z: z.logsumexp(-1),
            lambda z: F.cross_entropy(z, targets),
        ):
            with refused("hidden", "numbers", "meta"):
                question(logits)


@pytest.mark.parametrize("shape", [(3,), (4, 1), (1, 4), (), (4, 6)])
def test_targets_that_do_not_fit_hidden(shape: tuple[int, ...]) -> None:
    with refused("targets", str(shape)):
        loss(targets=torch.zeros(shape, dtype=torch.long))


@pytest.mark.parametrize("shape", [(4,), (4, 6), (3, 7), (7,)])
def test_probabilities_that_do_not_fit(shape: tuple[int, ...]) -> None:
    with refused("targets", str(shape)):
        loss(targets=torch.ones(shape))


@pytest.mark.parametrize("question", ["log_prob", "rank"])
def test_ids_asked_for(question: str) -> None:
    def ask(ids: Any) -> None:
        options: dict[str, Any] = {question: ids}
        query(HIDDEN, WEIGHT, **options)

    for bad in (7, -1, -100):
        with refused(question, "[0, 7)", str(bad), "index"):
            ask(torch.tensor([0, 1, bad, 2]))
    with refused(question, "float32"):
        ask(TARGETS.float())
    with refused(question, "(3,)"):
        ask(TARGETS[:3])


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan")])
def test_label_smoothing(value: float) -> None:
    with refused("label_smoothing", "[0, 1]", str(value)):
        loss(label_smoothing=value)


def test_reduction() -> None:
    with refused("reduction", "'mean'", "'sum'", "'none'", "'average'"):
        loss(reduction="average")


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_num_items_needs_the_mean(reduction: str) -> None:
    with refused("num_items", "reduction", "mean", reduction):
        loss(reduction=reduction, num_items=3)


@pytest.mark.parametrize(
    "value",
    [-3, math.nan, math.inf, True, "3", torch.tensor(-3), torch.tensor([2, 3]), torch.tensor(True)],
    ids=str,
)
def test_num_items(value: Any) -> None:
    with refused("num_items"):
        loss(num_items=value)


@pytest.mark.parametrize("value", [math.nan, 1.5, 1.0, True, None, "a", 2**70], ids=str)
def test_ignore_index(value: Any) -> None:
    with refused("ignore_index", "integer" if value != 2**70 else "in ["):
        loss(ignore_index=value)
    with refused("ignore_index"):
        F.cross_entropy(LMHead(D, V)(HIDDEN), TARGETS, ignore_index=value)


@pytest.mark.parametrize("value", [0, -5])
def test_max_bytes(value: int) -> None:
    with refused("max_bytes", str(value)):
        loss(max_bytes=value)
    with refused("max_bytes", str(value)):
        query(HIDDEN, WEIGHT, entropy=True, max_bytes=value)


@pytest.mark.parametrize("value", [-1, 8])
def test_top_k(value: int) -> None:
    with refused("top_k", "7", str(value)):
        query(HIDDEN, WEIGHT, top_k=value)


def test_topk_of_lazy_logits() -> None:
    with pytest.raises((ValueError, RuntimeError, IndexError), match="k"):
        LMHead(D, V)(HIDDEN).topk(8)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_softcap(value: float) -> None:
    with refused("softcap", str(value)):
        loss(softcap=value)
    with refused("softcap", str(value)):
        query(HIDDEN, WEIGHT, entropy=True, softcap=value)
    with refused("softcap", str(value)):
        LMHead(D, V, softcap=value)
    with refused("softcap", str(value)):
        LMHead.from_linear(nn.Linear(D, V), softcap=value)
    with refused("softcap", str(value)):
        LMHead.tied(nn.Embedding(V, D), softcap=value)


def test_kl_to() -> None:
    with refused("kl_to", "str"):
        query(HIDDEN, WEIGHT, kl_to="teacher")
    with refused("kl_to", "7", "6"):
        query(HIDDEN, WEIGHT, kl_to=(HIDDEN, WEIGHT[:6]))
    with refused("kl_to", "4", "3"):
        query(HIDDEN, WEIGHT, kl_to=(HIDDEN[:3], WEIGHT))


def test_options_are_keyword_only() -> None:
    with pytest.raises(TypeError, match="positional"):
        linear_cross_entropy(HIDDEN, WEIGHT, TARGETS, None)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        query(HIDDEN, WEIGHT, None)  # type: ignore[call-overload]


def test_sizes_of_a_head() -> None:
    for sizes, name in [((0, V), "hidden_size"), ((D, 0), "vocab_size"), ((D, -1), "vocab_size")]:
        with refused(name):
            LMHead(*sizes)


def test_what_a_head_is_made_from() -> None:
    with refused("linear", "Embedding"):
        LMHead.from_linear(nn.Embedding(V, D))  # type: ignore[arg-type]
    with refused("embedding", "Linear"):
        LMHead.tied(nn.Linear(D, V))  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [0, -2])
def test_rank_of_a_low_rank_delta(rank: int) -> None:
    with refused("rank", str(rank)):
        LMHead(D, V).add_low_rank(rank)


# --- not errors -----------------------------------------------------------------------------------


def test_nan_in_hidden_stays_in_its_row() -> None:
    hidden = HIDDEN.clone()
    hidden[1, 0] = torch.nan
    rows = loss(hidden, reduction="none")
    assert rows.isnan().tolist() == [False, True, False, False]
    assert loss(hidden).isnan()
    answers = query(hidden, WEIGHT, log_prob=TARGETS, entropy=True, logsumexp=True)
    for answer in (answers.log_prob, answers.entropy, answers.logsumexp):
        assert answer is not None
        assert answer.isnan().tolist() == [False, True, False, False]


def test_empty_batch() -> None:
    hidden = torch.empty(0, D, requires_grad=True)
    weight = WEIGHT.clone().requires_grad_()
    targets = torch.empty(0, dtype=torch.long)
    assert loss(hidden, weight, targets).isnan()
    assert loss(hidden, weight, targets, reduction="none").shape == (0,)
    total = loss(hidden, weight, targets, reduction="sum")
    assert total == 0
    gradients = torch.autograd.grad(total, (hidden, weight))
    assert gradients[0].shape == (0, D)
    assert_close(gradients[1], torch.zeros(V, D))
    answers = query(hidden, weight, log_prob=targets, entropy=True, argmax=True, top_k=2)
    assert answers.log_prob is not None
    assert answers.log_prob.shape == (0,)
    assert answers.top_k is not None
    assert answers.top_k.indices.shape == (0, 2)


def test_a_vocabulary_of_one_token() -> None:
    hidden, weight = HIDDEN.clone().requires_grad_(), WEIGHT[:1].clone().requires_grad_()
    value = loss(hidden, weight, torch.zeros(N, dtype=torch.long))
    assert value == 0
    for gradient in torch.autograd.grad(value, (hidden, weight)):
        assert torch.count_nonzero(gradient) == 0
