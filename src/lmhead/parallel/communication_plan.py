"""`plan`: memory and communication of a head that is trained on several ranks, by arithmetic.

With the ring algorithms of NCCL and gloo a rank sends, for x bytes of its own and n ranks:

    all-gather       (n - 1) x         x: the rank's part
    reduce-scatter   (n - 1) / n x     x: the whole tensor
    all-reduce       2 (n - 1) / n x
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from lmhead import checks
from lmhead.sweep import DEFAULT_MAX_BYTES

Shard = Literal["data", "full", "vocab", "gather"]
_KINDS = get_args(Shard)


@dataclass(frozen=True)
class HeadPlan:
    """Bytes per rank for one training step of a head."""

    weight: int  # the weight while it is used; `kept` is what remains between steps
    kept: int  # the rank's part of the weight
    gradient: int  # the weight's gradient at its peak
    temporary: int  # logits, or the tiles of a sweep
    sent: int  # sent by this rank in a step
    tokens: int  # rows that all ranks together process in a step

    @property
    def memory(self) -> int:
        """Peak of the head: weight, gradient and temporary memory."""
        return self.weight + self.gradient + self.temporary

    @property
    def sent_per_token(self) -> float:
        """Bytes that one rank sends for each row of the step."""
        return self.sent / self.tokens


def plan(
    vocab_size: int,
    hidden_size: int,
    tokens: int,
    *,
    ranks: int,
    shard: Shard,
    itemsize: int = 2,
    reshard: bool = False,
    max_bytes: int | None = None,
) -> HeadPlan:
    """Return memory and communication of a head's training step on several ranks.

    Equivalent to: adding up the tensors and collectives of such a step.

    Args:
        vocab_size: V.
        hidden_size: D.
        tokens: rows N that a rank sees. With "vocab" and "gather" all ranks see the same rows.
        ranks: number of ranks n.
        shard: "data": a copy of the weight on each rank (DDP). "full": FSDP2. "vocab": V / n tokens
            on each rank, lazy logits. "gather": the same with all logits gathered on every rank.
        itemsize: bytes of an entry of weight, gradient and hidden states; 2 for bfloat16.
        reshard: with "full", whether the weight is freed after the head's forward pass
            (`reshard_after_forward=True`): it is gathered again for the loss and for the backward
            pass. If not, it stays in memory from forward to backward.
        max_bytes: bound on the temporary memory of a sweep; None for 128 MiB.

    >>> gathered = plan(128256, 4096, 8192, ranks=8, shard="gather")
    >>> split = plan(128256, 4096, 8192, ranks=8, shard="vocab")
    >>> gathered.sent // split.sent, gathered.temporary // split.temporary
    (16, 33)
    """
    sizes = {"vocab_size": vocab_size, "hidden_size": hidden_size}
    for name, value in {**sizes, "tokens": tokens, "ranks": ranks, "itemsize": itemsize}.items():
        checks.check_integer(name, value, low=1)
    if shard not in _KINDS:
        raise ValueError(f"shard must be one of {', '.join(_KINDS)}; got {shard!r}")
    n = ranks
    weight_bytes = vocab_size * hidden_size * itemsize
    part = -(-vocab_size // n) * hidden_size * itemsize
    logits = tokens * vocab_size * itemsize
    tiles = min(logits * 2, DEFAULT_MAX_BYTES if max_bytes is None else max_bytes)
    reduce = 2 * (n - 1)  # times x / n
    if shard == "data":
        return HeadPlan(
            weight_bytes, weight_bytes, weight_bytes, tiles, reduce * weight_bytes // n, n * tokens
        )
    if shard == "full":
        gathers = 3 if reshard else 1  # forward, loss, backward; or forward
        sent = gathers * (n - 1) * part + (n - 1) * weight_bytes // n
        held = weight_bytes + (part if n > 1 else 0)
        return HeadPlan(held, part, weight_bytes, tiles, sent, n * tokens)
    to_hidden = reduce * tokens * hidden_size * itemsize // n
    if shard == "gather":
        share = tokens * -(-vocab_size // n) * itemsize
        temporary = 2 * logits + share  # all logits, their gradient, this rank's slice
        return HeadPlan(part, part, part, temporary, (n - 1) * share + to_hidden, tokens)
    numbers = 2 * 8 * tokens  # lse and the target's logit, in float64
    return HeadPlan(part, part, part, tiles, (n - 1) * numbers + to_hidden, tokens)
