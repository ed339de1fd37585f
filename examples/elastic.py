"""A job whose nodes come and go: a node that dies does not stop the others, and one that starts takes over their model and goes on.

    rumor coordinator --bind 0.0.0.0:29510                       # on one host
    python examples/elastic.py --coordinator HOST:29510          # on each node, in any order, at any time

Kill a node, and the others go on. Start it again, and it is back at their next global average. No checkpoint is needed for that. With
--folder, the nodes also save checkpoints every 100 steps, for the case that all of them are lost.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
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
    """Append the time, the step, the number of members and the memory of this process, in bytes, to a file."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    with path.open("a") as file:
        file.write(f"{time.time():.3f} {step} {members} {pages * os.sysconf('SC_PAGE_SIZE')}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--coordinator", required=True, metavar="HOST:PORT", help="address of `rumor coordinator`")
    parser.add_argument("--name", help="name of this node in messages")
    parser.add_argument("--min-nodes", type=int, default=1, help="nodes that must be there for training to go on")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--bits", type=int, default=32, choices=(32, 16, 8, 4))
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to sleep in each step, in the place of a larger model")
    parser.add_argument("--folder", help="folder for checkpoints, on storage that all nodes see")
    parser.add_argument("--notes", type=Path, help="folder to write the steps and the memory of this process to")
    options = parser.parse_args()
    torch.set_num_threads(1)

    x, y, test_x, test_y = digits()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    group = rumor.elastic(options.coordinator, name=options.name, min_nodes=options.min_nodes)
    method = rumor.gossip_pga(rumor.one_peer_exponential, H=6, bits=options.bits)
    averager = rumor.Averager(model, method, group=group, optimizer=opt)
    if options.folder is not None:
        rumor.load(options.folder, averager, optimizer=opt)
    print(f"{options.name or 'a node'} is member {averager.rank} of {len(averager.members)}, from step {averager.steps}", flush=True)

    share = iter(averager.share_of(len(x)))  # this member's part of the images, as members change
    while averager.steps < options.steps:
        if options.folder is not None and averager.steps % 100 == 0:  # at the top of the loop, where newcomers begin, too
            rumor.save(options.folder, averager, optimizer=opt)
        mine = torch.tensor([next(share) for _ in range(32)])
        loss = nn.functional.cross_entropy(model(x[mine]), y[mine])
        opt.zero_grad()
        loss.backward()
        opt.step()
        averager.step(loss)
        if options.notes is not None:
            note(options.notes / f"{os.getpid()}.txt", averager.steps, len(averager.members))
        time.sleep(options.pause)
    averager.finish()
    accuracy = (model(test_x).argmax(dim=1) == test_y).float().mean().item()
    print(f"accuracy of the mean model: {accuracy:.1%}", flush=True)


if __name__ == "__main__":
    main()
