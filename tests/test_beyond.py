"""experiments/beyond.py: docs/beyond.md, its pictures, and the table for Adam, from the committed results."""

import doctest
import inspect
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import rumor
from tests import warm
from tests.test_accuracy import write_data

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "experiments"))

import adamw  # noqa: E402
import beyond  # noqa: E402
import forest  # noqa: E402
from images.study import FOUR_BITS, TABLES  # noqa: E402
from networks import methods  # noqa: E402
from networks.runs import Run  # noqa: E402
from networks.sent import bytes_per_step  # noqa: E402

KINDS = {replace(run, split="iid"): None for run in TABLES["beyond small"].runs}


@pytest.mark.parametrize("run", KINDS, ids=lambda run: f"{run.name}, {run.nodes}")
def test_the_bytes_are_those_that_the_simulator_counts(run: Run) -> None:
    sim = rumor.Simulator(torch.nn.Linear(255, 4), run.algorithm(1000))  # 4 blocks of codes
    if run.state is not None:
        sim.average_state(torch.optim.SGD(sim.parameters(), lr=0.1, momentum=0.9), run.state)
    steps = 210  # whole periods, and whole cycles of every graph
    for _ in range(steps):
        sim.step(torch.ones(run.nodes), lr=0.1)
    expected = bytes_per_step(run, sim.metrics.rounds["global"] / steps) * 1024 * steps
    assert sim.metrics.bytes_sent == pytest.approx(expected, rel=0.01)


def test_the_pages_are_those_of_the_results() -> None:
    found = beyond.panels()
    page, choosing = (path.read_text() for path in (beyond.PAGE, beyond.CHOOSING))
    assert beyond.filled_in(page, found) == page
    assert beyond.choosing(choosing) == choosing
    for name in beyond.PICTURES:
        assert f"](beyond/{name}.png)" in page
        assert (beyond.PAGE.with_suffix("") / f"{name}.png").is_file()


def test_a_picture_is_drawn_though_parts_have_not_been_run(tmp_path: Path) -> None:
    found = [panel for panel in beyond.panels() if panel.word.startswith("cifar")]
    beyond.draw([panel._replace(points=[]) for panel in found[:3]] + found[3:], "title", tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_a_table_without_runs_says_so() -> None:
    assert beyond._adamw(nodes=1000) == beyond.NOT_YET
    assert beyond.diloco_gpt_table([]) == beyond.NOT_YET


def test_the_best_rate_is_of_those_with_the_most_seeds() -> None:
    rows = [
        {"method": "DDP", "lr": lr, "seed": seed, "loss": loss} for lr, seed, loss in (("1", "0", "2"), ("1", "1", "4"), ("2", "0", "1"))
    ]
    assert adamw.at_best(rows) == {"DDP": (1.0, {0: 2.0, 1: 4.0})}


def test_the_commands_are_for_the_data_that_is_there(tmp_path: Path) -> None:
    assert beyond.commands(tmp_path, "cuda") == []
    for name in ("fashion-mnist", "cifar-10-batches-bin"):
        (tmp_path / name).mkdir()
    (tmp_path / "enwik8").touch()
    on_gpu, on_cpu = (beyond.commands(tmp_path, device) for device in ("cuda", "cpu"))
    small = ["image_classification"] * len(beyond.SMALL_TABLES)
    assert [Path(command[0]).stem for command in on_gpu] == ["image_classification", "adamw", "adamw", *small, "adamw", "adamw"]
    assert [Path(command[0]).stem for command in on_cpu] == [*small, "adamw", "adamw"]


@pytest.mark.processes
def test_the_table_for_a_gpu_runs_at_toy_size(tmp_path: Path) -> None:
    """All of its methods, on 4 nodes instead of 32 and 50. It is the table of the command for a GPU."""
    write_data(tmp_path, train=600, test=20)
    toy = ["--net", "mlp", "--table", "beyond", "--epochs", "1", "--batch", "16", "--nodes", "4", "--device", "cpu", "--seeds", "1"]
    done = warm.run([ROOT / "experiments" / "image_classification.py", "--data", tmp_path, "--out", tmp_path / "found.csv", *toy])
    assert done.returncode == 0, done.stderr
    wanted = {replace(run, nodes=4) for run in TABLES["beyond"].runs}
    store = beyond.small_store(tmp_path / "found.csv", beyond.SMALL_RECIPE._replace(epochs=1, batch=16), images=600)
    rows = {run: store.find(run) for run in wanted}
    assert all(row is not None for row in rows.values())
    assert len({row["loss"] for row in rows.values() if row}) > len(rows) // 2, "methods differ"
    plain, averaged = (rows[replace(FOUR_BITS, nodes=4, state=state)]["loss"] for state in (None, "always"))
    assert plain != averaged, "averaging the optimizer's state makes a difference"


def test_the_methods_on_the_page_are_those_of_the_file() -> None:
    page = (ROOT / "docs" / "extending.md").read_text()
    for method in (methods.FollowsLr, methods.QuasiGlobalMomentum, methods.Scaffold):
        assert inspect.getsource(method) in page


def test_examples_are_true() -> None:
    assert doctest.testmod(beyond).failed == 0
    assert doctest.testmod(forest).failed == 0
