"""Penalties for repeated tokens: as in Hugging Face where it has them, else by hand."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from compare import Array, assert_close

from lmhead import reference as ref

os.environ.setdefault("HF_HUB_OFFLINE", "1")
NINF = -np.inf
V = 6


def _case() -> tuple[Array, Any]:
    rng = np.random.default_rng(0)
    z = rng.normal(size=(30, V))
    z[10:20, 2] = NINF
    z[20:, 4] = 0.0
    return z, rng.integers(0, V, size=(30, 9))


def _hugging_face(name: str, z: Array, context: Any, *options: Any) -> Any:
    processors = pytest.importorskip("transformers.generation.logits_process")
    theirs = getattr(processors, name)(*options)
    return theirs(torch.as_tensor(np.asarray(context)), torch.from_numpy(z)).numpy()


@pytest.mark.parametrize("penalty", [1.0, 1.3, 0.8])
def test_repetition_as_hugging_face(penalty: float) -> None:
    z, context = _case()
    expected = _hugging_face("RepetitionPenaltyLogitsProcessor", z, context[:, :3], penalty)
    assert_close(ref.repetition_penalty(z, context[:, :3], penalty), expected, atol=1e-15)


@pytest.mark.parametrize("n", [2, 3, 4, 9, 10])
def test_no_repeat_ngram_as_hugging_face(n: int) -> None:
    z, context = _case()
    context[:10, 6:] = context[:10, :3]  # so that longer n-grams come up again
    expected = _hugging_face("NoRepeatNGramLogitsProcessor", z, context, n)
    assert_close(ref.no_repeat_ngram_filter(z, context, n), expected)
    assert np.isneginf(expected).sum() - np.isneginf(z).sum() > 0 or n > 4


def test_ids_the_head_cannot_say_are_ignored_as_in_hugging_face() -> None:
    z, context = np.array([[1.0, -1.0, 2.0]]), [[1, 7, 1, 7]]
    for name, ours, option in (
        ("RepetitionPenaltyLogitsProcessor", ref.repetition_penalty, 2.0),
        ("NoRepeatNGramLogitsProcessor", ref.no_repeat_ngram_filter, 2),
    ):
        function: Callable[..., Array] = ours
        expected = _hugging_face(name, z, context, option)
        assert_close(function(z, context, option), expected)
    assert_close(ref.frequency_penalty(z, context, 0.5), np.array([[1.0, -2.0, 2.0]]))
    assert_close(ref.dry_penalty(z, [[1, 7, 1]], multiplier=9.0, allowed_length=1), z)


def test_counts_by_hand() -> None:
    z, context = np.zeros((2, 4)), [[3, 1, 3, 3], []]  # rows may differ in length
    assert_close(ref.frequency_penalty(z, context, 0.5), np.array([[0, -0.5, 0, -1.5], [0.0] * 4]))
    assert_close(ref.presence_penalty(z, context, 0.5), np.array([[0, -0.5, 0, -0.5], [0.0] * 4]))
    assert_close(ref.presence_penalty(z[0], [3], -0.5), np.array([0, 0, 0, 0.5]))  # a reward


def test_unigrams_are_never_repeated() -> None:
    assert_close(ref.no_repeat_ngram_filter(np.zeros(3), [0, 2], 1), np.array([NINF, 0, NINF]))


# DRY, by hand


def _dry(context: list[int], vocab_size: int = 5, **options: Any) -> list[float]:
    options = {"multiplier": 1.0, "base": 2.0} | options
    penalty = -ref.dry_penalty(np.zeros(vocab_size), context, **options)
    return [float(x) for x in penalty]


@pytest.mark.parametrize(
    ("context", "options", "punished"),
    [
        ([0, 1], {}, {}),
        ([0, 1, 2, 0, 1], {}, {2: 1}),  # "0 1", then 2: length 2, 2^0
        ([0, 1, 2, 0, 1], {"multiplier": 2.0}, {2: 2}),
        ([0, 1, 2, 0, 1], {"allowed_length": 3}, {}),
        ([0, 1, 2, 0, 1], {"allowed_length": 1}, {2: 2}),  # 2^1
        ([4, 0, 1, 2, 4, 0, 1], {}, {2: 2}),  # "4 0 1": 2^1
        # "0 1" was followed by 2, "4 0 1" by 3; each word pays for its own longest.
        ([4, 0, 1, 3, 0, 1, 2, 4, 0, 1], {}, {2: 1, 3: 2}),
        # 2 followed "0 1" twice, and "0 1 2 4 0 1" once: the longest counts, once. 2^(6 - 2)
        ([0, 1, 2, 4, 0, 1, 2, 4, 0, 1], {}, {2: 16}),
        # Repeats may overlap: of 0 0 0 0, "0 0 0" occurs twice, so a further 0 prolongs 3.
        ([0, 0, 0, 0], {}, {0: 2}),
        # A breaker after the repeat hides it; before it, it shortens it; far away, it does not.
        ([0, 1, 3, 4, 0, 1], {"sequence_breakers": [[1]]}, {}),
        ([4, 0, 1, 2, 4, 0, 1], {"sequence_breakers": [[4]]}, {2: 1}),
        ([3, 0, 1, 2, 0, 1], {"sequence_breakers": [[3]]}, {2: 1}),
        # Broken by two ids in a row, only together: after "4 0" there is one id.
        ([4, 0, 1, 2, 4, 0, 1], {"sequence_breakers": [[4, 0]]}, {}),
        ([4, 0, 1, 2, 4, 0, 1], {"sequence_breakers": [[4, 1], [0, 4]]}, {2: 2}),
        ([4, 0, 1, 2, 4, 0, 1], {"sequence_breakers": [[1, 2, 3]]}, {2: 2}),  # not complete
        # Of two breakers that start at one place, the longer leaves less: one id, not two.
        ([4, 0, 1, 2, 4, 0, 1], {"sequence_breakers": [[4], [4, 0]]}, {}),
        # Of two places, the last start counts, though the other reaches further.
        ([4, 0, 1, 2, 3, 4, 0, 1, 2], {"sequence_breakers": [[4, 0, 1], [0]]}, {3: 1}),
        # A word that is a breaker by itself is never punished; the first of a longer one is.
        ([0, 1, 3, 0, 1], {"sequence_breakers": [[3]]}, {}),
        ([0, 1, 3, 0, 1], {"sequence_breakers": [[3, 4]]}, {3: 1}),
        # Nothing needs to repeat: every word that followed anything. 3 never did.
        ([3, 1, 2], {"allowed_length": 0}, {1: 1, 2: 1}),
    ],
)
def test_dry_by_hand(context: list[int], options: Any, punished: dict[int, float]) -> None:
    assert _dry(context, **options) == [float(punished.get(v, 0)) for v in range(5)]


def test_dry_as_the_tests_of_llama_cpp_expect() -> None:
    # Word 2 loses 1: 0.25 e^-1 / (0.75 + 0.25 e^-1) = 0.109232; loses 2: 0.032727 of five.
    z = np.log(np.full(4, 0.25))
    p = ref.softmax(ref.dry_penalty(z, [0, 1, 2, 0, 1], multiplier=1.0, base=1.1))
    assert_close(p, np.array([0.296923, 0.296923, 0.109232, 0.296923]), atol=1e-6)
    z = np.log(np.full(5, 0.2))
    p = ref.softmax(ref.dry_penalty(z, [0, 1, 2, 0, 1], multiplier=2.0, base=1.1))
    assert_close(p, np.array([0.241818, 0.241818, 0.032727, 0.241818, 0.241818]), atol=1e-6)
    p = ref.softmax(
        ref.dry_penalty(z, [0, 1, 3, 4, 0, 1], multiplier=1.0, base=1.1, sequence_breakers=[[3]])
    )
    assert_close(p, z * 0 + 0.2, atol=1e-12)


def test_dry_stops_growing_where_float32_would_end() -> None:
    # 88.7228391 / log 2 = 128.0000: the exponent stops at 127 or 128, here 200 - 1 - 2 = 197.
    penalty = _dry([0] * 200)[0]
    assert penalty in (2.0**127, 2.0**128)
    assert _dry([0] * 200, base=1.0)[0] == 1.0


def test_dry_repeats_of_a_long_text_by_their_definition() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        ids = rng.integers(0, 3, size=30).tolist()
        found = ref.dry_repeats(ids)
        for v in range(3):
            # v prolongs a repeat of n ids: the last n ids and v stand somewhere in the text.
            lengths = [
                n
                for n in range(30)
                for start in range(30 - n)
                if ids[start : start + n + 1] == [*ids[30 - n :], v] and (n or start)
            ]
            assert found.get(v, 0) == max(lengths, default=0)


# All of them

EVERY: dict[str, Callable[[Any, Any], Array]] = {
    "repetition": lambda z, c: ref.repetition_penalty(z, c, 1.2),
    "frequency": lambda z, c: ref.frequency_penalty(z, c, 0.3),
    "presence": lambda z, c: ref.presence_penalty(z, c, 0.3),
    "n-gram": lambda z, c: ref.no_repeat_ngram_filter(z, c, 2),
    "dry": lambda z, c: ref.dry_penalty(z, c, multiplier=0.5, allowed_length=1),
    "sequence bias": lambda z, c: ref.sequence_bias(z, c, {(1,): 0.5, (0, 1, 2): 1.0}),
    "bad words": lambda z, c: ref.bad_words_filter(z, c, [[0, 1], [2]]),
}


@pytest.mark.parametrize("name", EVERY)
def test_a_batch_works_row_by_row_and_nothing_is_written_to(name: str) -> None:
    rng = np.random.default_rng(0)
    z = rng.normal(size=(2, 3, V))
    z[0, 1, 2:4] = NINF
    context = [[rng.integers(0, V, size=n).tolist() for n in row] for row in [[0, 3, 9], [8, 1, 5]]]
    before = z.copy()
    result = EVERY[name](z, context)
    for i in range(2):
        for j in range(3):
            assert_close(result[i, j], EVERY[name](z[i, j], context[i][j]))
    assert not np.shares_memory(result, z)
    assert_close(z, before)


@pytest.mark.parametrize("name", EVERY)
def test_bad_contexts_and_rows_are_refused(name: str) -> None:
    f = EVERY[name]
    with pytest.raises(ValueError, match="finite maximum; got -inf in row 1"):
        f(np.array([[0.0, 1.0, 2.0], [NINF] * 3]), [[0], [0]])
    with pytest.raises(ValueError, match=r"one list of ids per row; got 3 for logits \(2, 4\)"):
        f(np.zeros((2, 4)), [[0], [0], [0]])
    with pytest.raises(ValueError, match="one list of ids per row"):
        f(np.zeros((2, 4)), [0, 1])
    with pytest.raises(ValueError, match="context must have no negative ids; got -1"):
        f(np.zeros(4), [0, -1])
    with pytest.raises(TypeError, match="context must be a list of integers"):
        f(np.zeros(4), [0.5])


def test_nothing_left_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"a word must be left to choose; .* -inf in row 0"):
        ref.no_repeat_ngram_filter(np.zeros(2), [0, 1], 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ref.repetition_penalty([0.0], [], 0.0), "penalty must be finite and above 0; got"),
        (lambda: ref.frequency_penalty([0.0], [], np.nan), "penalty must be finite; got nan"),
        (lambda: ref.presence_penalty([0.0], [], np.inf), "penalty must be finite; got inf"),
        (lambda: ref.no_repeat_ngram_filter([0.0], [], 0), "ngram_size must be at least 1; got 0"),
        (lambda: ref.dry_penalty([0.0], [], multiplier=np.inf), "multiplier must be finite"),
        (lambda: ref.dry_penalty([0.0], [], multiplier=1, base=0.5), "base must be .* got 0.5"),
        (lambda: ref.dry_penalty([0.0], [], multiplier=1, allowed_length=-1), "allowed_length"),
        (lambda: ref.dry_repeats([0], [[]]), "sequence_breakers must not be empty"),
    ],
)
def test_bad_options_are_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
