"""The program that accuracy.py starts on every host: it trains Fashion-MNIST with one method after another, or times their steps."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import fashion
from contestants import Contestant, WithRumor, ours, take_turns
from measure import machine, save

Batches = Iterator[tuple[Tensor, Tensor]]
BUCKETS_MB = (0.25, 1, 4)  # values of DDP's bucket_cap_mb for models of 1.2 and 3.8 MB; the fastest one counts
TIMED = (
    "computing alone",
    *(f"DDP, bucket_cap_mb={size:g}" for size in BUCKETS_MB),
    *("Local SGD", "Gossip SGD", "Gossip-PGA", "Gossip-PGA, delay=1", "Gossip-PGA, 4 bits", "DDP, bf16 hook", "DDP, 4 bits"),
)


def contestants(n: int, steps: int, bucket: float = 1, wanted: Sequence[str] | None = None) -> dict[str, Callable[..., Contestant]]:
    """Functions that build the wanted contestants, or all of them. "DDP" has the given bucket size."""
    found = ours(n, fashion.H, round(fashion.AGA_WARM_UP * steps), {bucket, *BUCKETS_MB})
    found["DDP"] = found[f"DDP, bucket_cap_mb={bucket:g}"]
    if wanted is None or not set(wanted) <= set(found):
        from peers import peers  # these imports are slow if many hosts do them

        found |= peers(n, fashion.H)
    return found if wanted is None else {name: found[name] for name in wanted}


def train(contestant: Contestant, batches: Batches, steps: int) -> tuple[list[Tensor], Tensor]:
    """Returns this host's model at every mark, and the seconds until then.

    The models are evaluated after the training. So the clock never stops, and no message travels during an evaluation.
    """
    marks = set(fashion.marks(steps))
    models, seconds = [], []
    dist.barrier()
    began = time.perf_counter()
    for k in range(steps):
        contestant.set_lr(fashion.lr_at(k, steps))
        contestant.step(*next(batches))
        if k + 1 in marks:
            seconds.append(time.perf_counter() - began)
            models.append(parameters_to_vector(contestant.model.parameters()).detach().clone())
    return models, torch.tensor(seconds, dtype=torch.float64)


@torch.no_grad()
def accuracies(models: list[Tensor], network: nn.Module, test: tuple[Tensor, Tensor], images: int) -> list[float]:
    """The accuracies of the mean models. `test` is this host's share of the `images`."""
    correct = []
    for x in models:
        dist.all_reduce(x)
        vector_to_parameters(x / dist.get_world_size(), network.parameters())
        correct.append((network(test[0]).argmax(1) == test[1]).sum())
    total = torch.stack(correct)
    dist.all_reduce(total)
    return [round(int(count) / images, 5) for count in total]


def run(name: str, make: Callable[..., Contestant], data: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], job: dict[str, Any]) -> None:
    """Trains one method with one seed and writes its file."""
    n, rank, seed, steps = dist.get_world_size(), dist.get_rank(), job["seed"], job["steps"]
    contestant = make(lambda: fashion.network(seed, job["widths"]), lr=fashion.LR)
    models, seconds = train(contestant, fashion.batches(data, fashion.BATCH // n, 1_000 * seed + rank), steps)
    rounds = contestant.averager.metrics.rounds if isinstance(contestant, WithRumor) else {}
    contestant.close()
    dist.all_reduce(seconds, dist.ReduceOp.MAX)  # the slowest host counts
    accuracy = accuracies(models, fashion.network(seed, job["widths"]), test, job["test images"])
    if rank == 0:
        found = {"method": name, **{key: job[key] for key in ("hosts", "ratio", "rate", "seed")}, "rounds": dict(rounds)}
        found |= {"steps": fashion.marks(steps), "seconds": [round(s, 4) for s in seconds.tolist()], "accuracy": accuracy}
        save(Path(job["files"][name]), found)


def train_all(job: dict[str, Any]) -> None:
    n, rank, seed = dist.get_world_size(), dist.get_rank(), job["seed"]
    folder = Path(job["data"])
    data, test = fashion.shard(folder, rank, n, seed), fashion.load(folder, "t10k")
    job["test images"] = len(test[1])
    test = (test[0][rank::n].clone(), test[1][rank::n].clone())
    made = contestants(n, job["steps"], job["bucket"], list(job["files"]))
    warm = Contestant(lambda: fashion.network(seed, job["widths"]))
    for x, y in (batch for batch, _ in zip(fashion.batches(data, fashion.BATCH // n, 0), range(20), strict=False)):
        warm.step(x, y)  # torch's first calls are slow, and would count against the first method
    for name, make in made.items():
        run(name, make, data, test, job)


def time_all(job: dict[str, Any]) -> None:
    """Times a step of each contestant, and an all-reduce."""
    n, rank = dist.get_world_size(), dist.get_rank()
    batches = fashion.batches(fashion.shard(Path(job["data"]), rank, n, 0), fashion.BATCH // n, rank)
    made = contestants(n, fashion.STEPS, wanted=job["methods"])
    steps: dict[str, Callable[[], object]] = {}
    for name, make in made.items():
        contestant = make(lambda: fashion.network(0, job["widths"]), lr=0.01)
        steps[name] = lambda contestant=contestant: contestant.step(*next(batches))  # type: ignore[misc]
    gradient = torch.randn(fashion.parameters_of(job["widths"]))
    steps["all-reduce alone"] = lambda: dist.all_reduce(gradient)
    spread = take_turns(steps, job["calls"], job["repeats"], fashion.H)
    if rank == 0:
        save(Path(job["out"]), {"machine": machine(), "bed": os.environ.get("RUMOR_BED", ""), "seconds": spread})


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; accuracy.py handles it and stops this one
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=Path, help="a JSON file that accuracy.py writes")
    job = json.loads(parser.parse_args().job.read_text())
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    (train_all if "files" in job else time_all)(job)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
