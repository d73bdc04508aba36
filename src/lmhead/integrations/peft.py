"""PEFT adapters on an `LMHead`: LoRA, DoRA, modules_to_save and trainable tokens stay lazy.

`enable` teaches PEFT about `LMHead`; layers on anything else are not affected. Adapters keep
PEFT's own parameters, names and files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from peft.tuners.lora import model as lora_model
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.variants import DoraLinearVariant
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import Tensor, nn

from lmhead.head import LMHead
from lmhead.lazy import LazyLogits
from lmhead.sweep import Pointwise, SweptScores, linear_scores

NORM_ROWS = 4096
"""Rows of the weight whose norms DoRA needs that are computed at once."""


class LoraHead(LoraLinear):  # type: ignore[misc]
    """PEFT's LoRA layer around an `LMHead`: z = hidden @ (W + scaling · B·A).T, never merged."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return lazy logits (..., V)."""
        if args or any(value is not None for value in kwargs.values()) or not self._is_lazy():
            result: Tensor = super().forward(x, *args, **kwargs)
            return result
        if (scores := self.scores(x)) is not None:
            return _lazy(scores, x)
        # PEFT adds to what the head returns, one adapter after the other.
        logits: Tensor = self.base_layer(x)
        for name in self._active():
            if name in self.lora_variant:
                logits = self._dora(name, x, logits)
            else:
                logits = logits + _lazy(self._delta(name, x), x)
        return logits

    def scores(self, x: Tensor) -> SweptScores | None:
        """Return the scores of hidden states (..., D), as rows; None if they are no plain sum."""
        head, active = self.base_layer, self._active()
        if not isinstance(head, LMHead) or (self.disable_adapters and self.merged):
            return None  # the forward pass unmerges first
        if self.disable_adapters or self.merged:
            active = []
        elif active and not head.is_plain:
            return None
        scores = head.scores(x)
        if any(name in self.lora_variant for name in active) or not isinstance(scores, SweptScores):
            return None
        return self._added(scores, x, active)

    def _active(self) -> list[str]:
        return [name for name in self.active_adapters if name in self.lora_A]

    def _is_lazy(self) -> bool:
        """Whether the forward pass is ours: LoRA and DoRA on an `LMHead`, not merged."""
        variants = [self.lora_variant[name] for name in self._active() if name in self.lora_variant]
        ours = all(isinstance(variant, DoraLinearVariant) for variant in variants)
        ready = isinstance(self.base_layer, LMHead) and not self.merged
        return ours and ready and not self.disable_adapters

    def _added(self, scores: SweptScores, x: Tensor, names: list[str]) -> SweptScores:
        """Return the scores with the terms of the adapters."""
        source = scores.source
        for name in names:
            delta = self._delta(name, x).source
            bias = source.bias
            if delta.bias is not None:
                bias = delta.bias if bias is None else bias + delta.bias
            source = replace(
                source,
                hiddens=(*source.hiddens, *delta.hiddens),
                weights=(*source.weights, *delta.weights),
                bias=bias,
            )
        return SweptScores(source, scores.grad_filter, scores.max_bytes)

    def _delta(self, name: str, x: Tensor, *, dropped: bool = True) -> SweptScores:
        """Return the scores that an adapter adds: scaling · B(A(dropout(x)))."""
        a, b, scaling = self.lora_A[name], self.lora_B[name], self.scaling[name]
        x = self._cast_input_dtype(x, a.weight.dtype)
        if dropped:
            x = self.lora_dropout[name](x)
        bias = None if b.bias is None else b.bias * scaling
        return self._product(a(x) * scaling, b.weight, bias)

    def _product(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> SweptScores:
        head: LMHead = self.base_layer
        options: Any = {"grad_filter": head.grad_filter, "max_bytes": head.max_bytes}
        return linear_scores(hidden, weight, bias, Pointwise(), **options)

    def _dora(self, name: str, x: Tensor, logits: Tensor) -> Tensor:
        """Return logits + (m - 1) · x W + m · scaling · B A x, with m = magnitude / |W + sBA|."""
        head: LMHead = self.base_layer
        a, b, scaling = self.lora_A[name].weight, self.lora_B[name].weight, self.scaling[name]
        magnitude = self.lora_magnitude_vector[name].weight
        m = magnitude / _norms(head.weight, a, b, scaling).to(magnitude)
        dropout = self.lora_dropout[name]
        if isinstance(dropout, nn.Identity) or not self.training:
            base = logits if head.bias is None else logits - head.bias
        else:
            x = dropout(x)
            base = _lazy(self._product(x, head.weight, None), x)
        delta = _lazy(self._delta(name, x, dropped=False), x)
        added: Tensor = (m - 1) * base + m * delta
        return logits + added.to(logits.dtype)


def _lazy(scores: SweptScores, x: Tensor) -> LazyLogits:
    return LazyLogits.of(scores, x.shape[:-1], scores.source.hiddens[0].dtype)


@torch.no_grad()
def _norms(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Return the norms of the rows of W + scaling · B·A, a few rows at a time."""
    parts = [
        torch.linalg.vector_norm(w + scaling * (b_rows @ a).to(w.dtype), dim=1)
        for w, b_rows in zip(torch.split(weight, NORM_ROWS), torch.split(b, NORM_ROWS), strict=True)
    ]
    return torch.cat(parts)


def convert(layer: Any, change: Callable[[nn.Module], nn.Module]) -> bool:
    """Change the linear layers inside a PEFT wrapper, in place. Return whether it is one."""
    if isinstance(layer, ModulesToSaveWrapper):
        layer.original_module = change(layer.original_module)
        for name, module in layer.modules_to_save.items():
            layer.modules_to_save[name] = change(module)
        return True
    if isinstance(layer, TrainableTokensWrapper):
        convert(layer.token_adapter, change)
        return True
    if isinstance(layer, TrainableTokensLayer):
        layer.base_layer = change(layer.base_layer)
        return True
    if type(layer) in (LoraLinear, LoraHead):
        layer.base_layer = change(layer.base_layer)
        # The adapters in it stay as they are; only the forward pass differs.
        layer.__class__ = LoraHead if isinstance(layer.base_layer, LMHead) else LoraLinear
        return True
    if isinstance(layer, BaseTunerLayer):
        raise TypeError(
            "the output layer must be an nn.Linear, or one with LoRA, DoRA, modules_to_save or "
            f"trainable_token_indices; got {type(layer).__module__}.{type(layer).__qualname__}"
        )
    return False


def enable() -> None:
    """Make PEFT's layers lazy where they wrap an `LMHead`. Calling it again does nothing."""
    if getattr(lora_model.dispatch_default, "__module__", "") == __name__:
        return
    dispatch = lora_model.dispatch_default
    update = ModulesToSaveWrapper.update
    forward_adapters = TrainableTokensLayer.forward_adapters

    @wraps(dispatch, assigned=("__name__", "__doc__"))
    def dispatch_default(target: Any, adapter_name: str, config: Any, **kwargs: Any) -> Any:
        layer = dispatch(target, adapter_name, config, **kwargs)
        if type(layer) is LoraLinear and isinstance(layer.base_layer, LMHead):
            layer.__class__ = LoraHead
        return layer

    @wraps(update)
    def update_lazily(self: Any, adapter_name: str, tied_module: Any = None, **kwargs: Any) -> None:
        new = adapter_name not in self.modules_to_save
        update(self, adapter_name, tied_module=tied_module, **kwargs)
        layer = self.modules_to_save[adapter_name]
        if new and isinstance(self.original_module, LMHead) and type(layer) is nn.Linear:
            # With tied weights PEFT makes an nn.Linear on the embedding's weight.
            self.modules_to_save[adapter_name] = self.original_module.like(layer)

    @wraps(forward_adapters)
    def forward_lazily(self: Any, x: Tensor, active: Any, *args: Any, **kwargs: Any) -> Tensor:
        lazy = isinstance(self.base_layer, LMHead) and active
        if not lazy or self.disable_adapters or self.merged:
            result: Tensor = forward_adapters(self, x, active, *args, **kwargs)
            return result
        self._check_overlapping_tokens(active)
        return _with_tokens(self, x, active)

    lora_model.dispatch_default = dispatch_default
    ModulesToSaveWrapper.update = update_lazily
    TrainableTokensLayer.forward_adapters = forward_lazily


def _with_tokens(layer: Any, x: Tensor, active: list[str]) -> Tensor:
    """Return the logits of a head with some rows of its weight replaced."""
    logits: Tensor = layer.base_layer(x)
    for name in active:
        rows = layer.trainable_tokens_delta[name].to(layer.base_layer.weight)
        ids = torch.tensor(layer.token_indices[name], device=x.device)
        logits[..., ids] = nn.functional.linear(x, rows)
    return logits
