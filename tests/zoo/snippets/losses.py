"""Losses on logits as papers and torch users write them."""

from typing import Any

import torch
import torch.nn.functional as F

from zoo.catalogue import Batch, snippet


def flat(z: Any, x: Batch) -> Any:
    return z.view(-1, x.V)


@snippet()
def cross_entropy_sum(z: Any, x: Batch) -> Any:
    return F.cross_entropy(flat(z, x), x.labels.view(-1), reduction="sum")


@snippet()
def cross_entropy_weighted_smoothed(z: Any, x: Batch) -> Any:
    return F.cross_entropy(
        flat(z, x), x.labels.view(-1), weight=x.class_weight, label_smoothing=0.1, ignore_index=-100
    )


@snippet()
def cross_entropy_smoothed_none(z: Any, x: Batch) -> Any:
    return F.cross_entropy(flat(z, x), x.labels.view(-1), label_smoothing=0.2, reduction="none")


@snippet()
def cross_entropy_other_ignore_index(z: Any, x: Batch) -> Any:
    return F.cross_entropy(flat(z, x), x.ids.view(-1), ignore_index=int(x.ids[0, 0]))


@snippet()
def cross_entropy_class_second(z: Any, x: Batch) -> Any:
    return F.cross_entropy(z.transpose(1, 2), x.labels), F.cross_entropy(
        z.mT, x.labels, reduction="none"
    )


@snippet()
def cross_entropy_probabilities(z: Any, x: Batch) -> Any:
    return F.cross_entropy(flat(z, x), x.probabilities.view(-1, x.V))


@snippet()
def cross_entropy_probabilities_of_a_teacher(z: Any, x: Batch) -> Any:
    with torch.no_grad():
        target = x.other.softmax(-1).flatten(0, 1)
    return F.cross_entropy(flat(z, x), target, label_smoothing=0.1, reduction="sum")


@snippet()
def cross_entropy_one_row(z: Any, x: Batch) -> Any:
    return F.cross_entropy(z[1, 2], x.ids[1, 2])


@snippet()
def cross_entropy_masked_rows(z: Any, x: Batch) -> Any:
    return F.cross_entropy(z[x.mask], x.ids[x.mask])


@snippet()
def cross_entropy_after_mask(z: Any, x: Batch) -> Any:
    masked = z.masked_fill(x.forbidden_rows, float("-inf"))
    return F.cross_entropy(masked.view(-1, x.V), x.ids.view(-1)), masked.logsumexp(-1)


@snippet()
def nll_weighted(z: Any, x: Batch) -> Any:
    log_p = F.log_softmax(flat(z, x), -1)
    return torch.nn.NLLLoss(weight=x.class_weight, reduction="mean")(log_p, x.labels.view(-1))


@snippet()
def cross_entropy_by_hand(z: Any, x: Batch) -> Any:
    shifted = z - z.max(dim=-1, keepdim=True).values
    log_p = shifted - shifted.exp().sum(-1, keepdim=True).log()
    return -log_p[torch.arange(x.B)[:, None], torch.arange(x.T), x.ids].mean()


@snippet()
def softmax_by_hand(z: Any, x: Batch) -> Any:
    e = torch.exp(z - torch.amax(z, dim=-1, keepdim=True).detach())
    p = e / e.sum(dim=-1, keepdim=True)
    return -torch.log(p.gather(-1, x.ids.unsqueeze(-1)) + 1e-10).mean()


@snippet(large="one-hot targets")
def one_hot_product(z: Any, x: Batch) -> Any:
    one_hot = F.one_hot(x.ids, x.V).to(z.dtype)
    return -(one_hot * F.log_softmax(z, -1)).sum(-1)


@snippet()
def z_loss(z: Any, x: Batch) -> Any:
    log_z = torch.logsumexp(z, dim=-1)
    loss = F.cross_entropy(flat(z, x), x.labels.view(-1), reduction="sum")
    return (loss + 1e-3 * (log_z.square() * (x.labels != -100)).sum()) / (x.labels != -100).sum()


@snippet(large="one-hot targets")
def binary_cross_entropy(z: Any, x: Batch) -> Any:
    target = F.one_hot(x.ids, x.V).to(z.dtype)
    return F.binary_cross_entropy_with_logits(z, target)


@snippet()
def binary_cross_entropy_rows(z: Any, x: Batch) -> Any:
    losses = F.binary_cross_entropy_with_logits(
        z, x.probabilities, reduction="none", pos_weight=x.class_weight
    )
    return losses.sum(-1)


@snippet()
def focal_loss(z: Any, x: Batch) -> Any:
    losses = F.cross_entropy(flat(z, x), x.labels.view(-1), reduction="none")
    p = torch.exp(-losses)
    return ((1 - p) ** 2 * losses).mean()


@snippet()
def focal_loss_by_probabilities(z: Any, x: Batch) -> Any:
    log_p = F.log_softmax(z, -1)
    weighted = (1 - log_p.exp()).pow(2) * log_p
    return -weighted.gather(-1, x.ids[..., None]).mean()


@snippet()
def unlikelihood(z: Any, x: Batch) -> Any:
    """Tokens of the context must not be repeated."""
    p = F.softmax(z, dim=-1)
    candidates = x.ids[:, None, :].expand(-1, x.T, -1)
    one_minus = torch.clamp(1.0 - p.gather(-1, candidates), min=1e-5)
    return -torch.log(one_minus).tril(-1).sum(-1).mean()


@snippet()
def unlikelihood_with_mask(z: Any, x: Batch) -> Any:
    log_p = F.log_softmax(z, -1)
    losses = -torch.log(torch.clamp(1.0 - log_p.exp(), min=1e-5)) * x.forbidden_rows
    return losses.sum()


@snippet()
def confidence_penalty(z: Any, x: Batch) -> Any:
    log_p = z.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1).mean()
    return F.cross_entropy(flat(z, x), x.labels.view(-1)) - 0.1 * entropy


@snippet()
def r_drop(z: Any, x: Batch) -> Any:
    """Two passes with dropout, symmetric KL between them."""
    p_loss = F.kl_div(F.log_softmax(z, -1), F.softmax(x.other, -1), reduction="none")
    q_loss = F.kl_div(F.log_softmax(x.other, -1), F.softmax(z, -1), reduction="none")
    padding = ~x.mask.unsqueeze(-1)
    p_loss = p_loss.masked_fill(padding, 0.0)
    q_loss.masked_fill_(padding, 0.0)
    return (p_loss.sum() + q_loss.sum()) / 2


@snippet()
def polynomial_loss(z: Any, x: Batch) -> Any:
    p = F.softmax(z, -1).gather(-1, x.ids[..., None]).squeeze(-1)
    return F.cross_entropy(flat(z, x), x.ids.view(-1), reduction="none").view_as(p) + 2.0 * (1 - p)


@snippet()
def generalized_cross_entropy(z: Any, x: Batch) -> Any:
    p = torch.softmax(z, dim=-1).gather(-1, x.ids[..., None])
    return ((1.0 - p.pow(0.7)) / 0.7).mean()


@snippet(large="one-hot targets")
def symmetric_cross_entropy(z: Any, x: Batch) -> Any:
    p = torch.clamp(F.softmax(z, dim=-1), min=1e-7, max=1.0)
    one_hot = torch.clamp(F.one_hot(x.ids, x.V).to(z.dtype), min=1e-4, max=1.0)
    return -(p * torch.log(one_hot)).sum(-1).mean()


@snippet()
def multi_margin(z: Any, x: Batch) -> Any:
    own = z.gather(-1, x.ids[..., None])
    return torch.clamp(1.0 + z - own, min=0).sum(-1)


@snippet()
def max_margin(z: Any, x: Batch) -> Any:
    own = z.gather(-1, x.ids[..., None])
    best_other = z.scatter(-1, x.ids[..., None], float("-inf")).amax(-1, keepdim=True)
    return F.relu(1.0 - own + best_other).squeeze(-1)


@snippet(large="margin of every token")
def additive_margin(z: Any, x: Batch) -> Any:
    margin = torch.zeros(x.B * x.T, x.V, dtype=z.dtype).scatter_(1, x.ids.view(-1, 1), 0.35)
    return F.cross_entropy(4.0 * (flat(z, x) - margin), x.ids.view(-1))


@snippet()
def energy_score(z: Any, x: Batch) -> Any:
    return -2.0 * torch.logsumexp(z / 2.0, dim=-1)


@snippet()
def renyi_entropy(z: Any, x: Batch) -> Any:
    return torch.log(z.softmax(-1).pow(1.5).sum(-1)) / (1 - 1.5)


@snippet()
def l2_of_logits(z: Any, x: Batch) -> Any:
    return 1e-3 * z.pow(2).mean(), z.square().sum(-1).sqrt()


@snippet()
def mean_squared_probability_error(z: Any, x: Batch) -> Any:
    return F.mse_loss(z.softmax(-1), x.probabilities)


@snippet()
def reinforce_expected_reward(z: Any, x: Batch) -> Any:
    """Sum over the vocabulary of p times a reward per token."""
    return -(z.softmax(-1) * x.token_bias).sum(-1).mean()


@snippet()
def gumbel_softmax_with_noise(z: Any, x: Batch) -> Any:
    soft = F.softmax((z + x.full.detach()) / 0.5, dim=-1)
    return (soft * x.token_bias).sum(-1)


@snippet()
def logit_penalty_outside_the_mask(z: Any, x: Batch) -> Any:
    return torch.where(x.allowed_rows, torch.zeros((), dtype=z.dtype), z).relu().sum(-1)


@snippet()
def loss_of_selected_tokens(z: Any, x: Batch) -> Any:
    """RHO-1: only the half of the tokens with the largest excess loss."""
    losses = F.cross_entropy(z.transpose(1, 2), x.ids, reduction="none")
    with torch.no_grad():
        excess = losses - F.cross_entropy(x.other.transpose(1, 2), x.ids, reduction="none")
        kept = excess >= excess.flatten().kthvalue(x.B * x.T // 2).values
    return losses[kept].mean()


@snippet()
def loss_per_sequence_mean(z: Any, x: Batch) -> Any:
    losses = F.cross_entropy(flat(z, x), x.ids.view(-1), reduction="none").view(x.B, x.T)
    return ((losses * x.mask).sum(-1) / x.mask.sum(-1)).mean()


@snippet()
def second_loss_on_the_same_logits(z: Any, x: Batch) -> Any:
    first = F.cross_entropy(flat(z, x), x.ids.view(-1))
    second = F.cross_entropy(flat(z, x) / 2.0, x.ids.view(-1).flip(0))
    return first + second, z.logsumexp(-1).mean()


@snippet()
def autograd_through_argmax_columns(z: Any, x: Batch) -> Any:
    """Straight-through: the value of the arg max, the gradient of the softmax."""
    top = z.argmax(-1, keepdim=True)
    p = z.softmax(-1).gather(-1, top)
    return (1.0 - p).detach() + p
