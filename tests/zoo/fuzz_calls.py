"""Call public functions with tensors that the compiled core cannot read: subclasses, freed storage,
other devices, odd strides. Every call must end with an answer or a Python exception.

    python tests/zoo/fuzz_calls.py 1000 0,1,2 last_call.txt

Arguments: number of calls per seed, seeds, a file that names the call under way, for after a crash,
and the number of the first call, to repeat one or to go on after a crash.
"""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import lmhead

ROWS, VOCAB, DIM = 6, 40, 16
BITS: list[Any] = [8, "4+4", 5]
DTYPES = [torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16]
ODD_DTYPES = [torch.int64, torch.bool, torch.complex64, torch.int8, torch.float8_e4m3fn]


class Plain(Tensor):
    """A subclass that changes nothing."""


class Wrapper(Tensor):
    """A subclass without storage of its own, as quantized and distributed tensors are."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: Tensor) -> None:
        self.bare = inner

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def bare(x: Any) -> Any:
            return x.bare if isinstance(x, Wrapper) else x

        args, kwargs = torch.utils._pytree.tree_map(bare, (args, kwargs or {}))
        return func(*args, **kwargs)


def freed(t: Tensor) -> Tensor:
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


def halved(t: Tensor) -> Tensor:
    """Storage that ends in the middle of the tensor."""
    t = t.clone()
    t.untyped_storage().resize_(t.untyped_storage().nbytes() // 2)
    return t


def unaligned(t: Tensor) -> Tensor:
    memory = torch.empty(t.numel() + 1, dtype=t.dtype)[1:]
    return memory.copy_(t.flatten()).view(t.shape)


def distributed(t: Tensor) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    return distribute_tensor(t, mesh, [random.choice([Replicate(), Shard(0)])])


def quantized(t: Tensor) -> Tensor:
    return torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8)


def fake(t: Tensor) -> Any:
    return FakeTensorMode().from_tensor(t)


def inference(t: Tensor) -> Tensor:
    with torch.inference_mode():
        return t.clone()


def lazy(t: Tensor) -> Any:
    return lmhead.LMHead(4, t.shape[-1], dtype=torch.float32)(torch.randn(*t.shape[:-1], 4))


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "same": lambda t: t,
    "requires grad": lambda t: t.clone().requires_grad_(),
    "parameter": nn.Parameter,
    "subclass": lambda t: t.as_subclass(Plain),
    "wrapper": Wrapper,
    "freed": freed,
    "halved": halved,
    "unaligned": unaligned,
    "distributed": distributed,
    "quantized": quantized,
    "fake": fake,
    "inference": inference,
    "lazy": lazy,
    "meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "sparse csr": lambda t: t.to_sparse_csr(),
    "mkldnn": lambda t: t.to_mkldnn(),
    "nested": lambda t: torch.nested.nested_tensor(list(t)),
    "zero": lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype),
    "negated": lambda t: torch._neg_view(t),
    "conjugated": lambda t: torch.conj(t.to(torch.complex64)),
    "transposed": lambda t: t.mT.contiguous().mT,
    "expanded": lambda t: t[:1].expand(t.shape),
    "every other": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "overlapping": lambda t: torch.as_strided(t, t.shape, (1,) * t.dim()),
    "flipped": lambda t: t.flip(0),
    "wrong rows": lambda t: t[1:],
    "wrong columns": lambda t: t[..., 1:],
    "empty": lambda t: t[:0],
    "no columns": lambda t: t[..., :0],
    "one more dimension": lambda t: t[None],
    "scalar": lambda t: t.sum(),
    "odd dtype": lambda t: t.to(random.choice(ODD_DTYPES)),
    "nan": lambda t: t * float("nan"),
    "infinite": lambda t: t * float("inf"),
    "numpy": lambda t: t.float().numpy(),
    "list": lambda t: t.tolist(),
    "none": lambda _: None,
    "huge ids": lambda t: t + 10**12,
    "negative ids": lambda t: -t - 1,
}


# Integer tensors without memory end the process in torch's own indexing.
NOT_FOR_IDS = ("freed", "halved", "zero")


def changed(t: Tensor, log: list[str]) -> Any:
    name = random.choice(["same", *CHANGES])
    if name in NOT_FOR_IDS and not t.is_floating_point():
        name = "same"
    log.append(name)
    return CHANGES[name](t)


# --- calls ----------------------------------------------------------------------------------------


def question(z: Any, ids: Any, log: list[str]) -> Any:
    """One of the things that code does with logits."""
    asks: dict[str, Callable[[], Any]] = {
        "argmax": lambda: z.argmax(-1),
        "topk": lambda: z.topk(random.choice([1, 3, 40, 41, -1])),
        "logsumexp": lambda: z.logsumexp(-1),
        "loss": lambda: F.cross_entropy(z, ids, reduction=random.choice(["mean", "sum", "none"])),
        "log_prob": lambda: z.log_softmax(-1).gather(-1, ids[..., None]),
        "sum": lambda: (z / 2).softmax(-1).sum(-1),
        "materialize": lambda: z.materialize(),
        "item": lambda: z[0, 1].item(),
        "columns": lambda: z[..., ids],
        "where": lambda: torch.where(ids[..., None] > 3, z, 0.0).amax(-1),
        "write": lambda: z.masked_fill_(ids[..., None] > 3, -1.0).argmax(-1),
        "div_": lambda: z.div_(2.0).logsumexp(-1),
        "numpy": lambda: z.detach().numpy(),
        "data_ptr": lambda: z.data_ptr(),
        "mask": lambda: z.mask_tokens(ids).argmax(-1),
        "sampler": lambda: lmhead.Sampler(seed=1, top_k=5, top_p=0.9)(z, position=0),
        "repr": lambda: repr(z),
        "vmap": lambda: torch.vmap(lambda row: row.logsumexp(-1))(z),
        "copy": lambda: z.clone().cpu().float().sum(),
    }
    name = random.choice(list(asks))
    log.append(name)
    return asks[name]()


class Odd(NamedTuple):
    """Arguments, one or more of them odd."""

    hidden: Any
    weight: Any
    bias: Any
    ids: Any


def backward(result: Any) -> None:
    """Gradients, where there are any."""
    tensors = [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, Tensor)]
    for t in tensors[:1]:
        if t.requires_grad:
            t.sum().backward()  # type: ignore[no-untyped-call]


def call_head(t: Odd, log: list[str]) -> Any:
    """A module whose parameters were replaced, as wrappers and loaders do."""
    head = lmhead.LMHead(DIM, VOCAB, bias=t.bias is not None)
    head.max_bytes = random.choice([None, None, 1, 1000])
    for name, value in (("weight", t.weight), ("bias", t.bias)):
        if value is not None:
            delattr(head, name)
            setattr(head, name, value)
    return question(head(t.hidden), t.ids, log)


def call_changed_later(t: Odd, log: list[str]) -> Any:
    """Logits of good tensors that go bad before the question."""
    head = lmhead.LMHead(DIM, VOCAB)
    states = torch.randn(ROWS, DIM)
    z = head(states)
    harm = random.choice(["free weight", "free hidden", "data", "step", "meta", "shrink"])
    log.append(harm)
    if harm == "free weight":
        head.weight.untyped_storage().resize_(0)
    elif harm == "free hidden":
        states.untyped_storage().resize_(0)
    elif harm == "data" and isinstance(t.weight, Tensor):
        head.weight.data = t.weight
    elif harm == "step":
        with torch.no_grad():
            head.weight.add_(1.0)
    elif harm == "meta":
        head.to("meta")
    else:
        head.weight.data = torch.randn(3, 2)
    return question(z, t.ids, log)


def call_loss(t: Odd, log: list[str]) -> Any:
    options: dict[str, Any] = {"bias": t.bias} if random.random() < 0.5 else {}
    if random.random() < 0.3:
        options["class_weight"] = changed(torch.rand(VOCAB), log)
    if random.random() < 0.3:
        options.update(label_smoothing=0.1, z_loss=0.01)
    if random.random() < 0.2:
        options["grad_filter"] = 0.02
    options["reduction"] = random.choice(["mean", "sum", "none"])
    return lmhead.linear_cross_entropy(t.hidden, t.weight, t.ids, **options)


def call_query(t: Odd, log: list[str]) -> Any:
    asked: dict[str, Any] = random.choice(
        [
            {"log_prob": t.ids},
            {"rank": t.ids},
            {"entropy": True, "logsumexp": True},
            {"argmax": True},
            {"top_k": 4},
            {"kl_to": (changed(torch.randn(ROWS, DIM), log), t.weight)},
        ]
    )
    answers = lmhead.query(t.hidden, t.weight, bias=t.bias, **asked)
    return [getattr(answers, name, None) for name in ("log_prob", "entropy", "logsumexp")]


def call_screened(t: Odd, log: list[str]) -> Any:
    head = lmhead.LMHead(DIM, VOCAB)
    if isinstance(t.weight, Tensor) and random.random() < 0.5:
        del head.weight
        head.weight = t.weight
    screened = lmhead.ScreenedHead(head, bits=random.choice(BITS))
    if random.random() < 0.3:
        head.weight.untyped_storage().resize_(0)
        log.append("free weight")
    return screened.argmax(t.hidden) if random.random() < 0.5 else screened.topk(t.hidden, 3)


def call_sampler(t: Odd, log: list[str]) -> Any:
    logits = changed(torch.randn(ROWS, VOCAB), log)
    sampler = lmhead.Sampler(seed=random.choice([0, 7]), temperature=0.8, min_p=0.05)
    return sampler(logits, t.ids, position=3)


def call_other_heads(t: Odd, log: list[str]) -> Any:
    kind = random.choice(["adaptive", "hierarchical", "sampled", "low rank"])
    log.append(kind)
    if kind == "adaptive":
        return question(lmhead.AdaptiveHead(DIM, VOCAB, cutoffs=[10])(t.hidden), t.ids, log)
    if kind == "hierarchical":
        return question(lmhead.HierarchicalHead(DIM, VOCAB)(t.hidden), t.ids, log)
    if kind == "sampled":
        return lmhead.SampledLoss(lmhead.LMHead(DIM, VOCAB), num_samples=8)(t.hidden, t.ids)
    return question(lmhead.LMHead(DIM, VOCAB).add_low_rank(2)(t.hidden), t.ids, log)


def call_tied(t: Odd, log: list[str]) -> Any:
    linear = nn.Linear(DIM, VOCAB, bias=t.bias is not None)
    del linear.weight
    linear.weight = t.weight
    return question(lmhead.LMHead.from_linear(linear)(t.hidden), t.ids, log)


def call_transformed(t: Odd, log: list[str]) -> Any:
    """Inside `torch.func`: the tensors that arrive are wrappers."""
    head = lmhead.LMHead(DIM, VOCAB)
    kind = random.choice(["grad", "vmap", "jvp", "functional_call"])
    log.append(kind)
    if kind == "grad":
        return torch.func.grad(lambda h: head(h).logsumexp(-1).sum())(t.hidden)
    if kind == "vmap":
        return torch.vmap(lambda h: question(head(h[None]), t.ids[:1], log))(t.hidden)
    if kind == "jvp":
        return torch.func.jvp(lambda h: head(h).logsumexp(-1), (t.hidden,), (t.hidden,))
    return question(torch.func.functional_call(head, {"weight": t.weight}, (t.hidden,)), t.ids, log)


CALLS = [
    call_head,
    call_head,
    call_head,
    call_changed_later,
    call_loss,
    call_loss,
    call_query,
    call_screened,
    call_sampler,
    call_other_heads,
    call_tied,
    call_transformed,
]


class SlowError(Exception):
    """A call took longer than it may."""


def too_slow(*_: Any) -> None:
    raise SlowError


def main() -> None:
    calls, seeds, path = int(sys.argv[1]), map(int, sys.argv[2].split(",")), sys.argv[3]
    first = int(sys.argv[4]) if len(sys.argv) > 4 else 0
    faulthandler.enable()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29555")
    dist.init_process_group(
        "gloo", rank=0, world_size=1, store=torch._C._distributed_c10d.HashStore()
    )
    signal.signal(signal.SIGALRM, too_slow)
    ends, done = Counter[str](), 0
    with open(path, "w", buffering=1) as report:
        for seed, number in product(seeds, range(first, calls)):
            random.seed(f"{seed} {number}")
            torch.manual_seed(number)
            log: list[str] = []
            call = random.choice(CALLS)
            report.seek(0)
            signal.alarm(60)
            try:
                dtype = random.choice(DTYPES)
                tensors: list[Any] = [
                    torch.randn(ROWS, DIM, dtype=dtype),
                    torch.randn(VOCAB, DIM, dtype=dtype),
                    torch.randn(VOCAB, dtype=dtype),
                    torch.randint(VOCAB, (ROWS,)),
                ]
                # One or two of them are odd: with all odd, the first check ends every call.
                odd = random.sample(range(4), random.choice([1, 1, 2, 4]))
                for k in odd:
                    tensors[k] = changed(tensors[k], log)
                    log[-1] += f" {('hidden', 'weight', 'bias', 'ids')[k]}"
                report.write(
                    f"call {number} of seed {seed}: {call.__name__} {dtype} {log}\n{'':200}"
                )
                report.seek(0)
                backward(call(Odd(*tensors), log))
                ends["answer"] += 1
            except SlowError:
                raise SystemExit(
                    f"call {number} of seed {seed} hangs: {call.__name__} {log}"
                ) from None
            except Exception as error:
                ends[type(error).__name__] += 1
                if isinstance(error, (AssertionError, AttributeError, KeyError)):
                    ends[f"{type(error).__name__}: {str(error)[:60]} in {call.__name__}"] += 1
            finally:
                signal.alarm(0)
                done += 1
    print(f"{done} calls: {dict(ends.most_common(40))}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
