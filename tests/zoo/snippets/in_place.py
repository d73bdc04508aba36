"""Writes into the logits, then a loss: what a tensor would show afterwards."""

from typing import Any

import torch
import torch.nn.functional as F

from zoo.catalogue import Batch, snippet

NEG = float("-inf")


def questions(z: Any, x: Batch) -> Any:
    return z.log_softmax(-1).gather(-1, x.ids[..., None]).squeeze(-1), z.logsumexp(-1), z.argmax(-1)


@snippet()
def div(z: Any, x: Batch) -> Any:
    z.div_(0.7)
    return questions(z, x)


@snippet()
def mul(z: Any, x: Batch) -> Any:
    z.mul_(1.5)
    return questions(z, x)


@snippet()
def mul_by_tokens(z: Any, x: Batch) -> Any:
    z.mul_(x.token_bias)
    return questions(z, x)


@snippet()
def add(z: Any, x: Batch) -> Any:
    z.add_(x.token_bias, alpha=2.0)
    return questions(z, x)


@snippet()
def sub(z: Any, x: Batch) -> Any:
    z.sub_(z.amax(-1, keepdim=True).detach())
    return questions(z, x)


@snippet()
def add_other_model(z: Any, x: Batch) -> Any:
    z.add_(x.other, alpha=-0.5)
    return questions(z, x)


@snippet()
def augmented_operators(z: Any, x: Batch) -> Any:
    z /= 0.8
    z += x.token_bias
    z *= x.row
    z -= 1.0
    return questions(z, x)


@snippet()
def clamp(z: Any, x: Batch) -> Any:
    z.clamp_(-2.0, 2.0)
    return z.logsumexp(-1), z.sum(-1)


@snippet()
def masked_fill(z: Any, x: Batch) -> Any:
    z.masked_fill_(x.forbidden_rows, NEG)
    return questions(z, x)


@snippet()
def masked_fill_tokens(z: Any, x: Batch) -> Any:
    z.masked_fill_(~x.allowed, -1e4)
    return z.logsumexp(-1), z.argmax(-1)


@snippet()
def scatter(z: Any, x: Batch) -> Any:
    z.scatter_(-1, x.ids[..., None], 1.5)
    return z.logsumexp(-1), z.gather(-1, x.ids[..., None])


@snippet()
def scatter_add(z: Any, x: Batch) -> Any:
    z.scatter_add_(-1, x.ids[..., None], x.row)
    return questions(z, x)


@snippet()
def index_fill(z: Any, x: Batch) -> Any:
    z.index_fill_(-1, torch.tensor([0, 3]), -5.0)
    return z.logsumexp(-1), z.argmax(-1)


@snippet()
def index_fill_rows(z: Any, x: Batch) -> Any:
    z.index_fill_(0, torch.tensor([1]), 0.0)
    return z.logsumexp(-1)


@snippet()
def zero(z: Any, x: Batch) -> Any:
    z[:, 0].zero_()
    return z.logsumexp(-1)


@snippet()
def copy(z: Any, x: Batch) -> Any:
    z[:, 1:3].copy_(x.full[:, 1:3])
    return z.logsumexp(-1)


@snippet()
def fill_then_add(z: Any, x: Batch) -> Any:
    z.fill_(0.5)
    z += x.full
    return z.logsumexp(-1)


@snippet()
def assign_column(z: Any, x: Batch) -> Any:
    z[..., 3] = NEG
    return z.logsumexp(-1), z.argmax(-1)


@snippet()
def assign_columns(z: Any, x: Batch) -> Any:
    z[:, :, [1, 4, 6]] = -3.0
    z[..., 10:] = x.token_bias[10:]
    return z.logsumexp(-1), z.argmax(-1)


@snippet()
def write_through_a_column(z: Any, x: Batch) -> Any:
    z[..., 3].fill_(-4.0)
    z[:, 1, 5].add_(2.0)
    z[:, -1, :4].zero_()
    z.select(-1, 6).mul_(0.5)
    return z.logsumexp(-1), z.argmax(-1)


@snippet()
def assign_rows(z: Any, x: Batch) -> Any:
    z[1] = 0.0
    z[:, -1] = x.full[:, -1]
    return z.logsumexp(-1)


@snippet()
def assign_by_row_mask(z: Any, x: Batch) -> Any:
    z[~x.mask] = 0.0
    return z.logsumexp(-1), z.sum()


@snippet()
def assign_by_comparison(z: Any, x: Batch) -> Any:
    v, _ = z.topk(7)
    z[z < v[..., [-1]]] = NEG
    return z.logsumexp(-1), z.argmax(-1)


@snippet()
def assign_pairs(z: Any, x: Batch) -> Any:
    z[torch.arange(x.B), 2, x.ids[:, 2]] = 2.5
    return z.logsumexp(-1), z[:, 2].argmax(-1)


@snippet()
def assign_tuple_with_ellipsis(z: Any, x: Batch) -> Any:
    z[0, ..., 5:9] = 1.0
    z[None][0, 1, 2, 3] = 4.0
    return z.logsumexp(-1)


@snippet()
def slice_then_divide(z: Any, x: Batch) -> Any:
    part = z[:, 1:]
    part.div_(2.0)
    return part.logsumexp(-1), part.argmax(-1)


@snippet()
def divide_then_slice(z: Any, x: Batch) -> Any:
    z.div_(2.0)
    part = z[:, 1:]
    part.add_(1.0)
    return part.logsumexp(-1)


@snippet()
def clone_then_write(z: Any, x: Batch) -> Any:
    copy = z.clone()
    copy[..., 0] = NEG
    return copy.logsumexp(-1), z.logsumexp(-1)


@snippet()
def detach_clone_then_write(z: Any, x: Batch) -> Any:
    copy = z.detach().clone()
    copy.masked_fill_(~x.allowed, NEG)
    return copy.argmax(-1), F.cross_entropy(z.view(-1, x.V), x.ids.view(-1))


@snippet()
def question_between_writes(z: Any, x: Batch) -> Any:
    before = z.sum(-1), z.mean(dim=-1)
    z.mul_(2.0)
    between = z.mean(), z[..., 4].clone()
    z.add_(x.token_bias)
    return *before, *between, z.logsumexp(-1)


@snippet(grad=False)
def question_between_writes_without_gradient(z: Any, x: Batch) -> Any:
    before = z.logsumexp(-1)
    z.mul_(2.0)
    between = z.argmax(-1), z.softmax(-1)
    z.add_(x.token_bias)
    return before, *between, z.logsumexp(-1)


@snippet()
def tanh_in_place(z: Any, x: Batch) -> Any:
    z.tanh_()
    return z.sum(-1), z.mean()


@snippet(grad=False)
def functions_in_place(z: Any, x: Batch) -> Any:
    z.abs_()
    z.sqrt_().neg_()
    z.exp_()
    return z.sum(-1), z.mean()


@snippet()
def relu_in_place(z: Any, x: Batch) -> Any:
    F.relu(z, inplace=True)
    return z.sum(-1)


@snippet()
def softcap_in_place(z: Any, x: Batch) -> Any:
    z.div_(3.0).tanh_()
    return questions(3.0 * z, x)


@snippet(grad=False)
def functions_of_masked_logits(z: Any, x: Batch) -> Any:
    """tanh(-inf) is -1: a soft cap after the mask allows the tokens again, as torch does."""
    z.masked_fill_(~x.allowed, NEG)
    capped = 3.0 * torch.tanh(z / 3.0)
    return capped.logsumexp(-1), z.sigmoid().sum(-1), z.exp().mean(-1), z.clamp(min=-9.0).sum(-1)


@snippet(large="mask of every row")
def loss_after_chain_of_writes(z: Any, x: Batch) -> Any:
    z.div_(0.9)
    z[..., -3:] = NEG
    z.masked_fill_(x.forbidden_rows & (torch.arange(x.V) > 5), NEG)
    labels = x.ids.clamp(max=5)
    return F.cross_entropy(z.view(-1, x.V), labels.view(-1), reduction="none")


@snippet(grad=False)
def sub_log_normaliser(z: Any, x: Batch) -> Any:
    """Log-softmax in place."""
    z -= z.logsumexp(-1, keepdim=True)
    return z.gather(-1, x.ids[..., None]), z.exp().sum(-1)


@snippet()
def returned_object_is_the_same(z: Any, x: Batch) -> Any:
    same = z.div_(2.0)
    same.add_(1.0)
    return z.logsumexp(-1), same.logsumexp(-1)


@snippet()
def where_out_of_place(z: Any, x: Batch) -> Any:
    masked = torch.where(x.allowed_rows, z, torch.finfo(z.dtype).min)
    return masked.logsumexp(-1), masked.argmax(-1)


@snippet()
def masked_scatter_of_rows(z: Any, x: Batch) -> Any:
    """A per-row mask (B, T, 1) that broadcasts over the vocabulary."""
    masked = z.masked_fill(~x.mask.unsqueeze(-1), 0.0)
    return masked.logsumexp(-1), masked.sum() / x.mask.sum()


@snippet(grad=False)
def under_no_grad(z: Any, x: Batch) -> Any:
    z.div_(0.5)
    z[:, :, 7] = NEG
    return questions(z, x)
