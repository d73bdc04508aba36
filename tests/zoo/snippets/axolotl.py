"""Axolotl: chunked loss, distillation from stored top-k log-probs."""

from typing import Any

import torch
import torch.nn.functional as F

from zoo.catalogue import Batch, snippet


def stored_top_k(x: Batch, k: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and log-probs as a data set would hold them."""
    top, ids = x.probabilities.topk(k, dim=-1)
    return ids, top.log()


@snippet()
def chunked_cross_entropy(z: Any, x: Batch) -> Any:
    labels = x.labels.flatten()
    logits = z.reshape(-1, x.V)
    total = sum(
        F.cross_entropy(part, target, ignore_index=-100, reduction="sum")
        for part, target in zip(logits.chunk(5), labels.chunk(5), strict=True)
    )
    return total / (labels != -100).sum()


@snippet()
def distillation_top_k(z: Any, x: Batch) -> Any:
    ids, teacher = stored_top_k(x)
    student = torch.gather(z, dim=-1, index=ids)
    student = student - torch.logsumexp(z, dim=-1, keepdim=True)
    losses = teacher.exp() * (teacher - student)
    return losses[x.mask].sum() / x.mask.sum()


@snippet()
def distillation_temperature(z: Any, x: Batch) -> Any:
    ids, teacher = stored_top_k(x)
    student = torch.gather(z / 2.0, -1, ids)
    student = student - student.logsumexp(-1, keepdim=True)
    teacher = teacher - teacher.logsumexp(-1, keepdim=True)
    return (teacher.exp() * (teacher - student)).sum(-1).mean() * 4.0


@snippet()
def distillation_chunks_with_loss(z: Any, x: Batch) -> Any:
    ids, teacher = stored_top_k(x, 3)
    parts = []
    for part, part_ids, part_teacher in zip(
        torch.chunk(z, 2, dim=1), ids.chunk(2, 1), teacher.chunk(2, 1), strict=True
    ):
        log_p = torch.log_softmax(part, -1).gather(-1, part_ids)
        parts.append((part_teacher.exp() * (part_teacher - log_p)).sum())
    hard = F.cross_entropy(z.view(-1, x.V), x.labels.view(-1))
    return torch.stack(parts).sum() * 0.5 + hard * 0.5


@snippet()
def standardised_logits(z: Any, x: Batch) -> Any:
    """Distillation on z-scores: mean and standard deviation over the vocabulary."""
    mean, std = z.mean(dim=-1, keepdim=True), z.std(dim=-1, keepdim=True)
    student = (z - mean) / (std + 1e-7)
    return student.log_softmax(-1).gather(-1, x.ids.unsqueeze(-1)).squeeze(-1)


@snippet()
def perplexity_of_windows(z: Any, x: Batch) -> Any:
    labels = x.labels[:, 1:]
    nll = F.cross_entropy(z[:, :-1].permute(0, 2, 1), labels, reduction="none", ignore_index=-100)
    return torch.exp(nll.sum() / (labels != -100).sum())


@snippet()
def weighted_tokens(z: Any, x: Batch) -> Any:
    losses = F.cross_entropy(z.view(-1, x.V), x.ids.view(-1), reduction="none").view(x.B, x.T)
    return (losses * x.row.squeeze(-1)).sum() / x.row.sum()
