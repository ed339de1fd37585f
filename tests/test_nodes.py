"""Nodes of several ranks: whatever is inside, a node does what one process with all of its batch would, and sends as much."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import rumor
from tests.cluster import Cluster
from tests.nodes import ALGORITHMS, IN_CODES, STEPS, averager_of, groups, links, train_here, train_there, whole, wrapped
from tests.problems import OPTIMIZERS, batches, loss_fn
from tests.test_averager import Zoo


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


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_two_nodes_of_two_are_two_plain_nodes(four: Cluster, how: str, name: str) -> None:
    compare(four, 2, how, "network", name)


def compare_in_codes(cluster: Cluster, size: int, how: str, model_name: str, name: str) -> None:
    """Codes of parts round otherwise than those of the whole model, so the reference is training with plain messages."""
    plain, delayed = name.split()[0], " delayed" if "delayed" in name else ""
    found = cluster.run(train_there, size, how, model_name, name)
    expected = train_here(len(found) // size, size, model_name, plain + delayed)
    moved = (expected["x"][:, -1] - expected["x"][:, 0]).abs().max()
    for rank, result in enumerate(found):
        node = rank // size
        assert 0 < (result["x"] - expected["x"][node]).abs().max() < 0.1 * moved, "close to what plain messages give"
        for what in ("x", "averaged", "finished"):
            assert torch.equal(result[what], found[node * size][what]), "bitwise alike inside a node"
    if not delayed:
        assert torch.equal(found[0]["x"][2], found[-1]["x"][2]) or "aga" in name, "and on all nodes after a global round"


@pytest.mark.parametrize("name", IN_CODES)
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_nodes_of_two_may_send_codes(four: Cluster, how: str, name: str) -> None:
    compare_in_codes(four, 2, how, "network", name)


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_parts_that_are_uneven_or_empty_may_send_codes(six: Cluster, how: str) -> None:
    compare_in_codes(six, 3, how, "odd", "gossip_pga 4 bits")
    compare_in_codes(six, 3, how, "narrow", "gossip_pga 8 bits delayed")


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


def periods_of(rank: int, size: int) -> tuple[list[int | None], list[Tensor]]:
    """The period after each step, and the models after it, if every rank is given another learning rate."""
    model = wrapped(nn.Linear(3, 2), "ddp", size)
    n = dist.get_world_size() // size
    averager = averager_of(model, rumor.gossip_pga(links(n), rumor.LearningRate(1, 9)), size)
    periods, models = [], []
    for k in range(16):
        averager.step(lr=0.1 * 0.8 ** (k * (3 - rank)))
        periods.append(averager.metrics.H)
        models.append(whole(model))
    return periods, models


def test_ranks_with_different_learning_rates_agree_on_the_period(four: Cluster) -> None:
    found = four.run(periods_of, 2)
    assert all(periods == found[0][0] for periods, _ in found)
    assert len(set(found[0][0])) > 1


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
