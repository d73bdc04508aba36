"""Advice on weight tying: whether embedding and output layer should share their weight."""

from __future__ import annotations

from dataclasses import dataclass

from lmhead import checks


@dataclass(frozen=True)
class TyingAdvice:
    """What tying saves, and whether to tie.

    Attributes:
        tie: the recommendation.
        parameters_saved: V · D.
        bytes_saved: bytes of the weight, in the given dtype.
        training_bytes_saved: bytes of weight, gradient and Adam's two moments.
        share: fraction of the untied model's parameters that tying saves.
        reasons: for and against, for these sizes.
    """

    tie: bool
    parameters_saved: int
    bytes_saved: int
    training_bytes_saved: int
    share: float
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        verdict = "Tie" if self.tie else "Do not tie"
        lines = [
            f"{verdict}: tying saves {self.parameters_saved:,} parameters "
            f"({self.share:.0%} of the model), {self.bytes_saved / 2**20:,.0f} MiB of weights, "
            f"{self.training_bytes_saved / 2**20:,.0f} MiB in training.",
            *(f"  - {reason}" for reason in self.reasons),
        ]
        return "\n".join(lines)


def advise_tying(
    vocab_size: int,
    hidden_size: int,
    layers: int,
    *,
    bytes_per_parameter: int = 4,
    same_vocabulary: bool = True,
    sharded: bool = False,
) -> TyingAdvice:
    """Return whether input embedding and output layer should share their weight, and why.

    A Transformer block has about 12 D² parameters, the embedding V · D. Small models, in which the
    embeddings are a large share of the parameters, tie them: fewer parameters, regularisation, and
    each token's vector gets gradients from both sides. In large models untied weights fit better,
    because a token's input vector and output vector have different purposes.

    Args:
        vocab_size: V.
        hidden_size: D.
        layers: number of Transformer blocks.
        bytes_per_parameter: 4 for float32, 2 for half precisions.
        same_vocabulary: whether input and output use the same vocabulary (not so in translation
            with two vocabularies).
        sharded: whether embedding and head are on different machines (pipeline stages).

    >>> advise_tying(49152, 576, 30).tie
    True
    >>> advise_tying(128256, 4096, 32).tie
    False
    >>> print(advise_tying(50257, 768, 12))
    Tie: tying saves 38,597,376 parameters (24% of the model), 147 MiB of weights, ...
    """
    checks.check_integer("vocab_size", vocab_size, low=1)
    checks.check_integer("hidden_size", hidden_size, low=1)
    checks.check_integer("layers", layers, low=0)
    checks.check_integer("bytes_per_parameter", bytes_per_parameter, low=1)
    saved = vocab_size * hidden_size
    share = saved / (2 * saved + 12 * layers * hidden_size**2)
    reasons = []
    if not same_vocabulary:
        reasons.append("input and output have different vocabularies: there is nothing to share")
    if share >= 0.1:
        reasons.append(
            f"the head would be {share:.0%} of the model: parameters better spent on layers"
        )
        reasons.append("rare tokens get gradients from the input side as well")
    else:
        reasons.append(
            f"the head is only {share:.0%} of the model: a separate weight costs little and "
            "can differ from the input vectors"
        )
    if sharded:
        reasons.append(
            "embedding and head are on different machines: tying would send the gradient of "
            f"{saved:,} numbers between them at every step"
        )
    reasons.append("untie when fine-tuning only the head, or when the embedding is frozen")
    return TyingAdvice(
        tie=same_vocabulary and share >= 0.1 and not sharded,
        parameters_saved=saved,
        bytes_saved=saved * bytes_per_parameter,
        # gradient in the same dtype, two Adam moments in float32
        training_bytes_saved=saved * (2 * bytes_per_parameter + 8),
        share=share,
        reasons=tuple(reasons),
    )
