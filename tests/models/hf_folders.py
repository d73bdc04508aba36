"""Tiny random Hugging Face folders of many families, with a byte-level tokenizer."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

VOCAB = 300  # more than the tokenizer's: real vocabularies are padded
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
SPECIAL_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
PLAIN = {key: SMALL[key] for key in SMALL if key not in ("num_key_value_heads", "head_dim")}

# Family -> its configuration. Softcap and scale are strong enough for a test to notice their
# absence.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SMALL | {"tie_word_embeddings": False},
    "mistral": SMALL | {"sliding_window": 4},
    "qwen2": SMALL,
    "qwen3": SMALL | {"tie_word_embeddings": True},
    "gemma": SMALL,
    "gemma2": SMALL | {"final_logit_softcapping": 0.2, "sliding_window": 4},
    "gemma3_text": SMALL | {"final_logit_softcapping": 0.3, "sliding_window": 4},
    "cohere": SMALL | {"logit_scale": 0.25},
    "granite": SMALL | {"logits_scaling": 8.0},
    "minicpm3": PLAIN
    | {
        "dim_model_base": 4,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    },
    "gpt2": GPT2 | SPECIAL_IDS,
    "gptj": GPT2 | SPECIAL_IDS | {"rotary_dim": 4},
    "gpt_neox": PLAIN,
    "phi": PLAIN,
    "opt": {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "word_embed_proj_dim": 8,
        "ffn_dim": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
    }
    | SPECIAL_IDS,
    # Recurrent states beside keys and values; recurrent states alone; no cache at all.
    "falcon_h1": SMALL
    | {
        "lm_head_multiplier": 0.5,
        "mamba_d_ssm": 16,
        "mamba_n_heads": 2,
        "mamba_d_head": 8,
        "mamba_d_state": 4,
        "mamba_chunk_size": 8,
    },
    "mamba": {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
    | SPECIAL_IDS,
    "openai-gpt": GPT2 | SPECIAL_IDS,
    "bloom": {"vocab_size": VOCAB, "hidden_size": 16, "n_layer": 2, "n_head": 2} | SPECIAL_IDS,
}


def make(family: str, **changes: Any) -> Any:
    """A random model of transformers, the same each time, with logits of some size."""
    config = transformers.AutoConfig.for_model(family, **(FAMILIES[family] | changes))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            # Norms and biases begin at 1 and 0, where many mistakes cannot be seen.
            p.add_(torch.randn_like(p) * (0.1 if p.dim() == 2 else 0.2))
            assert p.isfinite().all(), name
    return model


def write_tokenizer(folder: Path) -> Path:
    """Bytes and three words; ids 0 to 3 are special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<pad>", "<s>", "</s>", "<unk>", *alphabet, "Ġa", "Ġt", "Ġth"]
    vocab = {word: id for id, word in enumerate(words)}
    merges = [("Ġ", "a"), ("Ġ", "t"), ("Ġt", "h")]
    tokenizer: Any = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(words[:4])
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def write(folder: Path, family: str = "llama", **changes: Any) -> Any:
    """Write a complete folder; return its model."""
    model = make(family, **changes)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


def edit(path: Path, **changes: Any) -> None:
    """Change entries of a JSON file; None removes one."""
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in fields.items() if value is not None}))
