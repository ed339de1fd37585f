"""Replica: this rank's model, attached to an engine: its tensors, its buckets, and the runner that mixes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rumor.averager.sampler import Samplers
from rumor.engines import NO_BUCKETS, Buckets
from rumor.engines.processes.local_group import LocalGroup
from rumor.engines.processes.process_group import ProcessGroup
from rumor.methods.algorithm import Algorithm, Step
from rumor.methods.runner import Runner
from rumor.model.buckets import FlatBuckets
from rumor.model.checks import trained_and_frozen
from rumor.model.optimizer_state import AverageState, OptimizerState
from rumor.model.tensors import as_real, is_averaged, ordinary_tensors
from rumor.model.tracked import TrackedTensors


class Replica:
    """One rank's replica of the model, and of the optimizer's state if nodes average it.

    `attach` binds it to an engine and a method, and builds all that depends on who the members are. It may be called again.

    Attributes:
        model: the module.
        engine: connects this node to the others.
        node: the ranks of this node.
        runner: runs the method.
        samplers: the places in the data.
    """

    engine: ProcessGroup
    node: LocalGroup
    runner: Runner

    def __init__(self, model: nn.Module, state: OptimizerState | None = None, average_state: AverageState | None = None):
        self.model, self._state, self._average_state = model, state, average_state
        _, self._frozen = trained_and_frozen(model)
        self._trained = TrackedTensors(model, "_parameters", lambda p: p.requires_grad)
        self._buffers = TrackedTensors(model, "_buffers", is_averaged)
        self.samplers = Samplers()

    def attach(self, engine: ProcessGroup, node: LocalGroup, algorithm: Algorithm, broadcast: bool = True) -> None:
        """Take over the model of rank 0, and get ready for the first step. A collective, unless `broadcast` is False."""
        self.engine, self.node = engine, node
        self._needs_loss, self._has_local_group = algorithm.needs_loss, engine.local is not None
        self._averages_lr = self._has_local_group and algorithm.schedule.signal == "lr"
        with ordinary_tensors():
            if broadcast:
                node.broadcast([*self.model.parameters(), *self.model.buffers()])
            self._shard, self._buffer_shard = node.shard(self._trained.tensors()), node.shard(self._buffers.tensors())
            self.buckets = FlatBuckets(self._shard.mine, engine.allocate, algorithm.bits)
            self._buffer_buckets = FlatBuckets(self._buffer_shard.mine, engine.allocate)
            if self._state is None:
                self.runner = Runner(algorithm, engine, self.buckets, self._buffer_buckets)
                return
            if broadcast:
                node.broadcast(self._state.tensors())
            self._state_shard = node.shard(self._state.tensors())
            in_full = self._state.in_full
            self._state_buckets = FlatBuckets(self._state_shard.mine, engine.allocate, 32 if in_full else algorithm.bits)
            mixed: Buckets = NO_BUCKETS if in_full else self._state_buckets
            full: Buckets = self._state_buckets if in_full else NO_BUCKETS
            self.runner = Runner(algorithm, engine, self.buckets, self._buffer_buckets, mixed, self._state.mixed, full)

    @property
    def device(self) -> torch.device:
        return self._trained.tensors()[0].device

    def tensors(self) -> list[Tensor]:
        """Return all tensors that are averaged, as real numbers."""
        return [as_real(t) for t in (*self._trained.tensors(), *self._buffers.tensors())]

    def shared_tensors(self) -> list[Tensor]:
        """Return all tensors that averages change: those of the model, and of the optimizer if its state is averaged."""
        return [*self.tensors(), *([] if self._state is None else self._state.tensors())]

    # ---- steps -------------------------------------------------------------------------------------------------------------------

    def begin(self, loss: Tensor | float | None, lr: float | None, at_once: bool = False) -> Step:
        """Decide the coming step and send what it sends. The step before must have ended. `at_once` is as in `Runner.begin`."""
        step = self.runner.decide(self._as_scalar(loss), lr)
        if self._averages_lr and step.lr is not None:  # the ranks of a node must agree on the period, too
            step = step._replace(lr=float(self.node.mean(torch.tensor([step.lr], dtype=torch.float64))))
        self.check_tensors(all_of_them=step.kind == "global")
        self.runner.begin(step, at_once)
        return step

    def replaces_buffers(self, step: Step) -> bool:
        return step.kind == "global" and len(self._buffer_buckets) > 0

    def settle(self, buckets: int | None = None) -> None:
        """Receive and write the first `buckets` buckets of the step under way (all if None). Raises if some model is not finite."""
        step = self.runner.settle(buckets)
        if step is None:
            return
        if self._has_local_group:
            with self.engine.metrics.at_work():
                if step.kind == "gossip":
                    gossiped = [self._state_shard] if self._average_state == "always" else []
                    self.node.share(self._shard, *gossiped, settle=False)
                elif step.kind == "global":
                    self.share_all()
        self.engine.raise_alarm(step.k, self.runner.algorithm.topology)

    def share_all(self) -> None:
        """Share what a global round has changed with the ranks of this node: the float buffers, too, and settled alarms."""
        averaged = [self._shard, self._buffer_shard, *([self._state_shard] if self._state is not None else [])]
        self.node.share(*averaged, settle=True)

    def finish(self) -> None:
        self.runner.finish()
        self.share_all()

    def show_mean(self) -> None:
        """Replace the model by the mean of all nodes."""
        self.runner.show_mean()
        self.share_all()

    def consensus_distance(self) -> float:
        distance = self.node.sum(self.runner.consensus_distance())
        self.engine.metrics.consensus_distance = distance
        return distance

    def _as_scalar(self, loss: Tensor | float | None) -> Tensor | None:
        if loss is None or not self._needs_loss:
            return None
        scalar = torch.as_tensor(loss).detach().to(torch.float64).reshape(-1)
        if scalar.numel() != 1:
            raise ValueError(f"step() takes this node's loss as one number, got a tensor of shape {list(torch.as_tensor(loss).shape)}")
        return self.node.mean(scalar)

    # ---- tensors -----------------------------------------------------------------------------------------------------------------

    def check_tensors(self, all_of_them: bool = True) -> None:
        """Check that parameters are where they were, since the optimizer has them too. Buffers may have been replaced, as some models do.

        `all_of_them`: also look for parameters that were added since, which takes a walk over all modules.
        """
        if all_of_them and (others := self._trained.new_parameters()):
            raise RuntimeError(
                f"{', '.join(others)} came after the Averager was built (a module was added or replaced), and would not be averaged: do "
                "that first, then build the optimizer and the Averager"
            )
        if self._frozen and any(p.requires_grad for p in self._frozen):
            raise RuntimeError("a parameter that was frozen when the Averager was built now trains: build the Averager after unfreezing")
        if self._trained.have_changed():
            if not self._trained.are_gone() and self._shard.is_gathered(self._trained.tensors()):
                raise RuntimeError("FSDP has parameters gathered, as its root has after a forward without a backward: call model.reshard()")
            raise RuntimeError(
                "a parameter has been replaced, or has moved in memory, since the Averager was built (model.to(), .half(), an assignment "
                "to .data, load_state_dict(assign=True), pruning, a parametrization): do that first, then build the optimizer and the "
                "Averager"
            )
        if self._buffers.have_changed():
            self._use_new_buffers()
        if self._state is not None and self._state.has_changed():  # optimizer.load_state_dict() replaces its tensors
            self._state_shard = self.node.shard(self._state.tensors())
            self._state_buckets.rebind(self._state_shard.mine)

    def _use_new_buffers(self) -> None:
        if self._buffers.are_gone():
            raise RuntimeError("a float buffer was removed after the Averager was built: remove it first, then build the Averager")
        self._buffer_shard = self.node.shard(self._buffers.tensors())
        self._buffer_buckets.rebind(self._buffer_shard.mine)
        self._buffers.remember()

    # ---- state -------------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        saved = {**self.runner.state_dict(), "rank": self.engine.rank, "local_rank": self.node.local_rank}
        if positions := self.samplers.positions:
            saved["positions"] = positions
        return saved if self._average_state is None else {**saved, "average_state": self._average_state}

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise ValueError unless it is of this rank and this method."""
        here = self.engine.rank, self.node.local_rank
        if isinstance(state, dict) and (there := (state.get("rank", here[0]), state.get("local_rank"))) != here:
            raise ValueError(f"this is the state of {_name(*there)}, but this is {_name(*here)}: each rank loads its own")
        self.runner.check_state(state)
        if (there_too := state.get("average_state")) != self._average_state:
            raise ValueError(f"this state is of a run with average_state={there_too!r}, but here it is {self._average_state!r}")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.check_state(state)
        self.settle()
        self.runner.load_state_dict(state)
        self._go_on(state)

    def continue_schedule(self, state: dict[str, Any]) -> None:
        """Take over the schedule and the places in the data alone, from a state of any rank of a run with other nodes.

        All nodes have the same model now.
        """
        self.settle()
        self.runner.restart(state["schedule"])
        self._go_on(state)

    def _go_on(self, state: dict[str, Any]) -> None:
        self.samplers.restore(state.get("positions", []))
        self.engine.forget_alarm()


def _name(rank: int, local_rank: int | None) -> str:
    return f"rank {rank}" if local_rank is None else f"rank {rank}, local rank {local_rank}"
