"""LocalGroup: a node of one or several ranks, and the services around its engine: handshake, meetings, votes, sums inside the node."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rumor.engines.processes import handshake
from rumor.engines.processes.join import JoinVote
from rumor.engines.processes.local_shard import LocalShard
from rumor.engines.processes.process_group import ProcessGroup
from rumor.engines.processes.transport import Transport
from rumor.metrics import span
from rumor.model.tensors import is_sharded


class LocalGroup:
    """The ranks of this node. `engine` connects this rank to its counterparts on the other nodes."""

    def __init__(self, engine: ProcessGroup):
        self._engine, self._across, self._local = engine, engine.transport, engine.local

    @property
    def local_rank(self) -> int | None:
        """Rank of this process inside the node; None if it is alone there."""
        return None if self._local is None else self._local.rank

    @property
    def place(self) -> tuple[int, int]:
        """Number of this node, and the rank inside it."""
        return self._engine.rank, self.local_rank or 0

    @property
    def size(self) -> int:
        """Number of ranks of this node."""
        return 1 if self._local is None else self._local.n

    # ---- all ranks of all nodes ----------------------------------------------------------------------------------------------------

    def agree(self, setup: dict[str, str], problem: Exception | None) -> None:
        """Raise on every rank of every node unless all have the same set-up and none has a problem."""
        if self._local is None:
            handshake.agree(self._across, setup, problem)
            return
        node = f"{self._engine.rank} of {self._engine.n}"
        try:
            handshake.agree(self._local, {**setup, "node that they are in (their rank in group=)": node}, problem)
        except (TypeError, ValueError, RuntimeError) as error:
            problem = error
        setup = {**setup, "rank inside the node (in local_group=)": f"{self._local.rank} of {self._local.n}"}
        handshake.agree(self._across, setup, problem, list(self._local.addresses.values()))
        self._local.addresses = self._across.addresses  # any process of any node may be the lost one

    def meet(self, values: dict[str, str], doing: str) -> None:
        """Raise on every rank of every node unless all have the same values. Every rank waits until all have called it."""
        problem = None
        if self._local is not None:
            try:
                handshake.compare(self._local, values, doing)
            except ValueError as error:
                problem = error
        handshake.compare(self._across, {**values, "error inside a node": str(problem)}, doing)
        if problem is not None:
            raise problem

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Give every rank of every node the values of rank 0 of node 0; of a DTensor, those of its counterpart on node 0."""
        if self._local is not None:
            self._local.broadcast([t for t in tensors if not is_sharded(t)])
        self._across.broadcast(tensors)

    def from_first(self, number: int) -> int:
        """Return the number that rank 0 of node 0 has."""
        value = torch.tensor([number])
        self.broadcast([value])
        return int(value)

    def vote(self) -> JoinVote:
        """Return a vote of all nodes."""
        return JoinVote(self._across)

    # ---- the ranks of this node ----------------------------------------------------------------------------------------------------

    def shard(self, tensors: Sequence[Tensor]) -> LocalShard:
        return LocalShard(tensors, self._local)

    def share(self, *shards: LocalShard, settle: bool) -> None:
        """Gather shards and alarms inside the node. With settle=True, also raise if a global round has settled an alarm."""
        if self._local is None:
            return
        with span("rumor::share"):
            for shard in shards:
                shard.share(self._engine.alarm)
        if settle:
            self._engine.raise_settled_alarm()

    def all_of(self, yes: bool) -> bool:
        """Return whether all ranks of this node say yes."""
        return yes if self._local is None else bool(_gathered(self._local, torch.tensor([float(yes)], device=self._local.device)).min())

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a number [1] over the ranks of this node."""
        return value if self._local is None else _gathered(self._local, value).mean(dim=0)

    def sum(self, value: float) -> float:
        """Return the sum over the ranks of this node of a number that came from a global round. Raises as `share` does."""
        if self._local is None:
            return value
        own = torch.full((3,), value, dtype=torch.float64, device=self._local.device)
        self._engine.alarm.tell(own[:2])
        numbers = _gathered(self._local, own)
        self._engine.alarm.merge(numbers[:, :2])
        self._engine.raise_settled_alarm()
        return float(numbers[:, 2].sum())


def _gathered(local: Transport, own: Tensor) -> Tensor:
    """Return the numbers [s] of all ranks of this node, [L, s]."""
    rows = torch.zeros(local.n, own.numel(), dtype=own.dtype, device=local.device)
    rows[local.rank].copy_(own)
    local.gather(rows, "comparing numbers inside the node")
    return rows
