"""Lightning: the same steps as the loop written by hand, bitwise, and checkpoints that hold the mean model and each node's own."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.integrations import BATCHES, flat, folder_after, network, optimizer

pytestmark = pytest.mark.processes
Ranks = list[dict[str, Any]]


folder = folder_after("integrations_lightning.py", "lightning")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Ranks:
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(4)]


def saved_model(path: Path) -> nn.Module:
    model = network(seed=9)
    state = torch.load(path, weights_only=True)["state_dict"]
    model.load_state_dict({name.removeprefix("net."): value for name, value in state.items()})
    return model


def stopped(ranks: Ranks) -> Tensor:
    return torch.stack([rank["resumed"]["stopped"] for rank in ranks])


@pytest.mark.parametrize("name", ["plain", "accumulated", "bf16", "slowmo"])
def test_a_fit_is_the_loop_written_by_hand(ranks: Ranks, name: str) -> None:
    for rank in ranks:
        fit, loop = rank[name], rank["by hand"][name]
        assert torch.equal(fit["seen"], loop["seen"])
        assert torch.equal(fit["end"], loop["end"])
        assert fit["counts"] == loop["counts"]
    assert not torch.equal(ranks[0][name]["seen"], ranks[1][name]["seen"]), "nodes that never differ prove nothing"


def test_a_strategy_handed_in_does_the_same(ranks: Ranks) -> None:
    assert all(torch.equal(rank["strategy"]["seen"], rank["plain"]["seen"]) for rank in ranks)


def test_the_loss_reaches_gossip_aga(ranks: Ranks) -> None:
    assert ranks[0]["accumulated"]["counts"]["H"] != 2, "H is still H_init"


def test_the_metrics_are_in_lightnings_log(ranks: Ranks) -> None:
    *each, after = ranks[0]["logged"]
    assert len(each) == BATCHES
    assert each[0].keys() == after.keys() == {"rumor/H", "rumor/bytes_sent", "rumor/seconds_waiting"}
    sent = [row["rumor/bytes_sent"] for row in each]
    assert 0 < sent[0] < sent[1]
    assert sent == sorted(sent)
    assert sent[-1] <= after["rumor/bytes_sent"]  # finish() averages once more
    assert {row["rumor/H"] for row in each} == {3}


def test_all_nodes_end_with_the_same_model(ranks: Ranks) -> None:
    assert all(torch.equal(rank["plain"]["end"], ranks[0]["plain"]["end"]) for rank in ranks)


@pytest.mark.parametrize("name", ["resumed", "state global", "state always"])
def test_a_resumed_fit_is_the_uninterrupted_one(ranks: Ranks, name: str) -> None:
    for rank in ranks:
        whole, rest = rank[name]["whole"], rank[name]["rest"]
        assert torch.equal(whole["seen"], rank["by hand"][name]["seen"])
        assert torch.equal(rest["seen"], whole["seen"][BATCHES:])
        assert torch.equal(rest["end"], whole["end"])
        assert rest["counts"]["rounds"] == whole["counts"]["rounds"]  # bytes differ by those of validating and saving the mean


def test_a_fit_averages_the_state_of_the_optimizer(ranks: Ranks) -> None:
    for rank in ranks:
        for name in ("state global", "state always"):
            whole, loop = rank[name]["whole"], rank["by hand"][name]
            assert torch.equal(whole["end"], loop["end"])
            assert whole["counts"] == loop["counts"]
        assert rank["state global"]["whole"]["counts"]["H"] > 3, "the period has followed the learning rate"
        assert not torch.equal(rank["state always"]["whole"]["seen"], rank["resumed"]["whole"]["seen"]), "the same method without state"


def test_a_resumed_fit_draws_the_random_numbers_of_the_uninterrupted_one(ranks: Ranks) -> None:
    for rank in ranks:
        ends = rank["with dropout"]
        assert torch.equal(ends["first"], ends["whole"][:BATCHES])
        assert torch.equal(ends["rest"], ends["whole"][BATCHES:])


@pytest.mark.parametrize("name", ["stop", "weights"])
def test_a_checkpoint_holds_the_mean_model(ranks: Ranks, folder: Path, name: str) -> None:
    models = stopped(ranks)
    assert models.std(dim=0).max() > 1e-4, "nodes that don't differ prove nothing"
    torch.testing.assert_close(flat(saved_model(folder / f"{name}.ckpt")), models.mean(dim=0), rtol=1e-5, atol=1e-6)


def test_validation_sees_the_mean_model(ranks: Ranks) -> None:
    for rank in ranks:
        torch.testing.assert_close(rank["resumed"]["validated"], stopped(ranks).mean(dim=0), rtol=1e-5, atol=1e-6)


def test_without_the_nodes_all_start_from_the_mean_model(ranks: Ranks, folder: Path) -> None:
    for rank in ranks:
        state = torch.load(folder / "stop.ckpt", weights_only=True)
        model = saved_model(folder / "stop.ckpt")
        opt, _ = optimizer(model)
        opt.load_state_dict(state["optimizer_states"][0])  # rank 0's
        x, y = rank["batch"]
        (model(x) - y).square().mean().backward()
        opt.step()
        assert torch.equal(rank["from the mean"], flat(model))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("one device", r"strategy is SingleDeviceStrategy: use devices=N or torchrun with strategy='ddp'"),
        ("two callbacks", r"this Trainer has 2 RumorCallbacks.*: pass only one"),
        ("two optimizers", r"average_state='global' averages the state of one optimizer, but .* returned 2: return one"),
        ("no averaged state", r"this state is of a run with average_state=None, but here it is 'global'"),
        ("sync_batchnorm", r"sync_batchnorm=True makes all nodes wait .*: leave it out"),
        ("three nodes", r"has 3 nodes, but this run has 4: .*RumorCallback\(..., save_nodes=False\)"),
        ("no nodes", r"has no states of nodes: .*RumorCallback\(..., save_nodes=False\)"),
    ],
)
def test_what_cannot_be_is_refused(ranks: Ranks, case: str, message: str) -> None:
    for rank in ranks:
        assert re.search(message, rank["refused"][case]), rank["refused"][case]


def test_a_checkpoint_without_random_numbers_will_do(ranks: Ranks) -> None:
    assert all(rank["refused"]["old"] == "it was not refused" for rank in ranks)
