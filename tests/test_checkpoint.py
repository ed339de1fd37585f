"""rumor.save and rumor.load: whole or not there, exact with the same nodes, the mean of all with others, and nothing foreign is run."""

import os
import pickle
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rumor
import rumor.checkpoint
from tests.cluster import Cluster
from tests.problems import ALGORITHMS, N, flat

STEPS, STOP = 14, 8


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    cluster = Cluster(3)
    yield cluster
    cluster.stop()


def parts(name: str, n: int = N) -> tuple[nn.Module, rumor.Averager, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
    algorithm = ALGORITHMS[name]() if n == N else rumor.gossip_aga(rumor.ring(n), 6, H_init=2)
    averager = rumor.Averager(model, algorithm)
    return model, averager, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, averager: rumor.Averager, opt: torch.optim.Optimizer, first: int, last: int) -> Tensor:
    """On data that each node draws, from all three sources of random numbers."""
    for _ in range(first, last):
        x = torch.randn(8, 5) + random.random() + float(np.random.rand())
        loss = model(x).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        averager.step(loss, lr=0.1)
    return torch.cat([flat(model), *(b.reshape(-1).float() for b in model.buffers())])


def seed(value: int) -> None:
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value)


def whole_run(rank: int, name: str, folder: str) -> Tensor:
    model, averager, opt = parts(name)
    seed(rank)
    train(model, averager, opt, 0, STOP)
    rumor.save(folder, averager, {"epoch": 1, "batch": STOP}, optimizer=opt)
    end = train(model, averager, opt, STOP, STEPS)
    averager.finish()
    return end


def rest_of_it(rank: int, name: str, folder: str) -> Tensor:
    model, averager, opt = parts(name)
    seed(99)
    position = rumor.load(folder, averager, optimizer=opt)
    assert averager.steps == position["batch"] == STOP
    end = train(model, averager, opt, STOP, STEPS)
    averager.finish()
    return end


@pytest.mark.parametrize("name", ["gossip_pga", "gossip_pga delayed", "gossip_aga", "slowmo", "osgp"])
def test_the_rest_of_a_run_is_bitwise_the_same(four: Cluster, name: str, tmp_path: Path) -> None:
    once, again = four.run(whole_run, name, str(tmp_path)), four.run(rest_of_it, name, str(tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


def saved_models(rank: int, folder: str) -> tuple[Tensor, Tensor]:
    model, averager, opt = parts("gossip_aga")
    seed(rank)
    train(model, averager, opt, 0, STOP)
    rumor.save(folder, averager, STOP, optimizer=opt)
    averager.finish()
    with averager.averaged():
        return flat(model), torch.cat([b.reshape(-1).float() for b in model.buffers() if b.is_floating_point()])


def went_on_with_three(rank: int, folder: str) -> tuple[Tensor, Tensor, int]:
    model, averager, opt = parts("gossip_aga", 3)
    assert rumor.load(folder, averager, optimizer=opt) == STOP
    assert averager.consensus_distance() < 1e-12
    assert opt.state_dict()["state"]
    found = flat(model), torch.cat([b.reshape(-1).float() for b in model.buffers() if b.is_floating_point()])
    train(model, averager, opt, 0, 3)
    averager.finish()
    return *found, averager.steps


def test_with_fewer_nodes_all_go_on_from_the_mean(four: Cluster, three: Cluster, tmp_path: Path) -> None:
    model, buffers = four.run(saved_models, str(tmp_path))[0]
    for theirs, their_buffers, steps in three.run(went_on_with_three, str(tmp_path)):
        assert torch.allclose(theirs, model, atol=1e-6)
        assert torch.allclose(their_buffers, buffers, atol=1e-6)
        assert steps == STOP + 3  # the schedule goes on where it was


def died_while_writing(rank: int, folder: str) -> None:
    """Rank 2's disk is full the second time: the others wait for it in vain, as if it had died."""
    model, averager, opt = parts("gossip_pga")
    train(model, averager, opt, 0, 2)
    rumor.save(folder, averager, "first", optimizer=opt)
    train(model, averager, opt, 2, 4)
    if rank == 2:
        rumor.checkpoint.torch.save = no_space
    rumor.save(folder, averager, "second", optimizer=opt)


def no_space(state: Any, path: Path) -> None:
    Path(path).write_bytes(b"half of it")
    raise OSError(28, "No space left on device")


def position_in(rank: int, folder: str) -> Any:
    _model, averager, opt = parts("gossip_pga")
    return rumor.load(folder, averager, optimizer=opt)


def test_the_checkpoint_before_is_intact_when_one_rank_can_not_write(four: Cluster, tmp_path: Path) -> None:
    brittle = Cluster(N, timeout=4.0)
    try:
        errors = brittle.errors(died_while_writing, str(tmp_path))
    finally:
        brittle.stop(kill=True)
    assert issubclass(errors[2][0], OSError)
    assert "No space left" in errors[2][1]
    assert "waiting for all ranks to have written their checkpoints" in errors[0][1]
    assert not list(tmp_path.rglob(".*.pt")), "what was half written is removed"
    assert four.run(position_in, str(tmp_path)) == ["first"] * N


def keeps(rank: int, folder: str) -> None:
    model, averager, opt = parts("gossip_pga")
    for step in range(4):
        train(model, averager, opt, step, step + 1)
        rumor.save(folder, averager, step, optimizer=opt, keep=2)
    averager.finish()


def test_old_checkpoints_are_removed(four: Cluster, tmp_path: Path) -> None:
    four.run(keeps, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest.json", "step-00000003", "step-00000004"]


def test_without_a_checkpoint_nothing_is_loaded(four: Cluster, tmp_path: Path) -> None:
    assert four.run(position_in, str(tmp_path / "none yet")) == [None] * N


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch owned",)


def broken(path: Path, how: str) -> None:
    whole = path.read_bytes()
    if how == "cut short":
        path.write_bytes(whole[: len(whole) // 2])
    elif how == "foreign":
        torch.save({"model": torch.ones(3)}, path)
    elif how == "code":
        with path.open("wb") as file:
            pickle.dump(Evil(), file)
    elif how == "missing":
        path.unlink()


BROKEN = {
    "cut short": r"cut short or damaged.*go back to an earlier checkpoint",
    "foreign": r"no checkpoint of rumor.save\(\)",
    "code": "can't be loaded",
    "missing": "must be on storage that all nodes see",
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_file_that_is_not_whole_or_not_ours_is_refused_on_every_rank(
    four: Cluster, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    four.run(keeps, str(tmp_path))
    broken(tmp_path / "step-00000004" / "node-1-rank-0.pt", how)
    errors = four.errors(position_in, str(tmp_path))
    for rank, (_, text) in enumerate(errors):
        assert "rank 1" in text or rank == 1, text
    assert re.search(BROKEN[how], errors[1][1], re.S), errors[1][1]
    assert not list(tmp_path.rglob("owned"))


def other_optimizer(rank: int, folder: str) -> None:
    _model, averager, opt = parts("gossip_pga")
    rumor.load(folder, averager, optimizer=opt, scheduler=torch.optim.lr_scheduler.StepLR(opt, 1))


def test_what_was_not_saved_is_named(four: Cluster, tmp_path: Path) -> None:
    four.run(keeps, str(tmp_path))
    for _, text in four.errors(other_optimizer, str(tmp_path)):
        assert "has no state of scheduler: it was saved with optimizer" in text


def test_a_foreign_folder_is_refused(four: Cluster, tmp_path: Path) -> None:
    (tmp_path / "latest.json").write_text("[1, 2]")
    for _, text in four.errors(position_in, str(tmp_path)):
        assert "is not what rumor.save() writes" in text
