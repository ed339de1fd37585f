"""Communication hooks of DDP on a language model: a GPT of 3 M parameters with AdamW on enwik8, 4 ranks.

AdamW is not linear, so averaging models is not DDP for it. `rumor.ddp_hook` keeps DDP's steps and makes its messages smaller. Expect its
held-out loss to be that of plain DDP. All ranks may share one GPU: they talk through gloo.

    torchrun --standalone --nproc-per-node 4 experiments/ddp_hooks.py --data FOLDER                 # FOLDER/enwik8
    torchrun --standalone --nproc-per-node 4 experiments/ddp_hooks.py --data FOLDER --steps 20 --seeds 1 --hooks "4 bits"

Every finished run is a row of --out and is not run again, so you can stop the command at any time and start it again.
"""

from __future__ import annotations

import argparse
import csv
import math
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
from networks.engines import device_name
from rumor.checkpoint.files import replacing

RESULTS = Path(__file__).parent / "results" / "ddp_hooks.csv"
COLUMNS = ("hook", "seed", "ranks", "steps", "batch", "lr", "loss", "seconds", "device")
KEY = ("hook", "seed", "ranks", "steps", "batch", "lr")
STEPS, WARM_UP, BATCH, LENGTH, LR = 1_500, 100, 32, 128, 1e-3
HELD_OUT = 5_000_000  # the last characters of the text
EVALUATED, AT_ONCE = 2_048, 128  # sequences of them, and how many at a time
POWERSGD_RANK, POWERSGD_START = 2, 10


class GPT(nn.Module):
    """A transformer over characters: 4 layers of 256, as torch builds them."""

    def __init__(self, width: int = 256, layers: int = 4, heads: int = 4):
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 256, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(self.layers(hidden, mask=self.mask, is_causal=True))  # type: ignore[no-any-return]


def loss_of(model: nn.Module, text: Tensor, starts: Tensor) -> Tensor:
    rows = text[starts[:, None] + torch.arange(LENGTH + 1, device=text.device)].long()
    return nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def float32(ddp: DistributedDataParallel) -> None:
    """Leaves DDP as it is."""


def coded(bits: int) -> Callable[[DistributedDataParallel], object]:
    def register(ddp: DistributedDataParallel) -> None:
        ddp.register_comm_hook(rumor.ddp_hook_state(bits=bits), rumor.ddp_hook)

    return register


def bf16(ddp: DistributedDataParallel) -> None:
    # DDP recognizes the hook by its name and rejects it without NCCL, but it works with gloo. So wrap it.
    ddp.register_comm_hook(None, lambda group, bucket: bf16_compress_hook(group, bucket))


def powersgd(ddp: DistributedDataParallel) -> None:
    ddp.register_comm_hook(PowerSGDState(None, POWERSGD_RANK, start_powerSGD_iter=POWERSGD_START), powerSGD_hook)


HOOKS: dict[str, Callable[[DistributedDataParallel], object]] = {
    "none": float32,
    "8 bits": coded(8),
    "4 bits": coded(4),
    "bf16": bf16,
    f"PowerSGD, rank {POWERSGD_RANK}": powersgd,
}


def lr_at(step: int, steps: int, peak: float) -> float:
    """Linear warm-up, then half a cosine.

    >>> [round(lr_at(k, 1100, 1.0), 2) for k in (0, 49, 99, 600, 1100)]
    [0.01, 0.5, 1.0, 0.5, 0.0]
    """
    if step < WARM_UP:
        return peak * (step + 1) / WARM_UP
    return peak * 0.5 * (1 + math.cos(math.pi * (step - WARM_UP) / max(1, steps - WARM_UP)))


def train(hook: str, seed: int, text: Tensor, options: argparse.Namespace) -> tuple[float, float]:
    """Trains one run. Returns the held-out loss and the seconds."""
    torch.manual_seed(seed)
    model = GPT().to(text.device)
    one_bucket = {"bucket_cap_mb": 100_000} if hook.startswith("PowerSGD") else {}  # with more it deadlocks on gloo
    ddp = DistributedDataParallel(model, **one_bucket)
    HOOKS[hook](ddp)
    opt = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.1, betas=(0.9, 0.95))
    draw = torch.Generator().manual_seed(1_000 * seed + dist.get_rank())
    last, began = len(text) - HELD_OUT - LENGTH - 1, time.perf_counter()
    for step in tqdm(range(options.steps), desc=f"{hook}, seed {seed}", leave=False, disable=None if dist.get_rank() == 0 else True):
        for group in opt.param_groups:
            group["lr"] = lr_at(step, options.steps, options.lr)
        opt.zero_grad()
        loss_of(ddp, text, torch.randint(last, (options.batch,), generator=draw).to(text.device)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
    return held_out_loss(model, text, options.evaluated), time.perf_counter() - began


@torch.no_grad()
def held_out_loss(model: nn.Module, text: Tensor, sequences: int) -> float:
    """The loss on characters that no run has trained on, the same for every run."""
    starts = len(text) - HELD_OUT + torch.randint(HELD_OUT - LENGTH - 1, (sequences,), generator=torch.Generator().manual_seed(0))
    return sum(float(loss_of(model, text, some.to(text.device))) * len(some) for some in torch.split(starts, AT_ONCE)) / sequences


def read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: list[dict[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as aside, aside.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


def table(rows: list[dict[str, str]]) -> str:
    """The held-out loss with each hook, its difference to DDP without a hook, and the spread over seeds."""
    plain = {row["seed"]: float(row["loss"]) for row in rows if row["hook"] == "none"}
    shown: list[Row] = []
    for hook in dict.fromkeys(row["hook"] for row in rows):
        losses = {row["seed"]: float(row["loss"]) for row in rows if row["hook"] == hook}
        away = [losses[seed] - plain[seed] for seed in losses if seed in plain and hook != "none"]
        values = list(losses.values())
        shown.append(
            {
                "hook of DDP": hook,
                "held-out loss": f"{np.mean(values):.4f} ({len(values)} seeds: {min(values):.4f} to {max(values):.4f})",
                "- DDP's": f"{np.mean(away):+.4f} ({min(away):+.4f} to {max(away):+.4f})" if away else "-",
            }
        )
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
    text = options.data / "enwik8"
    if not text.is_file() or text.stat().st_size < 2 * HELD_OUT:
        parser.error(f"--data {options.data} has no file enwik8 of at least {2 * HELD_OUT:,} bytes")
    return options


def main() -> None:
    options = parse()
    dist.init_process_group("gloo")
    try:
        raw = np.fromfile(options.data / "enwik8", np.uint8)
        text = torch.from_numpy(raw).to(options.device)
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
                    write(options.out, [*rows, found])
                dist.barrier()
        if dist.get_rank() == 0:
            print(table(read(options.out)))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
