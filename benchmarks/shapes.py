"""Shapes of the heads of real models, with a number of tokens that makes a run of minutes."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """The sizes V, D and N of a head and its hidden states."""

    name: str
    vocab: int
    hidden_size: int
    tokens: int

    def flops(self, products: int = 1) -> int:
        """Return the operations of products (tokens x hidden_size) times (hidden_size x vocab)."""
        return 2 * self.tokens * self.vocab * self.hidden_size * products


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("smollm2", 49_152, 576, 2048),
        Shape("gpt2", 50_257, 768, 1024),
        Shape("llama-3.2-1b", 128_256, 2048, 256),
        Shape("qwen", 151_936, 896, 512),
        Shape("gemma-3-270m", 262_144, 640, 256),
    )
}
# The logits would take 4 GiB.
MANY_LOGITS = Shape("131072x64", 131_072, 64, 8192)

_PRODUCT = 2**35  # tokens · vocab · hidden_size of a shape given as VxD: a second or two


def parse_shape(text: str, tokens: int | None = None) -> Shape:
    """Return a shape by its name, or from `VxD`.

    >>> parse_shape("gpt2")
    Shape(name='gpt2', vocab=50257, hidden_size=768, tokens=1024)
    >>> parse_shape("200x16", tokens=30)
    Shape(name='200x16', vocab=200, hidden_size=16, tokens=30)
    """
    if text in SHAPES:
        known = SHAPES[text]
        return Shape(text, known.vocab, known.hidden_size, tokens or known.tokens)
    numbers = re.fullmatch(r"(\d+)x(\d+)", text)
    if numbers is None:
        raise ValueError(
            f"shape must be {', '.join(SHAPES)}, or VxD such as 50257x768; got {text!r}"
        )
    vocab, hidden_size = int(numbers[1]), int(numbers[2])
    if vocab < 32 or hidden_size < 2:
        raise ValueError(f"shape must have V >= 32 and D >= 2; got {text!r}")
    fits = max(16, min(2048, _PRODUCT // (vocab * hidden_size)))
    return Shape(f"{vocab}x{hidden_size}", vocab, hidden_size, tokens or fits)
