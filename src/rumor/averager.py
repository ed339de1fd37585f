"""Averager: one node among real processes. Build it after the model, call `step` after the optimizer's."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rumor.algorithm import Algorithm, check_algorithm
from rumor.checks import check_model, check_options, described, is_averaged, trained_and_frozen
from rumor.flat import Flat, Places, as_real
from rumor.metrics import Metrics
from rumor.node import Node, check_shards, layouts, reshard
from rumor.process_group import Group, ProcessGroup
from rumor.run import Run, ordinary_tensors
from rumor.under_forward import UnderForward
from rumor.version import VERSION

Batch = TypeVar("Batch")
T = TypeVar("T")


class Averager:
    """Averages `model` with those of the other nodes, as `algorithm` says. Every node starts from rank 0's model.

    Parameters are written in place and never rebound. Frozen ones (at construction) stay as they are. Float buffers (BatchNorm's) are
    averaged at global rounds, integer ones and the optimizer's state stay each node's own. Where an optimizer keeps fp32 master copies
    of half-precision parameters, hand in the module that holds the master copies: the next step would undo the average of the others.

    Args:
        model: the module that the optimizer trains; not in DistributedDataParallel over the same ranks.
        algorithm: what `rumor.gossip_pga(...)` and its like return, for as many nodes as the group has ranks.
        group: the group across nodes that this rank belongs to; the default group if None.
        local_group: the ranks inside this node, where a node is several GPUs; `group` is then this rank and its counterparts, one of each
            node. The ranks of a node must keep their parameters alike (DDP over this group) or sharded over it (FSDP2). Of what is alike,
            each of L ranks exchanges 1/L, and the node shares the outcome; of what is sharded, its own shard. Losses are averaged
            inside the node for Gossip-AGA. What is said of nodes below holds for all ranks of a node.
        lazy: step() returns while messages are under way, and each module waits for its own parameters when it next runs forward, or gives
            its state_dict(). Call settle() before you read parameters in any other way, such as in a forward that looks at another module's
            before it calls that. Not for models under torch.compile.
        rescue: the model's optimizer, if a run is to go on where a node's model is no longer finite: all nodes then take the mean of those
            that are, and that node's optimizer starts anew. Without it, FloatingPointError ends the run on every rank.

    A rank that waits longer than the group's time-out (`init_process_group(timeout=...)`, `new_group(timeout=...)`) raises ConnectionError.
    A model that is not finite raises FloatingPointError on every rank, naming the node and the step; its float buffers count, too, at
    global rounds, if they were finite when the Averager was built.
    """

    def __init__(
        self,
        model: nn.Module,
        algorithm: Algorithm,
        *,
        group: Group | None = None,
        local_group: Group | None = None,
        lazy: bool = False,
        rescue: torch.optim.Optimizer | None = None,
    ):
        self.engine = ProcessGroup(group, local_group)
        self._node = Node(self.engine)
        problem, setup = None, {}
        try:
            check_model(model, self.engine)
            reshard(model)
            check_shards(model, self.engine.inside)
            check_algorithm(algorithm)
            check_options(algorithm, self.engine.n, lazy, rescue, is_shared=local_group is not None)
            _, self._frozen = trained_and_frozen(model)
            setup = {"version of Rumor": VERSION, "algorithm": repr(algorithm), "model": described(model)}
            setup["rescue= (is one given?)"] = str(rescue is not None)
            if local_group is not None:
                setup["layout in memory"] = layouts(model)
        except (TypeError, ValueError) as error:
            problem = error  # told to the others, who would wait for this rank in vain
        self._node.agree(setup, problem)
        self._model = model
        self._trained = Places(model, "_parameters", lambda p: p.requires_grad)
        self._buffers = Places(model, "_buffers", is_averaged)
        self._showing_mean = False
        with ordinary_tensors():
            self._node.broadcast([*model.parameters(), *model.buffers()])
            self._part, self._buffer_part = self._node.part(self._trained.tensors()), self._node.part(self._buffers.tensors())
            self._x = Flat(self._part.mine, self.engine.room)
            self._b = Flat(self._buffer_part.mine, self.engine.room)
            self._run = Run(algorithm, self.engine, self._x, self._b)
        self._lazy, self._rescue = lazy, rescue
        if lazy:
            here = weakref.ref(self)  # the hooks must not keep this Averager alive
            hooks = UnderForward(
                model,
                self._x.buckets_of,
                is_under_way=lambda: (averager := here()) is not None and averager._run.is_under_way,
                settle=lambda buckets: averager._settle(buckets) if (averager := here()) is not None else None,
            )
            weakref.finalize(self, hooks.remove).atexit = False

    def __repr__(self) -> str:
        return f"Averager(rank {self.engine.rank} of {self.engine.n}, after {self._run.k} steps of {self._run.algorithm})"

    @property
    def model(self) -> nn.Module:
        return self._model

    @property
    def steps(self) -> int:
        """So far."""
        return self._run.k

    @property
    def metrics(self) -> Metrics:
        """Rounds by kind, bytes sent, seconds spent waiting, and the period in force."""
        return self.engine.metrics

    @ordinary_tensors()
    def step(self, loss: Tensor | float | None = None, lr: float | None = None) -> None:
        """Mixes the models. Call it once per optimizer step, on every node, also where GradScaler has skipped the optimizer's.

        Args:
            loss: this rank's loss of this step; Gossip-AGA needs it, others ignore it.
            lr: the current learning rate; SlowMo needs it, others ignore it.
        """
        k = self._run.k

        def step() -> None:
            if self._run.k == k:  # else it was found out when this step was done
                self._step(loss, lr)

        self._or_rescue(step)

    def _step(self, loss: Tensor | float | None, lr: float | None) -> None:
        self.refuse_in_averaged("step()")
        self._find_tensors(all_of_them=self._run.round() == "global")
        self._run.begin(self._as_scalar(loss), lr)
        replaces_buffers = self._run.round() == "global" and len(self._b)  # which a forward would have updated by then
        if not self._lazy or replaces_buffers:
            self.settle()

    def settle(self) -> None:
        """With `lazy`: waits for what step() left under way, so that the parameters can be read."""
        self._settle(None)

    @ordinary_tensors()
    def _settle(self, buckets: int | None) -> None:
        k, kind = self._run.k, self._run.round()
        if self._run.settle(buckets):
            with self.metrics.at_work():
                if kind == "gossip":
                    self._node.share(self._part, settle=False)
                elif kind == "global":
                    self._share_all()
            self.engine.raise_alarm(k, self._run.algorithm.topology)

    def _or_rescue(self, do: Callable[[], T]) -> T:
        """With `rescue`: if some node's model turns out not to be finite, all go on from the mean of the others, and do it again."""
        try:
            return do()
        except FloatingPointError as error:
            if self._rescue is None:
                raise
            self._take_mean_of_finite(error)
            return do()

    def _take_mean_of_finite(self, error: FloatingPointError) -> None:
        """All nodes go on from the mean of those whose models are finite. Every rank comes here at the same step."""
        assert self._rescue is not None
        self._run.abandon()
        is_finite = self._run.is_finite()
        self.engine.forget_alarm()
        if self._run.take_mean_of(is_finite) == 0:
            raise error
        if not is_finite:
            self._rescue.state.clear()
            self._rescue.zero_grad()
            self.metrics.rescues += 1
            why = str(error).split(";")[0]  # the rest says what to do where nobody is rescued
            warnings.warn(f"node {self.engine.rank} goes on from the mean of the others at step {self._run.k}: {why}", stacklevel=5)

    def _share_all(self) -> None:
        """After a global round, inside the node: float buffers have changed, too, and alarms are settled."""
        self._node.share(self._part, self._buffer_part, settle=True)

    def refuse_in_averaged(self, what: str) -> None:
        if self._showing_mean:
            raise RuntimeError(f"{what} inside averaged(), where the model is not this node's own and is put back in the end: leave it")

    def _find_tensors(self, all_of_them: bool = True) -> None:
        """Parameters must be where they were, since the optimizer has them too; buffers may have been replaced, as some models do.

        `all_of_them`: looks for parameters that came later, too, which takes a walk over all modules.
        """
        self.settle()
        if all_of_them and (others := self._trained.others()):
            raise RuntimeError(
                f"{', '.join(others)} came after the Averager was built (a module was added or replaced), and would not be averaged: do "
                "that first, then build the optimizer and the Averager"
            )
        if any(p.requires_grad for p in self._frozen):
            raise RuntimeError("a parameter that was frozen when the Averager was built now trains: build the Averager after unfreezing")
        if self._trained.have_changed():
            if not self._trained.are_gone() and self._part.is_gathered(self._trained.tensors()):
                raise RuntimeError("FSDP has parameters gathered, as its root has after a forward without a backward: call model.reshard()")
            raise RuntimeError(
                "a parameter has been replaced, or has moved in memory, since the Averager was built (model.to(), .half(), an assignment "
                "to .data, load_state_dict(assign=True), pruning, a parametrization): do that first, then build the optimizer and the "
                "Averager"
            )
        if self._buffers.are_gone():
            raise RuntimeError("a float buffer is gone since the Averager was built: do that first, then build the Averager")
        if self._buffers.have_changed():
            self._buffer_part = self._node.part(self._buffers.tensors())
            self._b.rebind(self._buffer_part.mine)
            self._buffers.remember()

    def _as_scalar(self, loss: Tensor | float | None) -> Tensor | None:
        if loss is None or not self._run.algorithm.needs_loss:
            return None
        scalar = torch.as_tensor(loss).detach().to(torch.float64).reshape(-1)
        if scalar.numel() != 1:
            raise ValueError(f"step() takes this node's loss as one number, got a tensor of shape {list(torch.as_tensor(loss).shape)}")
        return self._node.mean(scalar)

    @ordinary_tensors()
    def finish(self) -> None:
        """Waits for what is in flight or expected, then averages once more: all nodes end with the same model. A collective."""
        self.refuse_in_averaged("finish()")
        self._find_tensors()
        self._or_rescue(self._run.finish)
        self._share_all()

    def join(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """`batches` for as long as every node has one, so that nobody waits for a node that has run out. A collective, in every turn.

        Every rank loops over its own: `for x, y in averager.join(loader)`. All loops end together, with the shortest; what the others have
        left is dropped (shuffle, and it is another part each epoch). Whether all have the next batch is asked while this one trains,
        so `batches` is one ahead of the loop: a checkpoint from inside it should count batches, and not save the loader's own state.
        """
        end, ahead, vote = object(), iter(batches), self._node.vote()
        following: Any = next(ahead, end)
        try:
            vote.ask(self._node.all_of(following is not end), self._run.begun)
            while vote.is_unanimous():
                batch, following = following, next(ahead, end)
                vote.ask(self._node.all_of(following is not end), self._run.begun)
                yield batch
        finally:
            vote.leave()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the model holds the mean of all nodes (to evaluate or save it); after, its own again. A collective."""
        self.refuse_in_averaged("averaged()")
        with ordinary_tensors():
            self._find_tensors()
            tensors = [as_real(t) for t in (*self._trained.tensors(), *self._buffers.tensors())]
            own = self._or_rescue(lambda: self._taken_for_mean(tensors))
        try:
            self._showing_mean = True
            yield
        finally:
            self._showing_mean = False
            reshard(self._model)  # what FSDP has gathered inside is the mean
            with ordinary_tensors():
                _put_back(tensors, own)

    def _taken_for_mean(self, tensors: list[Tensor]) -> list[Tensor]:
        """The model becomes the mean of all nodes'; returns what `tensors` held."""
        own = [t.clone() for t in tensors]
        try:
            self._run.show_mean()
            self._share_all()
        except BaseException:
            _put_back(tensors, own)
            raise
        return own

    @ordinary_tensors()
    def consensus_distance(self) -> float:
        """1/n sum_i ||x_i - x_bar||^2 of the trained parameters. A collective."""
        self._find_tensors()
        self.metrics.consensus_distance = self._node.sum(self._run.consensus_distance())
        return self.metrics.consensus_distance

    @ordinary_tensors()
    def state_dict(self) -> dict[str, Any]:
        """This rank's state, with the messages in flight; the model and the optimizer are saved beside it, each rank its own."""
        self.settle()
        return {**self._run.state_dict(), "rank": self.engine.rank, "local_rank": self._node.local_rank}

    @ordinary_tensors()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from `state`. Build the Averager first, then load model, optimizer and averager."""
        self.refuse_in_averaged("load_state_dict()")
        self.check_state(state)
        self.settle()
        self._run.load_state_dict(state)
        self.engine.forget_alarm()

    @ordinary_tensors()
    def go_on(self, state: dict[str, Any]) -> None:
        """Takes over the schedule alone, from a state of any rank of a run with other nodes: all nodes have the same model now."""
        self.settle()
        self._run.start_anew(state["schedule"])
        self.engine.forget_alarm()

    # ---- for checkpoints

    def check_state(self, state: dict[str, Any]) -> None:
        """Raises if it is not of this rank and this algorithm."""
        here = self.engine.rank, self._node.local_rank
        if isinstance(state, dict) and (there := (state.get("rank", here[0]), state.get("local_rank"))) != here:
            raise ValueError(f"this is the state of {_named(*there)}, but this is {_named(*here)}: each rank loads its own")
        self._run.check_state(state)

    def from_first(self, number: int) -> int:
        """The number that rank 0 of node 0 has. A collective."""
        value = torch.tensor([number])
        self._node.broadcast([value])
        return int(value)

    @property
    def place(self) -> tuple[int, int]:
        """This rank's node, and its rank inside it."""
        return self.engine.rank, self._node.local_rank or 0

    @property
    def local_size(self) -> int:
        """Ranks of a node."""
        return self._node.size

    @property
    def device(self) -> torch.device:
        return self._trained.tensors()[0].device

    def meet(self, values: dict[str, str], doing: str) -> None:
        """None leaves before all have come; raises on every rank unless all bring the same values. A collective."""
        self._node.meet(values, doing)


def _put_back(tensors: list[Tensor], values: list[Tensor]) -> None:
    for t, value in zip(tensors, values, strict=True):
        t.copy_(value)


def _named(rank: int, local_rank: int | None) -> str:
    return f"rank {rank}" if local_rank is None else f"rank {rank}, local rank {local_rank}"
