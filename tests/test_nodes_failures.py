"""What goes wrong in a node of several ranks: an error on every rank of every node, and nothing hangs."""

import os
import re
import signal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import rumor
from rumor.model.tensors import local_part
from tests.cluster import Cluster
from tests.nodes import ALGORITHMS, IN_CODES, averager_of, groups, wrapped
from tests.problems import flat, network


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
    averager = averager_of(model, {**ALGORITHMS, **IN_CODES}[name](dist.get_world_size() // 2), 2)
    here = [local_part(p) for p in model.parameters()]
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
    for name in (*ALGORITHMS, *IN_CODES):
        results = (four if nodes == 2 else six).run(poisoned, how, name)
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


def step_for_ever(rank: int) -> str:
    """Rank 1, inside node 0 of 3, dies at step 3."""
    averager = averager_of(network(), rumor.gossip_sgd(rumor.ring(3)), 2, 3.0)
    try:
        for k in range(1000):
            if rank == 1 and k == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            averager.step()
    except ConnectionError as error:
        return str(error)
    return "no error"


def test_a_dead_rank_is_an_error_within_the_time_out(six: Cluster) -> None:
    for text in six.survivors(1, step_for_ever).values():
        assert re.search(r"lost touch with the others while .* step [34]\D", text), text
        assert "local rank 1 of node 0 is lost (its process is gone)" in text
