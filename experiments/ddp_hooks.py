"""Communication hooks of DDP on a language model: a GPT of 3 M parameters with AdamW on enwik8, 4 ranks.

AdamW is not linear, so averaging models is not DDP for it. `rumor.ddp_hook` keeps DDP's steps and makes its messages smaller. Expect its
held-out loss to be that of plain DDP. All ranks may share one GPU: they talk through gloo.

    torchrun --standalone --nproc-per-node 4 experiments/ddp_hooks.py --data FOLDER                 # FOLDER/enwik8
    torchrun --standalone --nproc-per-node 4 experiments/ddp_hooks.py --data FOLDER --steps 20 --seeds 1 --hooks "4 bits"

Every finished run is a row of --out and is not run again, so you can stop the command at any time and start it again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import rumor
from logistic.tables import Row, as_text
from networks.command import above_zero, at_least_one
from networks.compare import with_interval
from networks.engines import device_name
from text.gpt import EVALUATED, GPT, check_text, held_out_loss, last_start, load_text, loss_of, lr_at, read, sequences, write

RESULTS = Path(__file__).parent / "results" / "ddp_hooks.csv"
COLUMNS = ("hook", "seed", "ranks", "steps", "batch", "lr", "loss", "seconds", "device")
KEY = ("hook", "seed", "ranks", "steps", "batch", "lr")
STEPS, BATCH, LR = 1_500, 32, 1e-3
POWERSGD_RANK, POWERSGD_START = 2, 10


def float32(ddp: DistributedDataParallel, opt: torch.optim.Optimizer) -> None:
    """Leaves DDP as it is."""


def coded(bits: int, follows_moments: bool = False) -> Callable[[DistributedDataParallel, torch.optim.Optimizer], object]:
    def register(ddp: DistributedDataParallel, opt: torch.optim.Optimizer) -> None:
        ddp.register_comm_hook(rumor.ddp_hook_state(bits=bits, optimizer=opt if follows_moments else None), rumor.ddp_hook)

    return register


def bf16(ddp: DistributedDataParallel, opt: torch.optim.Optimizer) -> None:
    # DDP recognizes the hook by its name and rejects it without NCCL, but it works with gloo. So wrap it.
    ddp.register_comm_hook(None, lambda group, bucket: bf16_compress_hook(group, bucket))


def powersgd(ddp: DistributedDataParallel, opt: torch.optim.Optimizer) -> None:
    ddp.register_comm_hook(PowerSGDState(None, POWERSGD_RANK, start_powerSGD_iter=POWERSGD_START), powerSGD_hook)


HOOKS: dict[str, Callable[[DistributedDataParallel, torch.optim.Optimizer], object]] = {
    "none": float32,
    "8 bits": coded(8),
    "4 bits": coded(4),
    "4 bits, optimizer=": coded(4, follows_moments=True),
    "bf16": bf16,
    f"PowerSGD, rank {POWERSGD_RANK}": powersgd,
}


def train(hook: str, seed: int, text: Tensor, options: argparse.Namespace) -> tuple[float, float]:
    """Trains one run. Returns the held-out loss and the seconds."""
    torch.manual_seed(seed)
    model = GPT().to(text.device)
    one_bucket = {"bucket_cap_mb": 100_000} if hook.startswith("PowerSGD") else {}  # with more it deadlocks on gloo
    ddp = DistributedDataParallel(model, **one_bucket)
    opt = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.1, betas=(0.9, 0.95))
    HOOKS[hook](ddp, opt)
    draw = torch.Generator().manual_seed(1_000 * seed + dist.get_rank())
    last, began = last_start(text, model.length), time.perf_counter()
    for step in tqdm(range(options.steps), desc=f"{hook}, seed {seed}", leave=False, disable=None if dist.get_rank() == 0 else True):
        for group in opt.param_groups:
            group["lr"] = lr_at(step, options.steps, options.lr)
        opt.zero_grad()
        starts = torch.randint(last, (options.batch,), generator=draw)
        loss_of(ddp, sequences(text, starts.to(text.device), model.length)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
    return held_out_loss(model, text, options.evaluated), time.perf_counter() - began


def table(rows: list[dict[str, str]]) -> str:
    """The mean held-out loss with each hook, and its difference to DDP without a hook, seed by seed, with the 95 % interval of its mean."""
    plain = {row["seed"]: float(row["loss"]) for row in rows if row["hook"] == "none"}
    shown: list[Row] = []
    for hook in dict.fromkeys(row["hook"] for row in rows):
        losses = {row["seed"]: float(row["loss"]) for row in rows if row["hook"] == hook}
        away = [losses[seed] - plain[seed] for seed in losses if seed in plain and hook != "none"]
        cells: Row = {"hook of DDP": hook, "seeds": str(len(losses)), "held-out loss": f"{np.mean(list(losses.values())):.4f}"}
        shown.append({**cells, "minus DDP's": with_interval(away, 4) if away else "-"})
    return as_text(shown)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with enwik8")
    parser.add_argument("--hooks", nargs="+", choices=list(HOOKS), default=list(HOOKS), help="hooks to compare")
    parser.add_argument("--steps", type=at_least_one, default=STEPS, help="steps of a run")
    parser.add_argument("--seeds", type=at_least_one, default=3, help="number of seeds")
    parser.add_argument("--batch", type=at_least_one, default=BATCH, help="sequences per rank and step")
    parser.add_argument("--lr", type=above_zero, default=LR, help="highest learning rate")
    parser.add_argument("--evaluated", type=at_least_one, default=EVALUATED, help="held-out sequences to evaluate on")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="device of all ranks")
    parser.add_argument("--out", type=Path, default=RESULTS, help="results file")
    options = parser.parse_args()
    check_text(parser, options.data)
    return options


def main() -> None:
    options = parse()
    dist.init_process_group("gloo")
    try:
        text = load_text(options.data, options.device)
        for seed in range(options.seeds):
            for hook in options.hooks:
                key = dict(zip(KEY, map(str, (hook, seed, dist.get_world_size(), options.steps, options.batch, options.lr)), strict=True))
                rows = read(options.out)
                dist.barrier()  # all ranks have read the file before the first one writes it
                if any(all(row[name] == value for name, value in key.items()) for row in rows):
                    continue
                loss, seconds = train(hook, seed, text, options)
                if dist.get_rank() == 0:
                    found = {**key, "loss": f"{loss:.6f}", "seconds": f"{seconds:.1f}", "device": device_name(text.device)}
                    write(options.out, [*rows, found], COLUMNS)
                dist.barrier()
        if dist.get_rank() == 0:
            print(table(read(options.out)))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
