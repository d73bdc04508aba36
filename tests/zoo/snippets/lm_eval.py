"""lm-eval: log-likelihood of continuations, greedy checks, rolling perplexity."""

from typing import Any

import torch
import torch.nn.functional as F

from zoo.catalogue import Batch, snippet


@snippet(grad=False)
def log_likelihood(z: Any, x: Batch) -> Any:
    found = []
    for logits, ids in zip(F.log_softmax(z, dim=-1), x.ids, strict=True):
        continuation = ids[-3:].unsqueeze(0)
        part = logits[-4:-1].unsqueeze(0)
        greedy = part.argmax(dim=-1)
        exact = (greedy == continuation).all()
        log_p = torch.gather(part, 2, continuation.unsqueeze(-1)).squeeze(-1)
        found.append((log_p.sum(), exact))
    return torch.stack([a for a, _ in found]), torch.stack([b for _, b in found])


@snippet(grad=False)
def log_likelihood_in_float32(z: Any, x: Batch) -> Any:
    log_p = F.log_softmax(z, dim=-1, dtype=torch.float32)
    return torch.gather(log_p, 2, x.ids.unsqueeze(-1)).squeeze(-1).sum(-1)


@snippet(grad=False)
def several_continuations(z: Any, x: Batch) -> Any:
    """Single-token answers: all of them from one row of logits."""
    choices = torch.tensor([1, 5, 9, 13])
    log_p = torch.log_softmax(z[:, -1, :], -1)
    scores = log_p.index_select(-1, choices)
    return scores, scores.argmax(-1), log_p[:, choices]


@snippet(grad=False)
def is_greedy(z: Any, x: Batch) -> Any:
    greedy = z.argmax(-1).eq(x.ids)
    top = torch.log_softmax(z, -1).amax(-1)
    own = torch.log_softmax(z, -1).gather(-1, x.ids[..., None])[..., 0]
    return greedy, own == top


@snippet(grad=False)
def rolling_log_likelihood(z: Any, x: Batch) -> Any:
    total = torch.zeros((), dtype=z.dtype)
    for start in range(0, x.T, 2):
        window = z[:, start : start + 2].log_softmax(-1)
        total = total + window.gather(-1, x.ids[:, start : start + 2, None]).sum()
    return total


@snippet(grad=False)
def batch_moved_to_cpu(z: Any, x: Batch) -> Any:
    log_p = F.log_softmax(z, dim=-1).cpu()
    return log_p.gather(-1, x.ids.cpu()[..., None]).squeeze(-1).tolist() and log_p[0, 0, :2]


@snippet(grad=False)
def contextual_calibration(z: Any, x: Batch) -> Any:
    probabilities = z[:, -1].softmax(-1)[:, :4]
    normalised = probabilities / probabilities.sum(-1, keepdim=True)
    return normalised.argmax(-1), normalised


@snippet(grad=False)
def brier_score(z: Any, x: Batch) -> Any:
    choices = z[:, -1, [2, 4, 6]].softmax(-1)
    one_hot = F.one_hot(x.ids[:, -1] % 3, 3)
    return ((choices - one_hot) ** 2).sum(-1).mean()
