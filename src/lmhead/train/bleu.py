"""BLEU of translations, computed by sacreBLEU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

# Han characters: Chinese does not separate words by spaces; each character counts as a token.
_CHINESE = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")


class Bleu(NamedTuple):
    """A score of 0 to 100, and sacreBLEU's signature: how it was computed."""

    score: float
    signature: str


def installed() -> bool:
    """Return whether sacreBLEU is installed."""
    return find_spec("sacrebleu") is not None


def tokenizer_for(references: Sequence[str]) -> str:
    """Return sacreBLEU's tokenizer: "zh" if most references are Chinese, else the default "13a".

    >>> tokenizer_for(["我爱音乐。", "他来了。", "OK"]), tokenizer_for(["I love music."])
    ('zh', '13a')
    """
    chinese = sum(bool(_CHINESE.search(reference)) for reference in references)
    return "zh" if 2 * chinese > len(references) else "13a"


def bleu(translations: Sequence[str], references: Sequence[str]) -> Bleu:
    """Return corpus BLEU with one reference per translation.

    Equivalent to: sacrebleu.corpus_bleu(translations, [references], tokenize=...)

    Example::

        bleu(["我爱音乐。"], ["我喜欢音乐。"])
    """
    if not references or len(translations) != len(references):
        raise ValueError(
            "there must be as many translations as references, and at least 1; "
            f"got {len(translations)} and {len(references)}"
        )
    try:
        metrics: Any = import_module("sacrebleu.metrics")
    except ImportError:
        raise ImportError("BLEU needs sacreBLEU: pip install 'lmhead[eval]'") from None
    metric = metrics.BLEU(tokenize=tokenizer_for(references))
    score = metric.corpus_score(list(translations), [list(references)])
    return Bleu(round(float(score.score), 10), str(metric.get_signature()))
