"""Encoders and decoders of transformers (T5, BART, Marian, ...), for `Translator`."""

from __future__ import annotations

import copy
import math
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lmhead.errors import ModelError, PerformanceWarning
from lmhead.head import LMHead
from lmhead.models.folder import read_config, read_weights
from lmhead.models.huggingface import (
    check_architecture,
    close_logits,
    load_model,
    output_layer,
    quiet_transformers,
)
from lmhead.models.huggingface_body import fork
from lmhead.nn import ConditionedModel

_AUTO = "AutoModelForSeq2SeqLM"


class Sizes(NamedTuple):
    """The part of a model's configuration that `Translator` reads."""

    vocab_size: int
    hidden_size: int
    max_length: int


class HuggingFaceEncoderDecoder(nn.Module):
    """An encoder, a decoder and an `LMHead` on the model's own output layer."""

    def __init__(self, model: Any, head: LMHead) -> None:
        super().__init__()
        self.model, self.head = model, head
        config = model.config
        length = getattr(config, "max_position_embeddings", None) or 512
        self.config = Sizes(head.vocab_size, head.hidden_size, min(int(length), 512))

    def given(
        self, source: Tensor, mask: Tensor | None = None, *, eos_token_ids: tuple[int, ...] = ()
    ) -> ConditionedModel:
        """Return the decoder conditioned on sources (B, S), for `generate` and `beam_search`."""
        mask = torch.ones_like(source, dtype=torch.bool) if mask is None else mask
        with torch.no_grad():
            memory = self.model.get_encoder()(
                input_ids=source, attention_mask=mask.long(), return_dict=True
            ).last_hidden_state
        start = DecoderCache(None, memory, mask)
        decoder = self.model.get_decoder()

        @torch.no_grad()
        def body(ids: Tensor, cache: DecoderCache | None, _: Tensor) -> tuple[Tensor, DecoderCache]:
            before = cache or start
            out = decoder(
                input_ids=ids,
                encoder_hidden_states=before.memory,
                encoder_attention_mask=before.mask.long(),
                past_key_values=None if before.inner is None else _fork(before.inner),
                use_cache=True,
                return_dict=True,
            )
            return out.last_hidden_state, replace(before, inner=out.past_key_values)

        return ConditionedModel(body, self.head, eos_token_ids)


@dataclass(frozen=True)
class DecoderCache:
    """Keys and values of the decoder, None at the start, and the encoder's states of the rows."""

    inner: Any
    memory: Tensor
    mask: Tensor

    def select(self, rows: Tensor) -> DecoderCache:
        """Return the cache of the rows (B',), which may repeat or drop some."""
        chosen = _fork(self.inner)
        chosen.reorder_cache(rows)
        return DecoderCache(chosen, self.memory[rows], self.mask[rows])


def _fork(cache: Any) -> Any:
    """Return a copy of a cache of both attentions that can be modified on its own."""
    forked = copy.copy(cache)
    forked.self_attention_cache = fork(cache.self_attention_cache)
    forked.cross_attention_cache = fork(cache.cross_attention_cache)
    forked.is_updated = dict(cache.is_updated)
    return forked


def load_encoder_decoder(folder: Path) -> tuple[HuggingFaceEncoderDecoder, list[int], int]:
    """Open a folder; return the model, the ids that begin a text, and the one that ends it."""
    config = read_config(folder)
    tensors = read_weights(folder)
    check_architecture(config, _AUTO)
    with quiet_transformers(str(folder)):
        model = load_model(folder, config, tensors, _AUTO)
        settings = model.generation_config
        begin = settings.decoder_start_token_id
        if begin is None:
            begin = model.config.decoder_start_token_id
        ends = settings.eos_token_id
        end = ends[0] if isinstance(ends, list) else ends
        if begin is None or end is None:
            raise ModelError(
                f"{config.path} must have decoder_start_token_id and eos_token_id; "
                f"got {begin} and {end}"
            )
        forced = settings.forced_bos_token_id
        head = _head(model, folder, begin)
    prompt = [begin, forced] if forced else [begin]
    return HuggingFaceEncoderDecoder(model, head), prompt, int(end)


@torch.no_grad()
def _head(model: Any, folder: Path, begin: int) -> LMHead:
    """Return the head that gives the model's logits, with its bias and scale."""
    linear = output_layer(model, folder)
    ids = torch.tensor([[min(linear.out_features - 1, 7)]])
    states: list[Tensor] = []
    hook = model.get_decoder().register_forward_hook(
        lambda _module, _args, out: states.append(out[0])
    )
    try:
        theirs = model(input_ids=ids, decoder_input_ids=torch.tensor([[begin]])).logits[0, -1]
    finally:
        hook.remove()
    bias = getattr(model, "final_logits_bias", None)  # BART and its relatives
    if isinstance(bias, Tensor) and "bias" not in dict(linear.named_parameters()) and bias.any():
        biased = nn.Linear(linear.in_features, linear.out_features, device="meta")
        biased.weight = linear.weight
        biased.bias = nn.Parameter(bias.reshape(-1).to(linear.weight.dtype), requires_grad=False)
        linear = biased
    for scale in (1.0, 1 / math.sqrt(linear.in_features)):  # T5 scales tied weights
        head = LMHead.from_linear(linear, scale=scale)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PerformanceWarning)  # one row
            if close_logits(head(states[-1][0, -1]).materialize(), theirs):
                return head
    raise ModelError(
        f"the head of {type(model).__name__} in {folder} must be a linear layer with bias and "
        "scale; it does more, and lmhead would not give its logits"
    )
