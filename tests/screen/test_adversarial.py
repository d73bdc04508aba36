"""The screened answer is that of float64 over all tokens, whatever the head: no disagreement."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmhead.screen import ScreenedHead
from screen import heads

pytestmark = pytest.mark.both_cores

PROBLEMS = st.fixed_dictionaries(
    {
        "weights": st.sampled_from(sorted(heads.WEIGHTS)),
        "vocab": st.sampled_from([1, 2, 3, 255, 256, 257, 700, 1100]),
        "size": st.sampled_from([1, 2, 7, 63, 64, 65, 130, 192]),
        "rows": st.integers(1, 5),
        "k": st.sampled_from([1, 2, 5, 50]),
        "bias": st.sampled_from(heads.BIASES),
        "softcap": st.sampled_from([None, 30.0, 0.5]),
        "scale": st.sampled_from([1.0, 0.125, 3.0, -1.0, 0.0]),
        "bits": st.sampled_from([8, "4+4"]),
        "dtype": st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
        "calibrated": st.booleans(),
        "seed": st.integers(0, 2**32),
    }
)


@settings(max_examples=150, deadline=None)
@given(PROBLEMS)
def test_the_answer_is_that_of_float64(problem: dict[str, object]) -> None:
    check(**problem)  # type: ignore[arg-type]


def check(
    *,
    weights: str,
    vocab: int,
    size: int,
    rows: int,
    k: int,
    bias: str,
    softcap: float | None,
    scale: float,
    bits: object,
    dtype: torch.dtype,
    calibrated: bool,
    seed: int,
) -> None:
    random = torch.Generator().manual_seed(seed)
    weight = heads.WEIGHTS[weights](vocab, size, random).to(dtype)
    if not bool(weight.isfinite().all()):
        return  # 1e25 in float16
    hidden = heads.states(rows, weight.float(), random).to(dtype)
    hidden = torch.where(hidden.isfinite(), hidden, 0.0)
    head = heads.head_of(weight, heads.bias_of(bias, vocab, random), softcap=softcap, scale=scale)
    calibration = hidden + heads.normal(rows, size, random=random).to(dtype)
    screened = ScreenedHead(
        head,
        bits=bits,  # type: ignore[arg-type]
        calibration=calibration if calibrated and bool(calibration.isfinite().all()) else None,
    )
    if head.bias is not None and bool((head.bias == -torch.inf).all()):
        assert bool((screened.argmax(hidden).token == -1).all())
        return
    result = screened.verify(hidden, k=min(k, vocab))
    assert result.states == rows
    assert result.disagreements == 0
