"""Shard a model over the processes ("ranks") of a run: `--shard data`, `full` or `vocab`.

    data    every rank has the whole model; gradients are summed
    full    FSDP2: every rank keeps 1 / n of each parameter, and gathers a block while it is used
    vocab   every rank has 1 / n of the vocabulary in embedding and head; the rest as with data

With each of them a rank takes its rows of a batch. With vocab the hidden states of all rows are
multiplied with all slices of the head: they are gathered before the loss, and so are token
embeddings.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.optim import AdamW

from lmhead.parallel.process_ranks import Ranks
from lmhead.parallel.vocab_shard import VocabShard
from lmhead.train.task import Task
from lmhead.train.train_config import TrainConfig

T = TypeVar("T")


class Sharding:
    """The whole model on every rank (data).

    Attributes:
        everywhere: whether every rank takes part in validation and in collecting a checkpoint.
    """

    everywhere = False

    def __init__(self, task: Task, ranks: Ranks) -> None:
        self.task, self.ranks = task, ranks
        self.parameters = [p for p in task.model.parameters() if p.requires_grad]

    def evaluate(self, work: Callable[[], T]) -> T:
        """Run `work` with the model, with the same inputs on every rank that takes part."""
        return work()

    def loss(self, batch: Any, num_items: int) -> Tensor:
        """Return the loss of this rank's rows of a batch."""
        rows = self.task.shard(batch, self.ranks.rank, self.ranks.size)
        if self.ranks.first or self.task.items(rows):
            return self.task.loss(rows, num_items)
        # A rank without rows gets gradients of 0, so that all ranks have the same parameters.
        return 0.0 * self.task.loss(self.task.shard(batch, 0, self.ranks.size), num_items)

    def total(self, loss: float) -> float:
        """Return the loss of all rows."""
        return sum(self.ranks.gather_numbers(loss))

    def sum_gradients(self) -> None:
        """Sum the gradients over the ranks."""
        self.ranks.sum_gradients(self.parameters)

    def clip(self, limit: float) -> float:
        """Clip the gradients to a norm; return the norm before."""
        return float(_plain(nn.utils.clip_grad_norm_(self.parameters, limit)))


class FullSharding(Sharding):
    """FSDP2: a group for each block, one for the rest."""

    everywhere = True

    def __init__(self, task: Task, ranks: Ranks) -> None:
        from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

        mesh = _mesh(ranks)
        for block in _blocks(task.model):
            cross = getattr(block, "cross", None)
            if cross is not None:  # used before the block: keys and values of the encoder's output
                fully_shard(cross, mesh=mesh)
                for name in ("project", "attend"):
                    register_fsdp_forward_method(cross, name)
            fully_shard(block, mesh=mesh)
        root: Any = _Work(task.model)
        fully_shard(root, mesh=mesh)
        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)  # the sum over ranks, not the mean
                module.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction
        self._root = root
        super().__init__(task, ranks)

    def evaluate(self, work: Callable[[], T]) -> T:
        """Run `work` while the parameters outside of blocks are gathered."""
        try:
            return self._call(work)
        finally:
            self._root.reshard()

    def loss(self, batch: Any, num_items: int) -> Tensor:
        """Return the loss of this rank's rows of a batch."""
        return self._call(lambda: Sharding.loss(self, batch, num_items))

    def sum_gradients(self) -> None:
        """Do nothing: FSDP2 has summed them."""

    def _call(self, work: Callable[[], T]) -> T:
        with warnings.catch_warnings():  # blocks return views as keys; they are never written to
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
            return self._root(work)  # type: ignore[no-any-return]


class _Work(nn.Module):
    """The root of FSDP2: calls a function while the parameters outside of blocks are gathered."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], T]) -> T:
        return work()


class VocabSharding(Sharding):
    """Embedding and head split over the vocabulary, all else on every rank."""

    everywhere = True

    def __init__(self, task: Task, ranks: Ranks) -> None:
        untyped: Any = task
        model: Any = task.model
        if not (hasattr(untyped, "criterion") and hasattr(model, "head")):
            raise ValueError(
                "shard must be 'data' or 'full' for a task without `criterion` and `model.head`; "
                "got 'vocab'"
            )
        self._mesh, self._split_rows = _mesh(ranks), False
        embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
        split = {
            parameter: nn.Parameter(
                distribute_tensor(parameter.detach(), self._mesh, [Shard(0)], src_data_rank=None),
                requires_grad=parameter.requires_grad,
            )
            for module in (model.head, *embeddings)
            for parameter in module.parameters()
        }
        replaced = {m: _SplitEmbedding(split[m.weight], self) for m in embeddings}
        for module in list(model.modules()):
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter in split:
                    setattr(module, name, split[parameter])
            for name, child in list(module._modules.items()):
                if isinstance(child, nn.Embedding):
                    setattr(module, name, replaced[child])
        self._criterion = untyped.criterion
        untyped.criterion = self._gathered
        super().__init__(task, ranks)

    def loss(self, batch: Any, num_items: int) -> Tensor:
        """Return the loss of all rows, the same on every rank."""
        self._split_rows = True
        try:
            rows = self.task.shard(batch, self.ranks.rank, self.ranks.size)
            return self.task.loss(rows, num_items)
        finally:
            self._split_rows = False

    def total(self, loss: float) -> float:
        """Return the loss of all rows, which every rank has; NaN if a rank has NaN."""
        return super().total(loss) / self.ranks.size

    def sum_gradients(self) -> None:
        """Sum the gradients of parameters that every rank has."""
        self.ranks.sum_gradients([p for p in self.parameters if not is_split(p)])

    def clip(self, limit: float) -> float:
        """Clip the gradients, of slices and of whole parameters, to a norm; return it."""
        groups = [[p for p in self.parameters if is_split(p) is group] for group in (True, False)]
        gradients = [[p.grad for p in group if p.grad is not None] for group in groups]
        norms = [_plain(nn.utils.get_total_norm(group)) for group in gradients]
        norm = torch.stack(norms).norm()
        for group in groups:
            nn.utils.clip_grads_with_norm_(group, limit, norm)
        return float(norm)

    def _gathered(self, hidden: Tensor, targets: Tensor, num_items: int, number: int) -> Tensor:
        """Return the criterion of the rows of all ranks."""
        size = self._max_rows(hidden)
        rows = DTensor.from_local(_pad_rows(hidden, size), self._mesh, [Shard(0)], run_check=False)
        all_targets = self._gather(_pad_rows(targets, size, -100))
        return self._criterion(rows, all_targets, num_items, number)  # type: ignore[no-any-return]

    def look_up(self, ids: Tensor, weight: Any) -> Tensor:
        """Return embeddings (B, T, D) of ids (B, T): each rank looks up the tokens of its slice."""
        shard = VocabShard(self._mesh.get_group(), weight.shape[0])
        all_ids = self._gather(_pad_rows(ids, self._max_rows(ids))) if self._split_rows else ids
        owned = shard.owns(all_ids)
        local = shard.padded(weight.to_local())
        part = F.embedding((all_ids - shard.start).masked_fill(~owned, 0), local)
        part = part.masked_fill(~owned[..., None], 0.0)
        partial = DTensor.from_local(part, self._mesh, [Partial()], run_check=False)
        placement = Shard(0) if self._split_rows else Replicate()
        embeddings: Tensor = partial.redistribute(placements=[placement]).to_local()
        return embeddings[: len(ids)]

    def _max_rows(self, rows: Tensor) -> int:
        return int(max(self.ranks.gather_numbers(len(rows))))

    def _gather(self, rows: Tensor) -> Tensor:
        out = rows.new_empty(self.ranks.size * rows.shape[0], *rows.shape[1:])
        with self.ranks.communication():
            dist.all_gather(list(out.chunk(self.ranks.size)), rows.contiguous())
        return out


class _SplitEmbedding(nn.Module):
    """An embedding with the vocabulary split over ranks."""

    def __init__(self, weight: nn.Parameter, sharding: VocabSharding) -> None:
        super().__init__()
        self.weight = weight
        self._look_up = sharding.look_up

    def forward(self, ids: Tensor) -> Tensor:
        return self._look_up(ids, self.weight)


_KINDS: dict[str, type[Sharding]] = {"data": Sharding, "full": FullSharding, "vocab": VocabSharding}


def shard_model(
    task: Task, optimizer: AdamW, config: TrainConfig, ranks: Ranks
) -> tuple[Sharding, AdamW]:
    """Shard the model in place by `config.shard`; return the sharding and this rank's optimizer."""
    if ranks.size == 1 or config.shard == "data":
        return Sharding(task, ranks), optimizer
    full_parameters = dict(task.model.named_parameters())
    moments = {name: optimizer.state.get(p, {}) for name, p in full_parameters.items()}
    sharding = _KINDS[config.shard](task, ranks)
    sharded_optimizer = make_optimizer(task.model, config)
    for name, parameter in task.model.named_parameters():
        if moments[name]:
            sharded_optimizer.state[parameter] = {
                key: _placed(value, parameter) for key, value in moments[name].items()
            }
    return sharding, sharded_optimizer


def make_optimizer(model: nn.Module, config: TrainConfig) -> AdamW:
    """Return AdamW with weight decay for matrices and none for vectors (biases, norms)."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {
            "params": [p for p in trained if (p.dim() >= 2, is_split(p)) == (matrix, split)],
            "weight_decay": config.weight_decay if matrix else 0.0,
        }
        for matrix in (True, False)
        for split in (False, True)  # torch's list operations do not mix DTensors and tensors
    ]
    return AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        fused=True,
    )


def is_split(tensor: Any) -> bool:
    """Return whether a tensor is a `DTensor`."""
    return isinstance(tensor, DTensor)


def _plain(tensor: Any) -> Tensor:
    """Return the full tensor; every rank must call it."""
    return tensor.full_tensor() if is_split(tensor) else tensor  # type: ignore[no-any-return]


def _placed(value: Tensor, like: Any) -> Tensor:
    """Split a moment as its parameter is; a step count is the same everywhere."""
    if value.dim() == 0 or not is_split(like):
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def _mesh(ranks: Ranks) -> Any:
    return init_device_mesh("cpu", (ranks.size,))


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of the model: the members of its module lists named `blocks`."""
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] == "blocks" and isinstance(module, nn.ModuleList):
            yield from module


def _pad_rows(x: Tensor, rows: int, value: float = 0.0) -> Tensor:
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, rows - len(x)), value=value)
