"""LLaMA-Factory: batch log-probs, DFT, entropy-adaptive and KL-anchored losses, metrics."""

from typing import Any

import torch
import torch.nn.functional as F

from zoo.catalogue import Batch, snippet


@snippet()
def batch_log_probs(z: Any, x: Batch) -> Any:
    labels = x.labels[:, 1:].clone()
    logits = z[:, :-1, :]
    counts = labels != -100
    labels[labels == -100] = 0
    per_token = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
    return (per_token * counts).sum(-1), counts.sum(-1)


@snippet()
def chosen_and_rejected(z: Any, x: Batch) -> Any:
    chosen, rejected = z.to(z.dtype).split(x.B // 2, dim=0)
    ids = x.ids.chunk(2)
    return chosen.mean(), rejected.mean(), F.cross_entropy(chosen.flatten(0, 1), ids[0].flatten())


@snippet()
def dft_loss(z: Any, x: Batch) -> Any:
    logits = z.view(-1, x.V)
    labels = F.pad(x.labels, (0, 1), value=-100)[:, 1:].reshape(-1)
    losses = F.cross_entropy(logits, labels, ignore_index=-100, reduction="none")
    kept = labels != -100
    losses = losses[kept]
    return (losses * torch.exp(-losses.detach())).sum() / kept.sum()


@snippet()
def entropy_adaptive_loss(z: Any, x: Batch) -> Any:
    logits, labels = z[:, :-1].reshape(-1, x.V), x.labels[:, 1:].reshape(-1)
    kept = labels != -100
    logits, labels = logits[kept], labels[kept]
    losses = F.cross_entropy(logits, labels, reduction="none")
    with torch.no_grad():
        top, _ = torch.topk(logits, k=min(20, x.V), dim=-1)
        log_normaliser = torch.logsumexp(top, dim=-1, keepdim=True)
        p = torch.exp(top - log_normaliser)
        entropy = -(p * (top - log_normaliser)).sum(-1) / 3.0
    return (losses * entropy).mean()


@snippet()
def anchored_to_reference(z: Any, x: Batch) -> Any:
    policy, reference = F.log_softmax(z, dim=-1), F.softmax(x.other.detach(), dim=-1)
    kl = F.kl_div(policy, reference, reduction="none").sum(-1)
    counts = x.labels != -100
    return (kl * counts).sum() / counts.sum()


@snippet()
def predictions_for_metrics(z: Any, x: Batch) -> Any:
    predictions = torch.argmax(z, dim=-1)
    return predictions[:, :-1][x.labels[:, 1:] != -100] == x.labels[:, 1:][x.labels[:, 1:] != -100]


@snippet()
def odds_ratio(z: Any, x: Batch) -> Any:
    log_p = z.log_softmax(-1).gather(-1, x.ids.unsqueeze(-1)).squeeze(-1).mean(-1)
    chosen, rejected = log_p.chunk(2)
    odds = (chosen - rejected) - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
    return -chosen + 0.1 * -F.logsigmoid(odds)


@snippet()
def rows_in_order_of_length(z: Any, x: Batch) -> Any:
    order = x.mask.sum(-1).argsort(descending=True, stable=True)
    ordered = z.index_select(0, order)
    return F.cross_entropy(ordered.reshape(-1, x.V), x.labels[order].reshape(-1))


@snippet()
def packed_loss_per_segment(z: Any, x: Batch) -> Any:
    flat, labels = z.flatten(0, 1), x.labels.flatten()
    parts = zip(flat.tensor_split(3), labels.tensor_split(3), strict=True)
    return torch.stack([F.cross_entropy(p, t, reduction="sum") for p, t in parts])


@snippet()
def last_positions(z: Any, x: Batch) -> Any:
    last = x.mask.long().cumsum(-1).argmax(-1)
    rows = z[torch.arange(x.B), last]
    return rows.log_softmax(-1)[:, :3], rows.argmax(-1)
