"""A GPT over characters, its text, its learning rates and its results: what ddp_hooks.py and adamw.py share."""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from rumor.checkpoint.files import replacing

WARM_UP = 100  # steps
HELD_OUT = 5_000_000  # the last characters of the text
EVALUATED, AT_ONCE = 2_048, 128  # sequences of them, and how many at a time


class GPT(nn.Module):
    """A transformer over characters, as torch builds it. 4 layers of 256 have 3 M parameters.

    Args:
        length: the number of characters of a sequence.
    """

    def __init__(self, length: int = 128, width: int = 256, layers: int = 4, heads: int = 4):
        super().__init__()
        self.length, self.width = length, width
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 256, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers.layers:
            hidden = advanced(layer, hidden)
        return self.head(self.layers.norm(hidden))  # type: ignore[no-any-return]


def advanced(layer: nn.TransformerEncoderLayer, hidden: Tensor) -> Tensor:
    """Apply one layer to hidden [B, length, width], where each character sees those before it.

    It computes what the layer itself does. But torch's attention moves the length to the front and back again: copies, under vmap.
    """
    attention = layer.self_attn
    rows = functional.linear(layer.norm1(hidden), attention.in_proj_weight, attention.in_proj_bias)
    q, k, v = rows.unflatten(-1, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)  # [B, heads, length, width / heads] each
    seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    hidden = hidden + attention.out_proj(seen.transpose(1, 2).flatten(2))
    return hidden + layer.linear2(functional.gelu(layer.linear1(layer.norm2(hidden))))  # type: ignore[no-any-return]


def sequences(text: Tensor, starts: Tensor, length: int) -> Tensor:
    """Return the characters [..., length + 1] from each of `starts` [...] on: what a model reads, and what it has to guess."""
    return text[starts[..., None] + torch.arange(length + 1, device=text.device)].long()


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    return functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def lr_at(step: int, steps: int, peak: float) -> float:
    """Linear warm-up, then half a cosine.

    >>> [round(lr_at(k, 1100, 1.0), 2) for k in (0, 49, 99, 600, 1100)]
    [0.01, 0.5, 1.0, 0.5, 0.0]
    """
    if step < WARM_UP:
        return peak * (step + 1) / WARM_UP
    return peak * 0.5 * (1 + math.cos(math.pi * (step - WARM_UP) / max(1, steps - WARM_UP)))


@torch.no_grad()
def held_out_loss(model: GPT, text: Tensor, count: int) -> float:
    """The loss on `count` sequences that no run has trained on, the same for every run."""
    starts = len(text) - HELD_OUT + torch.randint(HELD_OUT - model.length - 1, (count,), generator=torch.Generator().manual_seed(0))
    parts = [sequences(text, some.to(text.device), model.length) for some in torch.split(starts, AT_ONCE)]
    return sum(float(loss_of(model, rows)) * len(rows) for rows in parts) / count


def check_text(parser: argparse.ArgumentParser, folder: Path) -> None:
    """Report in one line that the text is missing or too short."""
    text = folder / "enwik8"
    if not text.is_file() or text.stat().st_size < 2 * HELD_OUT:
        parser.error(f"--data {folder} has no file enwik8 of at least {2 * HELD_OUT:,} bytes")


def load_text(folder: Path, device: str) -> Tensor:
    """Return the characters of enwik8, as bytes."""
    return torch.from_numpy(np.fromfile(folder / "enwik8", np.uint8)).to(device)


def last_start(text: Tensor, length: int) -> int:
    """Return a number above the first character of every sequence to train on."""
    return len(text) - HELD_OUT - length - 1


def read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: list[dict[str, str]], columns: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as aside, aside.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
