"""`LazyLogits.ask`: the questions of `lmhead.query` about lazy logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmhead import checks
from lmhead.lazy.program import Env, Node
from lmhead.lazy.replay import replay
from lmhead.lazy.routing import answer
from lmhead.scores import DenseScores
from lmhead.scores.answers import Answers, Asked

if TYPE_CHECKING:
    from lmhead.lazy.logits import LazyLogits


def ask(
    logits: LazyLogits,
    *,
    kl_to: Any = None,
    max_bytes: int | None = None,
    **questions: Any,
) -> Answers:
    """Answer questions about the rows of lazy logits; see `lmhead.query`."""
    checks.check_max_bytes(max_bytes)
    shape = logits.shape
    asked = Asked.checked(
        logits.lead, shape[logits._vdim], logits.device, kl=kl_to is not None, **questions
    )
    other: list[Node] = []
    if kl_to is not None:
        if not hasattr(kl_to, "part"):
            raise TypeError(f"kl_to must be lazy logits; got {type(kl_to).__name__}")
        if kl_to.shape != shape:
            raise ValueError(
                f"kl_to must have logits of shape {tuple(shape)}; got {tuple(kl_to.shape)}"
            )
        other = [kl_to.part]
    limit = logits.max_bytes if max_bytes is None else max_bytes
    nodes = [logits.part, *other]

    def by_scores(env: Env) -> tuple[Tensor, ...]:
        found = [node.bound(env) for node in nodes]
        return asked.compute(found[0].limited(limit), found[1] if other else None)

    def by_rows(env: Env) -> tuple[Tensor, ...]:
        def rows(tiles: Sequence[Tensor], first: int, last: int) -> tuple[Tensor, ...]:
            some = [DenseScores(tile) for tile in tiles]
            return asked.compute(some[0], some[1] if other else None, slice(first, last))

        return replay(nodes, rows, env, max_bytes=limit)

    function = by_scores if all(node.is_scores for node in nodes) else by_rows
    with torch.set_grad_enabled(asked.smooth and torch.is_grad_enabled()):
        return asked.answers(answer(function, nodes), logits.dtype)
