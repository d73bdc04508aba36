"""The implementations that the contract runs on, each behind the same two methods.

`torch` is what a user writes today; where it differs from the contract, a test says so with
`torch_differs`, which is a strict expected failure. To point the suite at another library, write
one more `Implementation` and add it to `IMPLEMENTATIONS`.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lmhead
from lmhead.vocab import AdaptiveHead, HierarchicalHead


class LogProbAndEntropy(NamedTuple):
    log_prob: Tensor
    entropy: Tensor


class Implementation(ABC):
    """One way to compute; `can` names the options and properties it has beyond the common ones.

    "map" is scale and soft-capping; "transforms" are `torch.func`, `torch.compile`, second
    derivatives and checkpoints; "rows" that rows of the weight are used as they are given, so
    that half precision rounds them no further.
    """

    name: str
    can: frozenset[str] = frozenset()

    @abstractmethod
    def loss(self, hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
        """`linear_cross_entropy` with these options, in float32 for half precisions."""

    @abstractmethod
    def log_prob_and_entropy(
        self, hidden: Tensor, weight: Tensor, ids: Tensor, **options: Any
    ) -> LogProbAndEntropy:
        """Log-probability of ids (...) and entropy (...) of the next token, in nats."""


class Functional(Implementation):
    """`lmhead.linear_cross_entropy` and `lmhead.query`."""

    def __init__(self, name: str, max_bytes: int | None = None) -> None:
        self.name = name
        self.max_bytes = max_bytes
        self.can = frozenset({"z_loss", "num_items", "map", "rows", "transforms"})
        if max_bytes is None:
            self.can |= {"size", "three products"}

    def loss(self, hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
        loss: Tensor = lmhead.linear_cross_entropy(
            hidden, weight, targets, max_bytes=self.max_bytes, **options
        )
        return loss

    def log_prob_and_entropy(
        self, hidden: Tensor, weight: Tensor, ids: Tensor, **options: Any
    ) -> LogProbAndEntropy:
        answers = lmhead.query(
            hidden, weight, log_prob=ids, entropy=True, max_bytes=self.max_bytes, **options
        )
        assert answers.log_prob is not None
        assert answers.entropy is not None
        return LogProbAndEntropy(answers.log_prob, answers.entropy)


class Sharded(Functional):
    """`Functional` on weights and biases that are split over the ranks of this process group.

    One rank here; tests/parallel runs the suite on more of them.
    """

    def __init__(self, name: str, max_bytes: int | None = None) -> None:
        super().__init__(name, max_bytes)
        self.can -= {"transforms", "size", "three products"}

    def loss(self, hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
        return super().loss(hidden, self._split(weight), targets, **self._options(options))

    def log_prob_and_entropy(
        self, hidden: Tensor, weight: Tensor, ids: Tensor, **options: Any
    ) -> LogProbAndEntropy:
        split, options = self._split(weight), self._options(options)
        return super().log_prob_and_entropy(hidden, split, ids, **options)

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        bias = options.get("bias")
        return options if bias is None else {**options, "bias": self._split(bias)}

    @staticmethod
    def _split(tensor: Tensor) -> Tensor:
        """A slice of the tensor per rank; every rank gets the whole gradient."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Replicate, Shard

        if not torch.distributed.is_initialized():
            store = torch.distributed.HashStore()  # type: ignore[attr-defined]
            torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        whole = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
        return whole.redistribute(placements=[Shard(0)])


class Lazy(Implementation):
    """Torch's own functions on what `LMHead` returns."""

    name = "lazy"
    can = frozenset({"size", "three products", "map", "rows", "transforms"})

    def loss(self, hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
        logits = self._logits(hidden, weight, options)
        if "class_weight" in options:
            options["weight"] = options.pop("class_weight")
        return _cross_entropy(logits, targets, **options)

    def log_prob_and_entropy(
        self, hidden: Tensor, weight: Tensor, ids: Tensor, **options: Any
    ) -> LogProbAndEntropy:
        logits = self._logits(hidden, weight, options)
        return _log_prob_and_entropy(logits, ids)

    @staticmethod
    def _logits(hidden: Tensor, weight: Tensor, options: dict[str, Any]) -> Any:
        """Takes what belongs to the head out of the options."""
        bias = options.pop("bias", None)
        head = lmhead.LMHead(
            weight.shape[1],
            weight.shape[0],
            bias=bias is not None,
            softcap=options.pop("softcap", None),
            scale=options.pop("scale", 1.0),
            dtype=weight.dtype,
        )
        parameters = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        logits = torch.func.functional_call(head, parameters, (hidden,))
        return logits.float() if weight.dtype in HALF else logits


class Factored(Lazy):
    """An adaptive head without clusters, whose one softmax is that of a linear layer."""

    name = "factored"
    can = frozenset({"three products", "rows", "transforms"})

    @staticmethod
    def _logits(hidden: Tensor, weight: Tensor, options: dict[str, Any]) -> Any:
        bias = options.pop("bias", None)
        vocab, dim = weight.shape
        head = AdaptiveHead(dim, vocab, cutoffs=[], bias=bias is not None, dtype=weight.dtype)
        parameters = {"head_weight": weight} | ({} if bias is None else {"head_bias": bias})
        logits = torch.func.functional_call(head, parameters, (hidden,))
        return logits.float() if weight.dtype in HALF else logits


class OneFork(Lazy):
    """A hierarchical head of one fork, all tokens its branches: softmax again.

    The last branch has no row, its score is 0: the others are relative to it. It is the token
    with the largest bias, so that a masked token never is.
    """

    name = "one-fork"
    can = frozenset({"transforms"})

    @staticmethod
    def _logits(hidden: Tensor, weight: Tensor, options: dict[str, Any]) -> Any:
        bias = options.pop("bias", None)
        vocab, dim = weight.shape
        last = vocab - 1 if bias is None else int(bias.detach().argmax())
        rest = [token for token in range(vocab) if token != last]
        tree = [*rest, last] if rest else last
        head = HierarchicalHead(dim, vocab, tree=tree, bias=bias is not None, dtype=weight.dtype)
        parameters = {"weight": weight[rest] - weight[last]}
        if bias is not None:
            parameters["bias"] = bias[rest] - bias[last]
        logits = torch.func.functional_call(head, parameters, (hidden,))
        return logits.float() if weight.dtype in HALF else logits


class Plain(Implementation):
    """`F.linear`, then `F.cross_entropy` or `Categorical`, and the options written out."""

    name = "torch"
    can = frozenset({"z_loss", "num_items", "three products", "map", "rows", "transforms"})

    def loss(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        *,
        bias: Tensor | None = None,
        softcap: float | None = None,
        scale: float = 1.0,
        class_weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        num_items: int | Tensor | None = None,
        **unknown: Any,
    ) -> Tensor:
        assert not unknown
        logits = self.logits(hidden, weight, bias=bias, softcap=softcap, scale=scale)
        loss = _cross_entropy(
            logits,
            targets,
            weight=class_weight,
            ignore_index=ignore_index,
            reduction=reduction if num_items is None else "sum",
            label_smoothing=label_smoothing,
        )
        if z_loss:
            kept = torch.ones(logits.shape[:-1], dtype=torch.bool)
            if not targets.is_floating_point():
                kept = targets != ignore_index
            squares = torch.where(kept, logits.logsumexp(-1) ** 2, 0.0)
            if reduction == "mean" and num_items is None:
                squares = squares.sum() / kept.sum()
            elif reduction != "none":
                squares = squares.sum()
            loss = loss + z_loss * squares
        return loss if num_items is None else loss / num_items

    def log_prob_and_entropy(
        self, hidden: Tensor, weight: Tensor, ids: Tensor, **options: Any
    ) -> LogProbAndEntropy:
        return _log_prob_and_entropy(self.logits(hidden, weight, **options), ids)

    @staticmethod
    def logits(
        hidden: Tensor,
        weight: Tensor,
        *,
        bias: Tensor | None = None,
        softcap: float | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        logits = F.linear(hidden, weight, bias)
        if logits.dtype in HALF:
            logits = logits.float()
        logits = logits * scale
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)


HALF = (torch.bfloat16, torch.float16)
TORCH = Plain()
IMPLEMENTATIONS: tuple[Implementation, ...] = (
    Functional("functional"),
    # So little memory that even the smallest test takes many tiles and many chunks; the logits are
    # then computed once more for the gradients, and billions of them would take all day.
    Functional("functional-in-tiles", max_bytes=512),
    Sharded("sharded"),
    Sharded("sharded-in-tiles", max_bytes=512),
    Lazy(),
    Factored(),
    OneFork(),
    TORCH,
)


def every_implementation(
    *, needs: Collection[str] = (), torch_differs: str | None = None
) -> pytest.MarkDecorator:
    """Run a test on each implementation that can do what it needs.

    `torch_differs` says why plain torch must fail the test. The failure is strict: the day torch
    agrees, the test says so.
    """
    differs = pytest.mark.xfail(strict=True, reason=f"torch differs: {torch_differs}")
    return pytest.mark.parametrize(
        "implementation",
        [
            pytest.param(
                each, id=each.name, marks=[differs] if each is TORCH and torch_differs else []
            )
            for each in IMPLEMENTATIONS
            if set(needs) <= each.can
        ],
    )


def _cross_entropy(logits: Any, targets: Tensor, **options: Any) -> Tensor:
    """`F.cross_entropy`, which wants the classes in dimension 1, on logits (..., V)."""
    rows = logits.shape[:-1]
    if len(rows) > 1:
        logits = logits.flatten(0, -2)
        targets = targets.flatten(0, -2 if targets.is_floating_point() else -1)
    loss = F.cross_entropy(logits, targets, **options)
    return loss.view(rows) if options.get("reduction") == "none" else loss


def _log_prob_and_entropy(logits: Any, ids: Tensor) -> LogProbAndEntropy:
    """As written in most training loops; `Categorical` clamps -inf, so 0 · log 0 is 0."""
    log_prob = logits.log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)
    distribution = torch.distributions.Categorical(logits=logits, validate_args=False)
    return LogProbAndEntropy(log_prob, distribution.entropy())  # type: ignore[no-untyped-call]
