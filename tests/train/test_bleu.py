"""BLEU: Chinese is counted by characters, and the score is the one of the definition."""

import math

import pytest

from lmhead.train.bleu import bleu, tokenizer_for

pytest.importorskip("sacrebleu", reason="sacreBLEU is not installed")


def test_chinese_is_counted_by_characters() -> None:
    found = bleu(["我爱音乐。"], ["我爱音乐。"])
    assert found.score == 100.0
    assert "tok:zh" in found.signature
    assert "tok:13a" in bleu(["a b c d"], ["a b c d"]).signature
    assert tokenizer_for(["猫", "a dog"]) == "13a"  # one half is not most


def test_the_score_by_hand() -> None:
    # Of 6, 5, 4 and 3 n-grams 4, 3, 2 and 1 are those of the reference,
    # and the translation is one character too short.
    precision = (4 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25
    expected = 100 * math.exp(1 - 7 / 6) * precision
    assert bleu(["甲乙丙丁戊己"], ["甲乙丙丁庚辛壬"]).score == pytest.approx(expected, rel=1e-6)


def test_as_many_translations_as_references() -> None:
    with pytest.raises(ValueError, match=r"as many translations as references.*got 1 and 2"):
        bleu(["a"], ["a", "b"])
    with pytest.raises(ValueError, match="at least 1; got 0 and 0"):
        bleu([], [])
