"""The page's golden numbers are those of the textbook today."""

import json
import math
from typing import Any

import pytest

from explorer.golden import FILE, golden, plain


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two trees of JSON differ; numbers may differ by what another processor's exp does."""
    if type(a) is not type(b):
        return [path]
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return [path]
        return [d for key in a for d in differences(a[key], b[key], f"{path}.{key}")]
    if isinstance(a, list):
        if len(a) != len(b):
            return [path]
        return [d for i, x in enumerate(a) for d in differences(x, b[i], f"{path}[{i}]")]
    if isinstance(a, float):
        # float32 and float16 results may differ in their last place, sums by their order.
        tolerance = {"formats": 2e-3, "samplers": 1e-9}.get(path[1:].split("[")[0], 1e-13)
        return [] if math.isclose(a, b, rel_tol=tolerance, abs_tol=1e-15) else [path]
    return [] if a == b else [path]


def test_the_file_is_current() -> None:
    stored = json.loads(FILE.read_text(encoding="utf-8"))
    assert not differences(plain(golden()), stored), "run: python tests/explorer/golden.py"


@pytest.mark.parametrize("other", [[1.0, "nan"], [1.0], [1.0, 2.0 + 1e-9], {"a": 1.0}])
def test_a_difference_is_seen(other: Any) -> None:
    assert differences([1.0, 2.0], other)
