"""Forced, allowed and forbidden tokens: as in Hugging Face, where it has the rule."""

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from compare import Array, assert_close

from lmhead import reference as ref

os.environ.setdefault("HF_HUB_OFFLINE", "1")
NINF = -np.inf
V = 6


def _case(length: int = 4) -> tuple[Array, Any]:
    rng = np.random.default_rng(0)
    z = rng.normal(size=(40, V))
    z[20:, 2] = NINF
    return z, rng.integers(0, 3, size=(40, length))


def _hugging_face(name: str, z: Array, context: Any, *args: Any, **options: Any) -> Any:
    processors = pytest.importorskip("transformers.generation.logits_process")
    theirs = getattr(processors, name)(*args, **options)
    return theirs(torch.as_tensor(context), torch.from_numpy(z)).numpy()


def test_sequence_bias_as_hugging_face() -> None:
    z, context = _case()
    bias = {(1,): 0.5, (0, 1): -2.0, (2, 1): 4.0, (0, 2, 1): 1.0, (0,) * 5: 8.0, (1,) * 9: 16.0}
    expected = _hugging_face("SequenceBiasLogitsProcessor", z, context, bias)
    assert_close(ref.sequence_bias(z, context, bias), expected)
    assert len(np.unique((expected[:, 1] - z[:, 1]).round(6))) > 3


def test_bad_words_as_hugging_face() -> None:
    z, context = _case()
    bad = [[3], [0, 1], [2, 1, 4], [5]]
    expected = _hugging_face("NoBadWordsLogitsProcessor", z, context, bad, eos_token_id=[5])
    assert_close(ref.bad_words_filter(z, context, bad, eos_token_id=[5]), expected)
    assert np.isneginf(expected[:, 1]).any()
    assert np.isfinite(expected[:, 1]).any()


@pytest.mark.parametrize("length", [1, 3, 4, 5])
def test_rules_of_length_as_hugging_face(length: int) -> None:
    z, context = _case(length)
    assert_close(
        ref.min_length_filter(z, length, 4, [0, 5]),
        _hugging_face("MinLengthLogitsProcessor", z, context, 4, [0, 5]),
    )
    assert_close(
        ref.min_length_filter(z, length - 1, 3, [0, 5]),  # one id is prompt
        _hugging_face("MinNewTokensLengthLogitsProcessor", z, context, 1, 3, [0, 5]),
    )
    assert_close(
        ref.forced_tokens(z, length, {1: 2}),  # 2 is cut in half of the rows: it comes anyway
        _hugging_face("ForcedBOSTokenLogitsProcessor", z, context, 2),
    )
    assert_close(
        ref.forced_tokens(z, length, {4: [1, 5]}),
        _hugging_face("ForcedEOSTokenLogitsProcessor", z, context, 5, [1, 5]),
    )
    assert_close(
        ref.begin_suppress_filter(z, [1, 4], length, 3),
        _hugging_face("SuppressTokensAtBeginLogitsProcessor", z, context, [1, 4], 3),
    )


def test_suppressed_and_allowed_as_hugging_face() -> None:
    z, context = _case()
    expected = _hugging_face("SuppressTokensLogitsProcessor", z, context, [0, 5])
    assert_close(ref.suppress_filter(z, [0, 5]), expected)
    expected = _hugging_face(
        "PrefixConstrainedLogitsProcessor", z, context, lambda *_: [1, 2, 4], 1
    )
    assert_close(ref.allowed_filter(z, [1, 2, 4]), expected)


@pytest.mark.parametrize("scale", [0.5, 1.0, 1.5, 3.0])
def test_guidance_as_hugging_face(scale: float) -> None:
    z, context = _case()
    unconditional = np.random.default_rng(1).normal(size=z.shape) * 2

    class Model:
        def __call__(self, *_: Any, **__: Any) -> Any:
            logits = torch.from_numpy(unconditional)[:, None]
            return SimpleNamespace(logits=logits, get=lambda *_: None)

    name = "UnbatchedClassifierFreeGuidanceLogitsProcessor"
    expected = _hugging_face(name, z, context, scale, Model())
    assert_close(ref.guidance(z, unconditional, scale), expected, atol=1e-12)


# By hand


def test_guidance_of_forbidden_words() -> None:
    c, u = np.log([0.5, 0.5, 1e-300]), np.zeros(3)
    both = np.array([NINF, 0.0, 1.0])
    assert_close(ref.guidance(both, both, 2.0), ref.log_softmax(both), atol=1e-12)
    # Only the reader of the prompt forbids: forbidden.
    assert np.isneginf(ref.guidance(both, u, 2.0)).tolist() == [True, False, False]
    # Only the other forbids: infinitely likelier with the prompt. Under a scale of 1 it is 0 of it.
    with pytest.raises(ValueError, match=r"a word must be left to choose; the maximum is inf"):
        ref.guidance(c, both, 2.0)
    assert np.isneginf(ref.guidance(c, both, 0.5)).tolist() == [True, False, False]
    with pytest.raises(ValueError, match=r"unconditional must have shape \(3,\); got \(2,\)"):
        ref.guidance(c, np.zeros(2), 2.0)
    with pytest.raises(ValueError, match="scale must be finite; got nan"):
        ref.guidance(c, u, np.nan)


def test_bias_of_a_batch() -> None:
    z = np.zeros((2, 2, 3))
    expected = np.broadcast_to([1.5, 0.0, NINF], (2, 2, 3))
    assert_close(ref.logit_bias(z, {0: 1.5, 2: NINF}), expected)
    assert_close(ref.logit_bias(z, {}), z)


def test_lengths_may_differ_by_row() -> None:
    z, cut = np.zeros((3, 2)), [0.0, NINF]
    assert_close(ref.min_length_filter(z, [1, 2, 3], 2, [1]), np.array([cut, [0, 0], [0, 0]]))
    assert_close(
        ref.begin_suppress_filter(z, [1], [1, 2, 3], [1, 1, 3]), np.array([cut, [0, 0], cut])
    )
    forced = ref.forced_tokens(z + 5.0, [1, 2, 3], {1: 0, 3: [0, 1]})
    assert_close(forced, np.array([cut, [5, 5], [0, 0]]))


RULES: dict[str, Callable[[Any], Array]] = {
    "bias": lambda z: ref.logit_bias(z, {0: NINF}),
    "allowed": lambda z: ref.allowed_filter(z, [1]),
    "suppressed": lambda z: ref.suppress_filter(z, [0]),
    "suppressed at the beginning": lambda z: ref.begin_suppress_filter(z, [0], 3, 3),
    "minimum length": lambda z: ref.min_length_filter(z, 3, 4, [0]),
    "guidance": lambda z: ref.guidance(z, np.zeros((2, 2)), 1.5),
}


@pytest.mark.parametrize("name", RULES)
def test_nothing_left_is_an_error_and_nothing_is_written_to(name: str) -> None:
    z = np.array([[0.0, 1.0], [0.0, 2.0]])
    assert not np.shares_memory(RULES[name](z), z)
    assert_close(z, np.array([[0.0, 1.0], [0.0, 2.0]]))
    for bad in (np.nan, np.inf):
        with pytest.raises(ValueError, match=f"finite maximum; got {bad} in row 1"):
            RULES[name]([[0.0, 1.0], [0.0, bad]])
    if name != "guidance":
        with pytest.raises(ValueError, match=r"a word must be left to choose; .* -inf in row 1"):
            RULES[name]([[0.0, 1.0], [0.0, NINF]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ref.logit_bias([0.0], {1: 1.0}), r"bias must be in \[0, 1\); got 1"),
        (lambda: ref.logit_bias([0.0], {0: np.inf}), r"bias must be numbers below \+inf; got inf"),
        (lambda: ref.logit_bias([0.0], {0: np.nan}), r"bias must be numbers below \+inf; got nan"),
        (lambda: ref.sequence_bias([0.0], [], {(1, 0): 1.0}), r"bias must be in \[0, 1\); got 1"),
        (lambda: ref.sequence_bias([0.0], [], {(): 1.0}), "got an empty one"),
        (lambda: ref.allowed_filter([0.0], [3]), r"ids must be in \[0, 1\); got 3"),
        (lambda: ref.allowed_filter([0.0], []), "a word must be left to choose"),
        (lambda: ref.forced_tokens([0.0], 1, {1: 1}), r"ids must be in \[0, 1\); got 1"),
    ],
)
def test_bad_options_are_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
    with pytest.raises(TypeError, match="length must be integers"):
        ref.min_length_filter([0.0], 1.5, 2, [])
