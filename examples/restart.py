"""A job under torchrun that restarts when a node is lost: it resumes from its last checkpoint, with the nodes that are there.

    torchrun --standalone --nproc-per-node 4 --max-restarts 3 examples/restart.py --folder checkpoints
    torchrun --nnodes 3:4 --nproc-per-node 1 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        examples/restart.py --folder SHARED          # on each of 4 hosts

If a process dies, the others raise an error within the time-out, and torchrun restarts all of them. The Averager then binds the topology to
the new number of nodes. At most one interval between checkpoints is lost. With gloo, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: without it,
the restarted processes of torch 2.13 look for the processes of the previous start, and fail. With examples/elastic.py the others go on
without a restart; use this one for what rumor.elastic can't do yet (NCCL, nodes of several GPUs).
"""

from __future__ import annotations

import argparse
import datetime
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn

import rumor


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the training images and labels, then the test images and labels."""
    data = load_digits()
    x, y = torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return x[order[:1400]], y[order[:1400]], x[order[1400:]], y[order[1400:]]


def note(path: Path, step: int, members: int) -> None:
    """Append the time, the step, the number of nodes and the memory of this process, in bytes, to a file."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    with path.open("a") as file:
        file.write(f"{time.time():.3f} {step} {members} {pages * os.sysconf('SC_PAGE_SIZE')}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", required=True, help="folder of the checkpoints, on storage that all nodes see")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for a silent node")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to sleep in each step, in the place of a larger model")
    parser.add_argument("--notes", type=Path, help="folder to write the steps and the memory of this process to")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=options.timeout))
    rank, n = dist.get_rank(), dist.get_world_size()

    x, y, test_x, test_y = digits()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    averager = rumor.Averager(model, rumor.gossip_pga(rumor.one_peer_exponential, H=6))  # any number of nodes
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    first = rumor.load(options.folder, averager, optimizer=opt) or 0
    if rank == 0:
        print(f"{n} nodes, from step {first}", flush=True)
    for step in range(first, options.steps):
        mine = torch.randint(len(x), (32,))
        loss = nn.functional.cross_entropy(model(x[mine]), y[mine])
        opt.zero_grad()
        loss.backward()
        opt.step()
        averager.step(loss)
        if options.notes is not None:
            note(options.notes / f"{os.getpid()}.txt", step + 1, n)
        time.sleep(options.pause)
        if (step + 1) % options.every == 0:
            rumor.save(options.folder, averager, step + 1, optimizer=opt)
    averager.finish()
    if rank == 0:
        accuracy = (model(test_x).argmax(dim=1) == test_y).float().mean().item()
        print(f"accuracy of the mean model: {accuracy:.1%}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
