"""A conformance case, and a run of an implementation through them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

Kind = Literal["loss", "sampler", "decode"]
Status = Literal["passed", "failed", "unsupported"]


class Case(NamedTuple):
    """One property that an implementation must have."""

    name: str  # of the case, unique
    kind: Kind  # "loss", "sampler" or "decode"
    origin: str  # the issue it comes from, or the document that promises the property
    # called with the implementation; raises AssertionError if it fails
    check: Callable[[Any], None]

    @property
    def summary(self) -> str:
        """The first line of the check's docstring."""
        return (self.check.__doc__ or "").strip().splitlines()[0].rstrip(".")


class Result(NamedTuple):
    """The outcome of a case: `detail` is the failure, or what is not supported."""

    case: Case
    status: Status
    detail: str


CASES: dict[str, Case] = {}


def case(kind: Kind, origin: str) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Register a function as a case, named as the function is."""

    def register(check: Callable[[Any], None]) -> Callable[[Any], None]:
        name = check.__name__
        assert name not in CASES, name
        CASES[name] = Case(name, kind, origin, check)
        return check

    return register


def run_cases(implementation: Any, cases: Iterable[Case]) -> list[Result]:
    """Run cases; an option or method the implementation does not have is "unsupported"."""
    return [_run(implementation, each) for each in cases]


def _run(implementation: Any, each: Case) -> Result:
    try:
        each.check(implementation)
    except NotImplementedError as missing:
        return Result(each, "unsupported", str(missing) or "not supported")
    except Exception as error:
        if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
            return Result(each, "unsupported", str(error))
        message = " ".join(str(error).split()) or type(error).__name__
        if not isinstance(error, AssertionError):
            message = f"{type(error).__name__}: {message}"
        return Result(each, "failed", message[:300])
    return Result(each, "passed", "")


def expect(holds: bool, message: str) -> None:
    """Fail the case with a message unless the condition holds; unlike `assert`, also under -O."""
    if not holds:
        raise AssertionError(message)


def gradient_of(leaf: Tensor, name: str) -> Tensor:
    """Return the gradient of a leaf; fail the case if it has none."""
    if leaf.grad is None:
        raise AssertionError(f"no gradient of {name}")
    return leaf.grad


def expect_close(
    got: Tensor, want: Any, what: str, *, rtol: float = 1e-4, atol: float = 1e-5
) -> None:
    """Compare with the float64 truth; NaN and infinities must be at the same positions."""
    ours = got.detach().double().numpy()
    truth = np.asarray(want, dtype=np.float64)
    expect(ours.shape == truth.shape, f"{what} has shape {ours.shape}, should have {truth.shape}")
    if not np.allclose(ours, truth, rtol=rtol, atol=atol, equal_nan=True):
        with np.errstate(invalid="ignore"):
            off = np.abs(ours - truth)
        worst = tuple(
            int(i) for i in np.unravel_index(np.nan_to_num(off, nan=math.inf).argmax(), off.shape)
        )
        raise AssertionError(
            f"{what}{list(worst)} is {ours[worst]:.6g}, should be {truth[worst]:.6g}"
        )


def expect_refusal(call: Callable[[], Any], what: str) -> None:
    """Check that the call raises ValueError, RuntimeError, IndexError or TypeError."""
    try:
        got = call()
    except NotImplementedError:
        raise
    except (ValueError, RuntimeError, IndexError, TypeError, AssertionError) as error:
        if "unexpected keyword argument" in str(error):
            raise
        return
    raise AssertionError(f"{what} must be refused; got {torch.as_tensor(got).tolist()}")
