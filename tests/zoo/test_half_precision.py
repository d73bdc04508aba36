"""Every snippet of the catalogue on a bfloat16 head, dense and lazy.

The truth is the dense run in float64 on the same numbers: those of bfloat16, converted. The largest
error of a lazy result may be that of the dense bfloat16 result plus `SLACK` times the largest true
value. Ids, counts and masks must be those of the truth or those of dense bfloat16.
"""

import warnings

import pytest
import torch
from compare import assert_as_good_as
from torch import Tensor

import zoo.snippets  # noqa: F401
from lmhead import PerformanceWarning
from zoo.catalogue import (
    SNIPPETS,
    Batch,
    Run,
    Sizes,
    Snippet,
    gradients,
    logits_of,
    make_batch,
    materialized,
)

HALF = torch.bfloat16

# Six roundings to bfloat16.
SLACK = 3 * torch.finfo(HALF).eps

# The result depends on which of two values is larger, and both round to one bfloat16 number: in the
# truth, or in the lazy run after its own roundings.
DECISIONS = {
    "decoding-contrastive_decoding": "log-probabilities -4.093 and -4.097, a cutoff of -4.087",
    "in_place-augmented_operators": "the largest logits of a row, 4.266 and 4.254, are both 4.25",
}

# Differences of numbers of this size, each of which is rounded to bfloat16.
DIFFERENCES = {
    "trl-dpo_sigmoid": 32.0,  # log-probabilities of sequences
    "trl-dpo_weighting_raw": 24.0,  # twice a log-sum-exp
    "verl-sum_of_squared_probabilities": 24.0,  # the same, in an exponent
}

# What torch itself does not do in bfloat16.
REFUSED = {
    "metrics-numpy_of_detached_logits": "NumPy has no bfloat16",
    "openrlhf-log_probs_from_logits": "the snippet has no branch for bfloat16",
    "order_statistics-quantiles": "quantile() takes float32 and float64",
    "trl-grpo_entropy_mask": "quantile() takes float32 and float64",
    "verl-clipped_by_covariance": "quantile() takes float32 and float64",
}


class RoundedBatch(Batch):
    """A batch whose large tensors have numbers of bfloat16 too, whatever its dtype."""

    def _normal(self, seed: int) -> Tensor:
        return super()._normal(seed).to(HALF).to(self.row.dtype)


def batch_of_half(dtype: torch.dtype) -> Batch:
    """The numbers of a bfloat16 batch, in another dtype."""
    half = make_batch(Sizes(), HALF)
    leaves = {name: t.detach().to(dtype).requires_grad_() for name, t in half.leaves.items()}
    return RoundedBatch(
        sizes=half.sizes,
        ids=half.ids,
        labels=half.labels,
        mask=half.mask,
        advantages=half.advantages.to(dtype),
        temperature=leaves["temperature"],
        row=leaves["row"],
        token_bias=leaves["token_bias"],
        class_weight=half.class_weight.to(dtype),
        allowed=half.allowed,
        rng=half.rng,
        leaves=leaves,
    )


def run_half(entry: Snippet, dtype: torch.dtype, *, lazy: bool) -> Run:
    """Call a snippet as `zoo.catalogue.run` does, on the numbers of a bfloat16 batch."""
    x = batch_of_half(dtype)
    leaf = x.leaves
    with torch.set_grad_enabled(entry.grad):
        z = logits_of(leaf["hidden"], leaf["weight"], leaf["bias"], lazy=lazy)
        if entry.two:
            x.other = logits_of(leaf["other_hidden"], leaf["other_weight"], None, lazy=lazy)
        torch.manual_seed(5)
        made = entry.function(z, x)
        results = tuple(map(materialized, made if isinstance(made, tuple) else (made,)))
    return Run(results, gradients(results, leaf))


def lazy_run(entry: Snippet) -> Run:
    with warnings.catch_warnings():
        if entry.builds is not None:
            warnings.simplefilter("ignore", PerformanceWarning)
        return run_half(entry, HALF, lazy=True)


def compare(ours: Tensor, plain: Tensor, truth: Tensor, size: float, what: str) -> None:
    """Ours is as good as plain torch; `size` is that of the numbers it was computed from."""
    assert ours.dtype == plain.dtype, what
    if not plain.is_floating_point():
        assert ours.shape == plain.shape, what
        assert bool(((ours == truth) | (ours == plain)).all()), f"{what} is neither"
        return
    nan = bool(torch.isnan(truth).any())
    finite = torch.nan_to_num(truth.detach(), 0, 0, 0).abs()
    scale = max(size, float(finite.amax())) if truth.numel() else size
    assert_as_good_as(
        ours, plain, truth, SLACK, scale=scale, dtype=plain.dtype, equal_nan=nan, what=what
    )


def compare_runs(name: str) -> None:
    entry, size = SNIPPETS[name], DIFFERENCES.get(name, 1.0)
    ours = lazy_run(entry)
    plain, truth = (run_half(entry, dtype, lazy=False) for dtype in (HALF, torch.float64))
    assert len(ours.results) == len(plain.results)
    for k, (our, torchs, true) in enumerate(
        zip(ours.results, plain.results, truth.results, strict=True)
    ):
        compare(our, torchs, true, size, f"result {k}")
        assert our.requires_grad == torchs.requires_grad, f"requires_grad of result {k}"
    assert ours.gradients.keys() == plain.gradients.keys()
    for leaf, torchs in plain.gradients.items():
        compare(ours.gradients[leaf], torchs, truth.gradients[leaf], size, f"gradient of {leaf}")


@pytest.mark.parametrize("name", sorted(SNIPPETS.keys() - {*DECISIONS, *REFUSED}))
def test_values_and_gradients(name: str) -> None:
    compare_runs(name)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_as_by_torch(name: str) -> None:
    """Lazy logits raise the exception that a bfloat16 tensor does."""
    with pytest.raises((TypeError, RuntimeError, AttributeError)) as plain:
        run_half(SNIPPETS[name], HALF, lazy=False)
    with pytest.raises(plain.type):
        lazy_run(SNIPPETS[name])


@pytest.mark.parametrize("name", sorted(DECISIONS))
def test_decisions_differ_in_few_entries(name: str) -> None:
    """Shapes, dtypes and nine of ten entries are those of dense bfloat16."""
    ours = lazy_run(SNIPPETS[name])
    plain = run_half(SNIPPETS[name], HALF, lazy=False)
    for our, torchs in zip(ours.results, plain.results, strict=True):
        assert (our.shape, our.dtype) == (torchs.shape, torchs.dtype)
        same = torch.isclose(our.double(), torchs.double(), rtol=0.05, atol=0.05)
        assert float(same.double().mean()) > 0.9


def test_the_lists_name_snippets() -> None:
    listed = DECISIONS.keys() | DIFFERENCES.keys() | REFUSED.keys()
    assert listed <= SNIPPETS.keys()
    assert len(listed) <= 15, "the lists of exceptions must stay short"
