"""Averager: one node among real processes. Build it after the model, and call `step` after the optimizer's step."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rumor.averager.elastic import Elastic
from rumor.averager.elastic_node import ElasticNode, member_of
from rumor.averager.joining import batches_that_all_have
from rumor.averager.replica import Replica
from rumor.averager.rescue import or_rescue, rescue_or_raise
from rumor.averager.sampler import MemberSampler
from rumor.averager.setup import (
    bound_algorithm,
    check_group,
    check_lazy,
    check_member,
    check_model,
    check_no_ddp_around,
    check_options,
    rest_by_name,
    what_ranks_compare,
)
from rumor.engines.processes.local_group import LocalGroup
from rumor.engines.processes.process_group import ProcessGroup
from rumor.engines.processes.transport import Group, ranks_of
from rumor.membership.group import ElasticGroup
from rumor.methods.algorithm import Algorithm
from rumor.metrics import Metrics
from rumor.model.checks import reshard, trained_and_frozen
from rumor.model.forward_hooks import ForwardHooks
from rumor.model.optimizer_state import AverageState, OptimizerState, check_average_state
from rumor.model.tensors import ordinary_tensors

Batch = TypeVar("Batch")
T = TypeVar("T")
# DDP may be put around the model after the Averager was built, and leaves no trace on it. A search of all objects takes 10 to 100 ms.
DDP_LOOKED_FOR = (1, 50, 1_000, 10_000)  # calls of step()


class Averager:
    """Averages `model` with those of the other nodes, as `algorithm` says. Every node starts from rank 0's model.

    Parameters are written in place and never rebound. Parameters that are frozen at construction stay as they are. Float buffers
    (BatchNorm's) take part in global averages. Integer buffers stay each node's own, and so does the optimizer's state, unless you set
    `average_state`. If an optimizer keeps fp32 master copies of half-precision parameters, pass the module that holds the master copies:
    the next step would undo any other average.

    Args:
        model: the module that the optimizer trains; not in DistributedDataParallel over the same ranks.
        algorithm: a method such as `rumor.gossip_pga(rumor.one_peer_exponential, H=6)`. It is bound to the number of ranks in the group.
        group: the group across nodes that this rank belongs to; the default group if None. With `rumor.elastic("HOST:29510")`, nodes
            may die, hang, leave and join while the others go on.
        local_group: the ranks inside this node, if a node is several GPUs; `group` is then this rank and its counterparts, one of each
            node. The ranks of a node must keep their parameters alike (DDP over this group) or sharded over it (FSDP2). With DDP inside,
            each of the L ranks sends 1/L of the model, and the node shares the result. With FSDP2, each rank sends its own shards. Losses
            are averaged inside the node for Gossip-AGA. Below, a node means all of its ranks. In an elastic group, the first rank of a
            node sends the whole model and shares the result with the others, whose parameters must be alike.
        lazy: step() returns while messages are in flight, and each module waits for its own parameters when it next runs forward, or
            returns its state_dict(). Call settle() before you read parameters in any other way, for example in a forward that looks at
            the parameters of another module before it calls that module. Not for models under torch.compile.
        optimizer: the model's optimizer: SlowMo and `LearningRate` then read the learning rate there if `step` is not given it, and
            `average_state` is about its state. Build it before the Averager.
        average_state: "global": the optimizer's state is averaged at global averages, like the model (SGD's momentum while H > 1);
            "always": it also gossips, so messages are larger by as much. It covers SGD's momentum and the moments of Adam, AdamW and the
            like (these not with `delay=1`, and "always" only with 32 bits). All nodes then start from rank 0's state. None: it stays local.
        rescue: the model's optimizer, if the run is to go on when a node's model is no longer finite: all nodes then take the mean of the
            finite ones, and that node's optimizer starts again. Without it, FloatingPointError ends the run on every rank.

    A rank that waits longer than the group's time-out (`init_process_group(timeout=...)`, `new_group(timeout=...)`) raises ConnectionError.
    A model that is not finite raises FloatingPointError on every rank, with the node and the step. This includes float buffers, at
    global averages, if they were finite when the Averager was built.
    """

    @rest_by_name("Averager(model, algorithm, optimizer=opt)")
    def __init__(
        self,
        model: nn.Module,
        algorithm: Algorithm,
        *,
        group: Group | ElasticGroup | None = None,
        local_group: Group | None = None,
        lazy: bool = False,
        rescue: torch.optim.Optimizer | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        average_state: AverageState | None = None,
    ):
        self._lazy, self._rescue, self._optimizer = lazy, rescue, optimizer
        self._showing_mean, self._calls = False, 0  # calls of step()
        self._elastic: Elastic | ElasticNode | None = None
        self._local_ranks = None if local_group is None else ranks_of(local_group)
        check_group(group)
        if isinstance(group, ElasticGroup):
            check_member(model, algorithm, lazy, rescue, self._local_ranks or [])
            state = self._state_of(model, algorithm, average_state)
            setup = what_ranks_compare(model, algorithm, None, average_state, state, has_local_group=False)
            setup |= {"optimizer": type(optimizer).__name__, "name of the job": str(group.job)}
            self.replica = Replica(model, state, average_state)
            self._elastic = member_of(group, local_group, self.replica, algorithm, setup, optimizer)
            return
        engine = ProcessGroup(group, local_group)
        node = LocalGroup(engine)
        problem, setup, state = None, {}, None
        try:
            check_model(model, engine)
            algorithm = bound_algorithm(algorithm, engine.n)
            check_options(model, algorithm, lazy, rescue, average_state, has_local_group=local_group is not None)
            state = self._state_of(model, algorithm, average_state)
            setup = what_ranks_compare(model, algorithm, rescue, average_state, state, has_local_group=local_group is not None)
        except (TypeError, ValueError) as error:
            problem = error  # the others are told, so that they do not wait for this rank
        node.agree(setup, problem)
        engine.averages_ahead = lazy or algorithm.delay > 0
        self.replica = Replica(model, state, average_state)
        self.replica.attach(engine, node, algorithm)
        if lazy:
            self._add_hooks()

    def _state_of(self, model: nn.Module, algorithm: Algorithm, average_state: AverageState | None) -> OptimizerState | None:
        """Return the optimizer's state that nodes average, if any."""
        check_average_state(algorithm, self._optimizer, average_state, model.parameters())
        if self._optimizer is None or average_state is None:
            return None
        return OptimizerState(self._optimizer, trained_and_frozen(model)[0], algorithm, average_state)

    def _add_hooks(self) -> None:
        here = weakref.ref(self)  # the hooks must not keep this Averager alive
        hooks = ForwardHooks(
            self.model,
            self.replica.buckets.buckets_of,
            is_under_way=lambda: (averager := here()) is not None and averager.replica.runner.is_under_way,
            settle=lambda buckets: averager._settle(buckets) if (averager := here()) is not None else None,
        )
        weakref.finalize(self, hooks.remove).atexit = False

    def __repr__(self) -> str:
        engine = self.engine
        return f"Averager(rank {engine.rank} of {engine.n}, after {self.steps} steps of {self.replica.runner.algorithm})"

    @property
    def model(self) -> nn.Module:
        """The module."""
        return self.replica.model

    @property
    def engine(self) -> ProcessGroup:
        """The engine that connects this node to the others."""
        return self.replica.engine

    @property
    def steps(self) -> int:
        """Number of steps taken."""
        return self.replica.runner.k

    @property
    def is_elastic(self) -> bool:
        """Whether the members may change."""
        return self._elastic is not None

    @property
    def rank(self) -> int:
        """Number of this node among the members. It may change when members of an elastic group do."""
        return self.engine.rank if self._elastic is None else self._elastic.rank

    @property
    def members(self) -> list[str]:
        """Names of the nodes, by rank."""
        return [f"node {node}" for node in range(self.engine.n)] if self._elastic is None else list(self._elastic.members)

    @property
    def metrics(self) -> Metrics:
        """Counters: rounds by kind, bytes sent, seconds spent waiting, and the current period."""
        return self.engine.metrics

    # ---- training ------------------------------------------------------------------------------------------------------------------

    def step(self, loss: Tensor | float | None = None, lr: float | None = None) -> None:
        """Mix the models. Call it once per optimizer step, on every node, also if GradScaler has skipped the optimizer's step.

        Args:
            loss: this rank's loss of this step; Gossip-AGA needs it, other methods ignore it.
            lr: the learning rate of this step, which SlowMo and `rumor.LearningRate` need; that of `optimizer=` if None.
        """
        self.refuse_inside_averaged("step()")
        self._calls += 1
        if self._calls in DDP_LOOKED_FOR:
            own = [self.engine.transport.ranks[self.engine.rank]]
            check_no_ddp_around(self.model, self._local_ranks or own, self.replica.runner.algorithm)
        if lr is None and self._optimizer is not None and self.replica.runner.algorithm.needs_lr:
            lr = self._optimizer.param_groups[0]["lr"]
        with ordinary_tensors():
            runner = self.replica.runner
            k = runner.k
            try:
                self._step(loss, lr)
            except FloatingPointError as error:
                rescue_or_raise(self.replica, self._rescue, error, stacklevel=3)
                if runner.k == k:  # else the models were mixed before the error was raised
                    self._step(loss, lr)

    def _step(self, loss: Tensor | float | None, lr: float | None) -> None:
        if self._elastic is not None:
            return self._elastic.step(loss, lr)
        if not self._lazy:
            self.replica.begin(loss, lr)
            self.replica.settle()
            return
        check_lazy(self.model)
        self.replica.settle()  # the step before may be under way
        step = self.replica.begin(loss, lr)
        if self.replica.replaces_buffers(step):  # which the next forward would have updated before they arrive
            self.replica.settle()

    def settle(self) -> None:
        """With lazy=True: wait for the messages that step() left in flight, so that you can read the parameters."""
        self._settle(None)

    @ordinary_tensors()
    def _settle(self, buckets: int | None) -> None:
        self.replica.settle(buckets)

    @ordinary_tensors()
    def finish(self) -> None:
        """Wait for what is in flight, then average once more: all nodes end with the same model. A collective."""
        self.refuse_inside_averaged("finish()")
        self._prepare()
        if self._elastic is not None:
            return self._elastic.finish()
        or_rescue(self.replica, self._rescue, self.replica.finish)

    def leave(self) -> None:
        """Leave an elastic group, for example because this machine will be taken away. The others go on. Not a collective."""
        if self._elastic is None:
            raise RuntimeError("leave() is for a group whose members come and go: Averager(..., group=rumor.elastic(...))")
        self._elastic.leave()

    def join(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield `batches` for as long as every node has one, so that no node waits for one that has run out. Each batch is a collective.

        Every rank loops over its own batches: `for x, y in averager.join(loader)`. All loops end together, with the shortest. What the
        others have left is dropped. Whether all nodes have the next batch is asked while this one trains, so `batches` is one ahead of
        the loop: a checkpoint inside the loop should count batches, and not save the loader's own state.
        """
        if self._elastic is not None:
            raise RuntimeError("join() is for a fixed group: with rumor.elastic, loop `while averager.steps < total` (see share_of())")
        yield from batches_that_all_have(self.replica.node, self.replica.runner, batches)

    def share_of(self, data: Sized | int, seed: int = 0) -> MemberSampler:
        """Divide a data set among the members: an endless stream of the numbers of items, each for one member.

        `DataLoader(data, batch_size=32, sampler=averager.share_of(data))` never ends, so stop by the number of steps. As members of an
        elastic group change, so do their shares. A newcomer goes on where the others are, and a job that `rumor.load` continues goes on
        where it was saved. If the loader fetches batches ahead (`num_workers=`), these are left out then. Call it once for each data set.

        Args:
            data: the data set, or its size.
            seed: of the order, which is another one in each epoch; the same on all members.
        """
        elastic, node = self._elastic, self.replica.node
        fixed = node.place[0] * node.size + node.place[1], self.engine.n * node.size
        return self.replica.samplers.add(MemberSampler(data, lambda: fixed if elastic is None else elastic.place, seed))

    def together(self, do: Callable[[], T], otherwise: Callable[[], T] | None = None, rejoins: bool = False) -> T | None:
        """Call `do`, a collective that every rank calls. In an elastic group, `Elastic.together` or `ElasticNode.together` does it."""
        return do() if self._elastic is None else self._elastic.together(do, otherwise, rejoins)

    @property
    def has_left(self) -> bool:
        """Whether this node has left an elastic group, by finish() or leave()."""
        return self._elastic is not None and self._elastic.has_left

    # ---- the mean of all nodes -----------------------------------------------------------------------------------------------------

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the model hold the mean of all nodes inside the block, to evaluate or save it. A collective.

        After the block, the model has its own values again.
        """
        self.refuse_inside_averaged("averaged()")
        with ordinary_tensors():
            self._prepare()
            tensors = self.replica.tensors()
            show = partial(or_rescue, self.replica, self._rescue, partial(self._show_mean, tensors))
            own = self.together(show, otherwise=lambda: [t.clone() for t in tensors])
            if own is None:  # this node has just taken over the members' model
                own = [t.clone() for t in tensors]
        try:
            self._showing_mean = True
            yield
        finally:
            self._showing_mean = False
            reshard(self.model)  # FSDP may have gathered the mean inside
            with ordinary_tensors():
                _put_back(tensors, own)

    def _show_mean(self, tensors: list[Tensor]) -> list[Tensor]:
        """Replace the model by the mean of all nodes. Returns what `tensors` held."""
        own = [t.clone() for t in tensors]
        try:
            self.replica.show_mean()
            return own
        except BaseException:
            _put_back(tensors, own)
            raise

    @ordinary_tensors()
    def consensus_distance(self) -> float:
        """Return 1/n sum_i ||x_i - x_bar||^2 of the trained parameters. A collective."""
        self._prepare()
        distance = self.together(self.replica.consensus_distance)
        return math.nan if distance is None else distance

    def _prepare(self) -> None:
        self.replica.settle()
        self.replica.check_tensors()

    def refuse_inside_averaged(self, what: str) -> None:
        """Raise RuntimeError inside averaged(), where the model is not this node's own."""
        if self._showing_mean:
            raise RuntimeError(
                f"{what} inside averaged(), where the model is the mean of all nodes: call it after the `with averaged():` block"
            )

    # ---- state -------------------------------------------------------------------------------------------------------------------

    @ordinary_tensors()
    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, with the messages in flight. Each rank saves its own model and optimizer beside it."""
        self.replica.settle()
        return self.replica.state_dict()

    @ordinary_tensors()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`. Build the Averager first, then load model, optimizer and averager."""
        self.refuse_inside_averaged("load_state_dict()")
        self.replica.load_state_dict(state)


def _put_back(tensors: list[Tensor], values: list[Tensor]) -> None:
    for t, value in zip(tensors, values, strict=True):
        t.copy_(value)
