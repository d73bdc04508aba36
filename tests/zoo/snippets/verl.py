"""verl: log-probs and entropy of packed sequences, temperature in place."""

from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from zoo.catalogue import Batch, snippet


def entropy_from_logits(z: Any) -> Any:
    probabilities = F.softmax(z, dim=-1)
    return torch.logsumexp(z, dim=-1) - torch.sum(probabilities * z, dim=-1)


def log_probs_by_rows(z: Any, ids: Any) -> Any:
    selected = torch.gather(z, dim=-1, index=ids.unsqueeze(-1)).squeeze(-1)
    return selected - torch.stack([torch.logsumexp(row, dim=-1) for row in z])


@snippet()
def packed_temperature_in_place(z: Any, x: Batch) -> Any:
    packed = z.reshape(-1, x.V)
    packed.div_(0.8)
    return log_probs_by_rows(packed, x.ids.flatten())


@snippet()
def temperature_per_sequence_in_place(z: Any, x: Batch) -> Any:
    z.div_(x.temperature.clamp(min=1e-8))
    return -F.cross_entropy(z.view(-1, x.V), x.ids.view(-1), reduction="none")


@snippet()
def temperature_per_row_in_place(z: Any, x: Batch) -> Any:
    packed = z.view(-1, x.V)
    packed.div_(x.row.view(-1, 1).clamp(min=1e-8).to(z.dtype))
    return packed.log_softmax(-1).gather(-1, x.ids.view(-1, 1)), entropy_from_logits(packed)


@snippet()
def entropy_and_log_probs(z: Any, x: Batch) -> Any:
    return entropy_from_logits(z), log_probs_by_rows(z, x.ids)


@snippet()
def entropy_in_chunks(z: Any, x: Batch) -> Any:
    packed = z.view(-1, x.V)
    entropy = torch.zeros((packed.shape[0],), dtype=z.dtype)
    for i in range(0, packed.shape[0], 9):
        entropy[i : i + 9] = entropy_from_logits(packed[i : i + 9].to(z.dtype))
    return entropy


@snippet()
def entropy_checkpointed(z: Any, x: Batch) -> Any:
    return checkpoint(entropy_from_logits, z, use_reentrant=False)


@snippet()
def unpadded_rows(z: Any, x: Batch) -> Any:
    index = x.mask.flatten().nonzero().flatten()
    packed = torch.index_select(z.view(-1, x.V), 0, index)
    labels = torch.roll(x.ids.flatten()[index], shifts=-1, dims=0)
    log_p = log_probs_by_rows(packed, labels)
    padded = torch.zeros(x.B * x.T, dtype=z.dtype)
    return padded.index_put((index,), log_p).view(x.B, x.T)


@snippet()
def response_only(z: Any, x: Batch) -> Any:
    logits = z[:, -4 - 1 : -1, :]
    return log_probs_by_rows(logits, x.ids[:, -4:]), entropy_from_logits(logits)


@snippet()
def sum_of_squared_probabilities(z: Any, x: Batch) -> Any:
    return torch.exp(torch.logsumexp(2.0 * z, dim=-1) - 2.0 * torch.logsumexp(z, dim=-1))


@snippet()
def log_probs_of_cross_entropy(z: Any, x: Batch) -> Any:
    labels = x.labels.view(-1)
    return -F.cross_entropy(z.reshape(-1, x.V).float(), labels, reduction="none", ignore_index=-100)


@snippet()
def ppo_loss_with_entropy_bonus(z: Any, x: Batch) -> Any:
    log_p, entropy = log_probs_by_rows(z / 1.3, x.ids), entropy_from_logits(z / 1.3)
    ratio = torch.exp(log_p - log_p.detach())
    losses = -x.advantages * ratio - 0.01 * entropy
    return (losses * x.mask).sum() / x.mask.sum()


@snippet()
def top_k_distillation(z: Any, x: Batch) -> Any:
    with torch.no_grad():
        teacher_top, ids = torch.topk(F.log_softmax(x.other, -1), k=4, dim=-1)
    student = torch.gather(F.log_softmax(z, -1), -1, ids)
    return (teacher_top.exp() * (teacher_top - student)).sum(-1)


@snippet()
def clipped_logits(z: Any, x: Batch) -> Any:
    limited = torch.max(
        torch.min(z, torch.tensor(2.0, dtype=z.dtype)), torch.tensor(-2.0, dtype=z.dtype)
    )
    return limited.logsumexp(-1)


@snippet()
def clipped_by_covariance(z: Any, x: Batch) -> Any:
    log_prob = z.log_softmax(-1).gather(-1, x.ids[..., None])[..., 0]
    ratio = (log_prob - log_prob.detach() + 0.1).exp()
    losses = torch.maximum(-x.advantages * ratio, -x.advantages * ratio.clamp(0.8, 1.28))
    covariance = (x.advantages - x.advantages.mean()) * (log_prob - log_prob.mean()).detach()
    return (losses * (covariance <= covariance.flatten().quantile(0.8)))[x.mask].mean()


@snippet()
def low_variance_kl(z: Any, x: Batch) -> Any:
    log_prob = z.log_softmax(-1).gather(-1, x.ids[..., None])[..., 0]
    kl = (x.other.log_softmax(-1).gather(-1, x.ids[..., None])[..., 0] - log_prob).clamp(-20, 20)
    return (kl.exp() - kl - 1).clamp(-10, 10)
