"""Results of a task in float64, and the errors of other results against them.

Of a result that is too large for float64, only some rows are computed: `expected["x.rows"]` are the
indices of the rows of the result "x" that `expected["x"]` holds.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.inputs import Inputs

TOP_K = 20  # of the query task

# Above this product tokens · vocab · hidden_size, all rows in float64 would take minutes.
_FULL = 2**38
_WEIGHT_GRAD = 2**26  # numbers of the weight's gradient that are compared
_CHUNK = 2**25  # float64 logits at a time
_TILE = 8192  # rows of the weight in float64 at a time
_SOME_ROWS, _SOME_TOKENS = 256, 4096


def expected_results(task: str, inputs: Inputs, *, top_k: int = TOP_K) -> dict[str, Tensor]:
    """Return the results of a task, "loss" or "query"."""
    return _loss(inputs) if task == "loss" else _answers(inputs, top_k)


def errors(results: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Return the error of each result.

    Numbers: relative Frobenius error, |result - expected| / |expected|. Ids: fraction of the rows
    with a wrong one.

    >>> expected = {"x": torch.tensor([3.0, 4.0]), "ids": torch.tensor([1, 2])}
    >>> errors({"x": torch.tensor([3.0, 4.5]), "ids": torch.tensor([1, 3])}, expected)
    {'x': 0.1, 'ids': 0.5}
    """
    by_name = {}
    for name, result in results.items():
        right, rows = expected[name], expected.get(f"{name}.rows")
        ours = result.detach() if rows is None else result.detach()[rows]
        if ours.shape != right.shape:
            raise ValueError(
                f"{name} must have shape {tuple(right.shape)}; got {tuple(ours.shape)}"
            )
        if right.is_floating_point():
            by_name[name] = _relative(ours, right)
        else:
            by_name[name] = float((ours != right).reshape(len(right), -1).any(1).double().mean())
    return by_name


def fingerprint(results: dict[str, Tensor]) -> dict[str, float]:
    """Return a number per result by which a later call can be compared."""
    return {
        name: float(torch.linalg.vector_norm(result.detach().reshape(-1), dtype=torch.float32))
        if result.is_floating_point()
        else float(result.sum())
        for name, result in results.items()
    }


def _relative(ours: Tensor, right: Tensor) -> float:
    difference = norm = torch.zeros((), dtype=torch.float64)
    # In pieces: a whole gradient in float64 would raise the peak of memory.
    pieces = (torch.split(t.reshape(-1), _CHUNK) for t in (ours, right))
    for a, b in zip(*pieces, strict=True):
        difference = difference + (a.double() - b.double()).square().sum()
        norm = norm + b.double().square().sum()
    return float((difference / norm).sqrt())


def _loss(inputs: Inputs) -> dict[str, Tensor]:
    """Return mean cross-entropy and the gradients (p - y) W / N and (p - y)ᵀ h / N."""
    n, vocab, size = len(inputs.hidden), *inputs.weight.shape
    all_rows = n * vocab * size <= _FULL
    rows = _spaced(n, n if all_rows else _SOME_ROWS)
    tokens = _spaced(vocab, min(vocab, _WEIGHT_GRAD // size) if all_rows else _SOME_TOKENS)
    if len(tokens) < vocab:  # targets have large gradients: always compare them
        tokens = torch.unique(torch.cat([tokens, inputs.targets]))
    loss = torch.zeros((), dtype=torch.float64)
    hidden_grad = torch.zeros(len(rows), size, dtype=torch.float64)
    weight_grad = torch.zeros(len(tokens), size, dtype=torch.float64)
    for start, hidden, targets, z in _chunks(inputs):
        lse = z.logsumexp(-1, keepdim=True)
        row_ids = torch.arange(len(z))
        loss += (lse[:, 0] - z[row_ids, targets]).sum() / n
        p = z.sub_(lse).exp_()
        p[row_ids, targets] -= 1
        p /= n
        inside = (rows >= start) & (rows < start + len(z))
        chosen = p[rows[inside] - start]
        hidden_grad[inside] = sum(chosen[:, tile] @ w for tile, w in _tiles(inputs.weight))
        for piece in torch.split(torch.arange(len(tokens)), _TILE):
            weight_grad[piece] += p[:, tokens[piece]].T @ hidden
    return {
        "loss": loss,
        "hidden_grad": hidden_grad,
        "hidden_grad.rows": rows,
        "weight_grad": weight_grad,
        "weight_grad.rows": tokens,
    }


def _answers(inputs: Inputs, top_k: int) -> dict[str, Tensor]:
    parts: dict[str, list[Tensor]] = {}
    ids = torch.arange(len(inputs.weight))
    for _, _, targets, z in _chunks(inputs):
        log_p = z.log_softmax(-1)
        target = z.gather(-1, targets[:, None])
        before = (z > target) | ((z == target) & (ids < targets[:, None]))
        # Ties: lowest id first. Sort by id, then by value with a stable sort.
        best = z.topk(top_k).indices.sort().values
        order = z.gather(-1, best).sort(stable=True, dim=-1, descending=True).indices
        top = best.gather(-1, order)
        answers = {
            "log_prob": log_p.gather(-1, targets[:, None])[:, 0],
            "entropy": -(log_p.exp() * log_p).sum(-1),
            "rank": before.sum(-1),
            "argmax": top[:, 0],
            "top_k": top,
        }
        for name, answer in answers.items():
            parts.setdefault(name, []).append(answer)
    return {name: torch.cat(pieces) for name, pieces in parts.items()}


def _chunks(inputs: Inputs) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """Yield chunks of rows: start, hidden, targets, and the float64 logits."""
    n, vocab = len(inputs.hidden), len(inputs.weight)
    step = max(1, _CHUNK // vocab)
    for start in range(0, n, step):
        hidden = inputs.hidden[start : start + step].double()
        z = hidden.new_empty(len(hidden), vocab)
        for tile, w in _tiles(inputs.weight):
            z[:, tile] = hidden @ w.T
        yield start, hidden, inputs.targets[start : start + step], z


def _tiles(weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    for start in range(0, len(weight), _TILE):
        tile = slice(start, min(start + _TILE, len(weight)))
        yield tile, weight[tile].double()


def _spaced(n: int, wanted: int) -> Tensor:
    """Return at most `wanted` of range(n), evenly spaced."""
    return torch.arange(n) if wanted >= n else torch.arange(wanted) * n // wanted
