"""Shared by the tests of integrations: a small problem, the loop written by hand, and torchrun."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rumor
from tests import warm

ROOT = warm.ROOT
LIBRARIES = {  # modules to preload for the tests of an integration; test_docs.py uses them too
    "lightning": ["rumor.integrations.lightning"],
    "huggingface": ["rumor.integrations.huggingface", "accelerate", "transformers.models.gpt2.modeling_gpt2"],
}
N, BATCH, BATCHES = 4, 3, 7  # nodes; samples in a batch; batches of each node in an epoch
AVERAGED_STATES = {  # a period that follows the learning rate and changes at step 6; and state that is under way when a run is saved
    "global": rumor.gossip_pga(rumor.one_peer_exponential, H=rumor.LearningRate(3, 24, power=0.3), bits=4),
    "always": rumor.gossip_pga(rumor.ring, H=3, delay=1),
}


def dataset() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N * BATCH * BATCHES, 5, generator=generator)
    return x, x.square().sum(dim=1, keepdim=True)


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1))


def optimizer(model: nn.Module, decay: float = 0.9) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return opt, torch.optim.lr_scheduler.ExponentialLR(opt, decay)


def flat(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def by_hand(
    algorithm: Any,
    epochs: list[list[tuple[Tensor, Tensor]]],
    accumulate: int = 1,
    autocast: Callable[[], Any] = nullcontext,
    decay: float = 0.9,
    average_state: Any = None,
) -> dict[str, Any]:
    """Run the plain loop that an integration replaces, and return the parameters after each optimizer step and at the end."""
    model = network()
    opt, scheduler = optimizer(model, decay)
    averager = rumor.Averager(model, algorithm, optimizer=opt, average_state=average_state)
    seen: list[Tensor] = []
    losses: list[Tensor] = []
    for batches in epochs:
        for b, (x, y) in enumerate(batches):
            with autocast():
                loss = (model(x) - y).square().mean()
            (loss / accumulate).backward()
            losses.append(loss.detach())
            if (b + 1) % accumulate == 0 or b + 1 == len(batches):
                opt.step()
                opt.zero_grad()
                averager.step(torch.stack(losses).mean(), lr=scheduler.get_last_lr()[0])
                scheduler.step()
                losses = []
                seen.append(flat(model))
    averager.finish()
    return {"seen": torch.stack(seen), "end": flat(model), "counts": counts(averager)}


def counts(averager: rumor.Averager | None) -> dict[str, Any]:
    """Return the metrics of the averager, without the times."""
    assert averager is not None
    return {name: value for name, value in averager.metrics.as_dict().items() if "seconds" not in name and name != "waited_for"}


def run(arguments: list[str], folder: Path, deadline: float = warm.DEADLINE) -> str:
    """Return the output of `python ARGUMENTS`, in a new Python that has imported nothing yet."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=deadline, env=warm.environment())
    assert done.returncode == 0, done.stderr[-8000:]
    return done.stdout


def torchrun(script: Path, *arguments: str, folder: Path, integration: str | None = None) -> str:
    """Return the output of `torchrun SCRIPT` with four processes, forked from one that has imported the library of `integration`."""
    done = warm.torchrun(N, [script, *arguments], folder, preload=LIBRARIES[integration] if integration else ())
    assert done.returncode == 0, done.stderr[-8000:]
    return done.stdout


def folder_after(script: str, integration: str) -> Any:
    """Return a fixture: the folder in which four processes have run tests/`script`."""

    @pytest.fixture(scope="module")
    def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp(script)
        torchrun(ROOT / "tests" / script, str(folder), folder=folder, integration=integration)
        return folder

    return folder
