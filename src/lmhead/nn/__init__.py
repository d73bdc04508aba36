"""The Transformer around a head, to read and to run.

In:  token ids.
Out: hidden states after the final norm, which a head turns into words.

    config         sizes and kinds
    embedding      where a token stands: learned, sinusoidal and rotary positions
    attention      queries, keys and values; who sees whom
    cache          what attention remembers
    feed_forward   each token on its own
    block          one layer: Add & Norm around attention and feed-forward
    stack          embedding, blocks, norm: what encoders and decoders share
    encoder        every token sees all others
    decoder        every token sees those before it, and perhaps an encoder's states
    init           how numbers begin
    language_model, encoder_decoder
                   `DecoderLM` and `EncoderDecoder`: the whole, with a head
    llama          a body of the Llama family
"""

from lmhead.nn.attention import Attention, Look
from lmhead.nn.block import Block
from lmhead.nn.cache import KeyValueCache, Memory
from lmhead.nn.config import DecoderConfig, EncoderDecoderConfig, TransformerConfig
from lmhead.nn.decoder import DecoderBody
from lmhead.nn.encoder import Encoder
from lmhead.nn.encoder_decoder import EncoderDecoder, Writer
from lmhead.nn.feed_forward import FeedForward
from lmhead.nn.language_model import DecoderLM
from lmhead.nn.llama import LlamaBody, LlamaConfig

__all__ = [
    "Attention",
    "Block",
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
    "Look",
    "Memory",
    "TransformerConfig",
    "Writer",
]
