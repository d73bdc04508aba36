"""The implementations that the cases run on; subclass `Implementation` to add another."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lmhead.head import LMHead
from lmhead.linear_query import query
from lmhead.loss import linear_cross_entropy
from lmhead.sampling import Sampler


class Implementation:
    """The methods that the cases call. One that is not overridden makes its cases "unsupported".

    Attributes:
        name: shown in reports.
        version: of the library, shown in reports.
    """

    name = "implementation"
    version = ""

    def loss(self, hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
        """Return the loss of hidden (N, D), weight (V, D) and targets (N,).

        Options as of `linear_cross_entropy`: bias, class_weight, ignore_index, reduction,
        label_smoothing, softcap, z_loss, num_items.
        """
        raise NotImplementedError("no loss")

    def entropy(self, hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Return the entropy of each row, (N,), differentiable."""
        raise NotImplementedError("no entropy")

    def process(self, logits: Tensor, context: Tensor, **options: Any) -> Tensor:
        """Return logits (B, V) after penalties, temperature and truncation: -inf where removed.

        Options as Hugging Face names them: temperature, top_k, top_p, typical_p,
        repetition_penalty. `context` (B, L) are the ids so far.
        """
        raise NotImplementedError("no logits processors")

    def sample(self, logits: Tensor, *, seeds: list[int] | None = None, **options: Any) -> Tensor:
        """Return a token for each row (B,), each with its own seed."""
        raise NotImplementedError("no sampling")

    def argmax(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return the token with the largest logit of each row, (N,)."""
        raise NotImplementedError("no argmax")

    def topk(self, hidden: Tensor, weight: Tensor, k: int) -> Tensor:
        """Return the ids of the k largest logits, largest first: (N, k)."""
        raise NotImplementedError("no top-k")


class Torch(Implementation):
    """`F.linear`, then torch's own functions."""

    name = "torch"
    version = torch.__version__

    def loss(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        *,
        bias: Tensor | None = None,
        class_weight: Tensor | None = None,
        softcap: float | None = None,
        **options: Any,
    ) -> Tensor:
        """F.cross_entropy of the logits."""
        logits = F.linear(hidden, weight, bias)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if "num_items" in options or "z_loss" in options:
            raise NotImplementedError("F.cross_entropy has no num_items or z_loss")
        return F.cross_entropy(logits, targets, weight=class_weight, **options)

    def entropy(self, hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Categorical(logits=...).entropy()."""
        logits = F.linear(hidden, weight, bias)
        entropy: Tensor = torch.distributions.Categorical(logits=logits).entropy()  # type: ignore[no-untyped-call]
        return entropy

    def sample(self, logits: Tensor, *, seeds: list[int] | None = None, **options: Any) -> Tensor:
        """torch.multinomial; one generator for all rows, so only one seed."""
        if options:
            raise NotImplementedError("torch.multinomial has no options")
        generator = None
        if seeds is not None:
            generator = torch.Generator().manual_seed(seeds[0])
        return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]

    def argmax(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """argmax of the product."""
        return F.linear(hidden, weight).argmax(-1)

    def topk(self, hidden: Tensor, weight: Tensor, k: int) -> Tensor:
        """topk of the product."""
        return F.linear(hidden, weight).topk(k).indices


class Ours(Implementation):
    """Package lmhead itself."""

    name = "lmhead"

    def __init__(self) -> None:
        self.version = _version("lmhead")

    def loss(self, hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
        """linear_cross_entropy."""
        loss: Tensor = linear_cross_entropy(hidden, weight, targets, **options)
        return loss

    def entropy(self, hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """query(entropy=True)."""
        entropy: Tensor = query(hidden, weight, bias=bias, entropy=True).entropy
        return entropy

    def process(self, logits: Tensor, context: Tensor, **options: Any) -> Tensor:
        """Sampler(...).process."""
        return Sampler(seed=0, **options).process(logits, context)

    def sample(self, logits: Tensor, *, seeds: list[int] | None = None, **options: Any) -> Tensor:
        """Sampler(...)."""
        return Sampler(seed=seeds, **options)(logits).token

    def argmax(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """head(hidden).argmax(-1)."""
        return self._logits(hidden, weight).argmax(-1)

    def topk(self, hidden: Tensor, weight: Tensor, k: int) -> Tensor:
        """head(hidden).topk(k)."""
        ids: Tensor = self._logits(hidden, weight).topk(k).indices
        return ids

    @staticmethod
    def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        linear.weight = torch.nn.Parameter(weight, requires_grad=False)
        logits: Tensor = LMHead.from_linear(linear)(hidden)
        return logits


class Transformers(Implementation):
    """Hugging Face's logits processors, in the order of `generate`; all else is torch's."""

    name = "transformers"

    def __init__(self) -> None:
        transformers = _module("transformers")
        self.version = transformers.__version__
        self._made = transformers.generation.logits_process

    def process(self, logits: Tensor, context: Tensor, **options: Any) -> Tensor:
        """Apply the warpers of `generate`."""
        p = self._made
        known = {
            "repetition_penalty": p.RepetitionPenaltyLogitsProcessor,
            "temperature": p.TemperatureLogitsWarper,
            "top_k": p.TopKLogitsWarper,
            "top_p": p.TopPLogitsWarper,
            "typical_p": p.TypicalLogitsWarper,
        }
        if set(options) - set(known):
            raise NotImplementedError(f"no {', '.join(set(options) - set(known))}")
        for option, warper in known.items():
            if option in options:
                logits = warper(options[option])(context, logits)
        return logits

    def sample(self, logits: Tensor, *, seeds: list[int] | None = None, **options: Any) -> Tensor:
        """multinomial of the processed logits, as `generate` does."""
        context = torch.zeros(len(logits), 1, dtype=torch.int64)
        return Torch().sample(self.process(logits, context, **options), seeds=seeds)


class Liger(Implementation):
    """Liger's fused linear cross-entropy; on a CPU in Triton's interpreter."""

    name = "liger"

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            os.environ.setdefault("TRITON_INTERPRET", "1")
        functional = _module("liger_kernel.transformers.functional", "liger-kernel")
        self._loss: Callable[..., Tensor] = functional.liger_fused_linear_cross_entropy
        self.version = _version("liger-kernel")

    def loss(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        *,
        class_weight: Tensor | None = None,
        z_loss: float = 0.0,
        **options: Any,
    ) -> Tensor:
        """liger_fused_linear_cross_entropy."""
        if targets.is_floating_point():
            raise NotImplementedError("no target probabilities")
        try:
            return self._loss(
                hidden, weight, targets, ce_weight=class_weight, lse_square_scale=z_loss, **options
            )
        except Exception as error:
            if type(error).__name__ == "InterpreterError":
                raise NotImplementedError("Triton's interpreter cannot run it") from error
            raise


class CutCrossEntropy(Implementation):
    """Cut Cross-Entropy's implementation for CPUs, `torch_compile`, run eagerly."""

    name = "cce"

    def __init__(self) -> None:
        spec = importlib.util.find_spec("cut_cross_entropy")
        if spec is None or spec.submodule_search_locations is None:
            raise ModuleNotFoundError("pip install --no-deps cut-cross-entropy")
        package = ModuleType("cut_cross_entropy")  # its __init__ needs a GPU
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules.setdefault("cut_cross_entropy", package)
        module = importlib.import_module("cut_cross_entropy.torch_compile")
        self._loss: Callable[..., Tensor] = module.torch_compile_linear_cross_entropy
        self.version = _version("cut-cross-entropy")

    def loss(self, hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
        """torch_compile_linear_cross_entropy."""
        if targets.is_floating_point():
            raise NotImplementedError("no target probabilities")
        with torch.compiler.set_stance("force_eager"):
            return self._loss(hidden, weight, targets, **options)


class Function(Implementation):
    """A function with the signature of `linear_cross_entropy`: its losses alone are checked."""

    def __init__(self, name: str, function: Callable[..., Tensor]) -> None:
        self.name, self._loss = name, function

    def loss(self, hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
        """Call the function."""
        return self._loss(hidden, weight, targets, **options)


KNOWN: dict[str, Callable[[], Implementation]] = {
    "torch": Torch,
    "lmhead": Ours,
    "transformers": Transformers,
    "liger": Liger,
    "cce": CutCrossEntropy,
}


def named(name: str) -> Implementation:
    """Return a known implementation, or module:name of an Implementation or a loss function."""
    if name in KNOWN:
        return KNOWN[name]()
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ValueError(
            f"implementation must be one of {', '.join(KNOWN)}, or module:name; got {name!r}"
        )
    sys.path.insert(0, os.getcwd())
    implementation = getattr(_module(module), attribute)
    if isinstance(implementation, type) and issubclass(implementation, Implementation):
        implementation = implementation()
    ours = isinstance(implementation, Implementation)
    return implementation if ours else Function(name, implementation)


def _module(name: str, package: str | None = None) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(f"{package or name} is not installed: {missing}") from None


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown version"
