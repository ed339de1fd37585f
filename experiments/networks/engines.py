"""Trains the networks of the studies: all nodes in this process (`Simulated`), or one node per real process (`OneOfMany`)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import rumor
from rumor.methods import Algorithm
from rumor.model.optimizer_state import AverageState

T = TypeVar("T")
Tensors = tuple[Tensor, ...]  # a batch: tensors of shape [nodes in this process, B, ...]
Loss = Callable[..., Tensor]  # takes a model and one node's batch
MakeOptimizer = Callable[[Iterator[tuple[str, nn.Parameter]], nn.Module, Tensor], torch.optim.Optimizer]  # parameters, one node's model, lr


class Trainer(Protocol):
    """Trains some or all nodes, step by step."""

    nodes: list[int]  # the nodes in this process

    def start(self, algorithm: Algorithm, state: AverageState | None = None) -> None: ...  # state: as average_state of the Averager
    def step(self, batch: Tensors, lr: float) -> Tensor: ...  # returns the losses of the nodes in this process
    def mean_model(self) -> nn.Module: ...
    def node_models(self) -> Iterator[nn.Module]: ...
    def global_rounds(self) -> int: ...
    def consensus_distance(self) -> float: ...  # 1/n sum_i ||x_i - x_bar||^2


def captured(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Captures `step` as a CUDA graph. Every call returns its result in the same memory."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # compiles the step and creates the optimizer's state
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


@torch.no_grad()
def restart(sim: rumor.Simulator, opt: torch.optim.Optimizer, algorithm: Algorithm, state: AverageState | None) -> None:
    """Starts another run in the same memory: models as the simulator's module is now, and an optimizer without a past."""
    sim.restart(rumor.parallel_sgd(sim.n))  # which can average any state: that of the last run is dropped next
    sim.average_state(opt, None)
    sim.restart(algorithm)
    sim.average_state(opt, state)
    for of_parameter in opt.state.values():
        for value in of_parameter.values():
            if isinstance(value, Tensor):
                value.zero_()


class Simulated:
    """n nodes on one device. On a GPU, forward, backward and optimizer are compiled and captured as a graph, once for all methods."""

    def __init__(self, model: nn.Module, n: int, like: Tensors, loss_of: Loss, optimizer: MakeOptimizer, average_gradients: bool = False):
        self.model, self.nodes, self._average_gradients = model, list(range(n)), average_gradients
        self.sim = rumor.Simulator(model, rumor.parallel_sgd(n))
        self._batch = tuple(t.clone() for t in like)
        self._lr = torch.tensor(0.1, device=like[0].device)
        self._opt = optimizer(self.sim.named_parameters(), model, self._lr)
        self._losses_of = self.sim.compiled(loss_of) if self._lr.is_cuda else partial(self.sim, loss_of)
        self._train = captured(self._compute) if self._lr.is_cuda else self._compute

    def _compute(self) -> Tensor:
        self._opt.zero_grad()
        losses = self._losses_of(*self._batch)
        losses.sum().backward()
        if self._average_gradients:
            for leaf in self.sim.parameters():
                if leaf.grad is not None:
                    leaf.grad.copy_(leaf.grad.mean(0, keepdim=True).expand_as(leaf.grad))
        self._opt.step()
        return losses.detach()

    def start(self, algorithm: Algorithm, state: AverageState | None = None) -> None:
        """Starts a run from the current model."""
        restart(self.sim, self._opt, algorithm, state)

    def step(self, batch: Tensors, lr: float) -> Tensor:
        for static, tensor in zip(self._batch, batch, strict=True):
            static.copy_(tensor)
        self._lr.fill_(lr)
        losses = self._train()
        self.sim.step(losses, lr=lr)
        return losses

    def mean_model(self) -> nn.Module:
        return self.sim.mean_model()

    def node_models(self) -> Iterator[nn.Module]:
        return (self.sim.node_model(i) for i in self.nodes)

    def global_rounds(self) -> int:
        return self.sim.metrics.rounds["global"]

    def consensus_distance(self) -> float:
        return self.sim.consensus_distance()


class OneOfMany:
    """The node of this rank, started by torchrun."""

    def __init__(self, model: nn.Module, device: torch.device, loss_of: Loss, optimizer: MakeOptimizer, average_gradients: bool = False):
        self.model, self._loss_of, self._optimizer = model, loss_of, optimizer
        self.nodes = [dist.get_rank()]
        self._lr = torch.tensor(0.1, device=device)
        self._trained = DistributedDataParallel(model) if average_gradients else model

    def start(self, algorithm: Algorithm, state: AverageState | None = None) -> None:
        """Starts a run from the current model, which is equal on all ranks. From here on each rank has its own random numbers."""
        torch.manual_seed(1_000_003 * (torch.initial_seed() + 1) + self.nodes[0])
        self._opt = self._optimizer(self.model.named_parameters(), self.model, self._lr)
        self._averager = rumor.Averager(self.model, algorithm, optimizer=self._opt, average_state=state)

    def step(self, batch: Tensors, lr: float) -> Tensor:
        self._lr.fill_(lr)
        self._opt.zero_grad()
        loss = self._loss_of(self._trained, *(tensor[0] for tensor in batch))
        loss.backward()
        self._opt.step()
        self._averager.step(loss, lr=lr)
        return loss.detach()[None]

    def mean_model(self) -> nn.Module:
        with self._averager.averaged():
            return copy.deepcopy(self.model)

    def node_models(self) -> Iterator[nn.Module]:
        return iter([self.model])

    def global_rounds(self) -> int:
        return self._averager.metrics.rounds["global"]

    def consensus_distance(self) -> float:
        return self._averager.consensus_distance()


class TrainerCache:
    """Keeps the last trainer and its model. Runs with the same key use it again, with everything that it has compiled."""

    def __init__(self) -> None:
        self._key: object = None
        self._cached: tuple[Trainer, nn.Module] | None = None

    def get(self, key: object, make: Callable[[], tuple[Trainer, nn.Module]]) -> tuple[Trainer, nn.Module]:
        if self._cached is None or self._key != key:
            self._cached = None  # free the old stacked models first
            self._key, self._cached = key, make()
        return self._cached


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def mean_over_ranks(loss: Tensor) -> float:
    """Averages the loss over all ranks, if there are several. It stays on its device, because NCCL needs that."""
    if dist.is_initialized():
        loss = loss.double() / dist.get_world_size()
        dist.all_reduce(loss)
    return float(loss)


def as_first_says(value: T) -> T:
    """Returns the value of the first rank on every rank."""
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def step_bar(steps: int) -> tqdm[Any]:
    """A progress bar for one run. Only the first rank shows it, on a terminal, and it disappears at the end."""
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    return tqdm(total=steps, unit=" steps", leave=False, disable=None if is_first else True)


def all_of_ranks(values: list[float]) -> list[float]:
    """Concatenates the values of all ranks."""
    if not dist.is_initialized():
        return values
    rows: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(rows, values)
    return [value for row in rows for value in row]
