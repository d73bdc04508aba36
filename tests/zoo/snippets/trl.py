"""TRL: SFT, preference losses, GRPO and its relatives, distillation; older and newer spellings."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.catalogue import Batch, snippet


def token_log_probs(z: Any, ids: Tensor) -> Any:
    return z.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def sequence_log_probs(z: Any, x: Batch) -> Any:
    """Shifted, masked, one number per sequence: the DPO family."""
    logits, labels = z[:, :-1, :], x.labels[:, 1:].clone()
    counts = labels != -100
    labels[labels == -100] = 0
    return (token_log_probs(logits, labels) * counts).sum(-1)


@snippet()
def grpo_temperature_in_place(z: Any, x: Batch) -> Any:
    logits = z[:, :-1, :]
    logits.div_(0.6)
    return token_log_probs(logits, x.ids[:, 1:])


@snippet()
def grpo_temperature(z: Any, x: Batch) -> Any:
    logits = z[:, :-1, :]
    logits = logits[:, -3:, :]
    logits = logits / 0.6
    return token_log_probs(logits, x.ids[:, -3:])


@snippet()
def grpo_loss(z: Any, x: Batch) -> Any:
    log_probs = token_log_probs(z / 0.9, x.ids)
    old = log_probs.detach() - 0.1 * x.advantages
    ratio = torch.exp(log_probs - old)
    clipped = torch.clamp(ratio, 0.8, 1.2)
    per_token = -torch.min(ratio * x.advantages, clipped * x.advantages)
    return ((per_token * x.mask).sum(-1) / x.mask.sum(-1).clamp(min=1.0)).mean()


@snippet()
def grpo_kl_to_reference(z: Any, x: Batch) -> Any:
    log_probs = token_log_probs(z, x.ids)
    with torch.no_grad():
        reference = token_log_probs(x.other, x.ids)
    kl = torch.exp(reference - log_probs) - (reference - log_probs) - 1
    return (kl * x.mask).sum() / x.mask.sum()


@snippet()
def grpo_entropy_mask(z: Any, x: Batch) -> Any:
    flat = z.reshape(-1, x.V)
    entropies = []
    for chunk in flat.split(5, dim=0):
        log_p = F.log_softmax(chunk, dim=-1)
        entropies.append(-(torch.exp(log_p) * log_p).sum(-1))
    entropy = torch.cat(entropies).reshape(x.B, x.T)
    threshold = torch.quantile(entropy.detach()[x.mask], 0.5)
    return entropy * (x.mask & (entropy >= threshold))


@snippet()
def selective_log_softmax_loop(z: Any, x: Batch) -> Any:
    selected = torch.gather(z, dim=-1, index=x.ids.unsqueeze(-1)).squeeze(-1)
    normalisers = torch.stack([torch.logsumexp(row, dim=-1) for row in z])
    return selected - normalisers


@snippet()
def selective_log_softmax_many_ids(z: Any, x: Batch) -> Any:
    ids = torch.stack([x.ids, (x.ids + 1) % x.V], -1)
    selected = torch.gather(z, dim=-1, index=ids)
    return selected - torch.logsumexp(z, dim=-1, keepdim=True)


@snippet()
def selective_log_softmax_rows(z: Any, x: Batch) -> Any:
    per_row = []
    for row_logits, row_ids in zip(z, x.ids, strict=True):
        log_p = F.log_softmax(row_logits, dim=-1)
        per_row.append(log_p.gather(dim=-1, index=row_ids.unsqueeze(-1)).squeeze(-1))
    return torch.stack(per_row)


@snippet()
def entropy_from_logits_split(z: Any, x: Batch) -> Any:
    entropies = []
    for chunk in z.reshape(-1, z.shape[-1]).split(7, dim=0):
        log_p = F.log_softmax(chunk, dim=-1)
        entropies.extend([-(torch.exp(log_p) * log_p).sum(-1)])
    return torch.cat(entropies, dim=0).reshape(z.shape[:-1])


@snippet()
def entropy_from_logits_categorical(z: Any, x: Batch) -> Any:
    distribution: Any = torch.distributions.Categorical(logits=z, validate_args=False)
    return distribution.entropy()


@snippet()
def chunked_batches(z: Any, x: Batch) -> Any:
    return torch.cat([token_log_probs(z[i : i + 2] / 0.5, x.ids[i : i + 2]) for i in (0, 2)])


@snippet()
def dpo_sigmoid(z: Any, x: Batch) -> Any:
    policy = sequence_log_probs(z, x)
    with torch.no_grad():
        reference = sequence_log_probs(x.other, x)
    chosen, rejected = (policy - reference).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean(), chosen.detach(), rejected.detach()


@snippet()
def dpo_two_halves(z: Any, x: Batch) -> Any:
    half = x.B // 2
    chosen = token_log_probs(z[:half, :-1], x.ids[:half, 1:])
    rejected = token_log_probs(z[half:, :-1], x.ids[half:, 1:])
    margin = (chosen * x.mask[:half, 1:]).sum(-1) - (rejected * x.mask[half:, 1:]).sum(-1)
    return (margin - 1 / (2 * 0.1)) ** 2


@snippet()
def dpo_mean_logits(z: Any, x: Batch) -> Any:
    half = x.B // 2
    return (
        z[:half][x.mask[:half]].mean().detach(),
        z[half:][x.mask[half:]].mean().detach(),
        z[:, :-1].detach().mean(),
    )


@snippet()
def dpo_padding_free(z: Any, x: Batch) -> Any:
    flat = z.view(1, -1, x.V)[:, :-1]
    labels = x.ids.view(1, -1)[:, 1:]
    counts = x.mask.view(1, -1)[:, 1:]
    per_token = token_log_probs(flat, labels)
    per_token[~counts] = 0
    return per_token.sum(-1)


@snippet()
def dpo_weighting(z: Any, x: Batch) -> Any:
    """WPO: the log-prob divided by that of a token drawn from the model itself."""
    logits = z[:, :-1]
    log_p = F.log_softmax(logits, dim=-1)
    adjustment = torch.logsumexp(2 * log_p, dim=-1)
    per_token = log_p.gather(-1, x.ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    counts = x.mask[:, 1:]
    weight = torch.exp(((per_token - adjustment) * counts).sum(-1) / counts.sum(-1)).detach()
    return per_token.sum(-1) * torch.clamp(weight, max=1)


@snippet()
def dpo_weighting_raw(z: Any, x: Batch) -> Any:
    return torch.logsumexp(2 * z, -1) - 2 * torch.logsumexp(z, -1)


@snippet()
def dpo_weighting_squares(z: Any, x: Batch) -> Any:
    probabilities = F.softmax(z, dim=-1)
    return torch.log((probabilities**2).sum(-1))


@snippet()
def dpo_nll_part(z: Any, x: Batch) -> Any:
    half = x.B // 2
    logits, labels = z[:half, :-1], x.labels[:half, 1:]
    return F.cross_entropy(
        torch.flatten(logits, end_dim=1), torch.flatten(labels), ignore_index=-100
    )


@snippet()
def kto_sigmoid(z: Any, x: Batch) -> Any:
    policy = sequence_log_probs(z, x)
    with torch.no_grad():
        reference = sequence_log_probs(x.other, x)
        kl = (policy - reference).mean().clamp(min=0)
    ratio = policy - reference
    return torch.cat([1 - F.sigmoid(ratio[:2] - kl), 1 - F.sigmoid(kl - ratio[2:])])


@snippet()
def orpo_odds_ratio(z: Any, x: Batch) -> Any:
    logits, labels = z[:, :-1], x.labels[:, 1:].clone()
    counts = labels != -100
    labels = torch.where(labels == -100, 0, labels)
    average = (token_log_probs(logits, labels) * counts).sum(-1) / counts.sum(-1)
    chosen, rejected = average[: x.B // 2], average[x.B // 2 :]
    odds = (chosen - rejected) - (
        torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected))
    )
    nll = F.cross_entropy(logits[: x.B // 2].transpose(1, 2), x.labels[: x.B // 2, 1:])
    return nll - 0.1 * F.logsigmoid(odds).mean()


@snippet()
def cpo_simpo(z: Any, x: Batch) -> Any:
    log_p = sequence_log_probs(z, x) / x.mask[:, 1:].sum(-1).clamp(min=1)
    chosen, rejected = log_p.split(x.B // 2)
    margin = chosen - rejected - 0.5
    return -F.logsigmoid(2.0 * margin) * 0.9 - F.logsigmoid(-2.0 * margin) * 0.1


@snippet()
def gkd_jsd(z: Any, x: Batch) -> Any:
    beta = torch.tensor(0.3, dtype=z.dtype)
    student, teacher = F.log_softmax(z / 0.9, dim=-1), F.log_softmax(x.other / 0.9, dim=-1)
    mixture = torch.logsumexp(
        torch.stack([student + torch.log(1 - beta), teacher + torch.log(beta)]), dim=0
    )
    to_teacher = F.kl_div(mixture, teacher, reduction="none", log_target=True)
    to_student = F.kl_div(mixture, student, reduction="none", log_target=True)
    jsd = beta * to_teacher + (1 - beta) * to_student
    jsd = jsd[x.labels != -100]
    return jsd.sum() / (x.labels != -100).sum()


@snippet()
def gkd_jsd_per_token(z: Any, x: Batch) -> Any:
    student, teacher = F.log_softmax(z, dim=-1), F.log_softmax(x.other.detach(), dim=-1)
    mixture = torch.logsumexp(torch.stack([student, teacher]), dim=0) - torch.log(torch.tensor(2.0))
    jsd = 0.5 * F.kl_div(mixture, teacher, reduction="none", log_target=True)
    jsd = jsd + 0.5 * F.kl_div(mixture, student, reduction="none", log_target=True)
    return jsd.sum(-1)


@snippet()
def gkd_forward_kl(z: Any, x: Batch) -> Any:
    student, teacher = F.log_softmax(z, dim=-1), F.log_softmax(x.other, dim=-1)
    return (
        F.kl_div(student, teacher, reduction="none", log_target=True)[x.mask].sum() / x.mask.sum()
    )


@snippet()
def gkd_reverse_kl_batchmean(z: Any, x: Batch) -> Any:
    student, teacher = F.log_softmax(z, dim=-1), F.log_softmax(x.other, dim=-1)
    divergence = F.kl_div(teacher, student, reduction="none", log_target=True)
    return divergence.sum() / divergence.size(0)


@snippet()
def gkd_both_shifted(z: Any, x: Batch) -> Any:
    student, teacher = z[:, 1:-1, :], x.other[:, 1:-1, :]
    return F.kl_div(
        F.log_softmax(student, -1),
        F.log_softmax(teacher, -1),
        reduction="batchmean",
        log_target=True,
    )


@snippet()
def minillm_single_step(z: Any, x: Batch) -> Any:
    student, teacher = F.log_softmax(z, -1), F.log_softmax(x.other, -1)
    per_token = (student.exp() * (student - teacher)).sum(-1)
    return (per_token * x.mask).sum() / x.mask.sum()


@snippet()
def distillation_top_k_with_tail(z: Any, x: Batch) -> Any:
    """Top-k of the teacher, and one bucket for the rest of the probability."""
    teacher, student = F.log_softmax(x.other.detach(), -1), F.log_softmax(z, -1)
    top, ids = teacher.topk(5, dim=-1)
    own = student.gather(-1, ids)

    def with_tail(log_p: Tensor) -> Tensor:
        inside = torch.logsumexp(log_p, -1, keepdim=True).clamp(max=-1e-6)
        return torch.cat([log_p, torch.log(-torch.expm1(inside))], -1)

    return F.kl_div(with_tail(own), with_tail(top), reduction="none", log_target=True).sum(-1)


@snippet()
def sft_token_accuracy(z: Any, x: Batch) -> Any:
    logits, labels = z[..., :-1, :].contiguous(), x.labels[..., 1:].contiguous()
    predictions = logits.argmax(dim=-1)
    counts = labels != -100
    correct = ((predictions == labels) & counts).sum()
    return correct, counts.sum(), correct.float() / counts.sum()


@snippet()
def sft_entropy_metric(z: Any, x: Batch) -> Any:
    with torch.no_grad():
        log_p = F.log_softmax(z, dim=-1)
        entropy = -(torch.exp(log_p) * log_p).sum(-1)
        return torch.sum(entropy * x.mask) / x.mask.sum()


@snippet()
def sft_dft_loss(z: Any, x: Batch) -> Any:
    labels = F.pad(x.labels, (0, 1), value=-100)[..., 1:]
    counts = labels != -100
    labels = labels.masked_fill(~counts, 0)
    log_p = token_log_probs(z, labels)
    per_token = -log_p.exp().detach() * log_p
    return (per_token * counts).sum() / counts.sum()


@snippet()
def ppo_temperature_division(z: Any, x: Batch) -> Any:
    logits = z[:, 2:]
    logits /= 0.7 + 1e-7
    return token_log_probs(logits, x.ids[:, 2:])


@snippet()
def ppo_policy_statistics(z: Any, x: Batch) -> Any:
    probabilities = torch.nn.functional.softmax(z, dim=-1)
    entropy = torch.logsumexp(z, dim=-1) - torch.sum(probabilities * z, dim=-1)
    return entropy.mean(), token_log_probs(z, x.ids)


@snippet()
def online_dpo_take_along_dim(z: Any, x: Batch) -> Any:
    log_p = z[:, 1:-1].log_softmax(-1)
    return torch.take_along_dim(log_p, x.ids[:, 2:].unsqueeze(-1), dim=2).squeeze(-1)


@snippet()
def xpo_divergence(z: Any, x: Batch) -> Any:
    model, reference = sequence_log_probs(z, x), sequence_log_probs(x.other.detach(), x)
    return F.logsigmoid(model - reference).mean() - 0.01 * model.mean()


@snippet()
def empty_batch_keeps_the_graph(z: Any, x: Batch) -> Any:
    return z.sum() * 0.0


@snippet()
def aux_zero_of_mean(z: Any, x: Batch) -> Any:
    return F.cross_entropy(z.flatten(0, 1), x.ids.flatten()) + 0.0 * z.mean()


@snippet()
def gspo_sequence_ratio(z: Any, x: Batch) -> Any:
    log_prob = z.log_softmax(-1).gather(-1, x.ids[..., None])[..., 0]
    log_ratio = ((log_prob - log_prob.detach() + 0.05) * x.mask).sum(-1) / x.mask.sum(-1)
    gain = x.advantages[:, 0]
    return -torch.min(log_ratio.exp() * gain, log_ratio.exp().clamp(0.9, 1.1) * gain).mean()
