"""Nodes of several ranks: whatever is inside, a node does what one process with all of its batch would, and sends as much."""

import contextlib
import copy
import datetime
import io
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import rumor
from rumor.flat import held
from tests.cluster import Cluster
from tests.problems import OPTIMIZERS, batches, decayed, flat, loss_fn, network
from tests.test_averager import Zoo

PAGE = Path(__file__).parent.parent / "docs" / "nodes.md"
STEPS = 11  # the last one is no global round


@pytest.fixture(scope="module")
def six() -> Iterator[Cluster]:
    """2 nodes of 3 ranks, or 3 of 2; the last test here breaks it."""
    cluster = Cluster(6)
    yield cluster
    cluster.stop(kill=True)


# ---- on the ranks -----------------------------------------------------------------------------------------------------------------


@lru_cache
def groups(size: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup, Any]:
    """This rank's group across nodes, the one inside its node of `size` ranks, and both as a mesh for FSDP."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size() // size, size), mesh_dim_names=("replicate", "shard"))
    limit = datetime.timedelta(seconds=6)
    across, inside = (dist.new_subgroups_by_enumeration(ranks, timeout=limit)[0] for ranks in (mesh.mesh.t().tolist(), mesh.mesh.tolist()))
    return across, inside, mesh


def averager_of(model: nn.Module, algorithm: Any, size: int) -> rumor.Averager:
    across, inside, _ = groups(size)
    return rumor.Averager(model, algorithm, group=across, local_group=inside)


def wrapped(model: nn.Module, how: str, size: int) -> nn.Module:
    _, inside, mesh = groups(size)
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model, process_group=inside)
    from torch.distributed.fsdp import fully_shard

    if isinstance(model, nn.Sequential):
        fully_shard(model[0], mesh=mesh["shard"])  # the rest is the root's, which FSDP treats in its own way
    return fully_shard(model, mesh=mesh["shard"])


def whole(model: nn.Module) -> Tensor:
    """All parameters, [d]; of a sharded model too."""
    return torch.cat(
        [p.full_tensor().detach().reshape(-1) if hasattr(p, "full_tensor") else p.detach().reshape(-1) for p in model.parameters()]
    )


class Narrow(nn.Module):
    """So few parameters, and all of one row, that some ranks have none of them."""

    def __init__(self, d: int):
        super().__init__()
        self.line = nn.Parameter(torch.linspace(0.2, 0.5, d, dtype=torch.float64)[None])  # [1, d]

    def forward(self, x: Tensor) -> Tensor:
        z = x[..., : self.line.shape[1]] @ self.line.t()
        return torch.cat([z, 0 * z, -z], dim=-1)


MODELS: dict[str, Callable[[], nn.Module]] = {"network": network, "narrow": lambda: Narrow(1), "odd": lambda: Narrow(5)}


def links(n: int) -> rumor.Topology:
    """On a ring of 2 or 3, gossip would be a global average."""
    pair = rumor.from_matrix(torch.tensor([[0.7, 0.3], [0.3, 0.7]], dtype=torch.float64))
    return pair if n == 2 else rumor.from_networkx(nx.path_graph(n))


def lopsided(n: int) -> rumor.Topology:
    """Push-sum weights that are not 1 take three nodes."""
    return links(n) if n == 2 else rumor.from_digraph(nx.DiGraph([(0, 1), (1, 2), (2, 0), (0, 2), (2, 1)]))


ALGORITHMS: dict[str, Callable[[int], Any]] = {
    "parallel_sgd": rumor.parallel_sgd,
    "local_sgd": lambda n: rumor.local_sgd(n, 3),
    "gossip_sgd complete": lambda n: rumor.gossip_sgd(rumor.complete(n)),
    "gossip_pga": lambda n: rumor.gossip_pga(links(n), 3),
    "gossip_pga delayed": lambda n: rumor.gossip_pga(links(n), 3, delay=1),
    "gossip_pga by gossip": lambda n: rumor.gossip_pga(links(n), 3, average_rounds=2),
    "local_sgd delayed": lambda n: rumor.gossip_pga(rumor.isolated(n), 3, delay=1),
    "gossip_aga": lambda n: rumor.gossip_aga(links(n), warmup=4, H_init=2, H_max=5),
    "gossip_aga delayed": lambda n: rumor.gossip_aga(links(n), warmup=4, H_init=2, H_max=5, delay=1),
    "gossip_aga by gossip": lambda n: rumor.gossip_aga(links(n), warmup=4, H_init=2, H_max=5, average_rounds=2, delay=1),
    "slowmo": lambda n: rumor.slowmo(links(n), 3, momentum=0.6, slow_lr=0.9),
    "osgp": lambda n: rumor.osgp(lopsided(n)),
    "sgp": lambda n: rumor.osgp(lopsided(n), delay=0),
}


def train_there(rank: int, size: int, how: str, model_name: str, name: str) -> dict[str, Any]:
    n = dist.get_world_size() // size
    model = wrapped(MODELS[model_name](), how, size)
    averager = averager_of(model, ALGORITHMS[name](n), size)
    opt = OPTIMIZERS["nesterov"](model.parameters())
    x, y = batches(STEPS, n * size)
    iterates = []
    for k in range(STEPS):
        lr = decayed(opt, k)
        loss = loss_fn(model, x[k, rank], y[k, rank])
        loss.backward()
        opt.step()
        opt.zero_grad()
        averager.step(loss, lr=lr)
        iterates.append(whole(model))
    result = {"x": torch.stack(iterates), "H": averager.metrics.H, "distance": averager.consensus_distance()}
    assert averager.metrics.consensus_distance == result["distance"]
    with averager.averaged():
        result["averaged"] = whole(model)
    assert torch.equal(whole(model), iterates[-1]), "its own again"
    averager.finish()
    return {**result, "finished": whole(model)}


def train_here(n: int, size: int, model_name: str, name: str) -> dict[str, Any]:
    """n nodes of one rank, with the batches of `size` ranks each."""
    sim = rumor.Simulator(MODELS[model_name](), ALGORITHMS[name](n))
    opt = OPTIMIZERS["nesterov"](list(sim.parameters()))
    x, y = batches(STEPS, n * size)
    iterates = []
    for k in range(STEPS):
        lr = decayed(opt, k)
        losses = sim(loss_fn, x[k].reshape(n, -1, 5), y[k].reshape(n, -1))
        losses.sum().backward()
        opt.step()
        opt.zero_grad()
        sim.step(losses, lr=lr)
        iterates.append(sim.X)
    result = {"x": torch.stack(iterates, dim=1), "H": sim.metrics.H, "distance": sim.consensus_distance()}
    sim.finish()
    return {**result, "finished": sim.X}


def compare(cluster: Cluster, size: int, how: str, model_name: str, name: str) -> None:
    found = cluster.run(train_there, size, how, model_name, name)
    expected = train_here(len(found) // size, size, model_name, name)
    assert expected["distance"] > 1e-9 or name in ("parallel_sgd", "gossip_sgd complete")
    for rank, result in enumerate(found):
        node = rank // size
        assert (result["x"] - expected["x"][node]).abs().max() < 1e-9
        assert result["H"] == expected["H"]
        assert result["distance"] == pytest.approx(expected["distance"], rel=1e-6, abs=1e-20)
        assert (result["finished"] - expected["finished"][node]).abs().max() < 1e-9
        assert (result["averaged"] - expected["finished"][node]).abs().max() < 1e-9
        for what in ("x", "averaged", "finished"):
            assert torch.equal(result[what], found[node * size][what]), "bitwise alike inside a node"


# ---- what they should find ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_two_nodes_of_two_are_two_plain_nodes(four: Cluster, how: str, name: str) -> None:
    compare(four, 2, how, "network", name)


def test_nodes_of_one_rank_and_one_node_of_all(four: Cluster) -> None:
    compare(four, 1, "ddp", "network", "gossip_pga delayed")
    compare(four, 4, "ddp", "network", "parallel_sgd")


@pytest.mark.parametrize("model", ["odd", "narrow"])
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_parts_may_be_uneven_or_empty(six: Cluster, how: str, model: str) -> None:
    for name in ("gossip_pga", "gossip_aga delayed", "slowmo"):
        compare(six, 3, how, model, name)
    for name in ("gossip_aga", "osgp", "sgp"):  # their losses and weights must travel though a part is empty
        compare(six, 2, how, model, name)


def zoo(rank: int, size: int, average: bool) -> None:
    """A step of a model with parameters of all kinds, mixed dtypes among them."""
    across, _, _ = groups(size)
    n, node = dist.get_world_size(across), rank // size
    torch.manual_seed(rank)  # every rank starts elsewhere ...
    model = Zoo()
    topology = links(n)
    averager = averager_of(model, rumor.gossip_pga(topology, 1) if average else rumor.gossip_sgd(topology), size)
    torch.manual_seed(0)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for (name, t), first in zip(tensors.items(), (*(start := Zoo()).parameters(), *start.buffers()), strict=True):
        assert torch.equal(t, first), name  # ... and takes rank 0's
    begun = {name: t.detach().clone() for name, t in tensors.items()}
    with torch.no_grad():
        for name, t in tensors.items():
            if t.requires_grad or name == "running":
                t.add_(node + 1)
    averager.step()
    moved = sum(float(topology.W()[node, j]) * (j + 1) for j in range(n)) if not average else (n + 1) / 2
    for name, t in tensors.items():
        if not t.requires_grad and name != "running":
            assert torch.equal(t, begun[name]), name
            continue
        add = moved if t.requires_grad or average else node + 1
        tolerance = 6e-2 if t.dtype == torch.bfloat16 else 1e-5
        assert ((t.detach() - (begun[name] + add)).abs() <= tolerance).all(), name


@pytest.mark.parametrize("average", [True, False], ids=["global", "gossip"])
def test_parameters_and_buffers_of_all_kinds(six: Cluster, average: bool) -> None:
    six.run(zoo, 2, average)
    six.run(zoo, 3, average)


def bytes_across(rank: int, size: int, how: str, delay: int) -> tuple[int, int]:
    """What this rank sends to other nodes in 6 steps: as counted here, and by the metrics."""
    across, _, _ = groups(max(size, 2))
    model = nn.Linear(99, 100)  # 10,000 numbers
    n = dist.get_world_size(across)
    algorithm = rumor.gossip_pga(rumor.ring(n), 3, delay=delay)
    averager = averager_of(wrapped(model, how, size), algorithm, size) if size > 1 else rumor.Averager(model, algorithm, group=across)
    sent, isend, all_reduce = [], dist.isend, dist.all_reduce

    def counted_isend(tensor: Tensor, *arguments: Any) -> Any:
        sent.append(tensor.nbytes)
        return isend(tensor, *arguments)

    def counted_all_reduce(tensor: Tensor, *arguments: Any, group: Any, **options: Any) -> Any:
        assert group is across, "inside the node, parts are gathered"
        sent.append(2 * (n - 1) * tensor.nbytes // n)
        return all_reduce(tensor, *arguments, group=group, **options)

    dist.isend, dist.all_reduce = counted_isend, counted_all_reduce
    try:
        for _ in range(6):
            averager.step()
        averager.state_dict()
    finally:
        dist.isend, dist.all_reduce = isend, all_reduce
    return sum(sent), averager.metrics.bytes_sent


@pytest.mark.parametrize("delay", [0, 1])
def test_a_node_sends_its_model_once_however_many_ranks_it_has(four: Cluster, delay: int) -> None:
    plain = four.run(bytes_across, 1, "", delay)[0][0]
    payload = 6 * 40_000
    heads = 6 * 8 * 64  # of 8 buckets
    assert payload <= plain <= payload + heads
    for how in ("ddp", "fsdp"):
        results = four.run(bytes_across, 2, how, delay)
        for node in (results[:2], results[2:]):
            assert payload <= sum(counted for counted, _ in node) <= payload + 2 * heads
            assert sum(counted for counted, _ in node) == sum(metric for _, metric in node)


def resumed(rank: int, name: str, folder: Path) -> None:
    """Saves after 5 steps, goes on; then starts anew, loads, and must end at the very same model."""
    x, y = batches(STEPS)
    ends = []
    for first in (0, 5):
        torch.manual_seed(rank + first)
        model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()
        ddp = wrapped(model, "ddp", 2)
        averager = averager_of(ddp, ALGORITHMS[name](2), 2)
        opt = OPTIMIZERS["adamw"](model.parameters())
        path = folder / f"{name}-{rank}.pt"
        if first:
            for part, state in zip((model, opt, averager), torch.load(path, weights_only=True), strict=True):
                part.load_state_dict(state)
        for k in range(first, STEPS):
            if k == 5 and not first:
                torch.save(copy.deepcopy([model.state_dict(), opt.state_dict(), averager.state_dict()]), path)
            loss = loss_fn(ddp, x[k, rank], y[k, rank])
            loss.backward()
            opt.step()
            opt.zero_grad()
            averager.step(loss, lr=0.01)
        ends.append(torch.cat([t.detach().double().reshape(-1) for t in model.state_dict().values()]))
        averager.finish()
    assert torch.equal(ends[0], ends[1])


def test_resume_matches_uninterrupted_bitwise(four: Cluster, tmp_path: Path) -> None:
    for name in ALGORITHMS:
        four.run(resumed, name, tmp_path)


# ---- FSDP --------------------------------------------------------------------------------------------------------------------------


def goes_on_with_its_own(rank: int) -> tuple[Tensor, Tensor]:
    """A forward inside averaged() gathers the mean; the next forward outside must not use it."""
    torch.manual_seed(rank // 2)  # each node starts elsewhere, and takes node 0's
    model = wrapped(nn.Linear(5, 3).double(), "fsdp", 2)
    averager = averager_of(model, rumor.local_sgd(2, 100), 2)
    x = torch.ones(2, 5, dtype=torch.float64)
    with torch.no_grad():
        start = model(x)
        model.reshard()
        for p in model.parameters():
            p.mul_(1 + rank // 2)
        with averager.averaged():
            mean = model(x)
        own = model(x)
    assert torch.allclose(mean, 1.5 * start)
    assert torch.allclose(own, (1 + rank // 2) * start)
    model.reshard()
    averager.step()
    return start, own


def test_a_forward_after_averaged_uses_the_nodes_own_model(four: Cluster) -> None:
    (start, one), _, (other_start, other), _ = four.run(goes_on_with_its_own)
    assert torch.equal(start, other_start)
    assert (one - other).abs().max() > 1e-3


class FullyShardedDataParallel(nn.Sequential):
    """By its name: the real one wants a GPU."""


def mistake(rank: int, what: str) -> None:
    from torch.distributed.fsdp import fully_shard

    across, inside, mesh = groups(2)
    pga = rumor.gossip_pga(rumor.ring(2), 3)
    if what == "no local group":
        rumor.Averager(wrapped(network(), "fsdp", 2), pga, group=across)
    elif what == "whole mesh":
        averager_of(fully_shard(network(), mesh=mesh), pga, 2)
    elif what == "whole mesh as local group":
        rumor.Averager(fully_shard(network(), mesh=mesh), rumor.gossip_sgd(rumor.ring(2)), group=across, local_group=dist.group.WORLD)
    elif what == "gathered":
        model = wrapped(network(), "fsdp", 2)
        averager = averager_of(model, pga, 2)
        with torch.no_grad():
            model(torch.ones(2, 5, dtype=torch.float64))
        averager.step()
    elif what == "FSDP1":
        averager_of(FullyShardedDataParallel(network()), pga, 2)
    elif what == "crossed groups":
        crossed, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
        rumor.Averager(network(), pga, group=crossed, local_group=inside)
    elif what == "all ranks as group":
        rumor.Averager(network(), rumor.gossip_sgd(rumor.ring(4)), group=dist.group.WORLD, local_group=inside)
    elif what == "a problem on rank 3":
        averager_of(nn.ReLU() if rank == 3 else network(), pga, 2)
    elif what == "other layout on rank 1":
        model = network()
        if rank == 1:
            model[0].weight.data = model[0].weight.data.t().contiguous().t()
        averager_of(model, pga, 2)
    elif what == "gaps":
        model = network()
        model[0].weight.data = torch.ones(6, 10, dtype=torch.float64)[:, :5]
        averager_of(model, pga, 2)
    elif what == "other local rank's state":
        averager = averager_of(network(), pga, 2)
        averager.load_state_dict({**averager.state_dict(), "local_rank": 1 - rank % 2})
    elif what == "state of a plain node":
        state = rumor.Averager(network(), pga, group=across).state_dict()
        averager_of(network(), pga, 2).load_state_dict(state)
    elif what == "simulator":
        rumor.Simulator(wrapped(network(), "fsdp", 2), pga)


MISTAKES = {
    "no local group": r"parameter 0.weight is a DTensor over ranks \[., .\]: pass these as local_group=",
    "whole mesh": r"0.weight is placed as \(Replicate\(\), Shard\(dim=0\)\) over ranks \[0, 1, 2, 3\], but must be",
    "whole mesh as local group": r"is placed as \(Replicate\(\), Shard\(dim=0\)\)",
    "gathered": r"FSDP has parameters gathered.*: call model.reshard\(\)",
    "FSDP1": r"use torch.distributed.fsdp.fully_shard",
    "crossed groups": "disagree on the rank inside the node .*: rank 0 has . of 2, rank 1 has . of 2",
    "all ranks as group": "disagree on the (node that they are in|rank inside the node)",
    "a problem on rank 3": "ReLU has no parameters that train",
    "other layout on rank 1": r"disagree on the layout in memory: .*0.weight \[1, 6\]",
    "gaps": r"shape \[6, 5\] and strides \[10, 1\] has gaps",
    "other local rank's state": r"state of rank (.), local rank (.), but this is rank \1, local rank (?!\2)",
    "state of a plain node": r"state of rank (.), but this is rank \1, local rank",
    "simulator": "the Simulator needs it whole",
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_gives_a_clear_error_on_every_rank(four: Cluster, what: str) -> None:
    for _, text in four.errors(mistake, what):
        assert re.search(MISTAKES[what], text), text


# ---- a model that is not finite -----------------------------------------------------------------------------------------------------


def poisoned(rank: int, how: str, name: str) -> tuple[str, int, bool]:
    """The last weight of node 1, in the part of its rank 1 alone, goes bad before step 5. Returns error, step, and: still finite?"""
    model = network()
    model = model if how == "plain" else wrapped(model, how, 2)
    averager = averager_of(model, ALGORITHMS[name](dist.get_world_size() // 2), 2)
    here = [held(p) for p in model.parameters()]
    try:
        for k in range(12):
            if k == 5 and rank == 3:  # on this rank alone, which tells its node
                with torch.no_grad():
                    here[-1][-1] = float("nan")
            averager.step(1.0, lr=0.1)
    except FloatingPointError as error:
        return str(error), k, all(bool(p.isfinite().all()) for p in here)
    return "no error", 12, True


@pytest.mark.parametrize("nodes", [2, 3])
@pytest.mark.parametrize("how", ["plain", "fsdp"])
def test_a_part_that_is_not_finite_stops_all_ranks_at_the_same_step(four: Cluster, six: Cluster, how: str, nodes: int) -> None:
    for name in ALGORITHMS:
        results = (four if nodes == 2 else six).run(poisoned, how, name, deadline=30.0)
        assert len({(text, k) for text, k, _ in results}) == 1, f"{name}: {results}"
        assert 5 <= results[0][1] <= 9, name
        assert "the model of node 1 was not finite" in results[0][0], f"{name}: {results[0][0]}"
        assert all(finite for _, _, finite in results[:2] + results[4:]), f"{name}: it has spread"


def poisoned_at_the_end(rank: int, call: str) -> None:
    model = network()
    averager = averager_of(model, rumor.gossip_pga(rumor.ring(2), 50, delay=1), 2)
    averager.step()
    if rank == 3:
        with torch.no_grad():
            model[2].bias[-1] = float("nan")
    if call == "averaged":
        with averager.averaged():
            raise AssertionError("the mean of a model that is not finite has been shown")
    getattr(averager, call)()


@pytest.mark.parametrize("call", ["averaged", "finish", "consensus_distance"])
def test_global_calls_raise_on_every_rank(four: Cluster, call: str) -> None:
    errors = four.errors(poisoned_at_the_end, call)
    assert {kind for kind, _ in errors} == {FloatingPointError}, errors
    assert len({text for _, text in errors}) == 1


def several(averager: rumor.Averager) -> None:
    for _ in range(9):
        averager.step()


def back_to_a_checkpoint(rank: int) -> Tensor:
    model = network()
    averager = averager_of(model, rumor.gossip_pga(rumor.ring(2), 4, delay=1), 2)
    averager.step()
    saved = {name: t.clone() for name, t in model.state_dict().items()}, averager.state_dict()
    if rank == 3:
        with torch.no_grad():
            model[2].bias[-1] = float("nan")
    with pytest.raises(FloatingPointError):
        several(averager)
    model.load_state_dict(saved[0])
    averager.load_state_dict(saved[1])
    for _ in range(5):
        averager.step()
    return flat(model)


def test_the_run_can_go_back_to_a_checkpoint(four: Cluster) -> None:
    assert all(model.isfinite().all() for model in four.run(back_to_a_checkpoint))


def step_for_ever(rank: int) -> tuple[str, float]:
    """Rank 1, inside node 0 of 3, dies at step 3."""
    averager = averager_of(network(), rumor.gossip_sgd(rumor.ring(3)), 2)
    began = time.monotonic()
    try:
        for k in range(1000):
            if rank == 1 and k == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            averager.step()
    except ConnectionError as error:
        return str(error), time.monotonic() - began
    return "no error", 0.0


def test_a_dead_rank_is_an_error_within_the_time_out(six: Cluster) -> None:
    for text, seconds in six.survivors(1, step_for_ever, deadline=40.0).values():
        assert "lost touch with the others while" in text
        assert seconds < 20


# ---- what the page says ---------------------------------------------------------------------------------------------------------------


def example(rank: int, script: str) -> str:
    """As under torchrun, but in the group that is there: to start processes takes ten times as long as to run it."""
    start, end, said = dist.init_process_group, dist.destroy_process_group, io.StringIO()
    try:
        dist.init_process_group = dist.destroy_process_group = lambda *_: None
        with contextlib.redirect_stdout(said):
            exec(script, {})
    finally:
        dist.init_process_group, dist.destroy_process_group = start, end
    return said.getvalue()


@pytest.mark.parametrize("script", re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S), ids=["ddp", "fsdp"])
def test_the_examples_of_the_page(four: Cluster, script: str) -> None:
    found = re.fullmatch(r"loss ([\d.]+); this rank sent [\d,]+ bytes to other nodes\n", four.run(example, script)[0])
    assert found
    assert float(found[1]) < 3.0  # 20 at the start
