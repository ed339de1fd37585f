"""A model for `rumor probe` and `rumor plan` (docs/planning.md): an MLP of 1.86 M parameters for 28 x 28 images, batch 256.

torchrun --standalone --nproc-per-node 4 -m rumor probe --model examples/model_to_plan.py:build
"""

from collections.abc import Callable

import torch
from torch import nn


def build() -> tuple[nn.Module, Callable[..., None]]:
    """Return the model and a function that takes one training step: forward, backward and optimizer."""
    model = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x, y = torch.randn(256, 784), torch.randint(10, (256,))

    def step(model: nn.Module = model) -> None:  # takes the model as an argument, so that the probe can also time DDP
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()

    return model, step
