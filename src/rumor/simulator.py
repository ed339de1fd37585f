"""Simulator: n nodes in this one process, with exactly the methods that real processes run. engines/stacked.py mixes the models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

from rumor.engines import NO_BUCKETS, Buckets, PackedBuckets, Stacked, StackedBuckets
from rumor.engines.stacked import alike
from rumor.methods.algorithm import Algorithm, Step, check_algorithm
from rumor.methods.runner import Runner
from rumor.metrics import Metrics
from rumor.model.checks import check_module, trained_and_frozen
from rumor.model.node_module import NodeModule
from rumor.model.optimizer_state import AverageState, OptimizerState, check_average_state
from rumor.model.tensors import as_real, is_averaged, is_sharded
from rumor.topology import Topology

LOOK_EVERY = 64  # steps between looks at a GPU's record of models that are not finite, if no global average comes first


class Simulator:
    """n nodes in one process: a copy of `model` for each, as stacked leaves `[n, *shape]`.

    torch's own optimizers work on `sim.parameters()` because they are elementwise. An optimizer that looks at a whole parameter (LAMB,
    LARS, Muon, Adafactor), or code that looks at the whole model (gradient clipping), would mix the nodes. All nodes have the module's
    train/eval mode.

    >>> import rumor
    >>> model = nn.Linear(2, 1)
    >>> sim = rumor.Simulator(model, rumor.gossip_pga(rumor.ring(4), H=2))
    >>> opt = torch.optim.SGD(sim.parameters(), lr=0.1)
    >>> x, y = torch.randn(4, 8, 2), torch.randn(4, 8, 1)  # [n, batch, ...]
    >>> for _ in range(2):
    ...     losses = sim(lambda model, x, y: (model(x) - y).square().mean(), x, y)
    ...     losses.sum().backward()
    ...     opt.step(); opt.zero_grad()
    ...     sim.step(losses)
    >>> sim.consensus_distance() < 1e-12  # step 1 was global
    True

    Args:
        model: the module that all nodes start from. It is not changed.
        algorithm: a method such as `rumor.gossip_pga(rumor.ring(32), H=6)`.
        n: the number of nodes, for a method that is not bound to one: `Simulator(model, rumor.gossip_pga(rumor.ring, H=6), n=32)`.
        vmap: False runs the model node by node, for models that `torch.func.vmap` can't take (nn.LSTM, `.item()`, branches on data).
    """

    def __init__(self, model: nn.Module, algorithm: Algorithm, *, n: int | None = None, vmap: bool = True):
        check_module(model)
        algorithm = _bound(algorithm, n)
        trained_and_frozen(model)  # raises if nothing trains
        if any(is_sharded(p) for p in model.parameters()):
            raise ValueError("the model has DTensors (FSDP2 or tensor parallel), spread over processes: the Simulator needs it whole")
        self.n = n = algorithm.topology.n
        self._model, self._vmap = model, vmap
        self._leaves = {name: nn.Parameter(_stack(p, n), requires_grad=p.requires_grad) for name, p in model.named_parameters()}
        self._buffers = {name: _stack(buffer, n) for name, buffer in model.named_buffers()}
        self._trained = [leaf for leaf in self._leaves.values() if leaf.requires_grad]
        self._frozen = [leaf for leaf in self._leaves.values() if not leaf.requires_grad]
        self._state: OptimizerState | None = None
        self._average_state: AverageState | None = None
        self._first_bad = torch.full((n,), -1, device=self._trained[0].device)  # the step at which each node was first not finite, or -1
        self._start(algorithm)

    @torch.no_grad()
    def _start(self, algorithm: Algorithm) -> None:
        self.engine = Stacked(self.n, self._trained[0].device)
        floats = [b for b in self._buffers.values() if is_averaged(b)]
        rows = [[as_real(t).view(self.n, -1) for t in tensors] for tensors in (self._trained, floats)]
        buckets = StackedBuckets if algorithm.bits == 32 else PackedBuckets
        model, buffers = buckets(rows[0]), StackedBuckets(rows[1])
        if self._state is None:
            self._runner = Runner(algorithm, self.engine, model, buffers)
        else:
            self._state.has_changed()  # creates what is missing
            in_full = self._state.in_full
            self._state_buckets = (StackedBuckets if in_full else buckets)(self._state_rows(self._state))
            mixed: Buckets = NO_BUCKETS if in_full else self._state_buckets
            full: Buckets = self._state_buckets if in_full else NO_BUCKETS
            self._runner = Runner(algorithm, self.engine, model, buffers, mixed, self._state.mixed, full)
        must_be_finite = self._runner.nodes.buffers.finite_check is not None
        self._checked_buffers = [row for row in rows[1] if row.numel()] if must_be_finite else []
        self._was_global = False  # whether the last round was
        self._first_bad.fill_(-1)

    @torch.no_grad()
    def average_state(self, optimizer: torch.optim.Optimizer, average_state: AverageState | None) -> None:
        """Average the optimizer's state, too: at global averages ("global"), or at every step ("always"). Call it before the first step.

        It covers SGD's momentum ("global": while H > 1) and the moments of Adam, AdamW and the like, as in the Averager. None: it stays
        local. The learning rate, where a method needs it, is then read from `optimizer` if `step` is not given it.
        """
        if self._runner.steps_begun:
            raise RuntimeError(f"average_state() comes before the first step, and {self._runner.k} steps were taken: call restart() first")
        check_average_state(self._runner.algorithm, optimizer, average_state, self._trained)
        self._state = None if average_state is None else OptimizerState(optimizer, self._trained, self._runner.algorithm, average_state)
        self._average_state = average_state
        self._start(self._runner.algorithm)

    def _state_rows(self, state: OptimizerState) -> list[Tensor]:
        return [as_real(t).view(self.n, -1) for t in state.tensors()]

    @torch.no_grad()
    def restart(self, algorithm: Algorithm) -> None:
        """Start again with the module as it is now, and with any method for as many nodes.

        The stacked tensors stay where they are, so a step that was compiled, or captured in a CUDA graph, serves many runs. The
        optimizer's state is not touched.
        """
        check_algorithm(algorithm)
        if isinstance(algorithm.topology, Topology) and algorithm.topology.n != self.n:
            raise ValueError(
                f"this Simulator has {self.n} nodes, and {algorithm.topology} is for {algorithm.topology.n}: build another one"
            )
        algorithm = algorithm.bind(self.n)
        if self._state is not None:
            check_average_state(algorithm, self._state.optimizer, self._average_state, self._trained)
            self._state.check_method(algorithm)
        for stacked, own in ((self._leaves, self._model.named_parameters()), (self._buffers, self._model.named_buffers())):
            for name, tensor in own:
                stacked[name].copy_(tensor.expand_as(stacked[name]))
        self._start(algorithm)

    def __repr__(self) -> str:
        return f"Simulator({self.n} nodes, after {self._runner.k} steps of {self._runner.algorithm})"

    @property
    def metrics(self) -> Metrics:
        """Counters: rounds by kind, and the bytes that the average node would have sent."""
        return self.engine.metrics

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the stacked leaves, for the optimizer."""
        return iter(self._leaves.values())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self._leaves.items())

    @property
    def X(self) -> Tensor:
        """All models, [n, d]: a packed copy to look at."""
        return torch.cat([as_real(leaf).reshape(self.n, -1) for leaf in self._leaves.values()], dim=1)

    # ---- the training step ---------------------------------------------------------------------------------------------------------

    def __call__(self, loss_fn: Callable[..., Tensor], *batch: Any) -> Tensor:
        """Return the losses `[n]` of all nodes. `loss_fn(model, *node_batch)` returns one node's. Tensors in `batch` are `[n, B, ...]`."""
        self._check(batch)
        run = self._all_at_once if self._vmap else self._node_by_node
        return self._keep_buffers(*run(loss_fn, dict(self._leaves), self._buffers, batch))

    def compiled(self, loss_fn: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
        """Return `sim(loss_fn, *batch)` as a function of the batch, compiled with `torch.compile(..., **options)`. It outlives restart().

        Batches should have one shape: with dynamic=False, the default here, each shape is compiled anew (vmap can't take symbolic sizes).
        """
        node = NodeModule(self._model)

        def of_one(leaves: dict[str, Tensor], buffers: dict[str, Tensor], batch: tuple[Any, ...]) -> tuple[Tensor, dict[str, Tensor]]:
            return node.called_with(leaves, buffers, loss_fn, batch)

        of_all = torch.compile(vmap(of_one, randomness="different"), **{"dynamic": False, **options})

        def losses_of(*batch: Any) -> Tensor:
            self._check(batch)
            return self._keep_buffers(*of_all(dict(self._leaves), self._buffers, batch))

        return losses_of

    def _check(self, batch: tuple[Any, ...]) -> None:
        for leaf in tree_leaves(batch):
            if not isinstance(leaf, Tensor) or leaf.dim() == 0 or len(leaf) != self.n:
                got = list(leaf.shape) if isinstance(leaf, Tensor) else repr(leaf)
                raise ValueError(f"each tensor of a batch must be [n, ...] with n = {self.n}, one row a node, got {got}")

    def _keep_buffers(self, losses: Tensor, changed: dict[str, Tensor]) -> Tensor:
        """Take over the buffers as the model has left them, and return the losses."""
        if losses.dim() != 1:
            raise ValueError(f"loss_fn must return one number for its node, got a tensor of shape {list(losses.shape[1:])}")
        with torch.no_grad():
            for name, value in changed.items():
                self._buffers[name].copy_(value)
        return losses

    def _one_node(
        self, loss_fn: Callable[..., Tensor], leaves: dict[str, Tensor], buffers: dict[str, Tensor], batch: tuple[Any, ...]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return one node's loss, and the buffers that the model has replaced instead of changing them in place."""
        loss, now = NodeModule(self._model).called_with(leaves, buffers, loss_fn, batch)
        return loss, {name: value for name, value in now.items() if value is not buffers[name]}

    def _all_at_once(
        self, loss_fn: Callable[..., Tensor], leaves: dict[str, Tensor], buffers: dict[str, Tensor], batch: tuple[Any, ...]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        try:
            result: tuple[Tensor, dict[str, Tensor]] = vmap(self._one_node, in_dims=(None, 0, 0, 0), randomness="different")(
                loss_fn, leaves, buffers, batch
            )
        except RuntimeError as error:
            raise RuntimeError(
                f"{error}\nThis came from the model under torch.func.vmap. If vmap can't take it (nn.LSTM, .item(), branches on data), use "
                "Simulator(model, algorithm, vmap=False), which runs node by node"
            ) from error
        return result

    def _node_by_node(
        self, loss_fn: Callable[..., Tensor], leaves: dict[str, Tensor], buffers: dict[str, Tensor], batch: tuple[Any, ...]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        losses, changes = [], []
        for i in range(self.n):
            mine = [tree_map(lambda t, i=i: t[i], part) for part in (leaves, buffers, batch)]
            loss, changed = self._one_node(loss_fn, *mine)
            losses.append(loss)
            changes.append(changed)
        replaced = {name for changed in changes for name in changed}
        rows = {name: [changed.get(name, buffers[name][i]) for i, changed in enumerate(changes)] for name in replaced}
        return torch.stack(losses), {name: torch.stack(row) for name, row in rows.items()}

    @torch.no_grad()
    def step(self, losses: Tensor | None = None, lr: float | None = None) -> None:
        """Mix the models. Call it once per optimizer step. Gossip-AGA needs the `losses` [n], SlowMo and LearningRate the learning rate."""
        if any(leaf.requires_grad for leaf in self._frozen):
            raise RuntimeError("a parameter that was frozen when the Simulator was built now trains: build the Simulator after unfreezing")
        if losses is not None and (not isinstance(losses, Tensor) or losses.shape != (self.n,)):
            got = f"shape {list(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
            raise ValueError(f"step() takes the losses of all nodes, a tensor [{self.n}], got {got}")
        if self._state is not None:
            if lr is None and self._runner.algorithm.needs_lr:
                lr = self._state.optimizer.param_groups[0]["lr"]
            if self._state.has_changed():  # optimizer.load_state_dict() replaces its tensors
                self._state_buckets.rebind(self._state_rows(self._state))
        step = self._runner.decide(None if losses is None else losses.detach().to(torch.float64)[:, None], lr)
        self._look_for_bad_nodes(step)
        self._runner.begin(step)
        self._runner.settle()

    def _look_for_bad_nodes(self, step: Step) -> None:
        """Raise, with the node and the step, if a model is not finite. On a GPU only before the next average, so that it need not wait."""
        k = step.k
        of_leaves = [as_real(leaf).reshape(self.n, -1).norm(torch.inf, dim=1) for leaf in self._trained if leaf.numel()]
        largest = torch.stack(of_leaves).double().sum(dim=0)
        if self._checked_buffers:
            largest = largest + torch.cat(self._checked_buffers, dim=1).norm(torch.inf, dim=1)
        self._first_bad = torch.where((self._first_bad < 0) & ~largest.isfinite(), k, self._first_bad)
        was_global, self._was_global = self._was_global, step.kind == "global"
        # if a global average follows another (Parallel SGD), all nodes are the same already, so an average does no harm
        if largest.is_cuda and (was_global or not self._was_global) and (k + 1) % LOOK_EVERY:
            return
        bad = [(first, node) for node, first in enumerate(self._first_bad.tolist()) if first >= 0]
        if bad:
            first, node = min(bad)
            raise FloatingPointError(
                f"the model of node {node} was not finite (NaN or Inf) at step {first}: lower the learning rate or clip gradients"
            )

    # ---- the same methods as the Averager's -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def finish(self) -> None:
        """Use or drop what is in flight, then average once more: all nodes end with the same model."""
        self._runner.finish()

    @torch.no_grad()
    def consensus_distance(self) -> float:
        """Return 1/n sum_i ||x_i - x_bar||^2 of the trained parameters."""
        return self._runner.consensus_distance()

    @torch.no_grad()
    def mean_model(self) -> nn.Module:
        """Return an ordinary module that holds x_bar, and the mean of the float buffers."""
        module = self.node_model(0)
        trained: list[Tensor] = [p for p in module.parameters() if p.requires_grad]
        floats = [b for b in module.buffers() if is_averaged(b)]
        for tensors, means in zip((trained, floats), self._runner.mean(), strict=True):
            own = [as_real(tensor) for tensor in tensors]
            if tensors is trained and self._runner.algorithm.bits < 32:  # as PackedBuckets has them
                own = [tensor for group in alike(own) for tensor in group]
            mean = [message.wait().x.reshape(-1) for message in means]
            for tensor, part in zip(own, torch.split(torch.cat(mean), [t.numel() for t in own]) if mean else (), strict=True):
                tensor.copy_(part.view(tensor.shape))
        return module

    def node_model(self, i: int) -> nn.Module:
        """Return an ordinary module that holds node i's model."""
        return self._module(lambda stacked: stacked[i])

    @torch.no_grad()
    def _module(self, pick: Callable[[Tensor], Tensor]) -> nn.Module:
        module = copy.deepcopy(self._model)
        for mine, stacked in ((module.named_parameters(), self._leaves), (module.named_buffers(), self._buffers)):
            for name, tensor in mine:
                tensor.copy_(pick(stacked[name]))
        return module

    def state_dict(self) -> dict[str, Any]:
        """Return all nodes' parameters and buffers, and the method's state with the messages in flight."""
        stacked: dict[str, Mapping[str, Tensor]] = {"parameters": self._leaves, "buffers": self._buffers}
        saved = {part: {name: t.detach().clone() for name, t in tensors.items()} for part, tensors in stacked.items()}
        with torch.no_grad():
            return {**self._runner.state_dict(), **saved, "average_state": self._average_state}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        if not isinstance(state, dict) or not {"parameters", "buffers"} <= state.keys():
            raise ValueError("this is not a state of the Simulator: load what state_dict() returned")
        stacked: dict[str, Mapping[str, Tensor]] = {"parameters": self._leaves, "buffers": self._buffers}
        for part, tensors in stacked.items():
            theirs, mine = ({name: list(t.shape[1:]) for name, t in group.items()} for group in (state[part], tensors))
            if theirs != mine:
                raise ValueError(f"this state is of another model: its {part} are {theirs}, those here {mine}")
        if (there := state.get("average_state")) != self._average_state:
            raise ValueError(f"this state is of a run with average_state={there!r}, but here it is {self._average_state!r}")
        self._runner.load_state_dict(state)
        for part, tensors in stacked.items():
            for name, tensor in tensors.items():
                tensor.copy_(state[part][name])
        self._first_bad.fill_(-1)


def _bound(algorithm: Algorithm, n: int | None) -> Algorithm:
    check_algorithm(algorithm)
    if isinstance(algorithm.topology, Topology):
        if n not in (None, algorithm.topology.n):
            raise ValueError(f"{algorithm.topology} is for n={algorithm.topology.n} nodes, got n={n}: leave out n, or pass a builder")
    elif n is not None:
        return algorithm.bind(n)
    else:
        raise ValueError(f"{algorithm} fits any number of nodes, so the Simulator must be told: Simulator(model, algorithm, n=32)")
    return algorithm


def _stack(t: Tensor, n: int) -> Tensor:
    """Return n contiguous copies. On strided views, fused optimizers and batch_norm under vmap give wrong results without an error."""
    return t.detach().expand(n, *t.shape).clone(memory_format=torch.contiguous_format)
