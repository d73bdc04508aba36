"""The Transformer around a head, to read and to run.

In:  token ids.
Out: hidden states after the final norm, which a head turns into words.

    config         sizes and kinds
    embedding      where a token stands: learned, sinusoidal and rotary positions
    attention      queries, keys and values; who sees whom
    cache          what attention remembers
    feed_forward   each token on its own
    block          one layer: Add & Norm around attention and feed-forward
    init           how numbers begin
    decoder        `DecoderLM`, a language model
    llama          a body of the Llama family
"""

from lmhead.nn.attention import Attention, Look
from lmhead.nn.block import Block
from lmhead.nn.cache import KeyValueCache
from lmhead.nn.config import DecoderConfig, TransformerConfig
from lmhead.nn.decoder import DecoderBody, DecoderLM
from lmhead.nn.feed_forward import FeedForward
from lmhead.nn.llama import LlamaBody, LlamaConfig

__all__ = [
    "Attention",
    "Block",
    "DecoderBody",
    "DecoderConfig",
    "DecoderLM",
    "FeedForward",
    "KeyValueCache",
    "LlamaBody",
    "LlamaConfig",
    "Look",
    "TransformerConfig",
]
