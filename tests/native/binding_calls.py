"""Calls of the compiled core with damaged arguments, by seed: a program of its own.

The arguments are those of real calls (losses, queries, samplers, screened and hierarchical heads),
recorded at the core's own functions; then some are replaced: other sizes, dtypes and strides, no
memory, numbers out of range. A call must end in an answer or a Python exception. `make sanitize`
runs this in a Python with AddressSanitizer preloaded and a core that is compiled for it:

    python -m native.binding_calls CALLS SEED [FILE OF THE CORE]
"""

import faulthandler
import importlib.util
import random
import sys
import warnings
from collections import Counter
from typing import Any

if __name__ == "__main__" and len(sys.argv) > 3:  # before lmhead loads its own
    found = importlib.util.spec_from_file_location("lmhead._native", sys.argv[3])
    assert found is not None
    assert found.loader is not None
    sys.modules["lmhead._native"] = importlib.util.module_from_spec(found)
    found.loader.exec_module(sys.modules["lmhead._native"])

import numpy as np
import torch
from torch import Tensor

import lmhead
from lmhead import _native
from lmhead.nn import LlamaBody, LlamaConfig
from lmhead.nn.decode_step import attach_step
from lmhead.sampling import distribution
from lmhead.screen import screen_kernels
from lmhead.sweep import kernels

SECONDS = 60  # until a call that does not end is an error
INTEGERS = [-(2**62), -1, 0, 1, 2, 7, 1000, 2**31 - 1, 2**31, 2**62]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8]
DTYPES += [torch.int16, torch.int32, torch.int64, torch.bool]
UNSAFE_NAMES = ("use",)  # the instruction set, chosen by name


def record() -> dict[str, list[tuple[list[Any], dict[str, Any]]]]:
    """Return the arguments of real calls, by function."""
    calls: dict[str, list[tuple[list[Any], dict[str, Any]]]] = {}
    core: Any = kernels.core
    originals = {}

    def wrap(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            kept = calls.setdefault(name, [])
            if len(kept) < 12:
                kept.append(([copied(a) for a in args], {k: copied(v) for k, v in kwargs.items()}))
            return function(*args, **kwargs)

        return call

    for name, value in vars(core).items():
        if callable(value) and not name.startswith("_") and name not in UNSAFE_NAMES:
            originals[name] = value
            setattr(core, name, wrap(name, value))
    try:
        for seed, rows in enumerate((1, 3, 9, 40)):
            work(seed, rows)
    finally:
        for name, value in originals.items():
            setattr(core, name, value)
    return calls


def work(seed: int, rows: int) -> None:
    """Use whatever calls the core."""
    torch.manual_seed(seed)
    hidden, weight = torch.randn(rows, 24), torch.randn(300, 24)
    bias, ids = torch.randn(300), torch.randint(300, (rows,))
    asked: dict[str, Any] = {"log_prob": ids, "rank": ids, "entropy": True, "argmax": True}
    lmhead.query(hidden, weight, bias=bias, top_k=3, **asked)
    lmhead.query(hidden.bfloat16(), weight.bfloat16(), argmax=True)
    leaf, head = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    for options in ({}, {"softcap": 5.0, "label_smoothing": 0.1}, {"grad_filter": 0.1}):
        loss = lmhead.linear_cross_entropy(leaf, head, ids, **options)  # type: ignore[arg-type]
        torch.autograd.backward(loss)
    made = lmhead.LMHead(24, 300, bias=True)
    chains: list[dict[str, Any]] = [
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"top_k": 5},
        {"typical_p": 0.9},
    ]
    for bits in (8, "4+4"):
        screened = lmhead.ScreenedHead(made, bits=bits)
        screened.argmax(hidden)
        screened.topk(hidden, 4)
        for chain in chains:
            screened.sample(hidden, lmhead.Sampler(seed=list(range(rows)), **chain))
    for chain in chains:
        lmhead.Sampler(seed=list(range(rows)), **chain)(weight[:rows])
    lmhead.Sampler(seed=1, temperature=0.7)(weight[:rows])
    kernels.row_logits(hidden, weight)
    z, ones = weight[:rows].contiguous(), torch.ones(rows, dtype=torch.float64)
    largest = distribution.row_max(z)[0]
    distribution.moments(z, largest)
    distribution.mass_radius(z, ones, largest, largest, ones / 2)
    keys = distribution.make_keys([5] * rows, torch.arange(rows))
    distribution.gumbel_argmax(z, ones, keys)
    screen_kernels.best(torch.randn(rows, 300), torch.full((rows, 2), 9.0), 2)
    core, blocks = kernels.compiled(), torch.randint(0, 256, (3, 68), dtype=torch.uint8)
    core.stored_product(blocks, "Q8_0", torch.randn(5, 64), torch.empty(5, 3), 1)
    core.hash_bytes(blocks.view(-1), 1)
    prompt = torch.tensor([[3, 1, 4]])
    with torch.no_grad():
        body = LlamaBody(LlamaConfig(50, 64, 96, 2, 4, 2)).eval()
        attach_step(body)
        _, cache = body(prompt)
        body(prompt[:, :1], cache)
    tree = lmhead.HierarchicalHead(24, 300, tree="balanced")
    tree(hidden).argmax(-1)
    torch.autograd.backward(tree.log_prob(leaf, ids).sum())


def copied(value: Any) -> Any:
    """Return a copy of a tensor or array; other arguments as they are."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, list | tuple):
        return type(value)(map(copied, value))
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone() if kernels.readable(value) else value


def damaged(value: Any, draw: random.Random) -> Any:
    """Return something else in the place of an argument."""
    if isinstance(value, Tensor):
        return damaged_tensor(value, draw)
    if isinstance(value, bool) or value is None:
        return draw.choice([True, False, None, torch.zeros(3), 1])
    if isinstance(value, int):
        return draw.choice(INTEGERS)
    if isinstance(value, float):
        return draw.choice([0.0, -1.0, 1e300, float("nan"), float("inf"), -float("inf")])
    if isinstance(value, tuple | list) and value:
        items = list(value)
        place = draw.randrange(len(items))
        items[place] = damaged(items[place], draw)
        return type(value)(items) if draw.random() < 0.8 else type(value)(items[:-1])
    return None


def damaged_tensor(t: Tensor, draw: random.Random) -> Any:
    """Return a tensor of another size, type, stride or content."""
    kind = draw.randrange(12)
    if kind == 0:
        return None
    if kind == 1 and t.dim():
        return t.narrow(0, 0, max(0, len(t) - 1)).clone()
    if kind == 2 and t.dim():
        return torch.cat([t, t[:1]])
    if kind == 3 and t.dim():
        return t[..., :-1].contiguous()
    if kind == 4:
        return t.to(draw.choice(DTYPES))
    if kind == 5:
        return torch.stack([t, t], -1)[..., 0]
    if kind == 6:
        return t.new_empty(0)
    if kind == 7:
        return t[None].clone()
    if kind == 8:
        made = t.clone()
        made.untyped_storage().resize_(0)
        return made
    if kind == 9 and t.numel():
        extremes: list[Any] = [float("nan"), float("inf"), -float("inf"), 1e38, 0.0]
        if not t.is_floating_point():
            most = 1 if t.dtype == torch.bool else torch.iinfo(t.dtype).max
            least = 0 if t.dtype == torch.bool else torch.iinfo(t.dtype).min
            extremes = [least, min(300, most), most]
        made = t.clone().view(-1)
        made[draw.randrange(made.numel())] = draw.choice(extremes)
        return made.view(t.shape)
    if kind == 10 and t.numel():
        made = t.clone()
        made.untyped_storage().resize_(t.nbytes // 2)
        return made
    return t[:0].clone() if t.dim() else t.new_zeros(3)


def described(value: Any) -> str:
    """Return a short description of an argument."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(described, value))}]"
    if not isinstance(value, Tensor):
        return repr(value)
    return f"{value.dtype}{list(value.shape)}".removeprefix("torch.")


def main(calls: int, seed: int) -> None:
    """Call with damaged arguments; print how many ended in answers and exceptions."""
    faulthandler.enable()
    warnings.simplefilter("ignore")
    recorded = record()
    missing = {n for n in vars(_native) if callable(getattr(_native, n)) and n[0] != "_"}
    missing -= {*recorded, *UNSAFE_NAMES}
    draw, found = random.Random(seed), Counter[str]()
    names = sorted(recorded)
    for number in range(calls):
        name = draw.choice(names)
        args, kwargs = draw.choice(recorded[name])
        args, kwargs = [copied(a) for a in args], {k: copied(v) for k, v in kwargs.items()}
        places: list[Any] = [*range(len(args)), *kwargs]
        for place in draw.sample(places, min(len(places), draw.choice([1, 1, 2]))):
            if isinstance(place, int):
                args[place] = damaged(args[place], draw)
            else:
                kwargs[place] = damaged(kwargs[place], draw)
        print(number, name, *map(described, [*args, *kwargs.values()]), file=sys.stderr)
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        try:
            getattr(kernels.core, name)(*args, **kwargs)
            found["answers"] += 1
        except (TypeError, ValueError, MemoryError, IndexError, OverflowError, RuntimeError):
            found["refused"] += 1
        finally:
            faulthandler.cancel_dump_traceback_later()
    print(
        f"{len(names)} functions: {found['answers']} answers, {found['refused']} refused ; "
        f"not called: {', '.join(sorted(missing)) or 'none'}"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
