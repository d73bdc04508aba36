"""Hugging Face's own chain of processors, built by `GenerationMixin` as `generate` builds it."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.utils import GenerationMixin

# Options of ours that a GenerationConfig does not have.
_OURS = ("allowed_token_ids", "min_tokens_to_keep")


class _Model(GenerationMixin):  # type: ignore[misc]
    """What `GenerationMixin` asks of a model to build processors; its logits are given."""

    def __init__(self, unconditional: Tensor | None) -> None:
        self.config = SimpleNamespace(is_encoder_decoder=False)
        self.unconditional = unconditional

    def __call__(self, *_: Any, **__: Any) -> Any:
        class Output(dict[str, Any]):
            logits = None if self.unconditional is None else self.unconditional[:, None]

        return Output()


def processors(
    options: dict[str, Any], prompt_length: int, unconditional: Tensor | None = None
) -> Any:
    """The `LogitsProcessorList` of `generate(do_sample=True, **options)`."""
    given = {k: v for k, v in options.items() if k not in _OURS}
    config = GenerationConfig(do_sample=True, **{"top_k": 0, "num_beams": 1, **given})
    ends = options.get("eos_token_id")
    config._eos_token_tensor = None if ends is None else torch.tensor(ends).reshape(-1)
    allowed = options.get("allowed_token_ids")
    made = _Model(unconditional)._get_logits_processor(
        config,
        input_ids_seq_length=prompt_length,
        prefix_allowed_tokens_fn=None if allowed is None else lambda *_: allowed,
        device="cpu",
    )
    keep = options.get("min_tokens_to_keep", 1)
    for one in made:  # `generate` derives this from the number of beams
        if hasattr(one, "min_tokens_to_keep"):
            one.min_tokens_to_keep = keep
        if hasattr(one, "top_k"):
            one.top_k = max(one.top_k, keep)
    return made


def processed(
    logits: Tensor,
    options: dict[str, Any],
    context: Tensor,
    prompt_length: int,
    unconditional: Tensor | None = None,
) -> Tensor:
    """What Hugging Face makes of logits (B, V).

    Where a row has no word left, processors have their own ideas: some give every word the same
    chance, some raise. They are passed over, unless they force a word.
    """
    result = logits.clone()
    for processor in processors(options, prompt_length, unconditional):
        left = bool(result.amax(1).isfinite().all())
        if left or type(processor).__name__.startswith("Forced"):
            result = processor(context, result)
    return result
