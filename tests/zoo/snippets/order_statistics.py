"""Order statistics, norms and similarities over the vocabulary; other names of joins and picks."""

from typing import Any

import torch
import torch.nn.functional as F

from zoo.catalogue import Batch, snippet


@snippet()
def quantiles(z: Any, x: Batch) -> Any:
    ends = torch.quantile(z, torch.tensor([0.1, 0.9], dtype=z.dtype), dim=-1)
    return ends[1] - ends[0], z.quantile(0.5, -1, keepdim=True), torch.nanquantile(z, 0.3, dim=2)


@snippet()
def medians(z: Any, x: Batch) -> Any:
    return z.median(-1).values, z.kthvalue(3, dim=-1).values, z.nanmedian(-1, keepdim=True).values


@snippet()
def spread_with_mean(z: Any, x: Batch) -> Any:
    std, mean = torch.std_mean(z, dim=-1, keepdim=True)
    least, most = torch.aminmax(z, dim=-1)
    return ((z - mean) / (std + 1e-6)).square().mean(-1), most - least, *torch.var_mean(z, dim=-1)


@snippet()
def norms_of_everything(z: Any, x: Batch) -> Any:
    return z.norm(1), z.norm(float("inf"), dim=(0, 2)), torch.linalg.vector_norm(z, 3)


@snippet()
def feature_distillation(z: Any, x: Batch) -> Any:
    """Cosine distance of the logits of two models, and of normalised logits."""
    apart = 1 - F.cosine_similarity(z, x.other, dim=-1)
    return apart, F.normalize(z, dim=-1).sub(F.normalize(x.other, dim=-1)).abs().sum(-1)


@snippet()
def last_position_by_gather(z: Any, x: Batch) -> Any:
    last = (x.mask.long().cumsum(1) * x.mask).argmax(1)
    rows = z.gather(1, last.view(-1, 1, 1).expand(-1, 1, x.V)).squeeze(1)
    return rows.logsumexp(-1), z.gather(-1, x.ids[:2, :3, None])


@snippet()
def null_class(z: Any, x: Batch) -> Any:
    """A further class, with a logit of its own per row, beside the tokens."""
    more = torch.cat([z, x.row], dim=-1)
    return F.cross_entropy(more.flatten(0, 1), torch.where(x.mask, x.ids, x.V).flatten())


@snippet()
def stacked_by_other_names(z: Any, x: Batch) -> Any:
    both = torch.vstack([z, x.other]).logsumexp(-1)
    return both, torch.hstack([z[:, :2], x.other]).logsumexp(-1), z.tile((2, 1, 1)).logsumexp(-1)


@snippet()
def dropout_of_an_evaluated_model(z: Any, x: Batch) -> Any:
    return torch.nn.Dropout(0.5).eval()(z).logsumexp(-1), F.dropout(z, 0.0).logsumexp(-1)


@snippet()
def new_dimension_after_the_vocabulary(z: Any, x: Batch) -> Any:
    return z[..., None].logsumexp(-2), z[:, -1, :, None].sum(1)


@snippet()
def inverse_functions(z: Any, x: Batch) -> Any:
    return torch.erfinv(z.tanh() * 0.9).sum(-1), z.asinh().sum(-1), torch.copysign(z, x.row).sum(-1)
