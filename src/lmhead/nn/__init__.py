"""A Transformer on torch's layers: token ids in, hidden states for a head out.

transformer_config    sizes and options
position_embedding    learned, sinusoidal and rotary positions
multi_head_attention  queries, keys, values and masks
cache                 keys and values of the tokens so far
mlp                   the feed-forward sublayer
block                 one layer: attention and feed-forward with residuals and norms
stack                 embedding, blocks, norm, initialisation
encoder, decoder      bidirectional; causal, with optional cross-attention
decoder_lm            `DecoderLM`: decoder and head
encoder_decoder       `EncoderDecoder`: encoder, decoder and head
llama                 a decoder of the Llama family
"""

from lmhead.nn.block import Block
from lmhead.nn.cache import KeyValueCache, Memory
from lmhead.nn.decoder import DecoderBody
from lmhead.nn.decoder_lm import DecoderLM
from lmhead.nn.encoder import Encoder
from lmhead.nn.encoder_decoder import ConditionedModel, EncoderDecoder
from lmhead.nn.llama import LlamaBody, LlamaConfig
from lmhead.nn.mlp import FeedForward
from lmhead.nn.multi_head_attention import Attention, AttentionMask
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
