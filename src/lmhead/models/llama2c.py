"""Checkpoints of llama2.c: a header of seven integers, then float32 numbers.

    header   7 int32: dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, max_seq_len;
             vocab_size is negative if the head has a weight of its own
    arrays   float32, little-endian, one after the other, in the order of `_arrays`

The file is memory-mapped: opening is instant, and the operating system loads the pages that are
used, once for all processes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lmhead import checks
from lmhead.errors import ModelError
from lmhead.models.language_model import LanguageModel
from lmhead.models.llama2c_tokenizer import Llama2cTokenizer
from lmhead.models.llama_folder import build_llama
from lmhead.models.model_files import MAX_LAYERS, StrPath, file_size, one_line
from lmhead.nn import LlamaConfig

_HEADER = struct.Struct("<7i")
_LATER_VERSIONS = 0x616B3432  # "ak42", the first number of the formats that came after
_BOS, _EOS = 1, 2


def load_llama2c(model_path: StrPath, tokenizer_path: StrPath | None = None) -> LanguageModel:
    """Open a checkpoint of llama2.c (version 0, float32), with its vocabulary if there is one.

    The weights stay in the file, which must not move; they do not require gradients. Without
    `tokenizer_path`, `tok<vocab_size>.bin` or `tokenizer.bin` beside the checkpoint is used.

    Example::

        model = load_llama2c("stories15M.bin")
        generate(model, "Once upon a time", max_new_tokens=50).text
    """
    path = Path(model_path)
    config, max_length, tied = _read_header(path)
    state = _map_arrays(path, config, max_length, tied)
    head_weight = None if tied else state.pop("head")
    body, head = build_llama(config, state, head_weight)
    return LanguageModel(
        body,
        head,
        # A checkpoint of llama2.c may begin the next story instead of ending this one.
        eos_token_ids=(_BOS, _EOS),
        tokenizer=_open_tokenizer(path, tokenizer_path, config.vocab_size),
        max_length=max_length,
        name=path.stem,
    )


def _read_header(path: Path) -> tuple[LlamaConfig, int, bool]:
    """Return the sizes, the maximum number of tokens, and whether the head is tied."""
    if file_size(path) < _HEADER.size:
        raise ModelError(
            f"{path} is not a model of a known format: a checkpoint of llama2.c has a header of "
            f"{_HEADER.size} bytes; got {file_size(path)} bytes"
        )
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER.size)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {one_line(error)}") from error
    size, inner, layers, heads, groups, vocab, max_length = _HEADER.unpack(header)
    if size == _LATER_VERSIONS:
        raise ModelError(
            f"{path} must be a llama2.c checkpoint of version 0 (export.py --version 0); got "
            f"version {inner}"
        )
    try:
        config = LlamaConfig(
            vocab_size=abs(vocab),
            hidden_size=size,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=groups,
            rotary="interleaved",
        )
        checks.check_integer("max_seq_len", max_length, low=1)
        checks.check_integer("n_layers", layers, low=1, high=MAX_LAYERS)
    except ValueError as error:
        raise ModelError(
            f"{path} is not a model of a known format, or a damaged checkpoint of llama2.c: {error}"
        ) from None
    return config, max_length, vocab > 0


def _arrays(
    config: LlamaConfig, max_length: int, tied: bool
) -> Iterator[tuple[str, bool, tuple[int, ...]]]:
    """Yield name, whether there is one per layer, and shape of every array, in the file's order."""
    size, inner, d = config.hidden_size, config.intermediate_size, config.head_size
    queries, keys = config.num_attention_heads * d, config.num_key_value_heads * d
    yield "embedding.weight", False, (config.vocab_size, size)
    yield "attention_norm.weight", True, (size,)
    yield "attention.query.weight", True, (queries, size)
    yield "attention.key.weight", True, (keys, size)
    yield "attention.value.weight", True, (keys, size)
    yield "attention.output.weight", True, (size, queries)
    yield "feed_forward_norm.weight", True, (size,)
    yield "feed_forward.gate.weight", True, (inner, size)
    yield "feed_forward.down.weight", True, (size, inner)
    yield "feed_forward.up.weight", True, (inner, size)
    yield "norm.weight", False, (size,)
    yield "rotary", False, (2, max_length, d // 2)  # cos and sin, which we compute
    if not tied:
        yield "head", False, (config.vocab_size, size)


def _map_arrays(path: Path, config: LlamaConfig, max_length: int, tied: bool) -> dict[str, Tensor]:
    """Return views of the file, by the names of the parameters of `LlamaBody`."""
    layers = config.num_hidden_layers
    arrays = [
        (name, per_layer, (layers, *shape) if per_layer else shape)
        for name, per_layer, shape in _arrays(config, max_length, tied)
    ]
    expected = _HEADER.size + 4 * sum(prod(shape) for _, _, shape in arrays)
    size = file_size(path)
    if size != expected:
        raise ModelError(
            f"{path} must have {expected:,} bytes, as its header says ({config}, "
            f"max_seq_len={max_length}, {'tied' if tied else 'untied'} head); got {size:,}"
        )
    # Copy on write: a change stays in this process and never reaches the file.
    numbers = torch.from_numpy(np.memmap(path, "<f4", mode="c", offset=_HEADER.size))
    state: dict[str, Tensor] = {}
    begin = 0
    for name, per_layer, shape in arrays:
        array = numbers[begin : begin + prod(shape)].view(shape)
        begin += prod(shape)
        if per_layer:
            state.update({f"blocks.{i}.{name}": layer for i, layer in enumerate(array)})
        elif name != "rotary":
            state[name] = array
    return state


def _open_tokenizer(path: Path, given: StrPath | None, vocab_size: int) -> Llama2cTokenizer | None:
    if given is not None:
        return Llama2cTokenizer(given, vocab_size)
    for name in (f"tok{vocab_size}.bin", "tokenizer.bin"):
        if (beside := path.with_name(name)).is_file():
            return Llama2cTokenizer(beside, vocab_size)
    return None
