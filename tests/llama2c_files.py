"""Tiny files in llama2.c's formats, written from their description, and a tiny model from them."""

import struct
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from lmhead.models import LanguageModel, load_llama2c

SIZES = {
    "dim": 16,
    "hidden_dim": 24,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "vocab_size": 300,
    "max_seq_len": 64,
}


def random_weights(seed: int = 0, *, tied: bool = True, **changes: int) -> dict[str, Tensor]:
    """Every array of a checkpoint, by the names of llama2.c and in the order of the file."""
    s = SIZES | changes
    size, inner, layers, vocab = s["dim"], s["hidden_dim"], s["n_layers"], s["vocab_size"]
    d = size // s["n_heads"]
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) / 2

    weights = {
        "tok_embeddings": random(vocab, size),
        "attention_norm": 1 + random(layers, size) / 2,
        "wq": random(layers, s["n_heads"] * d, size),
        "wk": random(layers, s["n_kv_heads"] * d, size),
        "wv": random(layers, s["n_kv_heads"] * d, size),
        "wo": random(layers, size, s["n_heads"] * d),
        "ffn_norm": 1 + random(layers, size) / 2,
        "w1": random(layers, inner, size),
        "w2": random(layers, size, inner),
        "w3": random(layers, inner, size),
        "norm": 1 + random(size) / 2,
        # Never to be read: both tables can be computed.
        "freqs_cos": torch.full((s["max_seq_len"], d // 2), torch.nan),
        "freqs_sin": torch.full((s["max_seq_len"], d // 2), torch.nan),
    }
    return weights if tied else weights | {"output": random(vocab, size)}


def write_checkpoint(path: Path, weights: dict[str, Tensor], **changes: int) -> Path:
    sizes = SIZES | changes
    if "output" in weights:
        sizes["vocab_size"] *= -1
    data = struct.pack("<7i", *sizes.values())
    path.write_bytes(data + b"".join(w.numpy().tobytes() for w in weights.values()))
    return path


def vocabulary(tokens: Iterable[str] = (), size: int = SIZES["vocab_size"]) -> list[bytes]:
    """Special tokens, bytes, the given tokens, and fillers up to the size."""
    pieces = [b"<unk>", b"\n<s>\n", b"\n</s>\n"]
    pieces += [f"<0x{byte:02X}>".encode() for byte in range(256)]
    pieces += [token.encode() for token in tokens]
    return pieces + [f"w{i}".encode() for i in range(size - len(pieces))]


def write_vocabulary(path: Path, pieces: list[bytes]) -> Path:
    """Of two pieces the one with the lower id is merged first, as in real vocabularies."""
    longest = max(map(len, pieces))
    entries = (
        struct.pack("<fi", 0.0 if id < 259 else 259.0 - id, len(piece)) + piece
        for id, piece in enumerate(pieces)
    )
    path.write_bytes(struct.pack("<i", longest) + b"".join(entries))
    return path


TOKENS = [" ", "a", "b", "c", "h", "e", "l", "o", " h", "el", "lo", " hel", " hello", "ab", "你"]


def tiny_model(folder: Path, seed: int = 0) -> LanguageModel:
    write_vocabulary(folder / "tok300.bin", vocabulary(TOKENS))
    return load_llama2c(write_checkpoint(folder / "tiny.bin", random_weights(seed)))
