"""Checks a plan: times whole training steps of examples/model_to_plan.py on the network of the plan.

It compares computing alone, DDP, and Gossip-PGA on the one-peer exponential graph: in float32 without and with overlap, and with 4 bits.

    torchrun ... benchmarks/planned_step.py --H 4 --out FILE.json          # on every node, started as `rumor probe` was
"""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path

import torch.distributed as dist

import rumor
from contestants import take_turns
from measure import machine, save
from on_host import Step, build, with_averager, with_ddp


def contestants(n: int, H: int) -> dict[str, Step]:
    """Builds a training step for each contestant, each with its own model."""
    peers = rumor.one_peer_exponential(n)
    averaged = {f"Gossip-PGA, delay={delay}": with_averager(build, rumor.gossip_pga(peers, H, delay=delay)) for delay in (0, 1)}
    coded = with_averager(build, rumor.gossip_pga(peers, H, bits=4))
    return {"computing alone": build()[1], "DDP": with_ddp(build), **averaged, "Gossip-PGA, 4 bits": coded}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--H", type=int, default=4, help="period of Gossip-PGA")
    parser.add_argument("--repeats", type=int, default=10, help="number of turns of 3 periods each")
    parser.add_argument("--out", type=Path, default=Path("planned-step.json"), help="file for the results")
    options = parser.parse_args()
    if options.H < 1 or options.repeats < 1:
        parser.error(f"--H and --repeats must be at least 1, got {options.H} and {options.repeats}")
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    found = take_turns(contestants(dist.get_world_size(), options.H), 3 * options.H, options.repeats, options.H)
    if dist.get_rank() == 0:
        for name, spread in found.items():
            print(f"{name:24} {1e3 * spread['median']:6.0f} ms   ({1e3 * spread['fastest']:.0f} to {1e3 * spread['slowest']:.0f})")
        save(options.out, {"machine": machine(), "n": dist.get_world_size(), "H": options.H, "seconds": found})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
