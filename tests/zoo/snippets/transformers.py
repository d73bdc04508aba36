"""transformers: loss functions, label smoother, what models do to their own logits."""

from typing import Any

import torch
import torch.nn.functional as F

from zoo.catalogue import Batch, snippet


@snippet()
def causal_lm_loss(z: Any, x: Batch) -> Any:
    logits = z.float()
    labels = F.pad(x.labels, (0, 1), value=-100)[..., 1:].contiguous()
    loss = F.cross_entropy(
        logits.view(-1, x.V), labels.view(-1), ignore_index=-100, reduction="sum"
    )
    return loss / 17


@snippet()
def causal_lm_loss_mean(z: Any, x: Batch) -> Any:
    labels = F.pad(x.labels, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
    return F.cross_entropy(z.view(-1, x.V), labels, ignore_index=-100, reduction="mean")


@snippet()
def label_smoother(z: Any, x: Batch) -> Any:
    logits, labels = z[..., :-1, :].contiguous(), x.labels[..., 1:].contiguous()
    log_p = -F.log_softmax(logits, dim=-1)
    if labels.dim() == log_p.dim() - 1:
        labels = labels.unsqueeze(-1)
    padding = labels.eq(-100)
    labels = torch.clamp(labels, min=0)
    nll = log_p.gather(dim=-1, index=labels)
    smoothed = log_p.sum(dim=-1, keepdim=True, dtype=z.dtype)
    nll.masked_fill_(padding, 0.0)
    smoothed.masked_fill_(padding, 0.0)
    active = padding.numel() - padding.long().sum()
    return 0.9 * nll.sum() / active + 0.1 * smoothed.sum() / (active * log_p.shape[-1])


@snippet()
def softcapping_in_the_model(z: Any, x: Batch) -> Any:
    logits = z / 3.0
    logits = torch.tanh(logits)
    logits = logits * 3.0
    return F.cross_entropy(logits.view(-1, x.V), x.ids.view(-1)), logits.argmax(-1)


@snippet()
def scaled_logits(z: Any, x: Batch) -> Any:
    """Cohere multiplies, Granite divides."""
    return (z * 0.0625).logsumexp(-1), (z / 8.0).log_softmax(-1)[..., 3]


@snippet()
def logits_to_keep(z: Any, x: Batch) -> Any:
    kept = z[:, slice(-2, None), :]
    return kept.float().logsumexp(-1)


@snippet()
def only_the_first_tokens(z: Any, x: Batch) -> Any:
    """A padded vocabulary cut down to the tokenizer's size."""
    return z[..., : x.V - 5].logsumexp(-1), F.cross_entropy(
        z[..., : x.V - 5].reshape(-1, x.V - 5), x.ids.clamp(max=x.V - 6).view(-1)
    )


@snippet()
def padded_vocabulary_masked(z: Any, x: Batch) -> Any:
    logits = torch.where(torch.arange(x.V) < x.V - 3, z, float("-inf"))
    return F.cross_entropy(logits.view(-1, x.V), x.ids.clamp(max=x.V - 4).view(-1)), logits.argmax(
        -1
    )


@snippet()
def masked_lm_loss(z: Any, x: Batch) -> Any:
    return torch.nn.CrossEntropyLoss()(z.view(-1, x.V), x.labels.view(-1))


@snippet()
def sequence_to_sequence_loss(z: Any, x: Batch) -> Any:
    """Marian and Bart: a bias buffer on the logits."""
    logits = z + x.token_bias.view(1, -1)
    return torch.nn.CrossEntropyLoss()(logits.view(-1, x.V), x.labels.view(-1))


@snippet(grad=False)
def nested_detach_and_concat(z: Any, x: Batch) -> Any:
    """Trainer's prediction loop with `preprocess_logits_for_metrics`."""
    kept = z.detach().argmax(-1)
    return torch.cat([kept, kept], 0)


@snippet()
def average_of_heads(z: Any, x: Batch) -> Any:
    """Trainer code that averages the losses of two heads."""
    first = F.cross_entropy(z.view(-1, x.V), x.labels.view(-1))
    second = F.cross_entropy(x.other.view(-1, x.V), x.labels.view(-1))
    return (first + second) / 2


@snippet()
def multi_token_prediction(z: Any, x: Batch) -> Any:
    """One weight, K sets of rows: the k-th head predicts the token k + 1 ahead."""
    losses = []
    for ahead, logits in enumerate((z, x.other), start=1):
        losses.append(
            F.cross_entropy(logits[:, :-ahead].flatten(0, 1), x.labels[:, ahead:].flatten())
        )
    return torch.stack(losses).mean()


@snippet(grad=False)
def assisted_probabilities(z: Any, x: Batch) -> Any:
    """Speculative sampling: accept ratio, then the positive part of p - q."""
    p, q = z[:1].softmax(-1), x.other[:1].softmax(-1)
    ids = x.ids[:1]
    own = p[:, torch.arange(x.T), ids].squeeze(0)
    draft = q[:, torch.arange(x.T), ids].squeeze(0)
    ratio = own / draft
    rest = torch.clamp(p[:, -1, :] - q[:, -1, :], min=0)
    rest.div_(rest.sum())
    return ratio, rest, torch.multinomial(rest, num_samples=1).squeeze(1)


@snippet(grad=False)
def assisted_greedy(z: Any, x: Batch) -> Any:
    selected = z[:, -4:].argmax(-1)
    candidates = x.ids[:, -3:]
    matches = (~(candidates == selected[:, :-1])).cumsum(dim=-1) < 1
    return matches.sum(-1), selected


@snippet(grad=False)
def beam_step(z: Any, x: Batch) -> Any:
    """Scores of two beams with two sequences: the top of (beams x V)."""
    log_p = F.log_softmax(z[:, -1, :], dim=-1).view(2, 2, x.V)
    accumulated = log_p + x.advantages[:, 0].view(2, 2)[:, :, None]
    flat = torch.reshape(accumulated, (2, 2 * x.V))
    values, ids = torch.topk(flat, k=4)
    return values, ids // x.V, ids % x.V


@snippet(grad=False)
def transition_scores(z: Any, x: Batch) -> Any:
    scores = torch.log_softmax(z.transpose(0, 1), dim=-1)
    return scores.gather(-1, x.ids.T[..., None])[..., 0]


@snippet(grad=False)
def scores_of_steps_stacked(z: Any, x: Batch) -> Any:
    """`output.scores` is a tuple of (B, V), one per step."""
    steps = tuple(z[:, t, :] for t in range(x.T))
    stacked = torch.stack(steps, dim=1)
    return stacked.log_softmax(-1).gather(-1, x.ids[..., None])[..., 0], steps[1].argmax(-1)


@snippet(grad=False)
def contrastive_ranking(z: Any, x: Batch) -> Any:
    probabilities = torch.nn.functional.softmax(z[:, -1, :], dim=-1)
    top, ids = torch.topk(probabilities, dim=-1, k=4)
    score = (1.0 - 0.6) * top - 0.6 * x.advantages[:, :4]
    return ids.gather(-1, score.argmax(-1, keepdim=True))
