"""One node of benchmarks/soak.py with torchft's LocalSGD: the model, data and optimizer of examples/elastic.py.

    torchft_lighthouse --min_replicas 5 --bind '[::]:29510'                  # on one host
    python benchmarks/soak_torchft.py --lighthouse http://HOST:29510         # on each node

torchft's own Manager finds the members, recovers the state of newcomers from a member, and averages over its own gloo group.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from elastic import digits, note

from peers import imported

HOST = "127.0.0.1"
TIMEOUT = timedelta(seconds=30)


def manager_of(model: nn.Module, opt: torch.optim.Optimizer, lighthouse: str, min_nodes: int) -> Any:
    """Join the job. Newcomers take over model and optimizer."""

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        opt.load_state_dict(state["optimizer"])

    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    manager = imported("torchft.manager").Manager(
        pg=imported("torchft.process_group").ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": opt.state_dict()},
        min_replica_size=min_nodes,
        use_async_quorum=False,  # a newcomer has the others' model before it takes part in an average
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=HOST,
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"node{os.getpid()}",
        hostname=HOST,
    )
    manager.store = store  # it must live as long
    return manager


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lighthouse", required=True, metavar="URL", help="address of torchft_lighthouse")
    parser.add_argument("--min-nodes", type=int, default=1, help="nodes that must be there for training to go on")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--H", type=int, default=6, help="steps between averages")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to sleep in each step, in the place of a larger model")
    parser.add_argument("--notes", type=Path, help="folder to write the steps and the memory of this process to")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("torchft").setLevel(logging.ERROR)

    x, y, test_x, test_y = digits()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    manager = manager_of(model, opt, options.lighthouse, options.min_nodes)
    with imported("torchft.local_sgd").LocalSGD(manager, model, opt, sync_every=options.H) as averager:
        while (average := manager.current_step()) * options.H < options.steps:
            mine = torch.randint(len(x), (32,))
            loss = nn.functional.cross_entropy(model(x[mine]), y[mine])
            opt.zero_grad()
            loss.backward()
            opt.step()  # and averages, at every H-th call
            average = manager.current_step()
            if options.notes is not None and average > 0:  # before, this node may not be a member yet
                members = manager.num_participants()
                note(options.notes / f"{os.getpid()}.txt", average * options.H + averager._local_step, members)
            time.sleep(options.pause)
    accuracy = (model(test_x).argmax(dim=1) == test_y).float().mean().item()
    print(f"accuracy of the mean model: {accuracy:.1%}", flush=True)
    time.sleep(1)  # for the others, which may still read from this node
    os._exit(0)  # torchft's threads can abort an interpreter that ends


if __name__ == "__main__":
    main()
