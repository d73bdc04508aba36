"""llama.cpp itself on a tiny random Llama: the tokens that its samplers keep.

The package `xllamacpp` runs llama.cpp's server within the process; its samplers are reached through
completions of one token, which list the kept tokens and their probabilities. The model is
written as a GGUF file with the package `gguf`; the same weights in a `LlamaBody` give the true
logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import gguf_metadata
import numpy as np
import torch
import xllamacpp
from torch import Tensor, nn

from lmhead.nn import LlamaBody, LlamaConfig

VOCAB, CONTEXT = 400, 256
EOS = 2
SIZES = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    rotary="interleaved",
)
_FIRST_TOKEN = 3 + 128  # the first id that is no byte
# DRY's breakers are strings to llama.cpp: every token that has the letter in it is one.
BREAKERS = {"Q": [3 + ord("Q"), 300, 301], "Z": [3 + ord("Z"), 302]}
# Names of the parameters of a `Block` in llama.cpp's files.
_PARTS = {
    "attn_norm": "attention_norm",
    "attn_q": "attention.query",
    "attn_k": "attention.key",
    "attn_v": "attention.value",
    "attn_output": "attention.output",
    "ffn_norm": "feed_forward_norm",
    "ffn_gate": "feed_forward.gate",
    "ffn_up": "feed_forward.up",
    "ffn_down": "feed_forward.down",
}


@dataclass(frozen=True)
class NextToken:
    """The next token that llama.cpp drew, and the probabilities it drew from."""

    token: int
    probability: dict[int, float]  # of every token that can be drawn


class TinyLlama(nn.Module):
    """Random weights; logits with a deviation of about 2."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.body = LlamaBody(SIZES)
        self.head = nn.Linear(SIZES.hidden_size, VOCAB, bias=False)
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            with torch.no_grad():
                weight.normal_(0, 0.25, generator=generator)
                if "norm" in name:
                    weight.add_(1)

    @torch.no_grad()
    def logits(self, ids: Sequence[int]) -> Tensor:
        """Of the token after the ids, (V,), float32."""
        hidden, _ = self.body(torch.tensor([ids]))
        out: Tensor = self.head(hidden[0, -1])
        return out

    def save(self, path: Path) -> Path:
        """As GGUF, in float32."""
        writer = gguf.GGUFWriter(str(path), "llama")
        gguf_metadata.add_sizes(writer, SIZES, context=CONTEXT)
        writer.add_rope_freq_base(SIZES.rope_theta)
        writer.add_rope_dimension_count(SIZES.head_size)
        _add_vocabulary(writer)
        for theirs, weight in self._weights().items():
            writer.add_tensor(f"{theirs}.weight", weight.detach().numpy().astype(np.float32))
        gguf_metadata.finish(writer)
        return path

    def _weights(self) -> dict[str, Tensor]:
        parameters = dict(self.named_parameters())
        by_name: dict[str, Tensor] = {
            "token_embd": parameters["body.embedding.weight"],
            "output_norm": parameters["body.norm.weight"],
            "output": parameters["head.weight"],
        }
        for layer in range(SIZES.num_hidden_layers):
            for theirs, ours in _PARTS.items():
                by_name[f"blk.{layer}.{theirs}"] = parameters[f"body.blocks.{layer}.{ours}.weight"]
        return by_name


def _add_vocabulary(writer: gguf.GGUFWriter) -> None:
    """Special tokens, bytes, and tokens of small letters.

    Bytes of ASCII alone: the server waits for the rest of a letter before it tells anything.
    """
    words = [f"w{''.join(chr(97 + int(c)) for c in str(id))}" for id in range(_FIRST_TOKEN, VOCAB)]
    for letter, ids in BREAKERS.items():
        for id in ids[1:]:
            words[id - _FIRST_TOKEN] += letter
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(128)), *words]
    kind = gguf.TokenType
    kinds = [kind.UNKNOWN, kind.CONTROL, kind.CONTROL, *[kind.BYTE] * 128]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(id) for id in range(VOCAB)])
    writer.add_token_types([*kinds, *[kind.NORMAL] * len(words)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(EOS)
    writer.add_unk_token_id(0)


class LlamaCpp:
    """A server of the model in a file, one request at a time."""

    def __init__(self, path: Path) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel = CONTEXT, 1
        params.n_gpu_layers, params.warmup, params.verbosity = 0, False, -1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._server = xllamacpp.Server(params)

    def log_probs(self, ids: Sequence[int]) -> Tensor:
        """Of all tokens after the ids, before any sampler: (V,), float64."""
        [answer] = self._answers(ids, samplers=[], post_sampling_probs=False)
        result = torch.full((VOCAB,), torch.nan, dtype=torch.float64)
        for word in answer["top_logprobs"]:
            result[word["id"]] = word["logprob"]
        return result

    def next_token(self, ids: Sequence[int], **options: Any) -> NextToken:
        """Return the next token after the ids, and the tokens that the samplers keep."""
        return self.next_tokens(ids, 1, **options)[0]

    def next_tokens(self, ids: Sequence[int], n: int, **options: Any) -> list[NextToken]:
        """Return the same for n tokens, each appended to the ids before the next."""
        answers = self._answers(ids, n_predict=n, post_sampling_probs=True, **options)
        return [
            NextToken(a["id"], {w["id"]: w["prob"] for w in a["top_probs"] if w["prob"] > 0})
            for a in answers
        ]

    def _answers(self, ids: Sequence[int], **options: Any) -> list[dict[str, Any]]:
        request = {"prompt": list(ids), "n_predict": 1, "n_probs": VOCAB, "cache_prompt": False}
        result = self._server.handle_completions({**request, "seed": 1, **options})
        found: list[dict[str, Any]] = result["choices"][0]["logprobs"]["content"]
        return found
