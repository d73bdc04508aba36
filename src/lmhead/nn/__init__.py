"""The Transformer around a head, to read and to run.

In:  token ids.
Out: hidden states after the final norm, which a head turns into words.

    llama    a body of the Llama family for generation: cache, left padding, grouped queries
"""

from lmhead.nn.llama import KeyValueCache, LlamaBody, LlamaConfig

__all__ = ["KeyValueCache", "LlamaBody", "LlamaConfig"]
