"""A Hugging Face model and its tokenizer, for the examples beside this file."""

from pathlib import Path
from typing import Any

import torch
import transformers

from lmhead.models import bundled
from lmhead.models.gguf import unpack


def load(folder: Path | None, *, quick: bool) -> tuple[Any, Any]:
    """Return (model, tokenizer) of a folder; None for SmolLM2-135M (`lmhead models add smollm2`).

    With `quick` the model is a random one of two layers with the tokenizer of `tiny`: a program
    ends in seconds, and its text makes no sense.
    """
    if not quick:
        folder = folder or unpack(bundled.add("smollm2"))
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
        return model, tokenizer
    end, file = "<|endoftext|>", bundled.add("tiny") / "tokenizer.json"
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(file), eos_token=end, pad_token=end
    )
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return transformers.LlamaForCausalLM(config), tokenizer
