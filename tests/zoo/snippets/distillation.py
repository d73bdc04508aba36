"""Distillation between two heads, beyond GKD."""

import math
from typing import Any

import torch
import torch.nn.functional as F

from zoo.catalogue import Batch, snippet


@snippet()
def hinton(z: Any, x: Batch) -> Any:
    temperature = 2.0
    soft = F.kl_div(
        F.log_softmax(z / temperature, dim=-1),
        F.softmax(x.other / temperature, dim=-1),
        reduction="batchmean",
    )
    return soft * temperature**2


@snippet()
def hinton_kl_div_loss_module(z: Any, x: Batch) -> Any:
    loss = torch.nn.KLDivLoss(reduction="sum", log_target=True)
    return loss(z.view(-1, x.V).log_softmax(1), x.other.view(-1, x.V).log_softmax(1))


@snippet()
def mean_squared_logits(z: Any, x: Batch) -> Any:
    return F.mse_loss(z, x.other), F.smooth_l1_loss(z, x.other), F.l1_loss(z, x.other.detach())


@snippet()
def soft_cross_entropy(z: Any, x: Batch) -> Any:
    return -(F.softmax(x.other.detach(), -1) * F.log_softmax(z, -1)).sum(-1).mean()


@snippet()
def total_variation(z: Any, x: Batch) -> Any:
    return 0.5 * (z.softmax(-1) - x.other.softmax(-1)).abs().sum(-1)


@snippet()
def alpha_divergence(z: Any, x: Batch) -> Any:
    log_p, log_q = z.log_softmax(-1), x.other.log_softmax(-1)
    return (1 - (0.4 * log_p + 0.6 * log_q).exp().sum(-1)) / (0.4 * 0.6)


@snippet()
def skewed_kl(z: Any, x: Batch) -> Any:
    """DistiLLM: KL to a mixture of teacher and student."""
    teacher, student = x.other.softmax(-1), z.softmax(-1)
    mixed = torch.log(0.1 * student + 0.9 * teacher)
    infinite = torch.isinf(z) | torch.isinf(x.other)
    products = torch.masked_fill(teacher * mixed, infinite, 0)
    per_token = products.sum(-1).view(-1)
    return -torch.sum(per_token * x.mask.view(-1)) / x.mask.sum()


@snippet()
def adaptive_kl_weights(z: Any, x: Batch) -> Any:
    """AKL: forward and reverse KL weighted by the gap on likely and unlikely tokens."""
    p, q = x.other.softmax(-1), z.softmax(-1)
    likely = p > 0.05
    gap = torch.abs(p - q)
    head, tail = (gap * likely).sum(-1).detach(), (gap * ~likely).sum(-1).detach()
    forward = (p * (p.log() - q.log())).sum(-1)
    reverse = (q * (q.log() - p.log())).sum(-1)
    return (head * forward + tail * reverse) / (head + tail)


@snippet()
def cosine_of_logits(z: Any, x: Batch) -> Any:
    dot = (z * x.other).sum(-1)
    return dot / (z.norm(dim=-1) * x.other.norm(dim=-1))


@snippet()
def pearson_of_probabilities(z: Any, x: Batch) -> Any:
    p, q = z.softmax(-1), x.other.softmax(-1)
    p, q = p - p.mean(-1, keepdim=True), q - q.mean(-1, keepdim=True)
    return 1 - (p * q).sum(-1) / (p.norm(dim=-1) * q.norm(dim=-1) + 1e-8)


@snippet(large="one-hot targets")
def decoupled(z: Any, x: Batch) -> Any:
    """DKD: target against the rest, and the rest among themselves."""
    is_target = F.one_hot(x.ids, x.V).bool()
    rest_student = F.log_softmax(z.masked_fill(is_target, -1e4), -1)
    rest_teacher = F.softmax(x.other.masked_fill(is_target, -1e4), -1)
    rest = F.kl_div(rest_student, rest_teacher, reduction="none").sum(-1)
    own = z.softmax(-1).gather(-1, x.ids[..., None]).squeeze(-1)
    return rest, own


@snippet()
def top_k_of_the_student_reverse(z: Any, x: Batch) -> Any:
    student = z.log_softmax(-1)
    own, ids = student.topk(6, dim=-1)
    teacher = x.other.log_softmax(-1).gather(-1, ids)
    return (own.exp() * (own - teacher)).sum(-1)


@snippet()
def self_distillation_live_teacher(z: Any, x: Batch) -> Any:
    """SDFT: the teacher is the model itself, without gradient."""
    with torch.no_grad():
        teacher = z.log_softmax(-1)
    student = (z * 0.9).log_softmax(-1)
    return F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)


@snippet()
def kl_of_categoricals(z: Any, x: Batch) -> Any:
    p = torch.distributions.Categorical(logits=z)
    q = torch.distributions.Categorical(logits=x.other)
    return torch.distributions.kl_divergence(p, q)


@snippet()
def divergence_of_chunks(z: Any, x: Batch) -> Any:
    parts = []
    for student, teacher in zip(
        z.view(-1, x.V).split(5), x.other.view(-1, x.V).split(5), strict=True
    ):
        log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
        parts.append((log_q.exp() * (log_q - log_p)).sum())
    return sum(parts) / x.mask.sum()


@snippet()
def speculative_acceptance(z: Any, x: Batch) -> Any:
    """EAGLE and Medusa training: overlap of draft and target."""
    return torch.minimum(z.softmax(-1), x.other.softmax(-1)).sum(-1)


@snippet()
def draft_loss(z: Any, x: Batch) -> Any:
    target = x.other.detach().softmax(dim=-1)
    log_p = F.log_softmax(z, dim=-1)
    losses = -torch.sum(x.mask.unsqueeze(-1) * (target * log_p), 2)
    return losses.sum() / x.mask.sum()


@snippet()
def jsd_of_two_sums(z: Any, x: Batch) -> Any:
    log_p, log_q = x.other.log_softmax(-1), z.log_softmax(-1)
    log_m = torch.logaddexp(log_p, log_q) - math.log(2.0)
    of_teacher = (log_p.exp() * (log_p - log_m)).sum(-1)
    return 0.5 * of_teacher + 0.5 * (log_q.exp() * (log_q - log_m)).sum(-1)


@snippet()
def jsd_of_masked_rows(z: Any, x: Batch) -> Any:
    p, q = x.other[x.mask].softmax(-1), z[x.mask].softmax(-1)
    m = 0.3 * p + 0.7 * q
    first, second = (p * (p.log() - m.log())).sum(-1), (q * (q.log() - m.log())).sum(-1)
    return first.mean() + 2 * second.mean()


@snippet()
def hellinger_distance(z: Any, x: Batch) -> Any:
    return (z.softmax(-1).sqrt() - x.other.softmax(-1).sqrt()).square().sum(-1)
