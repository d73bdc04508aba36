"""Logits processors and warpers of transformers, on scores (B, V) of the last position."""

from typing import Any

import torch
import torch.nn.functional as F

from zoo.catalogue import Batch, snippet

SORT = "sort over the vocabulary of the last position"


def last(z: Any) -> Any:
    return z[:, -1, :]


@snippet(grad=False)
def temperature(z: Any, x: Batch) -> Any:
    return (last(z) / 0.7).softmax(-1)


@snippet(grad=False)
def repetition_penalty(z: Any, x: Batch) -> Any:
    scores = last(z)
    own = torch.gather(scores, 1, x.ids)
    own = torch.where(own < 0, own * 1.3, own / 1.3)
    return scores.scatter(1, x.ids, own)


@snippet(grad=False)
def repetition_penalty_in_place(z: Any, x: Batch) -> Any:
    scores = last(z)
    own = torch.gather(scores, 1, x.ids)
    own = torch.where(own < 0, own * 1.3, own / 1.3)
    scores.scatter_(1, x.ids, own)
    return scores, scores.argmax(-1), scores.log_softmax(-1).topk(3).values


@snippet(grad=False)
def top_k(z: Any, x: Batch) -> Any:
    scores = last(z)
    remove = scores < torch.topk(scores, 5)[0][..., -1, None]
    return scores.masked_fill(remove, -float("inf"))


@snippet(grad=False, builds=SORT)
def top_p(z: Any, x: Batch) -> Any:
    scores = last(z)
    ordered, index = torch.sort(scores, descending=False)
    total = ordered.softmax(dim=-1).cumsum(dim=-1)
    remove = total <= (1 - 0.8)
    remove[..., -1:] = 0
    remove = remove.scatter(1, index, remove)
    return scores.masked_fill(remove, -float("inf"))


@snippet(grad=False)
def min_p(z: Any, x: Batch) -> Any:
    scores = last(z)
    probabilities = torch.softmax(scores, dim=-1)
    top, _ = probabilities.max(dim=-1, keepdim=True)
    remove = probabilities < 0.1 * top
    return scores.masked_fill(remove, -float("inf"))


@snippet(grad=False, builds=SORT)
def min_p_keeping_some(z: Any, x: Batch) -> Any:
    scores = last(z)
    probabilities = torch.softmax(scores, dim=-1)
    remove = probabilities < 0.5 * probabilities.amax(-1, keepdim=True)
    order = torch.argsort(scores, descending=True, dim=-1)
    ordered_remove = torch.gather(remove, dim=-1, index=order)
    ordered_remove[..., :2] = False
    remove = ordered_remove.scatter(1, order, ordered_remove)
    return scores.masked_fill(remove, -float("inf"))


@snippet(grad=False, builds=SORT)
def typical(z: Any, x: Batch) -> Any:
    scores = last(z)
    normalised = F.log_softmax(scores, dim=-1)
    p = torch.exp(normalised)
    entropy = -(normalised * p).nansum(-1, keepdim=True)
    shifted = torch.abs((-normalised) - entropy)
    ordered, index = torch.sort(shifted, descending=False)
    total = scores.gather(-1, index).softmax(dim=-1).cumsum(dim=-1)
    place = (total < 0.7).sum(dim=1)
    place.clamp_(max=ordered.shape[-1] - 1)
    remove = ordered > ordered.gather(1, place.view(-1, 1))
    remove[..., :1] = 0
    remove = remove.scatter(1, index, remove)
    return scores.masked_fill(remove, -float("inf"))


@snippet(grad=False)
def epsilon(z: Any, x: Batch) -> Any:
    scores = last(z)
    remove = scores.softmax(dim=-1) < 0.02
    keep = min(1, scores.size(-1))
    remove = remove & (scores < torch.topk(scores, keep)[0][..., -1, None])
    return scores.masked_fill(remove, -float("inf"))


@snippet(grad=False)
def eta(z: Any, x: Batch) -> Any:
    scores = last(z)
    p = scores.softmax(dim=-1)
    distribution: Any = torch.distributions.Categorical(logits=scores)
    entropy = distribution.entropy()
    threshold = torch.min(torch.tensor(0.03, dtype=z.dtype), 0.17 * torch.exp(-entropy))[..., None]
    remove = p < threshold
    remove = remove & (scores < torch.topk(scores, 1)[0][..., -1, None])
    return scores.masked_fill(remove, -float("inf"))


@snippet(grad=False)
def bad_tokens_bias(z: Any, x: Batch) -> Any:
    bias = torch.zeros(x.V, dtype=z.dtype)
    bias[torch.tensor([2, 7])] = float("-inf")
    return last(z) + bias


@snippet(grad=False)
def no_repeated_ngrams(z: Any, x: Batch) -> Any:
    scores = last(z).clone()
    for i, banned in enumerate([[1, 2], [], [5], [7, 8, 9]]):
        scores[i, banned] = -float("inf")
    return scores, scores.argmax(-1)


@snippet(grad=False)
def minimum_length(z: Any, x: Batch) -> Any:
    scores = last(z)
    is_end = torch.isin(torch.arange(scores.shape[-1]), torch.tensor([3]))
    return torch.where(is_end, -float("inf"), scores)


@snippet(grad=False)
def forced_token(z: Any, x: Batch) -> Any:
    scores = torch.full_like(last(z), -float("inf"))
    scores[:, 5] = 0
    return scores, scores.argmax(-1)


@snippet(grad=False)
def forced_token_in_place(z: Any, x: Batch) -> Any:
    scores = last(z)
    scores[:, [i for i in range(x.V) if i != 5]] = -float("inf")
    scores[:, 5] = 0
    return scores


@snippet(grad=False)
def exponential_decay_of_length(z: Any, x: Batch) -> Any:
    scores = last(z)
    penalties = torch.zeros_like(scores)
    penalties[:, 4] = torch.abs(scores[:, 4]) * (1.05**3 - 1)
    return scores + penalties


@snippet(grad=False)
def infinite_and_nan_removed(z: Any, x: Batch) -> Any:
    scores = torch.where(x.allowed, last(z), float("nan"))
    scores = torch.where(scores != scores, 0.0, scores)
    highest, lowest = torch.finfo(scores.dtype).max, torch.finfo(scores.dtype).min
    scores = torch.where(scores == float("inf"), highest, scores)
    return torch.where(scores == -float("inf"), lowest, scores)


@snippet(grad=False)
def renormalised(z: Any, x: Batch) -> Any:
    return last(z).log_softmax(dim=-1)


@snippet(grad=False)
def suppressed_tokens(z: Any, x: Batch) -> Any:
    suppressed = torch.isin(torch.arange(x.V), torch.tensor([0, 1, 30]))
    return torch.where(suppressed, -float("inf"), last(z))


@snippet(grad=False)
def suppressed_in_place(z: Any, x: Batch) -> Any:
    scores = last(z)
    scores[:, torch.tensor([0, 1, 30])] = -float("inf")
    return scores.argmax(-1), scores.softmax(-1)


@snippet(grad=False)
def prefix_constrained(z: Any, x: Batch) -> Any:
    scores = last(z)
    mask = torch.full_like(scores, -float("inf"))
    for row, allowed in enumerate([[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]]):
        mask[row, allowed] = 0
    return scores + mask


@snippet(grad=False)
def guidance(z: Any, x: Batch) -> Any:
    """Classifier-free guidance: conditional and unconditional log-probs."""
    conditional, unconditional = F.log_softmax(last(z), -1), F.log_softmax(last(x.other), -1)
    return 1.5 * (conditional - unconditional) + unconditional


@snippet(grad=False)
def guidance_of_halves(z: Any, x: Batch) -> Any:
    conditional, unconditional = last(z).split(x.B // 2, dim=0)
    return unconditional + (conditional - unconditional) * 3.0


@snippet(grad=False)
def watermark(z: Any, x: Batch) -> Any:
    scores = last(z).clone()
    for row in range(x.B):
        green = torch.randperm(x.V, generator=x.rng)[: x.V // 4]
        scores[row, green] = scores[row, green] + 2.5
    return scores


@snippet(grad=False)
def sequence_bias(z: Any, x: Batch) -> Any:
    bias = torch.zeros_like(last(z))
    bias[:, 3] += torch.tensor(1.5)
    bias[:, 6] += torch.where(x.ids[:, -1].eq(2), torch.tensor(-2.0), torch.tensor(0.0)).to(z.dtype)
    return last(z) + bias


@snippet(grad=False)
def hamming_diversity(z: Any, x: Batch) -> Any:
    scores = last(z).clone()
    for group in range(2):
        previous = torch.bincount(x.ids[2 * group], minlength=x.V).to(scores.dtype)
        scores[2 * group : 2 * group + 2] -= 0.5 * previous
    return scores


@snippet(grad=False)
def frequency_and_presence(z: Any, x: Batch) -> Any:
    scores = last(z)
    counts = torch.zeros(x.B, x.V, dtype=z.dtype).scatter_add_(
        1, x.ids, torch.ones_like(x.ids, dtype=z.dtype)
    )
    scores -= 0.3 * counts
    scores -= 0.2 * (counts > 0).to(z.dtype)
    return scores.argmax(-1), scores


@snippet(grad=False)
def logit_bias_by_id(z: Any, x: Batch) -> Any:
    scores = last(z)
    for token, bias in {3: 1.0, 8: -100.0}.items():
        scores[:, token] += bias
    return scores.argmax(-1), scores.log_softmax(-1)


@snippet(grad=False)
def bitmask_of_a_grammar(z: Any, x: Batch) -> Any:
    """What grammar engines do in torch: bits to bool, then masked_fill_."""
    scores = last(z)
    words = torch.randint(-(2**31), 2**31, (x.B, (x.V + 31) // 32), generator=x.rng).to(torch.int32)
    bits = (words.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32)) & 1
    forbidden = bits.view(x.B, -1)[:, : x.V] == 0
    scores.masked_fill_(forbidden, float("-inf"))
    return scores.argmax(-1), scores.softmax(-1)


@snippet(grad=False)
def gumbel_noise(z: Any, x: Batch) -> Any:
    noise = -torch.log(-torch.log(torch.rand(x.B, x.V, generator=x.rng, dtype=z.dtype)))
    return (last(z) / 0.9 + noise).argmax(-1)


@snippet(grad=False)
def exponential_race(z: Any, x: Batch) -> Any:
    """gpt-fast: probabilities divided by exponential noise."""
    logits = last(z) / max(0.8, 1e-5)
    v, _ = torch.topk(logits, 6)
    pivot = v.select(-1, -1).unsqueeze(-1)
    logits = torch.where(logits < pivot, -float("Inf"), logits)
    p = F.softmax(logits, dim=-1)
    noise = torch.empty(x.B, x.V, dtype=z.dtype).exponential_(1, generator=x.rng)
    return torch.argmax(p / noise, dim=-1, keepdim=True)


@snippet(grad=False)
def multinomial_draw(z: Any, x: Batch) -> Any:
    p = torch.softmax(last(z), -1)
    ids = torch.multinomial(p, num_samples=1, generator=x.rng).squeeze(1)
    return ids, p.gather(-1, ids[:, None])


@snippet(grad=False)
def categorical_draw(z: Any, x: Batch) -> Any:
    distribution: Any = torch.distributions.Categorical(logits=last(z))
    drawn = distribution.sample()
    return drawn, distribution.log_prob(drawn)


@snippet(grad=False)
def finite_checks(z: Any, x: Batch) -> Any:
    return torch.isnan(z).any(), torch.isinf(z).any(), torch.isfinite(z).all(), z.isnan().any(-1)
