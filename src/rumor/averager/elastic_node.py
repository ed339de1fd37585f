"""ElasticNode: a node of several ranks in an elastic group. Its first rank is the member, and shares what comes of each step.

The other ranks take no part in messages between nodes. So as many bytes leave a node as with one rank, and the node comes and goes as a
whole. If one of its ranks dies, the others raise ConnectionError: start the whole node again.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from rumor.averager.elastic import Elastic
from rumor.averager.replica import Replica
from rumor.engines.processes import handshake
from rumor.engines.processes.gloo_group import GlooGroup, store_server
from rumor.engines.processes.local_group import LocalGroup
from rumor.engines.processes.process_group import ProcessGroup
from rumor.engines.processes.transport import Group, Transport
from rumor.membership import limits
from rumor.membership.group import ElasticGroup
from rumor.membership.offer import JobEndedError
from rumor.membership.protocol import Address
from rumor.methods.algorithm import Algorithm
from rumor.metrics import Metrics
from rumor.model.tensors import as_real, ordinary_tensors
from rumor.schedule import ScheduleState

T = TypeVar("T")
DOING = "sharing a step inside the node"


def member_of(
    group: ElasticGroup,
    local_group: Group | None,
    replica: Replica,
    algorithm: Algorithm,
    setup: dict[str, str],
    optimizer: torch.optim.Optimizer | None,
) -> Elastic | ElasticNode:
    """Join the members of an elastic group. Waits until they let this node in."""
    if local_group is None:
        return Elastic(group, replica, algorithm, setup, optimizer)
    return ElasticNode(group, local_group, replica, algorithm, setup, optimizer)


class ElasticNode:
    """One rank of such a node. It has the methods of `Elastic`.

    Args:
        group: the coordinator, and this node's name.
        local_group: the ranks of this node.
        replica: the model of this rank.
        algorithm: the method, for any number of nodes.
        setup: what must be the same on all nodes, and on all ranks of a node.
        optimizer: whose state newcomers take over, if any.
    """

    def __init__(
        self,
        group: ElasticGroup,
        local_group: Group,
        replica: Replica,
        algorithm: Algorithm,
        setup: dict[str, str],
        optimizer: torch.optim.Optimizer | None,
    ):
        self._replica, self._optimizer, self._needs_loss = replica, optimizer, algorithm.needs_loss
        self._local = Transport(local_group, Metrics(), called="local rank")
        handshake.agree(self._local, setup)
        self.members: list[str] = []
        self.rank = 0
        self._shared_at = time.monotonic()
        self._member: Elastic | None = None
        if self._local.rank == 0:
            self._attempt(lambda: self._join(group, algorithm, setup))
        else:
            self._attach_alone(algorithm)
            self._share(everything=True)

    def _join(self, group: ElasticGroup, algorithm: Algorithm, setup: dict[str, str]) -> None:
        self._member = Elastic(
            group, self._replica, algorithm, {**setup, "ranks of a node": str(self._local.n)}, self._optimizer, self._keep_others_waiting
        )

    def _attach_alone(self, algorithm: Algorithm) -> None:
        """Attach the replica of another rank to an engine without neighbours: it counts steps, and sends nothing."""
        self._store = store_server()
        self._gloo = GlooGroup(Address("127.0.0.1", self._store.port), "alone", 0, 1, "127.0.0.1")
        engine = ProcessGroup(self._gloo)
        self._replica.attach(engine, LocalGroup(engine), algorithm.bind(1), broadcast=False)

    # ---- what Elastic does, by the first rank for all --------------------------------------------------------------------------------

    @property
    def has_left(self) -> bool:
        return self._member is not None and self._member.has_left

    @property
    def place(self) -> tuple[int, int]:
        """Number of this rank among the ranks of all members, and how many there are."""
        return self.rank * self._local.n + self._local.rank, len(self.members) * self._local.n

    def step(self, loss: Tensor | float | None, lr: float | None) -> None:
        if self._needs_loss and loss is not None:
            losses = self._local.gather_objects(float(loss), "averaging the loss inside the node")
            loss = sum(losses) / len(losses)
        if self._member is not None:
            member = self._member
            self._attempt(lambda: member.step(loss, lr))
        else:
            self._share()

    def together(self, do: Callable[[], T], otherwise: Callable[[], T] | None = None, rejoins: bool = False) -> T | None:
        """Let the first rank call `do`. The others call `otherwise` before they get the model that it has then."""
        if self._member is not None:
            member = self._member
            return self._attempt(lambda: member.together(do, rejoins=rejoins), everything=rejoins)
        kept = None if otherwise is None else otherwise()
        header = self._share()
        if header["took_over"]:
            return None
        return header["result"] if otherwise is None else kept

    def finish(self) -> None:
        if self._member is not None:
            self._attempt(self._member.finish)
        else:
            self._share()

    def leave(self) -> None:
        if self._member is not None:
            self._member.leave()

    # ---- inside the node -------------------------------------------------------------------------------------------------------------

    def _attempt(self, do: Callable[[], T], everything: bool = False) -> T:
        """Call `do` on the first rank, and share what has come of it, also an error."""
        is_first = self._member is None
        k, takeovers = (0, 0) if self._member is None else (self._replica.runner.k, self._member.takeovers)
        try:
            result = do()
        except (Exception, JobEndedError) as error:
            self._share(error=error)
            raise
        assert self._member is not None
        took_over = self._member.takeovers != takeovers
        self._share(everything or is_first or took_over or self._replica.runner.k not in (k, k + 1), took_over, result)
        return result

    def _share(
        self, everything: bool = False, took_over: bool = False, result: object = None, error: BaseException | None = None
    ) -> dict[str, Any]:
        """Send the state of the first rank to the others. Returns what it has said."""
        own = self._header(everything, took_over, result, error) if self._local.rank == 0 else None
        header = self._exchange(own)
        while header.get("is_waiting"):
            header = self._exchange(own)
        if self._local.rank > 0:
            if header.get("ended_at") is not None:
                raise JobEndedError(header["ended_at"])
            if header["error"] is not None:
                raise RuntimeError(f"the first rank of this node has failed: {header['error']}")
            self._follow(header)
        if header["error"] is None:
            with ordinary_tensors():
                self._broadcast(header["everything"])
        return header

    def _exchange(self, own: dict[str, Any] | None) -> dict[str, Any]:
        """Return what the first rank says."""
        header: dict[str, Any] = self._local.gather_objects(own, DOING)[0]
        self._shared_at = time.monotonic()
        return header

    def _keep_others_waiting(self) -> None:
        """Tell the other ranks now and then that the first one waits, so that their wait does not time out."""
        if time.monotonic() - self._shared_at > limits.SILENCE:
            self._exchange({"is_waiting": True})

    def _header(self, everything: bool, took_over: bool, result: object, error: BaseException | None) -> dict[str, Any]:
        if error is not None or self._member is None:
            return {"error": f"{type(error).__name__}: {error}", "ended_at": getattr(error, "k", None)}
        self.members, self.rank = self._member.members, self._member.rank
        metrics, optimizer = self._replica.engine.metrics, None
        if everything and self._optimizer is not None:
            file = io.BytesIO()
            torch.save(self._optimizer.state_dict(), file)
            optimizer = file.getvalue()
        return {
            "error": None,
            "everything": everything,
            "took_over": took_over,
            "result": result if isinstance(result, int | float | str) else None,
            "members": self.members,
            "rank": self.rank,
            "schedule": tuple(self._replica.runner.state.schedule),
            "rounds": dict(metrics.rounds),
            "membership": (metrics.membership_changes, metrics.seconds_regrouping),
            "positions": self._replica.samplers.positions if everything else None,
            "optimizer": optimizer,
        }

    def _follow(self, header: dict[str, Any]) -> None:
        self.members, self.rank = header["members"], header["rank"]
        runner, metrics = self._replica.runner, self._replica.engine.metrics
        runner.state.schedule = ScheduleState(*header["schedule"])
        metrics.rounds.update(header["rounds"])
        metrics.H = runner.state.schedule.H
        metrics.membership_changes, metrics.seconds_regrouping = header["membership"]
        if header["optimizer"] is not None and self._optimizer is not None:
            self._optimizer.load_state_dict(torch.load(io.BytesIO(header["optimizer"]), weights_only=True, map_location="cpu"))
            self._replica.check_tensors()
        if header["positions"] is not None:
            self._replica.samplers.restore(header["positions"])

    def _broadcast(self, everything: bool) -> None:
        """Give all ranks the first one's model: what is averaged, or all of it."""
        model = self._replica.model
        tensors = [as_real(t.detach()) for t in (*model.parameters(), *model.buffers())] if everything else self._replica.shared_tensors()
        for kind in dict.fromkeys((t.dtype, t.device) for t in tensors):
            alike = [t for t in tensors if (t.dtype, t.device) == kind]
            flat = torch.cat([t.reshape(-1) for t in alike])
            self._local.broadcast([flat])
            if self._local.rank > 0:
                parts = torch.split(flat, [t.numel() for t in alike])
                torch._foreach_copy_(alike, [part.view(t.shape) for part, t in zip(parts, alike, strict=True)])
