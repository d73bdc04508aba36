"""`replace_head`: put an `LMHead` in a Hugging Face model, and take it out again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import MethodType
from typing import Any, TypeVar, cast

import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from lmhead import checks
from lmhead.head import LMHead
from lmhead.sweep import GradFilter

Model = TypeVar("Model", bound=nn.Module)
_HOOKS = [name for name in nn.Module().__dict__ if "hooks" in name]


def replace_head(
    model: Model,
    *,
    softcap: float | None = None,
    scale: float = 1.0,
    grad_filter: float | GradFilter | None = None,
    max_bytes: int | None = None,
) -> Model:
    """Put an `LMHead` on the weight of a Hugging Face model's output layer.

    Equivalent to: model.lm_head = LMHead.from_linear(model.lm_head), wherever the layer is

    The weight and the bias remain the same parameters, tied weights remain tied, and checkpoints
    are those of the original model. Works for causal, sequence-to-sequence and multimodal models,
    before or after `resize_token_embeddings`, and inside PEFT, accelerate, DistributedDataParallel
    and `torch.compile` wrappers. Soft-capping and scaling that the model applies to its logits stay
    where they are; `softcap` and `scale` are applied before them.

    With PEFT, LoRA and DoRA layers, `modules_to_save` and `trainable_token_indices` on the output
    layer stay lazy too, whether PEFT wraps the model before or after this call.

    Args:
        model: a model with `get_output_embeddings()`. Changed in place.
        softcap: see `LMHead`.
        scale: see `LMHead`.
        grad_filter: see `LMHead`.
        max_bytes: bound on temporary memory; None for 128 MiB.

    Returns:
        The model.

    Raises:
        TypeError: the model has no output layer, or one that is not a plain linear layer.
        ValueError: the weight is quantized, sharded or offloaded.
    """
    checks.check_max_bytes(max_bytes)
    base = base_model(model)
    old = _output_layer(model, base)

    def to_head(linear: nn.Module) -> nn.Module:
        _check_replaceable(linear)
        if isinstance(linear, LMHead):  # new options for an existing head
            linear = _as_linear(linear)
        assert isinstance(linear, nn.Linear)
        head = LMHead.from_linear(linear, softcap=softcap, scale=scale, grad_filter=grad_filter)
        head.max_bytes = max_bytes
        return _take_over(head, linear)

    new = _convert(old, to_head)
    _swap(base, old, new)
    if hasattr(type(base), "_get_resized_lm_head"):
        base._get_resized_lm_head = MethodType(_resized, base)
    return model


def restore_head(model: Model) -> Model:
    """Undo `replace_head`: put an `nn.Linear` on the weight of the model's `LMHead`."""
    base = base_model(model)
    old = _output_layer(model, base)

    def to_linear(head: nn.Module) -> nn.Module:
        return _take_over(_as_linear(head), head) if isinstance(head, LMHead) else head

    _swap(base, old, _convert(old, to_linear))
    base.__dict__.pop("_get_resized_lm_head", None)
    return model


def base_model(model: nn.Module) -> Any:
    """Return the model inside PEFT, `torch.compile` and data-parallel wrappers."""
    while not hasattr(type(model), "get_output_embeddings"):
        if hasattr(model, "get_base_model"):
            model = cast("Any", model).get_base_model()
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module) or isinstance(
            inner := getattr(model, "module", None), nn.Module
        ):
            model = inner
        else:
            break
    return model


def _output_layer(model: nn.Module, base: Any) -> nn.Module:
    if not hasattr(base, "get_output_embeddings"):
        raise TypeError(
            "model must be a Hugging Face model with get_output_embeddings(); "
            f"got {type(model).__name__}"
        )
    layer = base.get_output_embeddings()
    if not isinstance(layer, nn.Module):
        raise TypeError(
            "model must have an output layer over the vocabulary; "
            f"get_output_embeddings() of {type(base).__name__} returned {layer!r}"
        )
    return layer


def _check_replaceable(layer: nn.Module) -> None:
    """Raise unless the layer is hidden @ weight.T + bias on a parameter that stays where it is."""
    class_name = f"{type(layer).__module__}.{type(layer).__qualname__}"
    if not isinstance(layer, nn.Linear):
        raise TypeError(f"the output layer must be an nn.Linear; got {class_name}")
    if type(layer).forward not in (nn.Linear.forward, LMHead.forward):
        raise TypeError(
            f"the output layer must be a plain nn.Linear; {class_name} computes something else"
        )
    weight = layer._parameters.get("weight")
    if weight is None:
        raise TypeError(
            "the weight of the output layer must be a parameter; it is computed (parametrized or "
            "flattened). Remove the parametrization, or call replace_head before wrapping the model"
        )
    if isinstance(weight, DTensor):
        raise ValueError(
            "the weight of the output layer must not be sharded yet; it is a DTensor. Call "
            "replace_head before fully_shard or parallelize_module"
        )
    if hasattr(weight, "ds_id"):
        raise ValueError("the weight of the output layer must be whole; DeepSpeed ZeRO-3 splits it")
    if type(weight) is not nn.Parameter or not weight.is_floating_point():
        raise ValueError(
            "the weight of the output layer must be a floating-point parameter; got "
            f"{type(weight).__name__} of {weight.dtype} (quantized?)"
        )
    hook = getattr(layer, "_hf_hook", None)  # of accelerate
    if any(getattr(each, "offload", False) for each in (hook, *getattr(hook, "hooks", ()))):
        raise ValueError(
            "the weight of the output layer must stay in memory; accelerate offloads it after each "
            "call. Keep the output layer on one device in device_map"
        )


def _convert(layer: nn.Module, change: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Return the layer changed, or a PEFT wrapper with the layers in it changed."""
    if find_spec("peft") is not None:
        from lmhead.integrations import peft  # optional dependency

        peft.enable()
        if peft.convert(layer, change):
            return layer
    return change(layer)


def _as_linear(head: LMHead) -> nn.Linear:
    if not head.is_plain:
        raise ValueError(
            f"an nn.Linear cannot do what this head does: {head}. A low-rank delta can be merged "
            "with merge_low_rank()"
        )
    linear = nn.Linear(head.hidden_size, head.vocab_size, bias=False, device="meta")
    linear.weight, linear.bias = head.weight, head.bias  # type: ignore[assignment]
    return linear


def _take_over(new: nn.Linear, old: nn.Module) -> nn.Linear:
    """Give the new layer the old one's mode, hooks and attributes."""
    new.training = old.training
    for name in _HOOKS:
        new.__dict__[name] = old.__dict__[name]
    for name in ("_is_hf_initialized", "_hf_tp_plan", "_hf_device_mesh"):
        if name in old.__dict__:
            new.__dict__[name] = old.__dict__[name]
    hook = getattr(old, "_hf_hook", None)
    if hook is not None:
        accelerate: Any = sys.modules["accelerate.hooks"]
        accelerate.remove_hook_from_module(old)
        accelerate.add_hook_to_module(new, hook)
    return new


def _swap(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put `new` wherever the model has `old`."""
    if new is old:
        return
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is old:
                setattr(parent, name, new)


def _resized(self: Any, old_lm_head: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """Resize as the model's class does; the new head has the options of the old one."""
    new: nn.Module = type(self)._get_resized_lm_head(self, old_lm_head, *args, **kwargs)
    if not isinstance(old_lm_head, LMHead) or isinstance(new, LMHead):
        return new
    assert isinstance(new, nn.Linear)
    head = old_lm_head.like(new)
    a, b = old_lm_head.low_rank_a, old_lm_head.low_rank_b
    if a is not None and b is not None:
        more = (0, 0, 0, head.vocab_size - len(b))  # no delta for new tokens
        head.low_rank_a, head.low_rank_b = a, nn.Parameter(F.pad(b.detach(), more))
    return head
