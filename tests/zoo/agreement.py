"""The comparison of a lazy run with a dense one: the error of plain torch, plus a few roundings."""

import torch
from compare import assert_as_good_as, assert_close
from torch import Tensor

from zoo.catalogue import Run


def agree(ours: Run, plain: Run, truth: Run, dtype: torch.dtype) -> None:
    """Results and gradients of a lazy run are as good as those of a dense run in the same dtype."""
    # A snippet that casts to float32 has the roundings of float32 in everything it returns.
    coarse = [torch.finfo(r.dtype).eps for r in plain.results if r.is_floating_point()]
    slack = 64 * max([torch.finfo(dtype).eps, *coarse])
    assert len(ours.results) == len(plain.results)
    for k, (our, torchs, true) in enumerate(
        zip(ours.results, plain.results, truth.results, strict=True)
    ):
        same(our, torchs, true, slack, f"result {k}")
        assert our.requires_grad == torchs.requires_grad, f"requires_grad of result {k}"
    assert ours.gradients.keys() == plain.gradients.keys()
    for name, torchs in plain.gradients.items():
        same(ours.gradients[name], torchs, truth.gradients[name], slack, f"gradient of {name}")


def same(ours: Tensor, plain: Tensor, truth: Tensor, slack: float, what: str) -> None:
    if plain.is_floating_point():
        nan = bool(torch.isnan(truth).any())
        finite = torch.nan_to_num(truth.detach(), 0, 0, 0).abs()
        scale = max(1.0, float(finite.amax())) if truth.numel() else 1.0
        assert_as_good_as(
            ours, plain, truth, slack, scale=scale, dtype=plain.dtype, equal_nan=nan, what=what
        )
    else:
        assert_close(ours, plain, dtype=plain.dtype, what=what)
