"""rumor.save and rumor.load: whole or not there, exact with the same nodes, the mean of all with others, and nothing foreign is run."""

import contextlib
import io
import json
import os
import pickle
import random
import re
import signal
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rumor
import rumor.checkpoint.checkpoint
from rumor.checkpoint import files
from tests.cluster import Cluster
from tests.nodes import averager_of
from tests.problems import ALGORITHMS, N, flat

STEPS, STOP = 14, 8


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


@pytest.mark.parametrize(
    "name", ["gossip_pga", "gossip_pga delayed", "gossip_aga", "gossip_pga by learning rate", "slowmo", "diloco", "osgp"]
)
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


def died_while_writing(rank: int, folder: str, how: str, more_steps: int) -> None:
    """Rank 2's disk is full the second time, or it is killed with half of its file written."""
    model, averager, opt = parts("gossip_pga")
    train(model, averager, opt, 0, 2)
    rumor.save(folder, averager, "first", optimizer=opt)
    train(model, averager, opt, 0, more_steps)
    if rank == 2:
        rumor.checkpoint.checkpoint.torch.save = no_space if how == "disk full" else last_breath
    rumor.save(folder, averager, "second", optimizer=opt)


def no_space(state: Any, path: Path) -> None:
    Path(path).write_bytes(b"half of it")
    raise OSError(28, "No space left on device")


def last_breath(state: Any, path: Path) -> None:
    Path(path).write_bytes(b"half of it")
    os.kill(os.getpid(), signal.SIGKILL)


def position_in(rank: int, folder: str) -> Any:
    _model, averager, opt = parts("gossip_pga")
    return rumor.load(folder, averager, optimizer=opt)


def error_of(rank: int, function: Callable[..., Any], *arguments: Any) -> str:
    try:
        function(rank, *arguments)
    except ConnectionError as error:
        return str(error)
    return "none"


@pytest.mark.parametrize("more_steps", [2, 0])  # 0: the second is of the same step
def test_the_checkpoint_before_is_intact_when_one_rank_can_not_write(
    four: Cluster, brittle: Cluster, more_steps: int, tmp_path: Path
) -> None:
    errors = brittle.errors(died_while_writing, str(tmp_path), "disk full", more_steps)
    assert issubclass(errors[2][0], OSError)
    assert "No space left" in errors[2][1]
    for rank in (0, 1, 3):
        assert "outcome of writing a checkpoint: rank 0 has succeeded, rank 2 has failed: [Errno 28] No space left" in errors[rank][1]
    assert not list(tmp_path.rglob(".*.pt")), "what was half written is removed"
    assert four.run(position_in, str(tmp_path)) == ["first"] * N


@pytest.mark.parametrize("more_steps", [2, 0])
def test_the_checkpoint_before_is_intact_when_one_rank_is_killed(four: Cluster, hasty: Cluster, more_steps: int, tmp_path: Path) -> None:
    for text in hasty.survivors(2, error_of, died_while_writing, str(tmp_path), "killed", more_steps).values():
        assert "writing a checkpoint" in text
        assert "node 2 is lost (its process is gone)" in text
    assert four.run(position_in, str(tmp_path)) == ["first"] * N


def saves_apart(rank: int, folder: str, ranks_of_a_host: int, late: bool) -> str:
    """Saves on shared storage first, then each host on a disk of its own; if `late`, all on shared storage that is slow."""
    model = nn.Linear(3, 2)
    size = ranks_of_a_host
    averager = averager_of(model, rumor.local_sgd(H=2), size) if size > 1 else rumor.Averager(model, rumor.local_sgd(H=2))
    rumor.save(f"{folder}/host0/runs", averager, "first")
    averager.step()
    looks, seen_in = rumor.checkpoint.checkpoint.LOOKS, rumor.checkpoint.checkpoint.seen_in
    rumor.checkpoint.checkpoint.LOOKS, rumor.checkpoint.checkpoint.LOOK_AGAIN = 3, 0.01
    answers = iter([0, 1])
    if late:
        rumor.checkpoint.checkpoint.seen_in = lambda *args: next(answers, None) or seen_in(*args)
    try:
        rumor.save(f"{folder}/host{0 if late else rank // ranks_of_a_host}/runs", averager, "second")
    except ValueError as error:
        return str(error)
    finally:
        rumor.checkpoint.checkpoint.LOOKS, rumor.checkpoint.checkpoint.LOOK_AGAIN = looks, 0.5
        rumor.checkpoint.checkpoint.seen_in = seen_in
    return "saved"


@pytest.mark.parametrize("ranks_of_a_host", [1, 2])
def test_a_checkpoint_on_disks_that_are_not_shared_is_refused(four: Cluster, ranks_of_a_host: int, tmp_path: Path) -> None:
    said = four.run(saves_apart, str(tmp_path), ranks_of_a_host, False)
    for rank, text in enumerate(said):
        assert f"rank 0 sees {ranks_of_a_host} of its 4 files" in text
        assert f"has written to {tmp_path}/host{rank // ranks_of_a_host}/runs. Give rumor.save() a folder on storage that all" in text
    latest = json.loads((tmp_path / "host0" / "runs" / "latest.json").read_text())
    assert latest["step"] == 0
    assert not (tmp_path / "host1" / "runs" / "latest.json").exists()


def test_files_that_a_network_file_system_shows_late_are_waited_for(four: Cluster, tmp_path: Path) -> None:
    assert four.run(saves_apart, str(tmp_path), 1, True) == ["saved"] * N
    assert json.loads((tmp_path / "host0" / "runs" / "latest.json").read_text())["step"] == 1


def other_names(rank: int, folder: str) -> list[str]:
    averager, said = rumor.Averager(nn.Linear(3, 2), rumor.local_sgd(H=2)), []
    for function in (rumor.save, rumor.load):
        with pytest.raises(ValueError, match="ranks disagree") as error:
            function(f"{folder}/of-{rank}", averager)  # type: ignore[operator]
        said.append(str(error.value))
    return said


def test_folders_of_other_names_are_refused_on_all_ranks(four: Cluster, tmp_path: Path) -> None:
    line = "ranks disagree on the name of the checkpoint folder, which must be one folder for all: rank 0 has of-0, rank 1 has of-1"
    assert four.run(other_names, str(tmp_path)) == [[line, line]] * N
    assert not list(tmp_path.iterdir())


def wrong_calls(rank: int, folder: str) -> list[str]:
    model, averager, opt = parts("gossip_pga")
    other = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    attempts: list[Callable[[], Any]] = [
        lambda: rumor.save(folder, averager, opt),
        lambda: rumor.save(folder, averager, 3, opt),  # type: ignore[misc]
        lambda: rumor.load(folder, averager, opt),  # type: ignore[misc]
        lambda: rumor.Averager(model, rumor.local_sgd(H=2), opt),  # type: ignore[misc]
        lambda: rumor.save(folder, averager, keep="2"),  # type: ignore[arg-type]
        lambda: rumor.load(folder, averager, step="2"),  # type: ignore[arg-type]
        lambda: rumor.load(f"{folder}/empty", averager, step=2),
        lambda: rumor.save(f"{folder}/file.pt", averager),
        lambda: rumor.Averager(model, rumor.slowmo(rumor.ring, H=3), optimizer=other),
    ]
    Path(folder, "file.pt").touch()
    said = []
    for attempt in attempts:
        with pytest.raises((TypeError, ValueError)) as error:
            attempt()
        said.append(f"{error.type.__name__}: {error.value}")
    return said


def test_wrong_calls_get_one_clear_line(four: Cluster, tmp_path: Path) -> None:
    call = '("checkpoints", averager, optimizer=opt)'
    expected = [
        f"TypeError: position is for plain values, got SGD: give it by name, as in rumor.save{call}",
        f"TypeError: SGD was given without the name of its argument: call rumor.save{call}",
        f"TypeError: SGD was given without the name of its argument: call rumor.load{call}",
        "TypeError: SGD was given without the name of its argument: call Averager(model, algorithm, optimizer=opt)",
        "ValueError: keep must be a whole number >= 1, got keep='2'",
        "ValueError: step must be a whole number >= 0, got step='2'",
        f"ValueError: {tmp_path}/empty has no checkpoint after 2 steps, and no other",
        f"ValueError: {tmp_path}/file.pt is a file: rumor.save() takes a folder for checkpoints",
        "ValueError: optimizer= has none of the model's parameters: build it from model.parameters() (in a Simulator, sim's)",
    ]
    assert four.run(wrong_calls, str(tmp_path)) == [expected] * N


@pytest.mark.parametrize(
    ("was", "n", "is_elastic", "says"),
    [
        (
            4,
            8,
            False,
            "step-1 of 4 nodes is loaded on 8: all nodes start from the mean of the saved models, node i takes the optimizer of ",
        ),
        (
            4,
            1,
            False,
            "of 4 nodes is loaded on 1: this node starts from the mean of the saved models, it takes the optimizer of saved node 0",
        ),
        (1, 2, False, "of 1 node is loaded on 2: all nodes start from the saved model, they take the optimizer of the saved node, and the"),
        (4, 2, True, "state start anew. rumor.elastic(..., min_nodes=4) would wait for 4 nodes, here and after a loss"),
    ],
)
def test_the_line_about_other_nodes_fits_their_number(was: int, n: int, is_elastic: bool, says: str) -> None:
    averager: Any = SimpleNamespace(engine=SimpleNamespace(n=n), is_elastic=is_elastic)
    line = rumor.checkpoint.checkpoint._with_other_nodes({"name": "step-1", "nodes": was}, averager, ["optimizer"])
    assert says in line
    assert ("saved node i % 4" in line) == (n == 8)
    assert ("min_nodes" in line) == is_elastic


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
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def broken(path: Path, how: str) -> None:
    whole, mark = path.read_bytes(), path.parent / "owned"
    if how == "cut short":
        path.write_bytes(whole[: len(whole) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "a bit flipped":
        at = whole.index(torch.load(path, weights_only=True)["model"]["0.weight"].numpy().tobytes())
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    elif how == "foreign":
        torch.save({"model": torch.ones(3)}, path)
    elif how == "code":
        torch.save({"format": 2, "model": Evil(mark)}, path)
    elif how == "plain code":
        with path.open("wb") as file:
            pickle.dump(Evil(mark), file)
    elif how == "missing":
        path.unlink()


BROKEN = {
    "cut short": r"cut short or damaged.*go back to an earlier checkpoint",
    "empty": r"cut short or damaged",
    "a bit flipped": r"cut short or damaged",
    "foreign": r"was not written by rumor.save\(\)",
    "code": r"holds more than tensors and plain values, so it is not loaded",
    "plain code": r"cut short or damaged",
    "missing": "must be on storage that all nodes see",
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_file_that_is_not_whole_or_not_ours_is_refused_on_every_rank(four: Cluster, how: str, tmp_path: Path) -> None:
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


def refusals(rank: int, folder: str) -> list[str]:
    """What does not fit, one after the other; the last is that nothing has changed."""
    model, averager, _opt = parts("gossip_pga")
    before = flat(model).clone()
    wide = nn.Linear(5, 7)
    attempts: list[Callable[[], Any]] = [
        lambda: rumor.load(folder, averager, optimizer=torch.optim.Adam(model.parameters())),
        lambda: rumor.load(folder, averager, optimizer=torch.optim.SGD(model[0].parameters())),
        lambda: rumor.load(folder, rumor.Averager(wide, ALGORITHMS["gossip_pga"]())),
        lambda: rumor.load(folder, rumor.Averager(model, ALGORITHMS["slowmo"]())),
        lambda: rumor.load(folder, averager, step=7),
        lambda: rumor.load(folder, averager, optimizer=3),  # type: ignore[arg-type]
        lambda: rumor.save(folder, averager, {"best": np.float64(1)}),
        lambda: rumor.save(folder, averager, optimizer=torch.optim.SGD(model.parameters(), lr=np.float64(0.1))),
    ]
    said = []
    for attempt in attempts:
        try:
            attempt()
            said.append("nothing")
        except (ValueError, TypeError) as error:
            said.append(str(error))
    with averager.averaged():
        for attempt in (partial(rumor.save, folder, averager), partial(rumor.load, folder, averager)):
            with pytest.raises(RuntimeError, match=r"inside averaged\(\)"):
                attempt()
    return [*said, str(torch.equal(flat(model), before))]


def test_what_does_not_fit_is_refused_before_anything_is_changed(four: Cluster, tmp_path: Path) -> None:
    four.run(keeps, str(tmp_path))
    there = sorted(path.name for path in tmp_path.rglob("*"))
    for said in four.run(refusals, str(tmp_path)):
        for expected, text in zip(
            [
                "has the state of optimizer of type SGD, but here it is of type Adam",
                "has optimizer with groups of [6] parameters, but here it has groups of [2]",
                "is of another model: it has no weight, and the model here has weight of shape [7, 5]",
                "but the algorithm here is SlowMo",
                "has no checkpoint after 7 steps, only those after: 3, 4",
                "optimizer= needs state_dict() and load_state_dict()",
                "because position holds more than tensors and plain values",
                "because optimizer holds more than tensors and plain values",
                "True",
            ],
            said,
            strict=True,
        ):
            assert expected in text, text
    assert there == sorted(path.name for path in tmp_path.rglob("*") if path.is_file() or any(path.iterdir()))


def two_of_one_step(rank: int, folder: str) -> tuple[Any, Any, Any]:
    model, averager, opt = parts("gossip_pga")
    train(model, averager, opt, 0, 2)
    rumor.save(folder, averager, "early", optimizer=opt)
    train(model, averager, opt, 2, 4)
    rumor.save(folder, averager, optimizer=opt, keep=3)
    averager.finish()
    rumor.save(folder, averager, "finished", optimizer=opt, keep=3)
    loads = (rumor.load(folder, averager, optimizer=opt), rumor.load(folder, averager, step=2, optimizer=opt))
    assert averager.steps == 2
    rumor.save(folder, averager, optimizer=opt, keep=1)
    return *loads, rumor.load(folder, averager, optimizer=opt)


def test_every_checkpoint_is_a_folder_of_its_own_and_an_earlier_one_can_be_asked_for(four: Cluster, tmp_path: Path) -> None:
    assert four.run(two_of_one_step, str(tmp_path)) == [("finished", "early", 2)] * N
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest.json", "step-00000002.1"]


def lazily(rank: int, folder: str) -> bool:
    """A step is under way when the checkpoint is loaded."""
    torch.manual_seed(1)
    model = nn.Linear(30, 30)
    averager = rumor.Averager(model, rumor.gossip_pga(rumor.ring(N), 30), lazy=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)

    def step() -> None:
        opt.zero_grad()
        model(torch.randn(4, 30)).square().mean().backward()
        opt.step()
        averager.step()

    step()
    rumor.save(folder, averager, optimizer=opt)
    saved = flat(model).clone()
    step()
    rumor.load(folder, averager, optimizer=opt)
    averager.settle()
    return torch.equal(flat(model), saved)


def test_a_step_that_is_under_way_leaves_no_trace_in_what_is_loaded(four: Cluster, tmp_path: Path) -> None:
    assert four.run(lazily, str(tmp_path)) == [True] * N


def saved_with_a_bad_node(rank: int, folder: str) -> None:
    model = nn.Linear(3, 2)
    averager = rumor.Averager(model, rumor.local_sgd(N, 10))
    with torch.no_grad():
        model.weight.fill_(float("nan") if rank == 1 else float(rank))
    for _ in range(4):
        averager.step()
    rumor.save(folder, averager)


def went_on_with_another_period(rank: int, folder: str) -> tuple[float, int]:
    model = nn.Linear(3, 2)
    averager = rumor.Averager(model, rumor.gossip_pga(rumor.ring(3), 3))
    assert rumor.load(folder, averager) == 4
    weight = float(model.weight.detach()[0, 0])
    for _ in range(6):
        averager.step()
    assert averager.metrics.H == 3
    return weight, averager.metrics.rounds["global"]


def test_with_fewer_nodes_a_bad_model_is_left_out_and_a_shorter_period_holds(four: Cluster, three: Cluster, tmp_path: Path) -> None:
    four.run(saved_with_a_bad_node, str(tmp_path))
    assert three.run(went_on_with_another_period, str(tmp_path)) == [(pytest.approx(5 / 3), 2)] * 3


def test_what_was_not_saved_is_named(four: Cluster, tmp_path: Path) -> None:
    four.run(keeps, str(tmp_path))
    for _, text in four.errors(other_optimizer, str(tmp_path)):
        assert "has no state of scheduler: it was saved with optimizer" in text


@pytest.mark.parametrize(
    "foreign",
    ["[1, 2]", "", '{"format": 2}', '{"format": 2, "name": "step-00000001", "step": 1, "nodes": 0, "ranks_of_a_node": 1, "earlier": []}'],
)
def test_a_foreign_folder_is_refused(four: Cluster, foreign: str, tmp_path: Path) -> None:
    (tmp_path / "latest.json").write_text(foreign)
    for _, text in four.errors(position_in, str(tmp_path)):
        assert "is not what rumor.save() writes" in text


WRONG_PATHS = {
    "step-00000004": r"part of one checkpoint: rumor.load\(\) takes the folder of all of them, .*{folder}$",
    "step-00000004/node-0-rank-0.pt": r"part of one checkpoint: rumor.load\(\) takes the folder of all of them, .*{folder}$",
    "latest.json": r"is a file: rumor.load\(\) takes the folder that rumor.save\(\) was given, here .*{folder}$",
}


@pytest.mark.parametrize("path", WRONG_PATHS)
def test_a_path_inside_of_a_checkpoint_is_refused(four: Cluster, path: str, tmp_path: Path) -> None:
    """None would mean that there is no checkpoint yet, and `or 0` would train from zero."""
    four.run(keeps, str(tmp_path))
    for _, text in four.errors(position_in, str(tmp_path / path)):
        assert re.search(WRONG_PATHS[path].format(folder=tmp_path.name), text, re.M), text


def test_a_folder_with_other_contents_is_refused(four: Cluster, tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt", "c.pt", "d"):
        (tmp_path / name).write_text("")
    for _, text in four.errors(position_in, str(tmp_path)):
        assert "holds a.txt, b.txt, c.pt, ... but no checkpoint: name the folder that rumor.save() was given" in text


@pytest.mark.parametrize("name", ["step-00000003", "lost+found", ".snapshot", None])
def test_a_folder_without_a_complete_checkpoint_is_empty(four: Cluster, name: str | None, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    if name is not None:
        (folder / name).mkdir(parents=True)
    assert four.run(position_in, str(folder)) == [None] * N


def test_a_folder_may_have_the_name_of_a_checkpoint(four: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "step-00000001"
    assert four.run(position_in, str(folder)) == [None] * N
    four.run(keeps, str(folder))
    assert four.run(position_in, str(folder)) != [None] * N


def said_of_no_checkpoint(rank: int, folder: str) -> str:
    _, averager, _ = parts("gossip_pga")
    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert rumor.load(folder, averager) is None
    return said.getvalue()


def said_of_other_nodes(rank: int, folder: str, n: int) -> str:
    _, averager, opt = parts("gossip_aga", n)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        rumor.load(folder, averager, optimizer=opt)
    return said.getvalue()


def test_one_line_says_that_the_number_of_nodes_has_changed(four: Cluster, three: Cluster, tmp_path: Path) -> None:
    four.run(saved_models, str(tmp_path))
    assert four.run(said_of_other_nodes, str(tmp_path), 4) == [f"rumor.load: step-{STOP:08d} is loaded\n", "", "", ""]
    line = (
        f"rumor.load: step-{STOP:08d} of 4 nodes is loaded on 3: all nodes start from the mean of the saved models, node i takes the "
        "optimizer of saved node i, and the step count goes on. Random numbers and the rest of the method's state start anew\n"
    )
    assert three.run(said_of_other_nodes, str(tmp_path), 3) == [line, "", ""]


def went_on_with_another_method(rank: int, folder: str) -> tuple[Tensor, int, str]:
    model, averager, opt = parts("gossip_pga")
    with pytest.raises(ValueError, match=r"this state is of GossipPGA\(.*Adaptive.* with another method"):
        rumor.load(folder, averager, optimizer=opt)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert rumor.load(folder, averager, from_mean=True, optimizer=opt) == STOP
    assert opt.state_dict()["state"]
    assert averager.consensus_distance() < 1e-12
    found = flat(model)
    train(model, averager, opt, 0, 3)
    averager.finish()
    return found, averager.steps, said.getvalue()


def test_a_run_goes_on_from_the_mean_with_another_method(four: Cluster, tmp_path: Path) -> None:
    mean = four.run(saved_models, str(tmp_path))[0][0]
    for rank, (model, steps, said) in enumerate(four.run(went_on_with_another_method, str(tmp_path))):
        torch.testing.assert_close(model, mean)
        assert steps == STOP + 3
        assert ("of 4 nodes is loaded on 4: all nodes start from the mean" in said) == (rank == 0)


def test_one_line_says_that_there_is_no_checkpoint(four: Cluster, tmp_path: Path) -> None:
    said = four.run(said_of_no_checkpoint, str(tmp_path / "none"))
    assert said == [f"rumor.load: no checkpoint in {tmp_path / 'none'} yet, nothing is loaded\n", "", "", ""]


def warned_of(rank: int, folder: str) -> list[str]:
    _, averager, _ = parts("gossip_pga")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rumor.load(folder, averager)
    return [f"{Path(one.filename).name}: {one.message}" for one in caught]


def test_an_optimizer_that_was_saved_and_is_not_loaded_is_named(four: Cluster, tmp_path: Path) -> None:
    four.run(keeps, str(tmp_path))
    said = four.run(warned_of, str(tmp_path))
    use = "use rumor.load(folder, averager, optimizer=optimizer)"
    assert said == [[f"test_checkpoint.py: the saved state of optimizer (SGD) is not loaded and starts anew: {use}"], [], [], []]


def wrong_order(rank: int, folder: str) -> list[str]:
    model, averager, _ = parts("gossip_pga")
    said = []
    for function, *arguments in ((rumor.save, averager, folder), (rumor.save, folder, model), (rumor.load, averager, folder)):
        with pytest.raises(TypeError) as error:
            function(*arguments)  # type: ignore[operator]
        said.append(str(error.value))
    return said


def test_arguments_in_the_wrong_order_show_the_right_call(four: Cluster, tmp_path: Path) -> None:
    for first, second, third in four.run(wrong_order, str(tmp_path)):
        assert first == (
            "rumor.save() takes the folder, then the Averager, got Averager and str: "
            'call rumor.save("checkpoints", averager, optimizer=opt)'
        )
        assert "got str and Sequential" in second
        assert 'call rumor.load("checkpoints", averager, optimizer=opt)' in third
    assert not list(tmp_path.iterdir())


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.amplitude = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("mask", torch.full((2,), -torch.inf))
        self.register_buffer("seen", torch.zeros(2))


def waves(rank: int, folder: str, saves: bool) -> tuple[list[complex], list[float], list[float]]:
    """Node 1's statistics go bad before it saves: it is left out."""
    model = Waves()
    averager = rumor.Averager(model, rumor.gossip_pga(rumor.ring(N if saves else 3), 6))
    if saves:
        with torch.no_grad():
            model.amplitude.fill_(complex(rank, 2 * rank))
            model.seen.fill_(float("nan") if rank == 1 else rank)
        rumor.save(folder, averager, 0)
    else:
        rumor.load(folder, averager)
    return model.amplitude.tolist(), model.mask.tolist(), model.seen.tolist()


def test_with_fewer_nodes_complex_numbers_and_masks_are_kept(four: Cluster, three: Cluster, tmp_path: Path) -> None:
    four.run(waves, str(tmp_path), True)
    for amplitude, mask, seen in three.run(waves, str(tmp_path), False):
        assert amplitude == [pytest.approx(complex(5 / 3, 10 / 3))] * 2  # the mean of nodes 0, 2 and 3
        assert mask == [-torch.inf] * 2
        assert seen == [pytest.approx(5 / 3)] * 2


def test_what_a_killed_process_had_not_finished_writing_can_be_removed(tmp_path: Path):
    (tmp_path / "done").write_text("1")
    if (pid := os.fork()) == 0:
        with files.replacing(tmp_path / "half") as aside:
            aside.write_text("2")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert len(list(tmp_path.iterdir())) == 2
    files.remove_unfinished(tmp_path, pid)
    assert [path.name for path in tmp_path.iterdir()] == ["done"]
