"""Scores of a linear layer: `ShardedScores` if its weight is a `DTensor`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lmhead import checks
from lmhead.parallel import fsdp
from lmhead.parallel.sharded_scores import ShardedScores, entered
from lmhead.parallel.vocab_shard import VocabShard
from lmhead.screen.screened_scores import Screen, ScreenedScores
from lmhead.sweep import GradFilter, Pointwise, Source, SweptScores, autocast
from lmhead.sweep import linear_scores as plain_scores

LinearScores = SweptScores | ShardedScores


def linear_scores(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pointwise: Pointwise,
    *,
    names: tuple[str, str] = ("hidden", "weight"),
    grad_filter: GradFilter | None = None,
    max_bytes: int | None = None,
) -> tuple[LinearScores, Tensor]:
    """Return the scores of a linear layer, and its hidden states as a plain tensor."""
    options: Any = {"names": names, "grad_filter": grad_filter, "max_bytes": max_bytes}
    if checks.is_dtensor(weight):
        return sharded_scores(hidden, (weight,), (), bias, pointwise, **options)
    return plain_scores(hidden, weight, bias, pointwise, **options), hidden


def sharded_scores(
    hidden: Tensor,
    weights: tuple[Tensor, ...],
    projections: tuple[Tensor, ...],
    bias: Tensor | None,
    pointwise: Pointwise,
    *,
    names: tuple[str, str] = ("hidden", "weight"),
    grad_filter: GradFilter | None = None,
    max_bytes: int | None = None,
    screen: Screen | None = None,
) -> tuple[LinearScores, Tensor]:
    """Return the scores of a linear layer whose first weight is a `DTensor`, and its hidden states.

    Args:
        hidden: (..., D), the same on every rank of the vocabulary; or a `DTensor`.
        weights: (V, D_i) each; a plain one is the same on every rank.
        projections: (D_i, D) each, of the weights after the first: their hidden states are
            hidden @ projection.T. The same on every rank.
        bias: (V,) or None, likewise.
        pointwise: the map from the linear layer to the logits.
        names: of hidden and weight, for errors.
        grad_filter: approximate gradients of losses.
        max_bytes: bound on temporary memory.
        screen: a quantized copy of this rank's slice of the weight.
    """
    weight: Any = weights[0]
    options = (pointwise, grad_filter, max_bytes, screen)
    dim = _vocab_dim(weight, names[1])
    checks.check_hidden_and_weight(*autocast(hidden, weight), names=names)
    checks.check_vector("bias", bias, weight)
    mesh = weight.device_mesh
    replicated = [_replicated(t, mesh, names[0]) for t in (hidden, *projections)]
    slices = [_slice(t, weight, dim) for t in (*weights, *(() if bias is None else (bias,)))]
    hidden, projected = replicated[0], replicated[1:]
    bias_slice = None if bias is None else slices.pop()
    if dim is None:
        return _local(hidden, tuple(slices), projected, bias_slice, *options), hidden
    shard = VocabShard(mesh.get_group(dim), weight.shape[0])
    hidden, *projected = (entered(t, shard) for t in replicated)
    local = _local(hidden, tuple(slices), projected, bias_slice, *options)
    owners = (*local.source.hiddens, *weights, *(() if bias is None else (bias,)))
    return ShardedScores(local, shard, owners), hidden


def _local(
    hidden: Tensor,
    weights: tuple[Tensor, ...],
    projections: list[Tensor],
    bias: Tensor | None,
    pointwise: Pointwise,
    grad_filter: GradFilter | None,
    max_bytes: int | None,
    screen: Screen | None,
) -> SweptScores:
    """Return the scores of plain tensors."""
    n = len(weights)
    hidden, *cast = autocast(hidden, *weights, *projections)
    hiddens = (hidden, *(hidden @ p.T for p in cast[n:]))
    rows = tuple(h.reshape(-1, h.shape[-1]) for h in hiddens)
    source = Source(rows, tuple(cast[:n]), bias, pointwise).keep_masked()
    if screen is not None:
        return ScreenedScores(source, grad_filter, max_bytes, screen=screen)
    return SweptScores(source, grad_filter, max_bytes)


def _vocab_dim(weight: Any, name: str) -> int | None:
    """Return the mesh dimension that the vocabulary is split over; None if every rank has it."""
    if fsdp.is_sharded_parameter(weight):
        raise RuntimeError(
            f"{name} is sharded by FSDP2 and is not gathered here; use it inside the forward pass "
            "of its module, or call unshard() first"
        )
    sharded = [i for i, p in enumerate(weight.placements) if not p.is_replicate()]
    if not sharded:
        return None
    if len(sharded) > 1 or not weight.placements[sharded[0]].is_shard(0):
        raise ValueError(
            f"{name} must be sharded over the vocabulary, with Shard(0) on one dimension of its "
            f"mesh and Replicate() on the others; got {tuple(weight.placements)}"
        )
    return sharded[0]


def _replicated(tensor: Any, mesh: Any, name: str) -> Tensor:
    """Return hidden states or a projection in full, on every rank."""
    if not checks.is_dtensor(tensor):
        return tensor  # type: ignore[no-any-return]
    from torch.distributed.tensor import Replicate

    if tensor.device_mesh != mesh:
        raise ValueError(f"{name} and weight must be on the same device mesh")
    # `entered` sums its gradient over the ranks of the vocabulary.
    return tensor.redistribute(placements=[Replicate()] * mesh.ndim).to_local()  # type: ignore[no-any-return]


def _slice(tensor: Any, weight: Any, dim: int | None) -> Tensor:
    """Return this rank's part of a weight or bias, split as the first weight is."""
    if checks.is_dtensor(tensor):
        if tensor.device_mesh != weight.device_mesh:
            raise ValueError("bias and weight must be on the same device mesh")
        return tensor.redistribute(placements=weight.placements).to_local()  # type: ignore[no-any-return]
    if dim is None:
        return tensor  # type: ignore[no-any-return]
    shard = VocabShard(weight.device_mesh.get_group(dim), weight.shape[0])
    return entered(tensor, shard)[shard.start : shard.start + shard.size]
