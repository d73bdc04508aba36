"""The one comparator of the tests: NaN, a wrong shape or a wrong dtype always fails.

`assert_close` is for results whose rounding is known. `assert_as_good_as` is for everything else:
the truth is float64, and ours may be as far from it as plain torch in the same dtype is on the
same input, plus a small constant. No result is less precise than plain torch.
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array: TypeAlias = npt.NDArray[np.float64]
Value: TypeAlias = Tensor | npt.NDArray[np.generic] | np.generic | float


def float64(value: Value) -> Array:
    """The value as a NumPy float64 array; exact for every dtype but integers above 2^53."""
    if isinstance(value, Tensor):
        value = value.detach().to(torch.float64).cpu().numpy()
    return np.asarray(value, dtype=np.float64)


def assert_close(
    actual: Value | None,
    expected: Value,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    dtype: torch.dtype | None = None,
    equal_nan: bool = False,
    what: str = "result",
) -> None:
    """|actual - expected| <= atol + rtol |expected|, element by element; shapes must be the same.

    Infinities must agree in place and sign. A NaN fails, also where it is expected, unless
    `equal_nan` allows it; then the positions must agree. `dtype` is that of `actual`.
    """
    a, e = _same_kind(actual, expected, dtype=dtype, equal_nan=equal_nan, what=what)
    finite = np.isfinite(e)
    difference = np.abs(_where(finite, a) - _where(finite, e))
    excess = difference - (atol + rtol * np.abs(_where(finite, e)))
    if (excess > 0).any():
        index = np.unravel_index(int(np.argmax(excess)), excess.shape)
        raise AssertionError(
            f"{what} differs in {int((excess > 0).sum())} of {a.size} entries, most at "
            f"{_index(index)}: {a[index]!r} should be {e[index]!r} (difference "
            f"{difference[index]:.3g}, atol {atol:.3g}, rtol {rtol:.3g})"
        )


def assert_as_good_as(
    ours: Value | None,
    plain: Value,
    truth: Value,
    slack: float,
    *,
    scale: float | None = None,
    dtype: torch.dtype | None = None,
    equal_nan: bool = False,
    what: str = "result",
) -> None:
    """max |ours - truth| <= max |plain - truth| + slack · scale.

    `scale` is the largest |truth| unless given: a difference of two large numbers has the rounding
    errors of those, not of the result. Where the truth is infinite or NaN, ours must be the same.
    Positions at which plain torch is not finite but the truth is do not widen the tolerance.
    """
    a, t = _same_kind(ours, truth, dtype=dtype, equal_nan=equal_nan, what=what)
    p = float64(plain)
    if p.shape != t.shape:
        raise AssertionError(f"{what}: plain torch has shape {p.shape}, the truth {t.shape}")
    finite = np.isfinite(t)
    wrong = np.abs(_where(finite, a) - _where(finite, t))
    comparable = finite & np.isfinite(p)
    allowed = np.abs(_where(comparable, p) - _where(comparable, t)).max(initial=0.0)
    if scale is None:
        scale = np.abs(_where(finite, t)).max(initial=0.0)
    if not np.isfinite(scale):
        raise AssertionError(f"{what}: the scale of a comparison must be finite, it is {scale}")
    limit = allowed + slack * scale
    if wrong.max(initial=0.0) > limit:
        index = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
        raise AssertionError(
            f"{what} is less exact than plain torch: off by {wrong[index]:.3g} at {_index(index)} "
            f"({a[index]!r} should be {t[index]!r}); torch is off by at most {allowed:.3g}, "
            f"and {slack:.3g} x {scale:.3g} is granted on top"
        )


def _same_kind(
    actual: Value | None, expected: Value, *, dtype: torch.dtype | None, equal_nan: bool, what: str
) -> tuple[Array, Array]:
    """Both as float64, once dtype, shape and everything that is not finite agree."""
    if actual is None:
        raise AssertionError(f"{what} is None")
    if dtype is not None:
        got = actual.dtype if isinstance(actual, Tensor) else type(actual)
        if got != dtype:
            raise AssertionError(f"{what} has dtype {got}, it should have {dtype}")
    a, e = float64(actual), float64(expected)
    if a.shape != e.shape:
        raise AssertionError(f"{what} has shape {a.shape}, it should have {e.shape}")
    if not equal_nan and np.isnan(e).any():
        raise AssertionError(f"{what}: the expected value is NaN, but equal_nan is False")
    for test in (np.isnan, np.isposinf, np.isneginf):
        found_at, expected_at = test(a), test(e)
        if (found_at != expected_at).any():
            index = np.unravel_index(int(np.argmax(found_at != expected_at)), a.shape)
            raise AssertionError(
                f"{what} is {a[index]!r} at {_index(index)}, it should be {e[index]!r}"
            )
    return a, e


def _where(mask: npt.NDArray[np.bool_], values: Array) -> Array:
    """The values under the mask, 0 elsewhere, so that inf - inf is never computed."""
    return np.where(mask, values, 0.0)


def _index(index: tuple[np.intp, ...]) -> str:
    return f"[{', '.join(str(int(i)) for i in index)}]"
