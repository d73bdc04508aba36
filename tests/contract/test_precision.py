"""Half precision: products in float32, sums in float32, gradients in the dtype of their tensor."""

import oracle
import pytest
import torch
from compare import assert_as_good_as, assert_close, float64

from contract.cases import Options, inputs, run
from contract.implementations import HALF, TORCH, Implementation, every_implementation

DTYPES = [torch.float32, torch.float64, *HALF]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@every_implementation(needs={"rows"})
def test_dtypes_and_errors(
    implementation: Implementation, reduction: str, dtype: torch.dtype
) -> None:
    """Half inputs give a float32 loss, as with `.float()` after the linear layer."""
    hidden, weight, bias, targets = inputs(48, vocab=101, dim=24, dtype=dtype)
    options: Options = {"bias": bias, "reduction": reduction}
    outcome = run(implementation, hidden, weight, targets, **options)
    plain = run(TORCH, hidden, weight, targets, **options)
    truth = oracle.linear_cross_entropy(hidden, weight, targets, **options)
    grads = oracle.linear_cross_entropy_backward(hidden, weight, targets, **options)
    # A log-sum-exp is rounded to float64: at 40, as here, by up to 16 eps, twice if sharded.
    slack = (32 if dtype == torch.float64 else 16) * torch.finfo(plain.loss.dtype).eps
    expected_dtype = torch.float32 if dtype in HALF else dtype
    assert_as_good_as(outcome.loss, plain.loss, truth, slack, dtype=expected_dtype, what="loss")
    for name, ours, torchs, true in zip(
        grads._fields, outcome.grads, plain.grads, grads, strict=True
    ):
        assert_as_good_as(ours, torchs, true, slack, dtype=dtype, what=name)


@pytest.mark.parametrize("dtype", HALF, ids=name_of)
@every_implementation(needs={"rows"})
def test_the_weight_gradient_of_many_rows_does_not_stall(
    implementation: Implementation, dtype: torch.dtype
) -> None:
    """Liger 512 and 827, CCE 14: a sum kept in bfloat16 stops growing after 256 equal terms.

    All hidden states are positive and only even tokens are targets, so the rows of the odd tokens
    gather 1024 contributions of one sign. What remains is the rounding of the result: 1 in 2^9
    for bfloat16, 1 in 2^12 for float16; half of that is rounding, the rest what we grant.
    """
    hidden, weight, bias, targets = inputs(1024, vocab=26, dim=8)
    hidden, weight = hidden.abs().to(dtype), (0.1 * weight).to(dtype)
    targets = targets // 2 * 2
    outcome = run(implementation, hidden, weight, targets, bias=bias.to(dtype))
    truth = oracle.linear_cross_entropy_backward(hidden, weight, targets, bias=bias.to(dtype))
    rtol = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}[dtype]
    for name in ("weight", "bias"):
        true = getattr(truth, name)[1::2]
        assert_close(getattr(outcome.grads, name)[1::2], true, rtol=rtol, dtype=dtype, what=name)


@pytest.mark.parametrize("dtype", HALF, ids=name_of)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@every_implementation(
    torch_differs="the gradient of the logits is rounded to half, and p - y = -1 loses the scale"
)
def test_the_upstream_gradient_is_not_rounded_to_half_precision(
    implementation: Implementation, reduction: str, dtype: torch.dtype
) -> None:
    """A loss is float32, and so is what reaches it: 1.0019 is 1 in bfloat16, a loss of scale.

    Roundings of single elements go both ways; their projection on the truth hardly moves.
    """
    hidden, weight, bias, targets = inputs(64, vocab=101, dim=24, dtype=dtype)
    upstream = torch.full((64,) if reduction == "none" else (), 1.0 + 0.49 * torch.finfo(dtype).eps)
    options: Options = {"bias": bias, "reduction": reduction, "upstream": upstream}
    outcome = run(implementation, hidden, weight, targets, **options)
    truth = oracle.linear_cross_entropy_backward(
        hidden, weight, targets, bias=bias, reduction=reduction, grad_output=upstream
    )
    for name in ("hidden", "weight"):
        true = getattr(truth, name)
        share = (float64(getattr(outcome.grads, name)) * true).sum() / (true * true).sum()
        assert_close(share, 1.0, atol=0.1 * torch.finfo(dtype).eps, what=f"gradient of {name}")


@pytest.mark.parametrize("dtype", HALF, ids=name_of)
@every_implementation()
def test_the_loss_of_many_rows_does_not_stall(
    implementation: Implementation, dtype: torch.dtype
) -> None:
    hidden, weight, bias, targets = inputs(1024, vocab=26, dim=8, dtype=dtype)
    loss = implementation.loss(hidden, weight, targets, bias=bias, reduction="sum")
    truth = oracle.linear_cross_entropy(hidden, weight, targets, bias=bias, reduction="sum")
    assert_close(loss, truth, rtol=1e-3, dtype=torch.float32)


@every_implementation(
    needs={"rows"}, torch_differs="its float16 logits end at 65504; ours are float32"
)
def test_float16_logits_beyond_the_range_of_float16(implementation: Implementation) -> None:
    hidden, weight, bias, targets = inputs(dtype=torch.float16, dim=16)
    hidden, weight = 200 * hidden, 200 * weight
    options: Options = {"bias": bias, "reduction": "none"}
    loss = implementation.loss(hidden, weight, targets, **options)
    truth = oracle.linear_cross_entropy(hidden, weight, targets, **options)
    assert abs(truth).max() > 65504
    assert_close(loss, truth, rtol=1e-6, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
@every_implementation()
def test_autocast(implementation: Implementation, dtype: torch.dtype) -> None:
    """float32 parameters under autocast: a float32 loss, and gradients in float32."""
    hidden, weight, bias, targets = inputs(dtype=torch.float32)
    truth = oracle.linear_cross_entropy(hidden, weight, targets, bias=bias)
    grads = oracle.linear_cross_entropy_backward(hidden, weight, targets, bias=bias)
    with torch.autocast("cpu", dtype=dtype):
        outcome = run(implementation, hidden, weight, targets, bias=bias)
        plain = run(TORCH, hidden, weight, targets, bias=bias)
    assert_as_good_as(outcome.loss, plain.loss, truth, 1e-5, dtype=torch.float32)
    for ours, torchs, true in zip(outcome.grads, plain.grads, grads, strict=True):
        assert_as_good_as(ours, torchs, true, 1e-2, dtype=torch.float32)
