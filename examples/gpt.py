"""A GPT over bytes, with all that a real training script has: mixed precision, accumulation, clipping, a schedule, checkpoints, compile.

    torchrun --standalone --nproc-per-node 4 examples/gpt.py                          # DDP
    torchrun --standalone --nproc-per-node 4 examples/gpt.py --method ddp-4bit        # DDP with an eighth of its bytes
    torchrun --standalone --nproc-per-node 4 examples/gpt.py --method "gossip_pga(one_peer_exponential, H=6, bits=4)"

The third line is Rumor: each node sends 4 bits a parameter to one other node, and all nodes average every 6 steps. With a coordinator and
without torchrun, nodes may die and join while the others go on:

    rumor coordinator
    python examples/gpt.py --coordinator HOST:29510 --method "gossip_pga(one_peer_exponential, H=6, bits=4)"      # on each node

The text is FILE in --data FILE. Without it, the model learns to write Python: it reads the standard library's source, which is on every
machine. With --folder FOLDER, a run that is started again goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

import rumor

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


# ---- the model ----------------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention to the bytes before, then two layers for each byte. Both add to what they read."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width)
        self.collect = nn.Linear(width, width)
        self.think = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:  # [batch, length, width]
        parts = self.attend(self.norm_1(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)  # [batch, heads, length, width / heads]
        seen = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.collect(seen.transpose(1, 2).flatten(2))
        return x + self.think(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, length: int, width: int, layers: int, heads: int):
        super().__init__()
        self.length = length
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:  # what is added 2 * layers times starts smaller, so that the sum does not grow with the depth
                is_added = name.endswith(("collect.weight", "think.2.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers) if is_added else 0.02)

    def forward(self, x: Tensor) -> Tensor:  # [batch, length] -> [batch, length, 256]
        hidden = self.bytes(x) + self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(hidden)))


def loss_of(net: nn.Module, rows: Tensor) -> Tensor:
    """Return the cross entropy of each byte, given those before it, in nats."""
    return cross_entropy(net(rows[:, :-1]).flatten(0, 1).float(), rows[:, 1:].flatten())


@torch.no_grad()
def written_by(model: GPT, count: int, device: torch.device) -> str:
    """Let the model write `count` bytes."""
    row = torch.tensor([list(b"\n")], device=device)
    for _ in range(count):
        chances = model(row[:, -model.length :])[0, -1].softmax(dim=-1)
        row = torch.cat([row, torch.multinomial(chances, 1)[None]], dim=1)
    return bytes(row[0].tolist()).decode(errors="replace")


# ---- the data -----------------------------------------------------------------------------------------------------------------------


def load_text(path: Path | None) -> tuple[Tensor, Tensor]:
    """Return the text to train on and the last tenth, which is held out, as bytes."""
    paths = sorted(Path(os.__file__).parent.glob("*.py")) if path is None else [path]
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in paths)), dtype=torch.uint8)
    return text[: -len(text) // 10], text[-len(text) // 10 :]


def rows_of(text: Tensor, count: int, length: int, seed: int) -> Tensor:
    """Return `count` random pieces of the text, each one byte longer than the model's input."""
    starts = torch.randint(len(text) - length, (count, 1), generator=torch.Generator().manual_seed(seed))
    return text[starts + torch.arange(length + 1)].long()


# ---- the nodes ----------------------------------------------------------------------------------------------------------------------


def connect(
    model: GPT, opt: torch.optim.Optimizer, options: argparse.Namespace
) -> tuple[nn.Module, rumor.Averager, dict[str, rumor.ddp.DDPHookState]]:
    """Return the module to train, the Averager, and what else a checkpoint needs.

    DDP averages gradients. Beside it stands an Averager that exchanges no models: it counts steps and saves checkpoints. So there is one
    loop for all methods.
    """
    net = torch.compile(model) if options.compile else model
    if not options.method.startswith("ddp"):
        elastic = rumor.elastic(options.coordinator, name=options.name, min_nodes=options.min_nodes) if options.coordinator else None
        return net, rumor.Averager(model, rumor.method(options.method), group=elastic, optimizer=opt), {}
    ddp = DistributedDataParallel(net)
    averager = rumor.Averager(model, rumor.gossip_sgd(rumor.isolated), optimizer=opt)
    if options.method == "ddp":
        return ddp, averager, {}
    hook = rumor.ddp_hook_state(bits=4, model=ddp, optimizer=opt)
    ddp.register_comm_hook(hook, rumor.ddp_hook)
    return ddp, averager, {"hook": hook}


def lr_at(step: int, options: argparse.Namespace) -> float:
    """Warm up in a line, then fall along half a cosine to a tenth."""
    if step < options.warmup:
        return options.lr * (step + 1) / options.warmup
    share = (step - options.warmup) / max(1, options.steps - options.warmup)
    return options.lr * (0.55 + 0.45 * math.cos(math.pi * share))


def train(options: argparse.Namespace, device: torch.device) -> None:
    text, held_out = load_text(options.data)
    checked = rows_of(held_out, options.evaluated, options.length, seed=0).to(device)
    torch.manual_seed(0)
    model = GPT(options.length, options.width, options.layers, options.heads).to(device)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    opt = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler(device.type, enabled=options.precision == "fp16")
    autocast = torch.autocast(device.type, PRECISIONS[options.precision], enabled=options.precision != "fp32")
    net, averager, saved = connect(model, opt, options)
    saved |= {"optimizer": opt, "scaler": scaler}
    if options.folder is not None:
        rumor.load(options.folder, averager, **saved)
    print(f"node {averager.rank} of {len(averager.members)} begins at step {averager.steps}", flush=True)

    first, began = 0, 0.0  # where and when the clock starts: after this node's first step, which compiles and warms up
    while averager.steps < options.steps:  # the job's steps: a newcomer begins at the others' step
        step = averager.steps
        if step % options.every == 0:  # at the top of the loop, and by the step alone: newcomers begin here, too
            with averager.averaged(), torch.no_grad(), autocast:  # inside, the model is the mean of all nodes
                if averager.rank == 0:
                    seconds, timed = time.monotonic() - began, step - first
                    pace = f", {1e3 * seconds / timed:.0f} ms a step after the first" if first and timed else ""
                    print(f"step {step}: held-out loss {loss_of(model, checked):.4f}{pace}", flush=True)
            if options.folder is not None:
                rumor.save(options.folder, averager, **saved)

        for group in opt.param_groups:
            group["lr"] = lr_at(step, options)
        # the batch depends on the step and the rank alone, so a resumed run and a newcomer need nothing else to go on
        rows = rows_of(text, options.accumulate * options.batch, options.length, seed=1_000 * step + averager.rank)
        total = torch.zeros((), device=device)
        for i, part in enumerate(rows.to(device).chunk(options.accumulate)):
            is_last = i == options.accumulate - 1
            waits = isinstance(net, DistributedDataParallel) and not is_last  # DDP need not average yet
            with net.no_sync() if waits else nullcontext():
                with autocast:
                    loss = loss_of(net, part) / options.accumulate
                scaler.scale(loss).backward()
            total += loss.detach()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        scaler.step(opt)  # with fp16, it leaves out a step whose gradients overflow
        scaler.update()
        opt.zero_grad()
        averager.step(total)  # even then: the neighbours wait for this node
        if not first:
            first, began = averager.steps, time.monotonic()

    averager.finish()  # now all nodes have the mean model
    if averager.rank == 0:
        with torch.no_grad(), autocast:
            print(f"loss of the mean model: {loss_of(model, checked):.6f}", flush=True)
        if options.out is not None:
            torch.save(model.state_dict(), options.out)
        print(written_by(model, options.write, device), flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--method", default="ddp", help="ddp, ddp-4bit, or a method of Rumor as you write it in Python")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="address of `rumor coordinator`, for nodes that come and go")
    parser.add_argument("--name", help="name of this node in messages, with --coordinator")
    parser.add_argument("--min-nodes", type=int, default=1, help="nodes that must be there to train, with --coordinator")
    parser.add_argument("--data", type=Path, help="a file of text; the default is the source of Python's standard library")
    parser.add_argument("--folder", type=Path, help="folder of checkpoints, on storage that all nodes see")
    parser.add_argument("--out", type=Path, help="file for the mean model's state dict, at the end")
    parser.add_argument("--steps", type=int, default=2_000, help="optimizer steps")
    parser.add_argument("--every", type=int, default=100, help="steps between evaluations and checkpoints")
    parser.add_argument("--batch", type=int, default=16, help="pieces of text in a batch of a node")
    parser.add_argument("--accumulate", type=int, default=1, help="batches in an optimizer step")
    parser.add_argument("--length", type=int, default=128, help="bytes that the model reads")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, help="highest learning rate; the default is 0.001 for DDP, and 0.002 for methods of Rumor")
    parser.add_argument("--warmup", type=int, default=100, help="steps until the learning rate is at its highest")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of a gradient")
    parser.add_argument("--precision", choices=list(PRECISIONS), default="bf16" if torch.cuda.is_available() else "fp32")
    parser.add_argument("--compile", action="store_true", help="train the model under torch.compile")
    parser.add_argument("--evaluated", type=int, default=64, help="held-out pieces of text to evaluate on")
    parser.add_argument("--write", type=int, default=200, help="bytes that the model writes at the end")
    options = parser.parse_args()
    if options.coordinator and options.method.startswith("ddp"):
        parser.error("--coordinator is for methods of Rumor: DDP can't go on without a lost node")
    if not options.coordinator and "RANK" not in os.environ:
        parser.error("start it with torchrun, or with --coordinator HOST:PORT")
    if options.lr is None:  # a node's own gradient is noisier than DDP's mean, so Adam's steps are shorter (docs/choosing.md)
        options.lr = 0.001 if options.method.startswith("ddp") else 0.002
    return options


def main() -> None:
    options = parse()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not options.coordinator:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(options, device)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
