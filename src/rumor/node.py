"""What is inside a node of several ranks: which part of the model each of them exchanges, and how the node gets the outcome.

Of tensors that the ranks of a node hold alike (DDP), rank l of L exchanges the l-th of L equal stretches with its counterparts on other
nodes, and then the node gathers them: d numbers leave it, not L d. Of DTensors (FSDP2) each rank exchanges its own shard, and there is
nothing to gather. The alarm goes along: only the rank whose part is not finite hears of it, and all of them must stop at the same step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from rumor.channel import Alarm
from rumor.flat import as_real, is_sharded
from rumor.process_group import ProcessGroup
from rumor.vote import Vote

LINE = 64  # bytes: what a rank has to tell begins at multiples of it, whatever its dtype


class Node:
    """This node as its ranks see it: `engine` reaches the other nodes, `engine.inside` (None where a node is one rank) its own ranks."""

    def __init__(self, engine: ProcessGroup):
        self._engine, self._inside = engine, engine.inside

    @property
    def local_rank(self) -> int | None:
        """Of this process inside the node; None where it is alone there."""
        return None if self._inside is None else self._inside.rank

    def agree(self, setup: dict[str, str], problem: Exception | None) -> None:
        """Raises on every rank of every node unless all have the same set-up and none a problem: first inside each node, then across."""
        if self._inside is not None:
            node = f"{self._engine.rank} of {self._engine.n}"
            try:
                self._inside.agree({**setup, "node that they are in (their rank in group=)": node}, problem)
            except (TypeError, ValueError, RuntimeError) as error:
                problem = error
            setup = {**setup, "rank inside the node (in local_group=)": f"{self._inside.rank} of {self._inside.n}"}
        self._engine.agree(setup, problem, [] if self._inside is None else list(self._inside.doors.values()))
        if self._inside is not None:
            self._inside.doors = self._engine.doors  # it may be any of them that is lost

    @property
    def size(self) -> int:
        """Ranks of this node."""
        return 1 if self._inside is None else self._inside.n

    def meet(self, values: dict[str, str], doing: str) -> None:
        """All ranks of all nodes; raises on every one of them unless all bring the same values."""
        problem = None
        if self._inside is not None:
            try:
                self._inside.compare(values, doing)
            except ValueError as error:
                problem = error
        self._engine.compare({**values, "word from inside the nodes": str(problem)}, doing)
        if problem is not None:
            raise problem

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Every rank of every node takes the values of rank 0 of node 0; of a DTensor, of its counterpart on node 0."""
        if self._inside is not None:
            self._inside.broadcast([t for t in tensors if not is_sharded(t)])
        self._engine.broadcast(tensors)

    def part(self, tensors: Sequence[Tensor]) -> Part:
        return Part(tensors, self._inside)

    def share(self, *parts: Part, settle: bool) -> None:
        """All ranks get what each of them has of `parts`, and know what each of them knows; `settle`: of a global round, too."""
        if self._inside is None:
            return
        with record_function("rumor::share"):
            for part in parts:
                part.share(self._engine._alarm)
        if settle:
            self._engine.raise_settled_alarm()

    def vote(self) -> Vote:
        """A question that all nodes are asked together, again and again."""
        return Vote(self._engine)

    def all_of(self, yes: bool) -> bool:
        """Of the ranks of this node."""
        return yes if self._inside is None else bool(self._told(self._inside, torch.tensor([float(yes)], device=self._inside.device)).min())

    def mean(self, value: Tensor) -> Tensor:
        """Of a number [1]."""
        return value if self._inside is None else self._told(self._inside, value).mean(dim=0)

    def sum(self, value: float) -> float:
        """Of a number that came of a global round; raises as `share` does."""
        if self._inside is None:
            return value
        own = torch.full((3,), value, dtype=torch.float64, device=self._inside.device)
        self._engine._alarm.tell(own[:2])
        told = self._told(self._inside, own)
        self._engine._alarm.merge(told[:, :2])
        self._engine.raise_settled_alarm()
        return float(told[:, 2].sum())

    @staticmethod
    def _told(inside: ProcessGroup, own: Tensor) -> Tensor:
        """[L, s]: the numbers [s] of all ranks."""
        rows = torch.zeros(inside.n, own.numel(), dtype=own.dtype, device=inside.device)
        rows[inside.rank].copy_(own)
        inside.gather(rows, "comparing numbers inside the node")
        return rows


class Part:
    """Of a node's tensors, what this rank exchanges (`mine`, views of them), and how it gets the rest."""

    def __init__(self, tensors: Sequence[Tensor], inside: ProcessGroup | None):
        self.mine = [as_real(t) for t in tensors if inside is None or is_sharded(t)]
        self._sharded = [is_sharded(t) for t in tensors]
        self._inside = inside
        self._row: _Row | None = None
        if inside is None:
            return
        alike = [as_real(t) for t in tensors if not is_sharded(t)]
        self._stretches = [_Stretches([t for t in alike if t.dtype == dtype], inside.n) for dtype in dict.fromkeys(t.dtype for t in alike)]
        for stretches in self._stretches:
            self.mine += stretches.pieces[inside.rank]
        if tensors and not any(t.numel() for t in self.mine):
            self.mine.append(as_real(tensors[0]).new_zeros(1))  # losses and weights travel with the first number, so there must be one

    def is_gathered(self, tensors: Sequence[Tensor]) -> bool:
        """Has FSDP put whole tensors in the place of some shards?"""
        return any(was and not is_sharded(t) for was, t in zip(self._sharded, tensors, strict=True))

    def share(self, alarm: Alarm) -> None:
        assert self._inside is not None
        if self._row is None:
            self._row = _Row(self._stretches, self._inside)
        self._row.fill(alarm)
        self._inside.gather(self._row.all, "sharing its parts inside the node")
        self._row.take(alarm)


class _Stretches:
    """Tensors of one dtype, end to end, cut into L stretches of one length: `pieces[l]`, views. The last ones may be shorter, or empty."""

    def __init__(self, tensors: Sequence[Tensor], L: int):
        self.dtype = tensors[0].dtype
        self.length = -(-sum(t.numel() for t in tensors) // L)
        self.pieces: list[list[Tensor]] = [[] for _ in range(L)]
        at = 0
        for rest in map(_laid_flat, tensors):
            while rest.numel():
                piece = rest[: self.length - at % self.length]
                self.pieces[at // self.length].append(piece)
                rest, at = rest[piece.numel() :], at + piece.numel()


class _Row:
    """What the ranks of a node tell each other, a row of bytes each: what they know of alarms, then their stretch of each dtype."""

    def __init__(self, stretches: Sequence[_Stretches], inside: ProcessGroup):
        sizes = [s.length * s.dtype.itemsize for s in stretches]
        ends = [LINE]
        for size in sizes:
            ends.append(ends[-1] + -(-size // LINE) * LINE)
        self.all = torch.zeros(inside.n, ends[-1], dtype=torch.uint8, device=inside.device)
        self._heads = self.all[:, :16].view(torch.float64)
        self._rank = inside.rank
        # of each dtype, the pieces of each rank and their places here
        self._own: list[tuple[list[Tensor], list[Tensor]]] = []
        self._others: list[tuple[list[Tensor], list[Tensor]]] = []
        for s, start, size in zip(stretches, ends, sizes, strict=False):
            pieces: list[Tensor] = []
            slots: list[Tensor] = []
            for rank, row in enumerate(self.all[:, start : start + size].unbind()):
                lengths = [p.numel() for p in s.pieces[rank]]
                places = torch.split(row.view(s.dtype)[: sum(lengths)], lengths)
                if rank == inside.rank:
                    self._own.append((s.pieces[rank], list(places)))
                else:
                    pieces += s.pieces[rank]
                    slots += places
            self._others.append((pieces, slots))

    def fill(self, alarm: Alarm) -> None:
        for pieces, slots in self._own:
            if pieces:
                torch._foreach_copy_(slots, pieces)
        alarm.tell(self._heads[self._rank])

    def take(self, alarm: Alarm) -> None:
        for pieces, slots in self._others:
            if pieces:
                torch._foreach_copy_(pieces, slots)
        alarm.merge(self._heads)


def _laid_flat(t: Tensor) -> Tensor:
    """All of its numbers as one row, in the order in which they lie in memory: a view."""
    order = sorted(range(t.dim()), key=t.stride, reverse=True)
    try:
        return t.permute(order).view(-1)
    except RuntimeError as error:
        raise ValueError(
            f"a tensor of shape {list(t.shape)} and strides {list(t.stride())} has gaps: make it contiguous() first"
        ) from error


def layouts(model: nn.Module) -> str:
    """What ranks that exchange stretches of memory must have alike, beyond names and shapes."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return ", ".join(f"{name} {list(t.stride())}" for name, t in tensors if not t.is_contiguous()) or "contiguous"


# ---- FSDP -------------------------------------------------------------------------------------------------------------------------


def check_shards(model: nn.Module, inside: ProcessGroup | None) -> None:
    """Refuses DTensors of which counterparts on the nodes would not have the same part."""
    if any(_is_a(module, "FullyShardedDataParallel") for module in model.modules()):
        raise ValueError("FullyShardedDataParallel (FSDP1) hides the parameters: use torch.distributed.fsdp.fully_shard (FSDP2)")
    for name, p in model.named_parameters():
        if not is_sharded(p):
            continue
        mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
        ranks = mesh.mesh.flatten().tolist()
        if inside is None:
            raise ValueError(
                f"parameter {name} is a DTensor over ranks {ranks}: pass these as local_group= (the ranks inside this node), and as group= "
                "one rank of each node"
            )
        if sorted(ranks) != sorted(inside.ranks) or not all(placement.is_shard() for placement in placements):
            raise ValueError(
                f"parameter {name} is placed as {placements} over ranks {ranks}, but must be sharded over the ranks of local_group=, "
                f"{inside.ranks}, and no more, as by fully_shard(model, mesh=mesh['shard']): across nodes, Rumor averages in FSDP's place"
            )


def reshard(model: nn.Module) -> None:
    """FSDP2 leaves its root's parameters gathered after a forward without a backward; what is averaged are the shards."""
    for module in model.modules():
        if _is_a(module, "FSDPModule"):
            module.reshard()  # type: ignore[operator]


def _is_a(module: nn.Module, name: str) -> bool:
    """By name: to import FSDP takes a second, and whoever uses it has done so."""
    return any(kind.__name__ == name for kind in type(module).__mro__)
