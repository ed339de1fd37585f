"""Hugging Face's Trainer and Accelerate: the same steps as the loop written by hand, bitwise, and checkpoints of the mean model."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.integrations import flat, folder_after, network

pytestmark = pytest.mark.processes
Ranks = list[dict[str, Any]]


folder = folder_after("integrations_huggingface.py", "huggingface")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Ranks:
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(4)]


@pytest.mark.parametrize("name", ["plain", "accumulated", "bf16", "slowmo", "accelerated", "accelerated state"])
def test_a_run_is_the_loop_written_by_hand(ranks: Ranks, name: str) -> None:
    for rank in ranks:
        run, loop = rank[name], rank["by hand"][name]
        assert torch.equal(run["seen"], loop["seen"])
        assert torch.equal(run["end"], loop["end"])
        assert run["counts"] == loop["counts"]
    assert not torch.equal(ranks[0][name]["seen"], ranks[1][name]["seen"]), "nodes that never differ prove nothing"


@pytest.mark.parametrize("name", ["accumulated", "accelerated"])
def test_the_loss_reaches_gossip_aga(ranks: Ranks, name: str) -> None:
    assert ranks[0][name]["counts"]["H"] != 2, "H is still H_init"


@pytest.mark.parametrize(("name", "step"), [("resumed", 10), ("state global", 8), ("state always", 8)])
def test_a_resumed_run_is_the_uninterrupted_one(ranks: Ranks, name: str, step: int) -> None:
    for rank in ranks:
        whole, rest = rank[name]["whole"], rank[name]["rest"]
        assert torch.equal(whole["seen"], rank["by hand"][name]["seen"])
        assert torch.equal(rest["seen"], whole["seen"][step:])
        assert torch.equal(rest["end"], whole["end"])
        assert rest["counts"]["rounds"] == whole["counts"]["rounds"]


def test_a_run_averages_the_state_of_the_optimizer(ranks: Ranks) -> None:
    for rank in ranks:
        for name in ("state global", "state always"):
            assert torch.equal(rank[name]["whole"]["end"], rank["by hand"][name]["end"])
            assert rank[name]["whole"]["counts"]["rounds"] == rank["by hand"][name]["counts"]["rounds"]
        assert rank["state global"]["whole"]["counts"]["H"] > 3, "the period has followed the learning rate"
        assert not torch.equal(rank["state always"]["whole"]["seen"], rank["resumed"]["whole"]["seen"]), "the same method without state"


def test_evaluation_and_checkpoints_are_of_the_mean_model(ranks: Ranks, folder: Path) -> None:
    models = torch.stack([rank["resumed"]["whole"]["seen"][9] for rank in ranks])
    assert models.std(dim=0).max() > 1e-4, "nodes that don't differ prove nothing"
    saved = network(seed=9)
    state = load_file(folder / "checkpoint-10" / "model.safetensors")
    saved.load_state_dict({name.removeprefix("net."): value for name, value in state.items()})
    for seen in (flat(saved), *(rank["resumed"]["whole"]["evaluated"][0] for rank in ranks)):
        torch.testing.assert_close(seen, models.mean(dim=0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("Trainer", r"this Trainer wraps the model in DistributedDataParallel.*: use rumor.integrations.huggingface.RumorTrainer"),
        ("no callback", r"this Trainer has 0 RumorCallbacks.*: pass callbacks=\[RumorCallback\(algorithm\)\]"),
        ("lost", r"not rumor_\d.pt, which this rank needs to resume: .*resume_from_mean=True"),
        ("cut", r"rumor_2.pt is cut short or damaged, so it can't be loaded: go back to an earlier checkpoint"),
        ("NAdam", r"average_state does not know mu_product of NAdam"),  # not of Accelerate's wrapper
        ("prepare", r"already in DistributedDataParallel over ranks \[0, 1, 2, 3\].*: take it out"),
    ],
)
def test_what_cannot_be_is_refused(ranks: Ranks, case: str, message: str) -> None:
    for rank in ranks:
        assert re.search(message, rank["refused"][case]), rank["refused"][case]
