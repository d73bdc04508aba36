"""OpenRLHF: log-probs at a temperature, entropy, distillation and preference losses."""

from typing import Any

import torch
import torch.nn.functional as F

from zoo.catalogue import Batch, snippet


@snippet()
def log_probs_from_logits(z: Any, x: Batch) -> Any:
    z.div_(0.7)
    if z.dtype in (torch.float32, torch.float64):
        batch = z.shape[:-1]
        selected = z.gather(-1, x.ids.unsqueeze(-1)).squeeze(-1)
        normalisers = torch.stack([torch.logsumexp(row, dim=-1) for row in z.reshape(-1, x.V)])
        return selected - normalisers.view(*batch)
    return None


@snippet()
def entropy(z: Any, x: Batch) -> Any:
    p = torch.nn.functional.softmax(z, dim=-1)
    return torch.logsumexp(z, dim=-1) - torch.sum(p * z, dim=-1)


@snippet()
def knowledge_distillation(z: Any, x: Batch) -> Any:
    teacher = F.softmax(x.other.detach(), dim=-1, dtype=z.dtype)
    infinite = torch.isinf(z)
    log_p = F.log_softmax(z, dim=-1, dtype=z.dtype)
    products = torch.masked_fill(teacher * log_p, infinite, 0)
    per_token = torch.sum(products, dim=-1).view(-1)
    counts = (x.labels != -100).int().view(-1)
    return -torch.sum(per_token * counts, dim=0) / torch.sum(counts, dim=0)


@snippet()
def language_model_loss(z: Any, x: Batch) -> Any:
    logits, labels = z[..., :-1, :].contiguous(), x.labels[..., 1:].contiguous()
    return torch.nn.CrossEntropyLoss(ignore_index=-100)(
        logits.view(-1, logits.size(-1)), labels.view(-1)
    )


@snippet()
def action_log_probs(z: Any, x: Batch) -> Any:
    rolled = torch.roll(x.ids, shifts=-1, dims=1)
    log_p = torch.log_softmax(z, -1).gather(2, rolled.unsqueeze(2)).squeeze(2)
    return log_p[:, :-1][:, -3:] * x.mask[:, -3:].to(z.dtype)


@snippet()
def average_log_prob_and_nll(z: Any, x: Batch) -> Any:
    logits, labels = z[:, :-1, :], x.labels[:, 1:].clone()
    counts = labels != -100
    labels[~counts] = 0
    per_token = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
    sums = (per_token * counts).sum(-1)
    return sums / counts.sum(-1), -sums.mean()


@snippet()
def kl_estimators(z: Any, x: Batch) -> Any:
    log_p = z.log_softmax(-1).gather(-1, x.ids[..., None])[..., 0]
    with torch.no_grad():
        base = x.other.log_softmax(-1).gather(-1, x.ids[..., None])[..., 0]
    ratio = log_p.float() - base.float()
    return ratio, ratio**2 / 2.0, (-ratio).exp() - 1 + ratio


@snippet()
def prm_loss_on_two_tokens(z: Any, x: Batch) -> Any:
    """Process reward: only the columns of "+" and "-" count."""
    logits = z[x.mask]
    pair = logits[..., torch.tensor([3, 11])]
    target = (x.ids[x.mask] % 2).long()
    return F.cross_entropy(pair, target), (pair.argmax(-1) == target).float().mean()
