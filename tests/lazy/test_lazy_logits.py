"""`LazyLogits` has the attributes of the logits, stays lazy, computes nothing until queried."""

import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from compare import assert_close
from lazy_and_dense import Twins, as_function, assert_same, materialized, twins
from torch_watch import Allocations, count_products, no_operation

from lmhead import LazyLogits, LMHead, PerformanceWarning

B, T, V = 2, 3, 13


@pytest.fixture
def case() -> Twins:
    return twins(B, T)


# --- what it says of itself -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_looks_like_the_logits(dtype: torch.dtype) -> None:
    case = twins(B, T, dtype=dtype)
    lazy, dense = case.lazy, case.dense
    assert isinstance(lazy, LazyLogits)
    assert lazy.shape == dense.shape
    assert isinstance(lazy.shape, torch.Size)
    assert lazy.dtype == dense.dtype
    assert lazy.device == dense.device
    assert lazy.requires_grad is True
    assert lazy.ndim == lazy.dim() == dense.ndim
    assert lazy.size() == dense.size()
    assert (lazy.size(-1), lazy.size(0)) == (V, B)
    assert lazy.numel() == dense.numel()
    assert len(lazy) == B


@pytest.mark.parametrize("hidden_trained", [False, True])
@pytest.mark.parametrize("head_trained", [False, True])
def test_requires_grad(hidden_trained: bool, head_trained: bool) -> None:
    case = twins(B)
    case.head.requires_grad_(head_trained)
    case.hidden.requires_grad_(hidden_trained)
    assert case.lazy.requires_grad == case.dense.requires_grad
    assert not case.lazy.detach().requires_grad
    assert not case.lazy.detach().logsumexp(-1).requires_grad
    with torch.no_grad():
        assert not case.lazy.requires_grad
        assert not case.lazy.logsumexp(-1).requires_grad


def test_one_vector_is_enough() -> None:
    case = twins()
    assert case.lazy.shape == (V,)
    assert_same(case, lambda z: z.log_softmax(-1)[4])
    assert_same(case, lambda z: z.argmax(-1))


def test_calling_the_head_computes_nothing(case: Twins) -> None:
    assert count_products(lambda: case.lazy, B * T, 5, V) == 0
    with Allocations(limit=case.hidden.numel()):
        _ = case.lazy


def test_repr_computes_nothing_and_tells_shape_and_dtype(case: Twins) -> None:
    lazy = case.lazy
    with no_operation():
        text = repr(lazy) + str(lazy) + f"{lazy}"
    assert "LazyLogits" in text
    assert "2, 3, 13" in text
    assert "float64" in text


def test_questions_about_the_shape_compute_nothing(case: Twins) -> None:
    lazy = case.lazy
    with no_operation():
        _ = lazy.shape, lazy.dtype, lazy.device, lazy.requires_grad, lazy.numel(), lazy.size(-1)


@pytest.mark.parametrize("text", ["z == 0", "z != 1.5", "z == z", "z != z", "z == torch.zeros(V)"])
def test_equality_is_that_of_a_tensor(case: Twins, text: str) -> None:
    ours = materialized(as_function(text)(case.lazy))
    assert torch.equal(ours, as_function(text)(case.dense))


def test_equality_with_something_else_is_false(case: Twins) -> None:
    assert (case.lazy == None) is False  # noqa: E711
    assert (case.lazy == "logits") is False


def test_has_no_truth_value(case: Twins) -> None:
    with pytest.raises((TypeError, RuntimeError, ValueError)):
        bool(case.lazy)


def test_explain_says_tiles_bytes_and_products() -> None:
    lazy = twins(B, T, vocab=1000).lazy
    with Allocations(limit=1):  # views are free
        text = str(lazy.explain())
    assert re.search(r"\d+ (vocabulary )?tiles?|tiles?\D*\d+", text), text
    assert re.search(r"\d+(\.\d+)? ?([KMG]i?B|B|bytes)\b", text), text
    assert re.search(r"products?", text), text
    assert "1000" in text or "1,000" in text, text


def test_explain_counts_more_tiles_for_a_larger_vocabulary() -> None:
    def explained(vocab: int) -> str:
        head = LMHead(4, vocab, device="meta")
        return str(head(torch.empty(4096, 4, device="meta")).explain())

    assert explained(100) != explained(300_000)


# --- building the tensor --------------------------------------------------------------------------


def test_materialize_is_the_dense_tensor(case: Twins) -> None:
    assert_same(case, materialized)


@pytest.mark.parametrize(
    "operation",
    [
        "torch.sort(z, dim=-1).values",
        "z.sort(-1).values",
        "torch.cumsum(z, -1)",
        "z.softmax(-1) @ torch.ones(V, 2, dtype=torch.float64)",
        "torch.where(z > 0, z, torch.zeros((), dtype=torch.float64))",
        "z + torch.arange(V, dtype=torch.float64)",
        "z.transpose(0, -1)",
        "F.relu(z)",
        "z.sin()",
        "z.exp()",
        "z.sum(-1)",
        "z.mean(dim=(0, 1))",
        "z.min(-1).values",
        "z.max()",
        "z.argmax()",
        "z.argmin(-1)",
        "z.argmax(1)",
        "z.logsumexp(1)",
        "z.topk(2, dim=1).values",
        "z.topk(3, largest=False).values",
        "z.gather(0, ids(1, 3, 13, vocab=2))",
        "z.permute(2, 0, 1)",
        "z.view(-1)",
        "z.view(2, 39)",
        "z.masked_fill(torch.arange(V) > 5, -1.0)",
        "torch.cat([z, z], 1)",
        "torch.stack([z[0], z[1]])",
        "torch.cat([z[:1], torch.zeros(1, 3, V, dtype=torch.float64)])",
        "torch.isnan(z).any()",
        "(z > 0).sum()",
        "F.cross_entropy(z.transpose(1, 2), ids(2, 3))",
        "-(z.softmax(-1) * z.log_softmax(-1)).sum(-1)",
        "F.kl_div(z.log_softmax(-1), (z * 2).softmax(-1), reduction='batchmean')",
        "F.kl_div(z.log_softmax(-1), (z * 2).log_softmax(-1), log_target=True, reduction='sum')",
        "z.chunk(2)[1]",
        "z.split(1)[0]",
        "z.unbind(1)[2]",
        "z.select(1, -1)",
        "z.narrow(1, 0, 2)",
        "z.repeat_interleave(2, dim=0)",
        "z.expand(2, 2, 3, V)",
        "z.norm()",
        "z.amax(-1)",
        "z.index_select(-1, tensor([5, 5, 0]))",
        "z.type_as(torch.zeros(1))",
        "z.squeeze()",
        "abs(z)",
        "z - z.max(-1, keepdim=True).values",
        "z - z.logsumexp(-1, keepdim=True)",
        "z - z",
    ],
)
def test_what_cannot_be_streamed_is_right_all_the_same(case: Twins, operation: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PerformanceWarning)
        assert_same(case, as_function(operation))


def test_building_the_tensor_warns_once_with_its_size(case: Twins) -> None:
    lazy = case.lazy
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.sort(lazy, dim=-1)
    ours = [w for w in caught if issubclass(w.category, PerformanceWarning)]
    assert len(ours) == len(caught) == 1
    message = str(ours[0].message)
    # 2 x 3 x 13 float64: the shape, or 624 bytes
    assert re.search(r"2(, | x | × )3(, | x | × )13|624|0\.6\d* ?Ki?B", message), message
    assert "sort" in message, message
    assert ours[0].filename == __file__, "the warning must point at the caller's line"


@pytest.mark.parametrize(
    "statement",
    [
        "z.div_(2)",
        "z.mul_(2)",
        "z.tanh_()",
        "z.masked_fill_(torch.arange(13) > 5, -1.0)",
        "z[..., 0] = -1.0",
        "z[0] = 0.0",
        "z.zero_()",
        "F.relu(z, inplace=True)",
        "z.requires_grad_()",
    ],
)
def test_a_change_in_place_is_refused_or_done_but_never_lost(statement: str) -> None:
    case = twins(B, T, trained=False)
    lazy, dense = case.lazy, case.dense
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PerformanceWarning)
        try:
            exec(statement, {"z": lazy, "torch": torch, "F": F})
        except (TypeError, NotImplementedError, AttributeError, RuntimeError):
            return
        exec(statement, {"z": dense, "torch": torch, "F": F})
        assert lazy.requires_grad == dense.requires_grad
        assert_close(materialized(lazy), dense.detach(), rtol=1e-12, atol=1e-12)
