"""`max_bytes` decides how the work is cut, and nothing else: the numbers stay the same.

From everything at once, through chunks of rows whose logits are kept until their gradients are
done, down to tiles that are computed twice.
"""

from typing import Any

import pytest
import torch
from compare import assert_close
from contract.cases import Inputs, Options, assert_true, inputs, run
from contract.implementations import Functional

import lmhead

# 300 rows of 101 tokens take 240 kB in float64.
BYTES = [2**e for e in (9, 12, 14, 16, 17, 18, 20)]


def rows_of_every_kind() -> Inputs:
    case = inputs(300, vocab=101, dim=7)
    case.targets[::7] = -100
    case.targets[120:200] = -100
    case.bias[60:75] = -torch.inf
    case.targets[(case.targets >= 60) & (case.targets < 75)] = 0
    return case


@pytest.mark.parametrize("max_bytes", BYTES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum", "label_smoothing": 0.1, "softcap": 6.0},
        {"reduction": "none", "scale": 0.5},
        {"num_items": 50, "z_loss": 0.01},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_loss_and_gradients(options: Options, max_bytes: int) -> None:
    hidden, weight, bias, targets = rows_of_every_kind()
    shape = (300,) if options.get("reduction") == "none" else ()
    upstream = torch.linspace(0.3, 1.7, 300, dtype=torch.float64)[: len(shape) * 300 or 1]
    upstream = upstream.reshape(shape)
    outcome = run(
        Functional("", max_bytes), hidden, weight, targets, bias=bias, upstream=upstream, **options
    )
    assert_true(outcome, hidden, weight, targets, bias=bias, upstream=upstream, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_gradients_of_any_cut_differ_by_rounding_only(dtype: torch.dtype) -> None:
    case = rows_of_every_kind()
    hidden, weight, bias = (t.to(dtype) for t in case[:3])
    outcomes = [
        run(Functional("", max_bytes), hidden, weight, case.targets, bias=bias)
        for max_bytes in BYTES
    ]
    # One rounding of the last place for bfloat16: the sums themselves are float32.
    rtol = 1e-5 if dtype == torch.float32 else 2.0**-7
    for outcome in outcomes[:-1]:
        assert_close(outcome.loss, outcomes[-1].loss, rtol=1e-6)
        for ours, whole in zip(outcome.grads, outcomes[-1].grads, strict=True):
            assert_close(ours, whole, rtol=rtol, atol=1e-7)


@pytest.mark.parametrize("max_bytes", BYTES)
def test_answers(max_bytes: int) -> None:
    hidden, weight, bias, targets = rows_of_every_kind()
    questions: dict[str, Any] = {
        "bias": bias,
        "log_prob": targets.clamp(min=0),
        "rank": targets.clamp(min=0),
        "entropy": True,
        "argmax": True,
        "top_k": 9,
        "kl_to": (hidden.flip(0), weight),
    }
    cut: Any = lmhead.query(hidden, weight, max_bytes=max_bytes, **questions)
    whole: Any = lmhead.query(hidden, weight, max_bytes=2**30, **questions)
    for name in ("log_prob", "entropy", "kl"):
        assert_close(getattr(cut, name), getattr(whole, name), rtol=1e-10, atol=1e-12, what=name)
    for name in ("rank", "argmax"):
        assert_close(getattr(cut, name), getattr(whole, name), what=name)
    assert_close(cut.top_k.indices, whole.top_k.indices)
    assert_close(cut.top_k.values, whole.top_k.values, rtol=1e-12, atol=1e-12)
