"""lmhead: the last step of a language model.

Hidden state in; loss, log-probabilities and next token out, with no logits tensor in memory.

>>> import torch, lmhead
>>> head = lmhead.LMHead(64, 1000)
>>> hidden, targets = torch.randn(8, 64), torch.randint(1000, (8,))
>>> logits = head(hidden)  # computes nothing
>>> loss = torch.nn.functional.cross_entropy(logits, targets)  # one sweep over the vocabulary
>>> loss.backward()

The public names are imported on first use, so that `lmhead --help` loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lmhead.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from lmhead.errors import PerformanceWarning as PerformanceWarning
    from lmhead.head import LMHead as LMHead
    from lmhead.integrations.transformers import replace_head as replace_head
    from lmhead.integrations.transformers import restore_head as restore_head
    from lmhead.lazy import LazyLogits as LazyLogits
    from lmhead.linear_divergence import divergence as divergence
    from lmhead.linear_query import query as query
    from lmhead.loss import linear_cross_entropy as linear_cross_entropy
    from lmhead.models import LanguageModel as LanguageModel
    from lmhead.models import open_model as open_model
    from lmhead.notebook import explore as explore
    from lmhead.sampling import Sampled as Sampled
    from lmhead.sampling import Sampler as Sampler
    from lmhead.sampling import beam_search as beam_search
    from lmhead.sampling import generate as generate
    from lmhead.sampling import stream_generate as stream_generate
    from lmhead.scores.answers import Answers as Answers
    from lmhead.screen import ScreenedHead as ScreenedHead
    from lmhead.sweep import GradFilter as GradFilter
    from lmhead.tying import TyingAdvice as TyingAdvice
    from lmhead.tying import advise_tying as advise_tying
    from lmhead.vocab import AdaptiveEmbedding as AdaptiveEmbedding
    from lmhead.vocab import AdaptiveHead as AdaptiveHead
    from lmhead.vocab import HierarchicalHead as HierarchicalHead
    from lmhead.vocab import SampledLoss as SampledLoss
    from lmhead.vocab import advise as advise

    __version__: str


def _refuse_sub_interpreters() -> None:
    """Raise ImportError in a sub-interpreter, where importing torch never ends."""
    for name in ("_interpreters", "_xxsubinterpreters"):
        try:
            interpreters: Any = import_module(name)
        except ImportError:
            continue
        if interpreters.get_current() != interpreters.get_main():
            raise ImportError(
                "lmhead cannot be imported in a sub-interpreter: torch cannot; use a process"
            )


_refuse_sub_interpreters()
_names, _load, __dir__ = lazy_exports(
    __name__,
    {
        "lmhead.linear_divergence": ["divergence"],
        "lmhead.errors": ["PerformanceWarning"],
        "lmhead.head": ["LMHead"],
        "lmhead.integrations.transformers": ["replace_head", "restore_head"],
        "lmhead.lazy": ["LazyLogits"],
        "lmhead.loss": ["linear_cross_entropy"],
        "lmhead.models": ["LanguageModel", "open_model"],
        "lmhead.notebook": ["explore"],
        "lmhead.sampling": ["Sampled", "Sampler", "beam_search", "generate", "stream_generate"],
        "lmhead.linear_query": ["query"],
        "lmhead.scores.answers": ["Answers"],
        "lmhead.screen": ["ScreenedHead"],
        "lmhead.sweep": ["GradFilter"],
        "lmhead.tying": ["TyingAdvice", "advise_tying"],
        "lmhead.vocab": [
            "AdaptiveEmbedding",
            "AdaptiveHead",
            "HierarchicalHead",
            "SampledLoss",
            "advise",
        ],
    },
)
__all__ = [*_names, "__version__"]


def __getattr__(name: str) -> Any:
    if name in ("distill", "losses"):
        return import_module(f"lmhead.{name}")
    if name != "__version__":
        return _load(name)
    from importlib.metadata import version  # slow to import

    globals()[name] = version("lmhead")
    return globals()[name]
