"""A model for `rumor probe` and `rumor plan` (docs/planning.md): an MLP of 1.86 M parameters for 28 x 28 images, batch 256.

torchrun --standalone --nproc-per-node 4 -m rumor probe --model examples/model_to_plan.py:build
"""

from collections.abc import Callable

import torch
from torch import nn


def build() -> tuple[nn.Module, Callable[..., None]]:
    """The model, and one training step of it: forward, backward and optimizer."""
    model = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x, y = torch.randn(256, 784), torch.randint(10, (256,))

    def step(model: nn.Module = model) -> None:  # with an argument, so that the probe can time DDP as well
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()

    return model, step
