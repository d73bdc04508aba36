"""nanoGPT, minGPT and build-nanoGPT: loss and sampling loop, one step each."""

from typing import Any

import torch
import torch.nn.functional as F

from zoo.catalogue import Batch, snippet


@snippet()
def loss(z: Any, x: Batch) -> Any:
    return F.cross_entropy(z.view(-1, z.size(-1)), x.labels.view(-1), ignore_index=-1 - 99)


@snippet(grad=False)
def sample_step(z: Any, x: Batch) -> Any:
    logits = z[:, -1, :] / 0.8
    v, _ = torch.topk(logits, min(10, logits.size(-1)))
    logits[logits < v[:, [-1]]] = -float("Inf")
    probabilities = F.softmax(logits, dim=-1)
    return torch.multinomial(probabilities, num_samples=1), probabilities


@snippet(grad=False)
def mingpt_sample_step(z: Any, x: Batch) -> Any:
    logits = z[:, -1, :] / 1.1
    out = logits.clone()
    v, _ = torch.topk(logits, 5)
    out[out < v[:, [-1]]] = -float("Inf")
    probabilities = F.softmax(out, dim=-1)
    return torch.multinomial(probabilities, num_samples=1), logits.argmax(-1)


@snippet(grad=False)
def mingpt_greedy_step(z: Any, x: Batch) -> Any:
    probabilities = F.softmax(z[:, -1, :], dim=-1)
    _, following = torch.topk(probabilities, k=1, dim=-1)
    return torch.cat((x.ids, following), dim=1)


@snippet(grad=False)
def build_nanogpt_top_50(z: Any, x: Batch) -> Any:
    probabilities = F.softmax(z[:, -1, :], dim=-1)
    top, ids = torch.topk(probabilities, 20, dim=-1)
    drawn = torch.multinomial(top, 1, generator=x.rng)
    return torch.gather(ids, -1, drawn)


@snippet(grad=False)
def hellaswag_row(z: Any, x: Batch) -> Any:
    logits, ids = z[..., :-1, :].contiguous(), x.ids[..., 1:].contiguous()
    losses = F.cross_entropy(logits.view(-1, logits.size(-1)), ids.view(-1), reduction="none")
    losses = losses.view(x.B, -1) * x.mask[..., 1:]
    return losses.sum(1), (losses.sum(1) / x.mask[..., 1:].sum(1)).argmin()


@snippet(grad=False)
def last_position_as_list(z: Any, x: Batch) -> Any:
    logits = z[:, [-1], :]
    return F.softmax(logits, dim=-1).argmax(-1), logits.amax(-1)


@snippet(grad=False)
def llama2_top_p(z: Any, x: Batch) -> Any:
    """Sort of the probabilities of the last position only: a few rows."""
    probabilities = torch.softmax(z[:, -1] / 0.9, dim=-1)
    ordered, index = torch.sort(probabilities, dim=-1, descending=True)
    total = torch.cumsum(ordered, dim=-1)
    ordered[total - ordered > 0.8] = 0.0
    ordered.div_(ordered.sum(dim=-1, keepdim=True))
    return torch.gather(index, -1, torch.multinomial(ordered, num_samples=1))
