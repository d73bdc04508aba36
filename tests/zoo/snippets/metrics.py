"""Numbers that training code logs about its logits, and views that precede them."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from zoo.catalogue import Batch, snippet


@snippet()
def means(z: Any, x: Batch) -> Any:
    return z.mean(), z.mean(-1), z[x.mask].mean(), z.mean(dim=-1, keepdim=True), z[:, :-1].mean()


@snippet()
def extremes(z: Any, x: Batch) -> Any:
    return z.max(), z.min(), z.amax(-1), z.amin(dim=-1), z.max(-1).values - z.min(-1).values


@snippet(grad=False)
def extreme_ids(z: Any, x: Batch) -> Any:
    return z.argmin(-1), z.min(-1).indices, z.argmax(-1, keepdim=True), z.max(-1).indices


@snippet()
def sums(z: Any, x: Batch) -> Any:
    return z.sum(), z.sum(-1), z.sum(dim=(-1, -2)), z.sum((0, 2)), z.softmax(-1).sum(-1)


@snippet()
def spread(z: Any, x: Batch) -> Any:
    return z.std(-1), z.var(-1), z.var(dim=-1, unbiased=False), z.std()


@snippet()
def norms(z: Any, x: Batch) -> Any:
    return z.norm(dim=-1), torch.linalg.vector_norm(z, dim=-1), z.norm(p=1, dim=-1), z.abs().max()


@snippet()
def absolute_and_square(z: Any, x: Batch) -> Any:
    return z.abs().mean(-1), (z**2).mean(), z.pow(3).sum(-1), torch.square(z).sum()


@snippet(grad=False)
def counts(z: Any, x: Batch) -> Any:
    return (z > 0).sum(), (z > 0).any(-1), (z < 100).all(), torch.count_nonzero(z > 1, dim=-1)


@snippet(grad=False)
def comparison_of_two(z: Any, x: Batch) -> Any:
    return (z > x.other).float().mean(), (z.argmax(-1) == x.other.argmax(-1)).sum()


@snippet(grad=False)
def top_k_hits(z: Any, x: Batch) -> Any:
    top = z.log_softmax(-1).topk(5, dim=-1)
    return (top.indices == x.ids[..., None]).any(-1), top.values.exp().sum(-1)


@snippet()
def top_k_values(z: Any, x: Batch) -> Any:
    top = torch.topk(z.softmax(-1), 3, dim=-1)
    return top.values, top.indices


@snippet()
def smallest(z: Any, x: Batch) -> Any:
    return z.topk(3, dim=-1, largest=False).values


@snippet(grad=False)
def masked_accuracy(z: Any, x: Batch) -> Any:
    hits = (z.argmax(-1) == x.ids).masked_select(x.mask)
    return hits.float().mean()


@snippet()
def views(z: Any, x: Batch) -> Any:
    return (
        z.view(2, 2, x.T, x.V).logsumexp(-1),
        z.unsqueeze(1).logsumexp(-1),
        z[None].squeeze(0).logsumexp(-1),
        z.unflatten(0, (2, 2)).flatten(0, 2).logsumexp(-1),
        z.flatten(0, 1).unflatten(0, (x.T, x.B)).logsumexp(-1),
    )


@snippet()
def slices(z: Any, x: Batch) -> Any:
    return (
        z[1:].logsumexp(-1),
        z[::2, 1::2].logsumexp(-1),
        z[:, 0].logsumexp(-1),
        z[..., -1, :].logsumexp(-1),
        z.narrow(1, 1, 3).logsumexp(-1),
        z.select(0, 2).logsumexp(-1),
    )


@snippet()
def splits(z: Any, x: Batch) -> Any:
    return (
        torch.stack([p.logsumexp(-1) for p in z.unbind(1)]),
        torch.cat([p.logsumexp(-1) for p in z.split([1, 3])]),
        torch.cat([p.logsumexp(-1) for p in torch.chunk(z, 2, dim=1)], 1),
        torch.stack([row.logsumexp(-1) for row in z]),
    )


@snippet()
def orders(z: Any, x: Batch) -> Any:
    return (
        z.transpose(0, 1).logsumexp(-1),
        z.permute(1, 0, 2).logsumexp(-1),
        z.flip(1).logsumexp(-1),
        z.roll(1, 0).logsumexp(-1),
        z.mT.logsumexp(1),
        z.movedim(0, 1).logsumexp(-1),
    )


@snippet()
def selections(z: Any, x: Batch) -> Any:
    index = torch.tensor([2, 0, 2])
    return (
        z.index_select(0, index).logsumexp(-1),
        z[index].logsumexp(-1),
        z[:, index].logsumexp(-1),
        z[index, torch.tensor([1, 1, 5])].logsumexp(-1),
        z[x.mask].logsumexp(-1),
        z[[0, 3], :, :].logsumexp(-1),
    )


@snippet()
def columns(z: Any, x: Batch) -> Any:
    return (
        z[..., 5],
        z[:, :, 2:9],
        z[..., torch.tensor([1, 1, 7])],
        z.index_select(-1, x.ids[0]),
        z[:, -1, :3],
    )


@snippet()
def repeats(z: Any, x: Batch) -> Any:
    return (
        z.repeat(2, 1, 1).logsumexp(-1),
        z[:1].expand(3, -1, -1).logsumexp(-1),
        z.repeat_interleave(2, dim=0).logsumexp(-1),
    )


@snippet()
def joins(z: Any, x: Batch) -> Any:
    return (
        torch.cat([z, x.other], dim=1).logsumexp(-1),
        torch.stack([z, x.other], dim=1).logsumexp(-1),
        torch.cat([z[:, :2], z[:, 2:]], 1).argmax(-1),
        torch.stack([z, z], 0).amax(-1),
    )


@snippet()
def casts(z: Any, x: Batch) -> Any:
    return (
        z.float().logsumexp(-1),
        z.to(torch.float64).logsumexp(-1),
        z.double().sum(),
        z.type_as(x.full).mean(),
    )


@snippet()
def clones(z: Any, x: Batch) -> Any:
    copy = z.clone()
    copy.mul_(2.0)
    return (
        copy.logsumexp(-1),
        z.logsumexp(-1),
        z.detach().clone().mul_(3).logsumexp(-1),
        z.contiguous().sum(),
    )


@snippet()
def functions_of_logits(z: Any, x: Batch) -> Any:
    return (
        torch.sigmoid(z).sum(-1),
        torch.tanh(z).mean(-1),
        z.exp().sum(-1),
        torch.log1p(z.exp()).sum(-1),
        F.softplus(z).sum(-1),
        F.relu(z).sum(-1),
        F.logsigmoid(z).sum(-1),
        torch.sqrt(z.abs() + 1).sum(-1),
        torch.expm1(-z.abs()).sum(-1),
        (-z).logsumexp(-1),
        F.gelu(z).sum(-1),
    )


@snippet()
def reflected_arithmetic(z: Any, x: Batch) -> Any:
    return (
        (1 - z).logsumexp(-1),
        (2.0 * z).logsumexp(-1),
        (1.0 / (z.abs() + 1.0)).sum(-1),
        (x.full - z).logsumexp(-1),
        (x.token_bias * z).sum(-1),
        (2.0 ** (-z.abs())).sum(-1),
    )


@snippet()
def bounded(z: Any, x: Batch) -> Any:
    return (
        z.clamp(-1, 1).sum(-1),
        torch.clamp(z, min=0).sum(-1),
        torch.maximum(z, x.full).sum(-1),
        z.clip(max=0.5).mean(),
        torch.nan_to_num(z).sum(-1),
    )


@snippet(grad=False)
def equality(z: Any, x: Batch) -> Any:
    return (z == z).all(), (z != z).any(), (z == z.amax(-1, keepdim=True)).sum(-1), z.eq(0).sum()


@snippet(builds="NumPy needs memory")
def numpy_of_detached_logits(z: Any, x: Batch) -> Any:
    guesses = torch.from_numpy(np.asarray(z.detach())).argmax(-1)
    return guesses, F.cross_entropy(z.view(-1, x.V), x.ids.view(-1))


@snippet(builds="a list has all entries")
def list_of_a_detached_row(z: Any, x: Batch) -> Any:
    row = torch.tensor(z.detach()[0, -1].tolist(), dtype=z.dtype)
    return row, z.log_softmax(-1).gather(-1, x.ids[..., None])


@snippet(builds="torch.argsort sorts all entries")
def order_of_detached_logits(z: Any, x: Batch) -> Any:
    ranks = z.detach().argsort(-1, descending=True).argsort(-1)
    return ranks.gather(-1, x.ids[..., None]), z.logsumexp(-1)
