"""lmhead: the last step of a language model.

Hidden state in; loss, log-probabilities and next token out, with no logits tensor in memory.

>>> import torch, lmhead
>>> head = lmhead.LMHead(64, 1000)
>>> hidden, targets = torch.randn(8, 64), torch.randint(1000, (8,))
>>> logits = head(hidden)  # computes nothing
>>> loss = torch.nn.functional.cross_entropy(logits, targets)  # one sweep over the vocabulary
>>> loss.backward()

The public names are loaded on first use, so that `lmhead --help` need not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmhead.errors import PerformanceWarning
    from lmhead.functional import Answers, linear_cross_entropy, query
    from lmhead.head import LMHead
    from lmhead.logits import LazyLogits
    from lmhead.models import LanguageModel, open_model
    from lmhead.sampling import Sampled, Sampler, beam_search, generate, stream_generate
    from lmhead.screen import ScreenedHead
    from lmhead.sweep import GradFilter
    from lmhead.tying import TyingAdvice, advise_tying
    from lmhead.vocab import AdaptiveEmbedding, AdaptiveHead, HierarchicalHead, SampledLoss, advise

    __version__: str

# Each public name once, with the room it lives in.
_ROOM = {
    "AdaptiveEmbedding": "vocab",
    "AdaptiveHead": "vocab",
    "Answers": "functional",
    "GradFilter": "sweep",
    "HierarchicalHead": "vocab",
    "LMHead": "head",
    "LanguageModel": "models",
    "LazyLogits": "logits",
    "PerformanceWarning": "errors",
    "Sampled": "sampling",
    "SampledLoss": "vocab",
    "Sampler": "sampling",
    "ScreenedHead": "screen",
    "TyingAdvice": "tying",
    "advise": "vocab",
    "advise_tying": "tying",
    "beam_search": "sampling",
    "generate": "sampling",
    "linear_cross_entropy": "functional",
    "open_model": "models",
    "query": "functional",
    "stream_generate": "sampling",
}

__all__ = [
    "AdaptiveEmbedding",
    "AdaptiveHead",
    "Answers",
    "GradFilter",
    "HierarchicalHead",
    "LMHead",
    "LanguageModel",
    "LazyLogits",
    "PerformanceWarning",
    "Sampled",
    "SampledLoss",
    "Sampler",
    "ScreenedHead",
    "TyingAdvice",
    "__version__",
    "advise",
    "advise_tying",
    "beam_search",
    "generate",
    "linear_cross_entropy",
    "open_model",
    "query",
    "stream_generate",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value = import_module("importlib.metadata").version("lmhead")
        globals()[name] = value
        return value
    if name not in _ROOM:
        raise AttributeError(f"module 'lmhead' has no attribute {name!r}")
    value = getattr(import_module(f"lmhead.{_ROOM[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
