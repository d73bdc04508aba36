"""Tokenizers of GGUF files against the real llama.cpp: every rule for splitting text."""

import json
import random
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from lmhead.models.gguf_file import GgufFile
from lmhead.models.gguf_tokenizer import SPLITS, make_tokenizer

gguf = pytest.importorskip("gguf")
xllamacpp = pytest.importorskip("xllamacpp")

# "default" is no rule of a model: llama.cpp warns of it, and splits in a way of its own.
RULES = sorted(set(SPLITS) - {"default"})
PAIRS = ["Ġ a", "1 2", "12 3", "123 4", "' s", "Ġ 1", "Ġ Ġ", "ĠĠ ĠĠ", "a b", "Ġ .", ". Ċ", "Ċ Ċ"]
TEXTS = [
    "qzqz",
    "1234",
    "12345 123456 1",
    "a1234b",
    "I'd've 12 it's DON'T",
    "x=3.14;\r\n  y",
    "  a  ",
]


def texts() -> list[str]:
    draw = random.Random(0)
    alphabet = list("abcXYZ 012123  '\n\r\ts.,!?-_éß你。🙂")
    return TEXTS + ["".join(draw.choices(alphabet, k=30)) for _ in range(60)]


def write(path: Path, rule: str) -> None:
    tokens = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [pair.replace(" ", "") for pair in PAIRS] + ["qzqz"]  # no merges lead to the last
    size, vocab = 32, len(tokens)
    writer: Any = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(size)
    writer.add_block_count(1)
    writer.add_feed_forward_length(size)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (vocab - 3))
    writer.add_token_merges(PAIRS)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (vocab, size), "output_norm": (size,)}
    shapes |= {f"blk.0.{part}": (size,) for part in ("attn_norm", "ffn_norm")}
    shapes |= {f"blk.0.attn_{part}": (size, size) for part in ("q", "k", "v", "output")}
    shapes |= {f"blk.0.ffn_{part}": (size, size) for part in ("gate", "up", "down")}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def theirs(path: Path) -> list[list[int]]:
    """The ids of all texts that llama.cpp gives."""
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel = 64, 1
    params.n_gpu_layers, params.warmup, params.verbosity = 0, False, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    found = []
    for text in texts():
        body = json.dumps({"content": text, "add_special": False, "parse_special": False})
        request = urllib.request.Request(
            f"{server.listening_address}/tokenize",
            body.encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            found.append(json.load(answer)["tokens"])
    return found


@pytest.mark.parametrize("rule", RULES)
def test_the_ids_of_llama_cpp(tmp_path: Path, rule: str) -> None:
    path = tmp_path / "small.gguf"
    write(path, rule)
    tokenizer: Any = make_tokenizer(GgufFile(path).metadata)
    ours = [list(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts()]
    assert ours == theirs(path)
