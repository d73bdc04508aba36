"""The page's plans are the package's today, and torch holds the tensors that the page names."""

import json

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import lmhead
from explorer.golden_plan import FILE, golden
from lmhead.sweep.questions import make_plan

N, V, D = 96, 5000, 16


def test_the_file_is_current() -> None:
    stored = json.loads(FILE.read_text(encoding="utf-8"))
    assert golden() == stored, "run: python tests/explorer/golden_plan.py"


def peak(dtype: torch.dtype, way: str) -> tuple[int, int]:
    """The most bytes that a loss and its backward pass hold at one time, and what they leave."""
    hidden = torch.randn(N, D, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, D, dtype=dtype, requires_grad=True)
    targets = torch.randint(V, (N,))

    def loss() -> Tensor:
        if way == "streamed":
            return lmhead.linear_cross_entropy(hidden, weight, targets)
        logits = F.linear(hidden, weight)
        return F.cross_entropy(logits.float() if way == "upcast" else logits, targets)

    def step() -> None:
        loss().backward()  # type: ignore[no-untyped-call]
        hidden.grad = weight.grad = None

    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        loss().backward()  # type: ignore[no-untyped-call]
    assert seen.profiler is not None
    assert seen.profiler.kineto_results is not None
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most, now


@pytest.mark.parametrize(
    ("dtype", "way", "per_logit"),
    [
        (torch.float32, "plain", 3 * 4),
        (torch.float32, "upcast", 3 * 4),
        (torch.bfloat16, "plain", 3 * 2),
        (torch.bfloat16, "upcast", 3 * 4),
    ],
)
def test_torch_holds_three_tables_at_its_peak(dtype: torch.dtype, way: str, per_logit: int) -> None:
    most, _ = peak(dtype, way)
    assert most == pytest.approx(per_logit * N * V, rel=0.03)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_streamed_loss_holds_what_the_page_says(dtype: torch.dtype) -> None:
    converts = dtype == torch.bfloat16
    plan = make_plan(N, V, D, itemsize=4, converts=converts, retain=True)
    results = dtype.itemsize * (V + N) * D
    sums = 4 * (V + N) * D if converts else 0
    most, left = peak(dtype, "streamed")
    assert left == pytest.approx(results, rel=0.05)
    assert most - results <= (plan.bytes + sums) * 1.02
    assert most - results >= sums
