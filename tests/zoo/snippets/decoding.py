"""Decoding with two models, mixtures, and other research code on whole batches of logits."""

from typing import Any

import torch
import torch.nn.functional as F

from zoo.catalogue import Batch, snippet


@snippet(grad=False)
def contrastive_decoding(z: Any, x: Batch) -> Any:
    """Expert minus amateur among the tokens that the expert finds plausible."""
    expert, amateur = z[:, -1].log_softmax(-1), x.other[:, -1].log_softmax(-1)
    cutoff = torch.log(torch.tensor(0.1, dtype=z.dtype)) + expert.max(dim=-1, keepdim=True).values
    difference = 1.5 * expert - 0.5 * amateur
    return difference.masked_fill(expert < cutoff, -float("inf"))


@snippet()
def contrastive_of_all_positions(z: Any, x: Batch) -> Any:
    expert, amateur = F.log_softmax(z, -1), F.log_softmax(x.other, -1)
    scores = (expert - 0.5 * amateur).masked_fill(expert < expert.amax(-1, keepdim=True) - 3, -1e4)
    return scores.log_softmax(-1).gather(-1, x.ids[..., None])[..., 0], scores.argmax(-1)


@snippet(grad=False)
def dexperts(z: Any, x: Batch) -> Any:
    return (z + 0.7 * (x.other - z.flip(0))).argmax(-1)


@snippet()
def product_of_experts(z: Any, x: Batch) -> Any:
    return F.cross_entropy((z + x.other).flatten(0, 1), x.ids.flatten(), reduction="none")


@snippet()
def mixture_of_probabilities(z: Any, x: Batch) -> Any:
    mixed = 0.3 * z.softmax(-1) + 0.7 * x.other.softmax(-1)
    return -torch.log(mixed.gather(-1, x.ids[..., None])).squeeze(-1), mixed.argmax(-1)


@snippet()
def mixture_with_a_gate(z: Any, x: Batch) -> Any:
    gate = torch.sigmoid(x.row)
    log_mixed = torch.logaddexp(
        torch.log(gate) + F.log_softmax(z, -1), torch.log1p(-gate) + F.log_softmax(x.other, -1)
    )
    return F.nll_loss(log_mixed.view(-1, x.V), x.labels.view(-1))


@snippet()
def interpolated_logits(z: Any, x: Batch) -> Any:
    return torch.lerp(z, x.other, 0.25).logsumexp(-1)


@snippet()
def mixture_of_softmaxes(z: Any, x: Batch) -> Any:
    weights = x.advantages[:, :2].softmax(-1).view(x.B, 2, 1, 1)
    stacked = torch.stack([z.softmax(-1), x.other.softmax(-1)], dim=1)
    mixed = (stacked * weights).sum(1)
    return torch.log(mixed + 1e-9).gather(-1, x.ids[..., None])


@snippet()
def ensemble_mean_of_log_probs(z: Any, x: Batch) -> Any:
    stacked = torch.stack([z.log_softmax(-1), x.other.log_softmax(-1)])
    return stacked.mean(0).argmax(-1), stacked.mean(0).logsumexp(-1)


@snippet()
def mutual_information(z: Any, x: Batch) -> Any:
    """BALD: entropy of the mean minus mean of the entropies."""
    p = torch.stack([z.softmax(-1), x.other.softmax(-1)])
    mean = p.mean(0)
    total = -(mean * mean.log()).sum(-1)
    expected = -(p * p.log()).sum(-1).mean(0)
    return total - expected


@snippet(grad=False)
def layer_contrast(z: Any, x: Batch) -> Any:
    """DoLa: Jensen-Shannon divergence to an earlier layer, then the difference."""
    final, early = z.log_softmax(-1), x.other.log_softmax(-1)
    middle = 0.5 * (final.exp() + early.exp())
    js = 0.5 * (
        F.kl_div(final, middle, reduction="none").mean(-1)
        + F.kl_div(early, middle, reduction="none").mean(-1)
    )
    return js, (final - early).argmax(-1)


@snippet(grad=False)
def entropy_and_varentropy(z: Any, x: Batch) -> Any:
    log_p = F.log_softmax(z, dim=-1)
    p = torch.exp(log_p)
    entropy = -torch.sum(p * log_p, dim=-1) / 0.6931471805599453
    variance = torch.sum(p * (log_p / 0.6931471805599453 + entropy.unsqueeze(-1)) ** 2, dim=-1)
    return entropy, variance


@snippet(grad=False)
def top_n_sigma(z: Any, x: Batch) -> Any:
    scores = z[:, -1]
    threshold = scores.max(-1, keepdim=True).values - 1.0 * scores.std(-1, keepdim=True)
    return torch.where(scores < threshold, -float("inf"), scores).softmax(-1)


@snippet(grad=False)
def margin_of_the_best_two(z: Any, x: Batch) -> Any:
    top = z.topk(2, dim=-1).values
    return top[..., 0] - top[..., 1]


@snippet(grad=False)
def rank_of_the_target(z: Any, x: Batch) -> Any:
    own = z.gather(-1, x.ids[..., None])
    return (z > own).sum(-1), (z >= own).long().sum(-1)


@snippet(grad=False)
def nucleus_size_by_threshold(z: Any, x: Batch) -> Any:
    p = z.softmax(-1)
    return (p > 0.01).sum(-1), (p * (p > 0.01)).sum(-1), torch.count_nonzero(p > 0.05, dim=-1)


@snippet(large="copy probabilities")
def pointer_copy(z: Any, x: Batch) -> Any:
    """Pointer-generator: probability of copying, added at the ids of the source."""
    copied = torch.zeros(x.B, x.T, x.V, dtype=z.dtype)
    copied = copied.scatter(-1, x.ids[:, None, :].expand(-1, x.T, -1), 1.0 / x.T)
    mixed = 0.8 * z.softmax(-1) + 0.2 * copied
    return -mixed.gather(-1, x.ids[..., None]).log().mean()


@snippet(large="gradient of a full-size bias")
def bias_of_context(z: Any, x: Batch) -> Any:
    """A full-size bias that is learned: its gradient is full-size too."""
    return F.cross_entropy((z + x.full).view(-1, x.V), x.labels.view(-1))


@snippet()
def temperature_learned(z: Any, x: Batch) -> Any:
    return F.cross_entropy((z / x.temperature).view(-1, x.V), x.labels.view(-1)), (
        z * x.row
    ).logsumexp(-1)


@snippet()
def adaptive_temperature(z: Any, x: Batch) -> Any:
    """A temperature computed from the entropy of the same logits."""
    p = z.softmax(-1)
    entropy = -(p * z.log_softmax(-1)).sum(-1, keepdim=True)
    scaled = z * torch.clamp(0.5 + 0.2 * entropy, min=1.0)
    return scaled.log_softmax(-1).gather(-1, x.ids[..., None])


@snippet()
def vector_scaling(z: Any, x: Batch) -> Any:
    scaled = z * torch.exp(0.1 * x.token_bias) + x.token_bias
    return F.cross_entropy(scaled.view(-1, x.V), x.ids.view(-1), reduction="sum")


@snippet()
def prior_correction(z: Any, x: Batch) -> Any:
    """Logit adjustment for rare classes."""
    adjusted = z + 1.0 * torch.log(x.class_weight / x.class_weight.sum())
    return F.cross_entropy(adjusted.view(-1, x.V), x.labels.view(-1))
