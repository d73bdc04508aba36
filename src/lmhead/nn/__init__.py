"""A Transformer on torch's layers: token ids in, hidden states for a head out.

transformer_config    sizes and options
multi_head_attention  queries, keys, values, masks, positions, and the cache
transformer           blocks, stack, `DecoderBody`, and `DecoderLM`: decoder and head
encoder_decoder       `EncoderDecoder`: encoder, decoder and head
llama                 a decoder of the Llama family
"""

from lmhead.nn.encoder_decoder import ConditionedModel, Encoder, EncoderDecoder
from lmhead.nn.llama import LlamaBody, LlamaConfig
from lmhead.nn.multi_head_attention import Attention, AttentionMask, KeyValueCache, Memory
from lmhead.nn.transformer import Block, DecoderBody, DecoderLM, FeedForward
from lmhead.nn.transformer_config import DecoderConfig, EncoderDecoderConfig, TransformerConfig

__all__ = [
    "Attention",
    "AttentionMask",
    "Block",
    "ConditionedModel",
    "DecoderBody",
    "DecoderConfig",
    "DecoderLM",
    "Encoder",
    "EncoderDecoder",
    "EncoderDecoderConfig",
    "FeedForward",
    "KeyValueCache",
    "LlamaBody",
    "LlamaConfig",
    "Memory",
    "TransformerConfig",
]
