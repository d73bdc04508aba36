"""`patch`: TRL's trainers compute log-probabilities and divergences with lmhead.

TRL's SFT, DPO, KTO, GRPO and RLOO trainers run the body of a model and hand its hidden states, with
the weight of the output layer, to a function of TRL; so does its distillation trainer. The patch
replaces that function by lmhead's sweep. Ignored positions are left out, and an output layer that
is more than its weight (an `LMHead` with softcap, scale or low-rank delta, PEFT's LoRA and DoRA) is
respected.
"""

from __future__ import annotations

import sys
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import wraps
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import trl
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import Tensor, nn
from trl import DistillationTrainer
from trl.trainer import (
    distillation_trainer,
    dpo_trainer,
    grpo_trainer,
    kto_trainer,
    rloo_trainer,
    sft_trainer,
    utils,
)

from lmhead import bypass, checks
from lmhead.checks import eager
from lmhead.head import LMHead
from lmhead.integrations.peft import LoraHead
from lmhead.integrations.transformers import replace_head
from lmhead.lazy import LazyLogits
from lmhead.linear_divergence import divergence
from lmhead.sweep import (
    EqualRows,
    GradFilter,
    Pointwise,
    SweptScores,
    accumulation_dtype,
    as_filter,
    linear_scores,
)

# Trainers that refuse an adapter on the output layer.
_REFUSING = (
    sft_trainer,
    dpo_trainer,
    kto_trainer,
    grpo_trainer,
    rloo_trainer,
    distillation_trainer,
)

TESTED = ("1.16.0",)
"""Versions of TRL that the patch was tested with."""

# The output layer of the model whose fused forward pass is running.
_layer: ContextVar[nn.Module | None] = ContextVar("_layer", default=None)
# The output layers of student and teacher while their divergence is computed.
_pair: ContextVar[tuple[Any, Any]] = ContextVar("_pair", default=(None, None))


@dataclass(frozen=True)
class _Options:
    grad_filter: GradFilter | None
    max_bytes: int | None


class Patch:
    """What `patch` returns: as a context manager it undoes the patch at the end."""

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *_: object) -> None:
        unpatch()


def patch(*, grad_filter: float | GradFilter | None = None, max_bytes: int | None = None) -> Patch:
    """Make TRL's trainers compute log-probabilities and divergences with lmhead.

    Call it before the trainer is created. `unpatch()`, or the end of a `with patch():` block,
    undoes it; models that already have a fused head keep working either way.

    Args:
        grad_filter: tail mass of the gradient filter, see `linear_cross_entropy`; None for exact
            gradients, which DPO with `use_weighting` and distillation have in any case.
        max_bytes: bound on temporary memory; None for 128 MiB.

    Raises:
        RuntimeError: a version of TRL that this was not tested with.
    """
    if trl.__version__ not in TESTED:
        raise RuntimeError(
            f"lmhead.integrations.trl was tested with TRL {', '.join(TESTED)}; installed is "
            f"{trl.__version__}, whose functions may differ. Install a tested version, or use "
            "lmhead.replace_head(model) without the patch"
        )
    checks.check_max_bytes(max_bytes)
    unpatch()
    options = _Options(as_filter(grad_filter), max_bytes)
    _set(utils, "_ChunkedLogProbFunction", _LogProbs(options))
    _set(distillation_trainer, "ChunkedDivergenceFunction", _Divergence(options))
    for module in (utils, distillation_trainer):
        # Then only the positions that count are passed on.
        _set(module, "_use_triton", lambda _device: True)
    for module in _REFUSING:
        _set(module, "BaseTunerLayer", _RefusedAdapter)
    _set(DistillationTrainer, "_compute_loss", _distillation_loss)
    _replace(_add_fused_lm_head, _add_head)
    return Patch()


def unpatch() -> None:
    """Restore TRL's functions."""
    while _saved:
        owner, name, value = _saved.pop()
        setattr(owner, name, value)
    _replace(_add_head, _add_fused_lm_head)


_saved: list[tuple[Any, str, Any]] = []


def _set(owner: Any, name: str, value: Any) -> None:
    _saved.append((owner, name, getattr(owner, name)))
    setattr(owner, name, value)


def _replace(old: Any, new: Any) -> None:
    """Replace a function in every module of TRL that has imported it."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "trl" and vars(module).get("add_fused_lm_head") is old:
            module.add_fused_lm_head = new  # type: ignore[attr-defined]


# The fused head ----------------------------------------------------------------------------------

_add_fused_lm_head = utils.add_fused_lm_head


@wraps(_add_fused_lm_head)
def _add_head(model: Any, *args: Any, cast_lm_head_to_fp32: bool = False, **kwargs: Any) -> None:
    """Add TRL's fused head, and record its output layer for our function."""
    if isinstance(model.get_output_embeddings(), LoraLinear):
        if cast_lm_head_to_fp32:
            raise ValueError("cast_lm_head_to_fp32 must be False where lm_head has a PEFT adapter")
        replace_head(model)
    _add_fused_lm_head(model, *args, cast_lm_head_to_fp32=cast_lm_head_to_fp32, **kwargs)
    fused = model.forward

    @wraps(fused.__func__)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("fused_lm_head"):
            return fused(*args, **kwargs)
        before = _layer.set(self.get_output_embeddings())
        try:
            return fused(*args, **kwargs)
        finally:
            _layer.reset(before)

    model.forward = MethodType(forward, model)


_compute_loss = DistillationTrainer._compute_loss


@wraps(_compute_loss)
def _distillation_loss(self: Any, student: Any, *args: Any, **kwargs: Any) -> Any:
    """Record the output layers of student and teacher for our divergence."""
    teacher = self.accelerator.unwrap_model(self.teacher_model)
    for model in (student, teacher):
        if isinstance(model.get_output_embeddings(), LoraLinear):
            replace_head(model)
    before = _pair.set((student.get_output_embeddings(), teacher.get_output_embeddings()))
    try:
        return _compute_loss(self, student, *args, **kwargs)
    finally:
        _pair.reset(before)


class _Refused(type):
    def __instancecheck__(cls, layer: Any) -> bool:
        return isinstance(layer, BaseTunerLayer) and type(layer) not in (LoraLinear, LoraHead)


class _RefusedAdapter(metaclass=_Refused):
    """Adapters on the output layer that TRL must still refuse: all but LoRA and DoRA."""


# Log-probabilities -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _LogProbs:
    """Replaces TRL's `ChunkedLogProbFunction`.

    SFT sums the log-probabilities, so their gradients are computed together with them; for a layer
    whose rows are weighted (DPO, GRPO, DFT) that stops after its first step.
    """

    options: _Options
    summed: WeakKeyDictionary[nn.Module, EqualRows] = field(default_factory=WeakKeyDictionary)
    respects_heads = True

    @eager
    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,  # noqa: ARG002
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1"),
    ) -> tuple[Tensor | None, ...]:
        """Return log-probability, entropy, log Σp², mean logit and argmax hits: (N,) each."""
        layer = _layer.get()
        guess = None if layer is None else self.summed.setdefault(layer, EqualRows())
        z = _logits(layer, hidden, weight, bias, self.options, guess)
        z = _mapped(z, final_logit_softcapping, logit_scale, temperature)
        answers = z.ask(
            log_prob=targets,
            entropy="entropy" in outputs,
            log_sum_sq="log_sum_sq_probs" in outputs,
            mean_logit="mean_logits" in outputs,
            top1_match=targets if "is_top1" in outputs else None,
        )
        constants = (answers.log_sum_sq, answers.mean_logit)
        detached = (None if value is None else value.detach() for value in constants)
        return (answers.log_prob, answers.entropy, *detached, answers.top1_match)


def _logits(
    layer: Any,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: _Options,
    guess: EqualRows | None = None,
) -> LazyLogits:
    """Return lazy logits of rows (N, D) in float32; by the layer, if it is more than a weight."""
    layer = _active(layer)
    if layer is None or not _is_ours(layer):
        layer = bypass.head_of(weight)
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    hidden = hidden.to(dtype)
    if layer is None:
        plain = linear_scores(hidden, weight.to(dtype), bias, Pointwise(), **vars(options))
        return _lazy(replace(plain, equal_rows=guess))
    scores = layer.scores(hidden) if isinstance(layer, LMHead | LoraHead) else None
    if not isinstance(scores, SweptScores):
        logits: LazyLogits = layer(hidden).to(accumulation_dtype(dtype))
        return logits
    grad_filter = options.grad_filter or scores.grad_filter
    max_bytes = options.max_bytes or scores.max_bytes
    return _lazy(SweptScores(scores.source, grad_filter, max_bytes, equal_rows=guess))


def _active(layer: Any) -> Any:
    """Return the layer that a `modules_to_save` wrapper calls at present."""
    if not isinstance(layer, ModulesToSaveWrapper):
        return layer
    names = [name for name in layer.active_adapters if name in layer.modules_to_save]
    return layer.modules_to_save[names[0]] if names and not layer.disable_adapters else None


def _is_ours(layer: Any) -> bool:
    if isinstance(layer, TrainableTokensWrapper):
        return isinstance(layer.token_adapter.base_layer, LMHead)
    return isinstance(layer, LMHead | LoraHead)


def _lazy(scores: SweptScores) -> LazyLogits:
    return LazyLogits.of(scores, torch.Size([scores.n_rows]), scores.dtype)


def _mapped(z: Any, softcap: float | None, scale: float, temperature: float) -> Any:
    """Return z after the scale, the soft-capping and the temperature of a model."""
    if scale != 1.0:
        z = z * scale
    if softcap is not None:
        z = softcap * (z / softcap).tanh()
    return z if temperature == 1.0 else z / temperature


# Divergences -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Divergence:
    """Replaces TRL's `ChunkedDivergenceFunction`."""

    options: _Options
    respects_heads = True

    @eager
    def apply(
        self,
        student_hidden: Tensor,
        student_weight: Tensor,
        student_bias: Tensor | None,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        teacher_bias: Tensor | None,
        beta: float,
        temperature: float = 1.0,
        student_logit_scale: float = 1.0,
        student_final_logit_softcapping: float | None = None,
        teacher_logit_scale: float = 1.0,
        teacher_final_logit_softcapping: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the divergence of student and teacher, and the student's entropy: (N,) each.

        beta = 0 is KL(teacher ‖ student), 1 is KL(student ‖ teacher), between them the generalized
        Jensen-Shannon divergence with the mixture (1 - beta) · student + beta · teacher.
        """
        student_layer, teacher_layer = _pair.get()
        student = _logits(student_layer, student_hidden, student_weight, student_bias, self.options)
        student = _mapped(
            student, student_final_logit_softcapping, student_logit_scale, temperature
        )
        with torch.no_grad():
            teacher = _logits(
                teacher_layer, teacher_hidden, teacher_weight, teacher_bias, self.options
            )
            teacher = _mapped(
                teacher, teacher_final_logit_softcapping, teacher_logit_scale, temperature
            )
            entropy = student.ask(entropy=True).entropy
        kind = {0.0: "kl", 1.0: "reverse_kl"}.get(beta, "jsd")
        weight = beta if kind == "jsd" else 0.5
        return divergence(teacher, student, kind=kind, beta=weight), entropy
