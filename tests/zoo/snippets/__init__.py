"""What training, evaluation and generation code does to logits, one file per source.

Importing this package fills `catalogue.SNIPPETS`.
"""

from zoo.snippets import (
    axolotl,
    decoding,
    distillation,
    generation,
    in_place,
    lightning,
    llama_factory,
    lm_eval,
    losses,
    metrics,
    nanogpt,
    open_instruct,
    openrlhf,
    order_statistics,
    transformers,
    trl,
    verl,
)

__all__ = [
    "axolotl",
    "decoding",
    "distillation",
    "generation",
    "in_place",
    "lightning",
    "llama_factory",
    "lm_eval",
    "losses",
    "metrics",
    "nanogpt",
    "open_instruct",
    "openrlhf",
    "order_statistics",
    "transformers",
    "trl",
    "verl",
]
