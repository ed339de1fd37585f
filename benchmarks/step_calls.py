"""How many functions of Rumor one averager.step() calls, and how often the next call is in another file.

A reader who follows a step makes the same jumps. Two real processes, a model of two layers, Gossip-PGA on a ring.

    python benchmarks/step_calls.py            prints both numbers for a gossip step and for a global one; --list: every call
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import rumor

H = 4
FOLDER = str(Path(rumor.__file__).parent)


class Trace:
    """Records calls of functions in src/rumor. Resuming a generator counts as a call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def __enter__(self) -> Trace:
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(FOLDER):
            self.calls.append((path[len(FOLDER) + 1 :], frame.f_code.co_name))

    def changes_of_file(self) -> int:
        return sum(one[0] != other[0] for one, other in zip(self.calls, self.calls[1:], strict=False))


def rank_main(rank: int, rendezvous: str, show: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    averager = rumor.Averager(model, rumor.gossip_pga(rumor.ring(2), H))
    for step in range(3 * H):
        with Trace() as trace:
            averager.step(1.0)
        kind = "global" if (step + 1) % H == 0 else "gossip"
        if rank == 0 and step >= 3 * H - 2:
            print(f"{kind} step: {len(trace.calls)} calls, {trace.changes_of_file()} changes of file", flush=True)
            for path, name in trace.calls if show else ():
                print(f"    {path:<45} {name}")
    averager.finish()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print every call")
    show: bool = parser.parse_args().list
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (f"{folder}/rendezvous", show), nprocs=2)


if __name__ == "__main__":
    main()
