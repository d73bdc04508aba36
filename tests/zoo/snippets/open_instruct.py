"""open-instruct: GRPO, DPO and reward code on top of plain transformers models."""

from typing import Any

import torch
import torch.nn.functional as F

from zoo.catalogue import Batch, snippet


@snippet()
def log_softmax_and_gather(z: Any, x: Batch) -> Any:
    log_p = z.log_softmax(dim=-1)
    return torch.gather(log_p, dim=-1, index=x.ids.unsqueeze(-1)).squeeze(-1)


@snippet()
def forward_with_temperature(z: Any, x: Batch) -> Any:
    logits = z[:, 1:-1]
    logits /= 1.0 + 1e-7
    log_p = F.log_softmax(logits, dim=-1)
    p = F.softmax(logits, dim=-1)
    entropy = torch.logsumexp(logits, dim=-1) - torch.sum(p * logits, dim=-1)
    return log_p.gather(-1, x.ids[:, 2:, None])[..., 0], entropy


@snippet()
def minibatches(z: Any, x: Batch) -> Any:
    found = []
    for i in range(0, x.B, 3):
        logits = z[i : i + 3]
        found.append(
            torch.gather(logits.log_softmax(-1), 2, x.ids[i : i + 3].unsqueeze(2)).squeeze(2)
        )
    return torch.cat(found, 0)


@snippet()
def masked_mean_of_invalid_log_probs(z: Any, x: Batch) -> Any:
    log_p = F.log_softmax(z, -1).gather(-1, x.ids.unsqueeze(-1)).squeeze(-1)
    log_p = torch.masked_fill(log_p, ~x.mask, 1.0)
    return torch.nan_to_num(log_p, nan=1.0), (log_p * x.mask).sum(1) / x.mask.sum(1)


@snippet()
def dpo_norm(z: Any, x: Batch) -> Any:
    labels = x.labels[:, 1:].clone()
    logits = z[:, :-1, :]
    counts = labels != -100
    labels[labels == -100] = 0
    log_p = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
    average = (log_p * counts).sum(-1) / counts.sum(-1)
    return -F.logsigmoid(5.0 * (average[: x.B // 2] - average[x.B // 2 :])), average


@snippet()
def concatenated_forward(z: Any, x: Batch) -> Any:
    """Two batches of logits joined before the log-probs."""
    both = torch.cat([z, x.other], dim=0)
    ids = torch.cat([x.ids, x.ids.flip(0)], 0)
    return both.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


@snippet()
def sum_loss_over_tokens(z: Any, x: Batch) -> Any:
    loss = torch.nn.CrossEntropyLoss(reduction="sum")
    logits, labels = z[..., :-1, :], x.labels[..., 1:]
    return loss(logits.reshape(-1, x.V), labels.reshape(-1)) / 1000.0


@snippet()
def z_loss_term(z: Any, x: Batch) -> Any:
    return 1e-4 * torch.logsumexp(z, dim=-1).pow(2)[x.mask].mean()


@snippet()
def log_probs_by_three_indices(z: Any, x: Batch) -> Any:
    log_probs = torch.log_softmax(z / 0.7, -1)
    return log_probs[torch.arange(x.B)[:, None], torch.arange(x.T), x.ids]
