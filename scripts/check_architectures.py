"""Open a small random model of every causal architecture of transformers; compare the logits.

    python scripts/check_architectures.py              all of them
    python scripts/check_architectures.py llama gpt2   these

Each is built by one set of options, saved as a folder, opened by `open_model`, and compared with
its own logits: in one call, and in two with the cache. Those that need more options, or have more
than 50 million parameters all the same, are not built. Prints a line per architecture, and counts.
"""

from __future__ import annotations

import collections
import contextlib
import multiprocessing
import os
import sys
import tempfile
from typing import Any

import tokenizers
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

import lmhead
from lmhead.errors import ModelError

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "moe_intermediate_size": 16,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 2, "moe_k": 2, "moe_topk": 2, "num_experts_per_token": 2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "is_decoder": True,
}  # fmt: skip
MOST_PARAMETERS = 50_000_000
TOLERANCE = 1e-4
SECONDS = 120


def examine(kind: str, name: str) -> str:
    """Return the result for one architecture."""
    transformers.logging.set_verbosity_error()
    try:
        torch.manual_seed(0)
        config = transformers.CONFIG_MAPPING[kind](**SIZES)
        model_class: Any = getattr(transformers, name)
        with torch.device("meta"):
            count = sum(p.numel() for p in model_class(config).parameters())
        if count > MOST_PARAMETERS:
            return f"not built: {count:,} parameters"
        model = model_class(config).eval()
        ids = torch.randint(3, config.get_text_config().vocab_size, (1, 9))
        with torch.no_grad():
            want = model(ids).logits
    except Exception as error:
        return f"not built: {type(error).__name__}: {error}"
    with tempfile.TemporaryDirectory() as folder:
        try:
            model.save_pretrained(folder)
            vocab = {f"w{id}": id for id in range(int(SIZES["vocab_size"]))}
            level = tokenizers.models.WordLevel(vocab, unk_token="w0")
            tokenizers.Tokenizer(level).save(f"{folder}/tokenizer.json")
        except Exception as error:
            return f"not built: {type(error).__name__}: {error}"
        try:
            ours = lmhead.open_model(folder)
        except ModelError as error:
            return f"refused: {error}"
        except Exception as error:
            return f"error when opened: {type(error).__name__}: {error}"
        try:
            with torch.no_grad():
                whole = ours.head(ours.hidden(ids)[0]).materialize()
                first, cache = ours.hidden(ids[:, :5])
                second, _ = ours.hidden(ids[:, 5:], cache)
                parts = ours.head(torch.cat([first, second], 1)).materialize()
        except Exception as error:
            return f"error when used: {type(error).__name__}: {error}"
    worst = max(float((found - want).abs().max()) for found in (whole, parts))
    return "agrees" if worst <= TOLERANCE * float(want.abs().max()) else f"differs by {worst:.1e}"


def _child(kind: str, name: str, pipe: Any) -> None:
    with open(os.devnull, "w") as null, contextlib.redirect_stderr(null):
        pipe.send(examine(kind, name))


def main() -> int:
    """Examine all or some; return 1 if the logits of one differ."""
    torch.set_num_threads(1)
    chosen = {kind: NAMES[kind] for kind in sys.argv[1:] or NAMES}
    fork = multiprocessing.get_context("fork")  # torch and transformers are imported once
    counts: collections.Counter[str] = collections.Counter()
    for kind, name in chosen.items():
        ours, theirs = fork.Pipe(duplex=False)
        child = fork.Process(target=_child, args=(kind, name, theirs))
        child.start()
        theirs.close()
        try:
            result = ours.recv() if ours.poll(SECONDS) else f"not built: {SECONDS} seconds"
        except EOFError:
            result = "error: the process ended"
        child.kill()
        child.join()
        counts[result.split(":")[0].split(" by ")[0]] += 1
        print(f"{kind:28} {' '.join(result.split())[:160]}", flush=True)
    print(f"\n{len(chosen)} architectures: {dict(counts)}")
    return int(counts["differs"] > 0)


if __name__ == "__main__":
    sys.exit(main())
