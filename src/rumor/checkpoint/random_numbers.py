"""The state of the random number generators, for checkpoints."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of all generators of this process and its device, as tensors and plain values."""
    name, keys, position, has_gauss, gauss = np.random.get_state()
    cuda = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return {
        "torch": torch.get_rng_state(),
        "cuda": cuda,
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), int(has_gauss), float(gauss)),
    }


def restore_random(state: dict[str, Any], device: torch.device) -> None:
    """Set all generators to a state that `random_state` returned."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"][0].cpu(), device)
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
