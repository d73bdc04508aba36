"""Train with the vocabulary split over processes: each holds V / n rows of the output layer.

Every process has the body and asks the same questions; numbers per row are exchanged, logits never.
The loss is that of one process. Without torchrun the program starts its own processes.

    python examples/vocab_parallel.py --processes 2
    torchrun --nproc-per-node 2 examples/vocab_parallel.py
    python examples/vocab_parallel.py --quick            # five steps, seconds
"""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import lmhead
from lmhead.parallel import VocabParallel

VOCAB, WIDTH, ROWS = 4096, 64, 128


def train(rank: int, processes: int, store: str, steps: int) -> None:
    """Train on one rank; rank 0 prints."""
    if store:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=processes)
    else:  # torchrun says where the others are
        dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same body and the same data on every rank
    body = nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    head = lmhead.LMHead(WIDTH, VOCAB)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    head = parallelize_module(head, mesh, VocabParallel())  # V / n rows on each rank
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=1.0)
    for step in range(steps):
        tokens = torch.randint(VOCAB, (ROWS,))
        targets = (tokens * 7 + 1) % VOCAB  # something to learn
        loss = F.cross_entropy(head(body(tokens)), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and (step % max(1, steps // 5) == 0 or step == steps - 1):
            rows = head.weight.to_local().shape[0]
            print(f"step {step}: loss {loss.item():.6f}, rows on this rank {rows}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Start the processes, or take part in those of torchrun."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="five steps")
    given = parser.parse_args()
    steps = 5 if given.quick else given.steps
    if "RANK" in os.environ:
        train(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "", steps)
        return
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        # "fork" shares what is imported already; where it does not exist, use torchrun.
        arguments = (given.processes, store, steps)
        mp.start_processes(train, arguments, nprocs=given.processes, start_method="fork")


if __name__ == "__main__":
    main()
