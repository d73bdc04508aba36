"""From the tensors of a linear layer to scores: sharded ones if the weight is a `DTensor`."""

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
    if not checks.is_dtensor(weight):
        scores = plain_scores(
            hidden,
            weight,
            bias,
            pointwise,
            names=names,
            grad_filter=grad_filter,
            max_bytes=max_bytes,
        )
        return scores, hidden
    return sharded_scores(
        hidden,
        (weight,),
        (),
        bias,
        pointwise,
        names=names,
        grad_filter=grad_filter,
        max_bytes=max_bytes,
    )


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
    if dim is None:
        plain = [_plain(t) for t in (hidden, *weights, *projections)]
        hidden, weights = plain[0], tuple(plain[1 : 1 + len(weights)])
        own = None if bias is None else _plain(bias)
        return _local(hidden, weights, plain[1 + len(weights) :], own, *options), hidden
    mesh = weight.device_mesh
    shard = VocabShard(mesh.get_group(dim), weight.shape[0])
    hidden = entered(_replicated(hidden, mesh, dim, names[0]), shard)
    local = _local(
        hidden,
        tuple(_slice(w, shard, dim) for w in weights),
        [entered(_plain(p), shard) for p in projections],
        None if bias is None else _slice(bias, shard, dim),
        *options,
    )
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
    hidden, *taken = autocast(hidden, *weights, *projections)
    hiddens = (hidden, *(hidden @ p.T for p in taken[n:]))
    rows = tuple(h.reshape(-1, h.shape[-1]) for h in hiddens)
    source = Source(rows, tuple(taken[:n]), bias, pointwise).keep_masked()
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


def _replicated(hidden: Any, mesh: Any, dim: int, name: str) -> Tensor:
    """Return the hidden states that all ranks of the vocabulary have in common."""
    if not checks.is_dtensor(hidden):
        return hidden  # type: ignore[no-any-return]
    from torch.distributed.tensor import Replicate

    if hidden.device_mesh != mesh:
        raise ValueError(f"{name} and weight must be on the same device mesh")
    placements = list(hidden.placements)
    placements[dim] = Replicate()
    # Its gradient is summed by `entered` already.
    return hidden.redistribute(placements=placements).to_local()  # type: ignore[no-any-return]


def _slice(tensor: Any, shard: VocabShard, dim: int) -> Tensor:
    """Return this rank's slice of a weight or bias, of a DTensor or of what every rank has."""
    if checks.is_dtensor(tensor) and tensor.placements[dim].is_shard(0):
        return tensor.to_local()  # type: ignore[no-any-return]
    return entered(_plain(tensor), shard)[shard.start : shard.start + shard.size]


def _plain(tensor: Any) -> Tensor:
    return tensor.to_local() if checks.is_dtensor(tensor) else tensor  # type: ignore[no-any-return]
