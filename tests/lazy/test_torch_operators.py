"""Every operator that torch tests itself, on its own samples: lazy logits against dense ones.

The samples become logits by a head whose weight is the identity. Values, shapes, dtypes, gradients,
`requires_grad` and what was written to must agree, and what torch accepts must not raise.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lmhead import LazyLogits, LMHead

if find_spec("expecttest") is None:  # torch's module imports it; nothing here uses it
    _stub: Any = ModuleType("expecttest")
    _stub.TestCase = object
    sys.modules["expecttest"] = _stub

_loaded = set(sys.modules)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_methods_invocations import op_db
# torch's module imports distutils, and setuptools warns when pip is looked up after that.
for _name in set(sys.modules) - _loaded:
    if _name.split(".")[0] == "distutils":
        del sys.modules[_name]

pytestmark = pytest.mark.filterwarnings("ignore")

# What a wrapper without memory refuses, and where torch's own results are not determined.
REFUSED = {"resize_", "resize_as_", "as_strided", "addbmm", "squeeze"}  # the last three in place
UNDETERMINED = {"empty_like", "new_empty", "new_empty_strided", "to_sparse"}
COUNTED_TWICE = {"index_fill"}  # torch counts repeated places in the gradient of the value
# Of images, attention and matrices: logits are built for them, as for all that is not recorded.
ELSEWHERE = ("sparse", "fft.", "linalg.", "_", "signal.", "masked.", "cholesky", "lu", "qr", "svd",
             "pca", "ormqr", "geqrf", "triangular_", "stft", "istft", "native_", "grid_", "max_p",
             "nn.functional.conv", "nn.functional.max_", "nn.functional.avg_", "nn.functional.adap",
             "nn.functional.fractional", "nn.functional.interpolate", "nn.functional.grid_sample",
             "nn.functional.upsample", "nn.functional.pixel", "nn.functional.pad",
             "nn.functional.embedding", "nn.functional.multi_head", "nn.functional.scaled_dot",
             "nn.functional.unfold", "nn.functional.fold")  # fmt: skip
SAMPLES = 1
GROUPS = 16


def _operators() -> list[Any]:
    every: list[Any] = op_db
    return [
        op for op in every
        if torch.float64 in op.supported_dtypes("cpu")
        and not op.name.startswith(ELSEWHERE)
        and op.name not in UNDETERMINED | COUNTED_TWICE
    ]  # fmt: skip


@cache
def _identity(size: int, dtype: torch.dtype) -> Tensor:
    """Made once: some samples have a thousand columns."""
    return torch.eye(size, dtype=dtype)


def _lazy(x: Tensor) -> Any:
    head = LMHead(x.shape[-1], x.shape[-1], dtype=x.dtype, device="meta")
    del head.weight
    head.weight = _identity(x.shape[-1], x.dtype)
    return head(x)


def _dense(x: Tensor) -> Tensor:
    return F.linear(x, _identity(x.shape[-1], x.dtype))


def _can_be_logits(x: Any) -> bool:
    floating = isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 0 and x.numel() > 0
    return floating and bool(x.isfinite().all())


def _tensors(found: Any) -> list[Tensor]:
    made = [x.materialize() if isinstance(x, LazyLogits) else x for x in tree_leaves(found)]
    return [
        x.to_dense() if isinstance(x, Tensor) and x.layout != torch.strided else x for x in made
    ]


def _run(function: Callable[..., Any], sample: Any, make: Callable[[Tensor], Any]) -> list[Any]:
    """Return results, arguments afterwards, and gradients."""
    leaves: list[Tensor] = []

    def convert(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        copy = x.detach().clone()
        if not x.is_floating_point():
            return copy
        if x.requires_grad:
            leaves.append(copy.requires_grad_())
        return make(copy) if _can_be_logits(x) else copy * 1

    args = tree_map(convert, (sample.input, *sample.args))
    kwargs = tree_map(convert, sample.kwargs)
    torch.manual_seed(0)
    made = _tensors(function(*args, **kwargs))
    smooth = [x for x in made if isinstance(x, Tensor) and x.requires_grad]
    grads: list[Any] = []
    if smooth and leaves:
        torch.manual_seed(1)
        upstream = [torch.randn(x.shape, dtype=x.dtype) for x in smooth]
        found = torch.autograd.grad(smooth, leaves, upstream, allow_unused=True)
        grads = [
            torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)
        ]
    after = [x for x in _tensors((args, kwargs)) if isinstance(x, Tensor)]
    flags = [x.requires_grad for x in made if isinstance(x, Tensor)]
    return [*made, *after, *grads, flags]


def _runs(op: Any) -> Iterator[tuple[str, Callable[..., Any], Any]]:
    functions = {"function": op.op, "in place": op.inplace_variant}
    for grad in (True, False):
        samples = op.sample_inputs(
            "cpu", torch.float64, requires_grad=grad and op.supports_autograd
        )
        for k, sample in enumerate(samples):
            if k == SAMPLES:
                break
            first = next(iter(tree_leaves((sample.input, sample.args))), None)
            if not _can_be_logits(first):
                continue
            for way, function in functions.items():
                if function is not None and not (op.name in REFUSED and way == "in place"):
                    yield f"{op.name} {op.variant_test_name} {way} {k}", function, sample


@pytest.mark.parametrize("group", range(GROUPS))
def test_as_on_a_tensor(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Each sample would look through the stack, and all loaded modules, for a test of unittest.
    monkeypatch.setattr(common_utils, "extract_test_fn", lambda: None)
    wrong = []
    for op in _operators()[group::GROUPS]:
        if op.name in ("resize_", "resize_as_"):
            continue
        for name, function, sample in _runs(op):
            try:
                expected = _run(function, sample, _dense)
            except Exception:
                continue  # torch refuses it as well
            try:
                ours = _run(function, sample, _lazy)
                torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9, equal_nan=True)
            except Exception as error:
                wrong.append(f"{name}: {type(error).__name__} {str(error)[:200]}")
    assert not wrong, "\n".join(wrong)


def test_the_operators_exist() -> None:
    assert len(_operators()) > 300
