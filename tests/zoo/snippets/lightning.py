"""Lightning and torchmetrics: training steps and metrics as their examples write them."""

from typing import Any

import torch
import torch.nn.functional as F

from zoo.catalogue import Batch, snippet


@snippet()
def training_step(z: Any, x: Batch) -> Any:
    return F.nll_loss(F.log_softmax(z.view(-1, x.V), dim=1), x.ids.view(-1))


@snippet()
def word_language_model_step(z: Any, x: Batch) -> Any:
    """The output is (T, B, V), as in the language-model example."""
    output = z.transpose(0, 1)
    return F.nll_loss(F.log_softmax(output, -1).reshape(-1, x.V), x.ids.T.reshape(-1))


@snippet(grad=False)
def validation_step(z: Any, x: Batch) -> Any:
    predictions = torch.argmax(z, dim=-1)
    accuracy = (predictions == x.ids).float().mean()
    return F.cross_entropy(z.reshape(-1, x.V), x.ids.reshape(-1)), accuracy


@snippet(grad=False)
def top_five_accuracy(z: Any, x: Batch) -> Any:
    top = z.topk(5, dim=-1).indices
    return (top == x.ids.unsqueeze(-1)).any(-1).float().mean()


@snippet(grad=False)
def perplexity_metric(z: Any, x: Batch) -> Any:
    """torchmetrics: probabilities, then the diagonal of the target columns."""
    probabilities = F.softmax(z.reshape(-1, z.shape[-1]), dim=1)
    target = x.labels.reshape(-1)
    kept = target.ne(-100)
    target = target.where(kept, torch.tensor(0))
    own = probabilities[torch.arange(target.numel()), target][kept]
    return torch.exp(-own.log().sum() / kept.sum())


@snippet()
def logged_mean_and_norm(z: Any, x: Batch) -> Any:
    return z.detach().mean(), z.detach().abs().amax(), z.detach().norm(dim=-1).mean(), z.norm()


@snippet()
def loss_in_float32(z: Any, x: Batch) -> Any:
    return F.cross_entropy(z.float().view(-1, x.V), x.ids.view(-1))


@snippet(grad=False)
def calibration_error_bins(z: Any, x: Batch) -> Any:
    confidence, prediction = z.softmax(-1).max(-1)
    hit = prediction.eq(x.ids).to(z.dtype)
    bins = torch.bucketize(confidence, torch.linspace(0, 1, 6, dtype=z.dtype)[1:-1])
    gaps = [(hit[bins == b].sum() - confidence[bins == b].sum()).abs() for b in range(5)]
    return torch.stack(gaps) / hit.numel()
