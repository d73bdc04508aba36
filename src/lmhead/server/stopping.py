"""A model that stops in the middle of its work: between two layers, if nobody waits any more.

In:  models, and what is to be called before each of their layers.
Out: a context in which it is; outside of it the models are as they were, and nothing costs more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lmhead.models import LanguageModel

__all__ = ["asking_before_layers"]


@contextmanager
def asking_before_layers(
    models: Iterable[LanguageModel], ask: Callable[[], object]
) -> Iterator[None]:
    """Inside, `ask` is called before each layer of these models; what it raises ends their work.

    A layer is an entry of a list of modules, as the blocks of every Transformer are. The models
    may not be at work elsewhere meanwhile: they would be asked, too.

    >>> import torch
    >>> from lmhead.head import LMHead
    >>> from lmhead.nn import LlamaBody, LlamaConfig
    >>> body = LlamaBody(LlamaConfig(50, 16, 24, 3, 4, 2))
    >>> model = LanguageModel(body, LMHead.tied(body.embedding))
    >>> asked = []
    >>> with asking_before_layers([model], lambda: asked.append("go on?")):
    ...     _ = model.hidden(torch.tensor([[1, 2]]))
    >>> _ = model.hidden(torch.tensor([[1, 2]]))
    >>> len(asked)
    3
    """

    def before(module: nn.Module, args: Any) -> None:  # noqa: ARG001
        ask()

    layers = {layer for model in models for layer in _layers(model.body)}
    hooks = [layer.register_forward_pre_hook(before) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _layers(body: object) -> Iterator[nn.Module]:
    """The entries of its lists of modules; none for a body that is no module."""
    if isinstance(body, nn.Module):
        for module in body.modules():
            if isinstance(module, nn.ModuleList):
                yield from module
