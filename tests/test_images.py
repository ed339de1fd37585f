"""The image study: data, splits, convolutions of many nodes at once, and toy runs of the command on both engines."""

import csv
import doctest
import importlib
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "experiments"))

import image_classification  # noqa: E402
import rumor  # noqa: E402
from images.convolution import convolution  # noqa: E402
from images.data import CIFAR, InMemory, Scale, cropped, load  # noqa: E402
from images.networks import SmallResNet, whitening  # noqa: E402
from images.split import ByLabel, Shuffled, split_of  # noqa: E402
from images.study import TABLES  # noqa: E402
from images.train import loss_of, lr_at, optimizer  # noqa: E402
from networks.command import _wanted  # noqa: E402
from networks.compare import Seeds  # noqa: E402
from networks.engines import OneOfMany, as_first_says, mean_over_ranks  # noqa: E402
from networks.page import _to_target, filled_in, stores  # noqa: E402
from networks.runs import Run, tables_of  # noqa: E402
from networks.store import Finished, Settings, Store  # noqa: E402
from tests import warm  # noqa: E402
from tests.cluster import Cluster  # noqa: E402
from tests.test_accuracy import write_data  # noqa: E402

CPU = torch.device("cpu")


# ---- convolutions -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "padding"), [(3, 1), (2, 0)])
@pytest.mark.parametrize("nodes", [None, 3])
def test_a_convolution_and_its_gradients_are_torchs(nodes: int | None, size: int, padding: int) -> None:
    random = torch.Generator().manual_seed(0)
    lead = [] if nodes is None else [nodes]
    x = torch.randn(*lead, 2, 6, 5, 4, generator=random, dtype=torch.float64)
    w = torch.randn(*lead, 7, size, size, 4, generator=random, dtype=torch.float64)

    def ours(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return convolution(x, w, padding)

    def torchs(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return functional.conv2d(x.permute(0, 3, 1, 2), w.permute(0, 3, 1, 2), padding=padding).permute(0, 2, 3, 1)

    found = []
    for function in (ours, torchs):
        inputs = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = function(*inputs) if nodes is None else torch.func.vmap(function)(*inputs)
        y.mul(torch.arange(y.numel(), dtype=y.dtype).view(y.shape).sin()).sum().backward()
        found.append((y, *(t.grad for t in inputs)))
    for mine, theirs in zip(*found, strict=True):
        assert mine.shape == theirs.shape
        assert (mine - theirs).abs().max() < 1e-12


def test_the_network_takes_the_same_step_stacked_and_alone() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(3, 8, 8, 8, 3), torch.randint(10, (3, 8))
    model = SmallResNet(widths=(8, 8))
    model.start(x.flatten(0, 1))
    sim = rumor.Simulator(model, rumor.gossip_sgd(rumor.isolated(3)))

    def loss_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(x), y)

    losses = sim(loss_of, x, y)
    losses.sum().backward()
    for node in range(3):
        model.zero_grad()
        loss = loss_of(model, x[node], y[node])
        loss.backward()
        assert abs(loss.item() - losses[node].item()) < 1e-5
        for (name, own), (_, stacked) in zip(model.named_parameters(), sim.named_parameters(), strict=True):
            if own.requires_grad:
                assert (own.grad - stacked.grad[node]).abs().max() < 1e-4, name


def test_the_first_layer_whitens_patches() -> None:
    images = torch.rand(50, 8, 8, 3) * torch.tensor([1.0, 2.0, 3.0])
    w = whitening(images, least=0.0)
    patches = images.unfold(1, 2, 1).unfold(2, 2, 1).permute(0, 1, 2, 4, 5, 3).reshape(-1, 12)
    white = patches @ w[:12].reshape(12, 12).T
    assert torch.allclose(white.T @ white / len(white), torch.eye(12), atol=1e-3)
    assert torch.equal(w[12:], -w[:12])


# ---- data ---------------------------------------------------------------------------------------------------------------------------


def test_cifar10_is_read_as_its_files_have_it(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for name in CIFAR:
        random.integers(256, size=(20, 3073), dtype=np.uint8).tofile(tmp_path / name)
    records = np.fromfile(tmp_path / CIFAR[1], np.uint8).reshape(20, 3073)
    records[:, 0] %= 10
    records.tofile(tmp_path / CIFAR[1])
    data = load(tmp_path, CPU)
    assert isinstance(data, InMemory)
    assert len(data.labels) == 100
    assert data.labels[20:40].tolist() == records[:, 0].tolist()
    green = data.sample()[25, :, :, 1]
    assert green.flatten().tolist() == records[5, 1 + 1024 : 1 + 2048].tolist()


def test_crops_move_and_flip() -> None:
    x = torch.arange(12 * 12, dtype=torch.uint8).view(1, 12, 12, 1).expand(200, -1, -1, -1)
    moves, flips = torch.full((200, 2), 4), torch.arange(200) % 2 == 1
    moves[2] = torch.tensor([5, 4])
    y = cropped(x, moves, flips)
    assert torch.equal(y[0], x[0])
    assert torch.equal(y[1], x[0].flip(1))
    assert torch.equal(y[2, :-1], x[0, 1:])
    assert torch.equal(y[2, -1], x[0, -2])


def write_images(path: Path, train: int = 6) -> None:
    """Write images of two classes, in folders like ImageNet's."""
    from PIL import Image

    for part, count in (("train", train), ("val", 2)):
        for label, colour in enumerate(((200, 30, 30), (30, 200, 30))):
            folder = path / part / f"class{label}"
            folder.mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (40 + i, 30), colour).save(folder / f"{i}.png")


def test_folders_of_images_are_read(tmp_path: Path) -> None:
    write_images(tmp_path)
    data = load(tmp_path, CPU, side=16)
    assert data.classes == 2
    assert data.labels.tolist() == [0] * 6 + [1] * 6
    x, y = next(iter(data.take(torch.tensor([[[0, 7], [11, 3], [1, 1]]]), [0, 1], seed=0)))
    assert x.shape == (2, 2, 16, 16, 3)
    assert y.tolist() == [[0, 1], [1, 0]]
    assert x[0, 1].float().mean((0, 1)).tolist() == pytest.approx([30, 200, 30], abs=2)
    assert [len(y) for _, y in data.test()] == [4]
    assert Scale(data)(x).shape == x.shape
    assert Scale(data)(x).isfinite().all()  # though all are as blue


def test_a_class_without_images_is_one_clear_line(tmp_path: Path) -> None:
    for folder in ("train/a", "val/a"):
        (tmp_path / folder).mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="has no images"):
        load(tmp_path, CPU)


def test_an_epoch_deals_out_every_image_once() -> None:
    order = Shuffled(100, 4).epoch(5, torch.Generator().manual_seed(0))
    assert order.shape == (5, 4, 5)
    assert sorted(order.flatten().tolist()) == list(range(100))


@pytest.mark.parametrize("alpha", [0.1, 0.3, 100.0])
def test_a_split_by_label_gives_every_image_to_one_node(alpha: float) -> None:
    labels = torch.arange(10).repeat(200)
    split = ByLabel(labels, 4, alpha, torch.Generator().manual_seed(0))
    assert sorted(torch.cat(split.owned).tolist()) == list(range(2000))
    shares = torch.stack([torch.bincount(labels[own], minlength=10) for own in split.owned]) / 200
    assert (shares.max(0).values.mean() > 0.6) == (alpha < 1)  # one node has most of a label
    epochs = [split.epoch(10, torch.Generator().manual_seed(1)) for _ in range(2)]
    for node, own in enumerate(split.owned):
        seen = torch.cat([order[:, node].flatten() for order in epochs]).tolist()
        assert set(seen) <= set(own.tolist())
        counts = np.bincount(seen, minlength=2000)[own.numpy()]
        assert counts.max() - counts.min() <= 1


def test_a_split_that_starves_a_node_is_refused() -> None:
    with pytest.raises(ValueError, match="leaves some of 50 nodes fewer than 32 images"):
        split_of("dirichlet(0.1)", torch.arange(10).repeat(20), 50, 0)


# ---- the study --------------------------------------------------------------------------------------------------------------------


def test_runs_are_shared_by_tables() -> None:
    assert tables_of(Run("Gossip-PGA", H=6), TABLES) == ["7", "15", "8", "10", "bits", "beyond"]
    assert tables_of(Run("Gossip-PGA", H=6, seed=4), TABLES) == ["7", "bits", "beyond"]


def test_the_small_table_is_named_only_where_it_is_alone() -> None:
    assert tables_of(Run("Parallel SGD", "complete", nodes=8), TABLES) == ["10"]
    assert tables_of(Run("Gossip SGD", "ring", nodes=8), TABLES) == ["quick"]


def test_a_method_is_one_row_of_a_table() -> None:
    options = Namespace(table=["7"], seeds=2, nodes=None, method=["Local SGD", "OSGP x2"])
    assert [(run.name, run.seed) for run in _wanted(options, TABLES)] == [(name, seed) for seed in (0, 1) for name in options.method]


def test_every_run_has_an_algorithm_for_its_nodes() -> None:
    for table in TABLES.values():
        for run in table.runs:
            assert run.algorithm(1000).topology.n == run.nodes


def settings_of(run: Run, **changes: object) -> Settings:
    return replace(Settings("cifar10", "SmallResNet", 2, 100, 32, 0.5, 5e-4, 0.2), **changes).stretched(run.stretch)  # type: ignore[arg-type]


def finished() -> Finished:
    return Finished(0.9, 0.8, 0.1, 1.0, 2.0, 3.0, "cpu", [(1.0, 0.5), (0.1, 0.9)])


CHANGES = {
    "data": "imagenet",
    "net": "ResNet50",
    "epochs": 3,
    "steps": 300,
    "batch": 64,
    "lr": 0.25,
    "weight_decay": 1e-4,
    "smoothing": 0.1,
}


@pytest.mark.parametrize("name", list(CHANGES))
def test_a_run_with_other_settings_is_another_run(tmp_path: Path, name: str) -> None:
    run, path = Run("Local SGD", "isolated", 6), tmp_path / "found.csv"
    Store(path, TABLES, settings_of).add(run, finished())
    assert Store(path, TABLES, settings_of).find(run) is not None
    assert Store(path, TABLES, lambda run: settings_of(run, **{name: CHANGES[name]})).find(run) is None


def test_a_longer_run_is_not_taken_for_a_stretched_one(tmp_path: Path) -> None:
    run, path = Run("Local SGD", "isolated", 6), tmp_path / "found.csv"
    Store(path, TABLES, settings_of).add(replace(run, stretch=3), finished())
    longer = Store(path, TABLES, lambda run: settings_of(run, epochs=6, steps=300))
    assert longer.find(run) is None
    assert longer.find(replace(run, stretch=3)) is None


def test_a_file_is_read_with_the_settings_of_most_of_its_runs(tmp_path: Path) -> None:
    run, path = Run("Local SGD", "isolated", 6), tmp_path / "found.csv"
    other, stretched, few = replace(run, seed=1), replace(run, stretch=3), replace(run, nodes=4)
    for one in (run, other, stretched, few):
        Store(path, TABLES, settings_of).add(one, finished())
    Store(path, TABLES, lambda run: settings_of(run, steps=200)).add(run, finished())  # a trial
    found = Store.as_written(path, TABLES)
    assert all(found.find(one) is not None and len(found.curve(one)) == 2 for one in (run, other, stretched, few))
    assert found.find(run)["steps"] == "100"
    assert found.find(replace(run, nodes=8)) is None
    Store(path, TABLES, lambda run: settings_of(run, steps=200)).add(few, finished())
    Store(path, TABLES, lambda run: settings_of(run, steps=200)).add(replace(few, seed=1), finished())
    assert Store.as_written(path, TABLES).find(few)["steps"] == "200"


def test_two_commands_may_write_to_one_file(tmp_path: Path) -> None:
    """Each has read it before the other wrote."""
    run, stores = Run("Local SGD", "isolated", 6), [Store(tmp_path / "found.csv", TABLES, settings_of) for _ in range(2)]
    for seed, store in enumerate(stores):
        store.add(replace(run, seed=seed), finished())
    both = Store(tmp_path / "found.csv", TABLES, settings_of)
    assert all(both.find(replace(run, seed=seed)) is not None and len(both.curve(replace(run, seed=seed))) == 2 for seed in (0, 1))


DAMAGED = {
    "has missing or unknown columns, H, .*weight_decay, worst_node": lambda text: "table,method\n7,Local SGD\n",
    "has missing or unknown columns, H, accuracy, ": lambda text: "",
    "has missing or unknown columns, more": lambda text: text.replace(",device", ",device,more"),
    "line 2 is damaged": lambda text: text.rstrip("\n"),
    "found.csv, line 2 is damaged": lambda text: text.rsplit(",", 2)[0] + "\n",
}


@pytest.mark.parametrize("error", list(DAMAGED))
def test_a_file_that_is_damaged_or_of_another_version_is_refused(tmp_path: Path, error: str) -> None:
    path = tmp_path / "found.csv"
    Store(path, TABLES, settings_of).add(Run("Local SGD", "isolated", 6), finished())
    path.write_text(DAMAGED[error](path.read_text()))
    with pytest.raises(ValueError, match=error):
        Store(path, TABLES, settings_of)


def test_a_file_is_read_at_one_learning_rate(tmp_path: Path) -> None:
    run, path = Run("Local SGD", "isolated", 6), tmp_path / "found.csv"
    for lr in (0.2, 0.1):
        Store(path, TABLES, partial(settings_of, lr=lr)).add(run, finished())
    Store(path, TABLES, partial(settings_of, lr=0.1)).add(replace(run, seed=1), finished())
    assert Store.as_written(path, TABLES).learning_rates() == [0.1, 0.2]
    high, low = (Store.as_written(path, TABLES, lr) for lr in (0.2, 0.1))
    assert (high.find(run)["lr"], low.find(run)["lr"]) == ("0.2", "0.1")
    assert high.find(replace(run, seed=1)) is None
    assert Store.as_written(path, TABLES, 0.4).find(run) is None


def test_how_many_seeds_reach_the_target_is_said() -> None:
    curves = (((1.0, 0.8), (0.5, 0.9)), ((1.0, 0.8), (0.5, 0.85)), ((1.0, 0.9), (0.5, 0.9)))
    seeds = Seeds(Run("Gossip SGD"), (0, 1, 2), (0.9, 0.85, 0.9), 100, 0.8, 0.0, 3.0, 1.0, True, curves)
    assert [_to_target(seeds, target) for target in (0.8, 0.9, 0.95)] == ["1 / 1.50", "2 / 3.00, 2 of 3", "not reached"]
    assert _to_target(replace(seeds, curves=(curves[0], curves[1], curves[1])), 0.9) == "1 of 3"


STUDY = ROOT / "experiments" / "image_classification.py"


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    return warm.run([STUDY, *arguments])


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


TOY = ("--net", "tiny", "--table", "quick", "--epochs", "1", "--batch", "8", "--device", "cpu", "--seeds", "1")


@pytest.mark.processes
def test_a_toy_study_and_again_without_running(tmp_path: Path) -> None:
    write_data(tmp_path)
    arguments = ("--data", str(tmp_path), *TOY, "--out", str(tmp_path / "found.csv"))
    done = start(*arguments)
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "found.csv")
    assert sorted(row["method"] for row in rows) == ["Gossip SGD", "Gossip-AGA", "Gossip-PGA", "Local SGD", "Parallel SGD"]
    assert {"table", "topology", "H", "nodes", "epochs", "seed", "split", "accuracy", "worst_node", "hours", "gpu_seconds"} <= set(rows[0])
    assert {(row["stretch"], row["steps"], row["batch"], row["net"]) for row in rows} == {("1", "9", "8", "TinyResNet")}
    before = (tmp_path / "found.csv").read_bytes()
    assert start(*arguments).returncode == 0
    assert (tmp_path / "found.csv").read_bytes() == before
    assert start(*arguments, "--lr", "0.1", "--method", "Local SGD", "Gossip-PGA", "--minutes", "0.01").returncode == 0
    later = rows_of(tmp_path / "found.csv")[len(rows) :]
    assert later
    assert {row["method"] for row in later} <= {"Local SGD", "Gossip-PGA"}


REFUSED = {
    ("--method", "Local"): "--method Local: not in table quick, which has Parallel SGD, Local SGD, ",
    ("--seeds", "0"): "argument --seeds: must be a whole number >= 1, got 0",
    ("--lr", "nan"): "argument --lr: must be a number > 0, got nan",
    ("--minutes", "-1"): "argument --minutes: must be a number > 0, got -1",
    ("--label-smoothing", "2"): "argument --label-smoothing: must be a number >= 0 and < 1, got 2",
    ("--batch", "1"): "--batch 1: BatchNorm needs at least 2 images",
    ("--out", "."): "--out .: give a file in a folder that you can write to",
    ("--out", "/dev/null/found.csv"): "--out /dev/null/found.csv: give a file in a folder that you can write to",
    ("--nodes", "500"): "error: 500 nodes x --batch 8 are more than the ",
    ("--data", "nowhere"): "error: nowhere has no known data set",
}


@pytest.mark.parametrize("wrong", list(REFUSED))
def test_what_cannot_be_is_one_line_before_anything_is_trained(
    tmp_path: Path, wrong: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path)
    with pytest.raises(SystemExit) as exit:
        image_classification.main(["--data", str(tmp_path), *TOY, "--out", "found.csv", *wrong])
    assert REFUSED[wrong] in f"{exit.value} {capsys.readouterr().err}"
    assert not (tmp_path / "found.csv").exists()


def test_ranks_that_would_each_simulate_all_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        image_classification.parse(["--data", "."])
    assert "use --engine processes, or start it without torchrun" in capsys.readouterr().err


def test_ctrl_c_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(runner: image_classification.Runner, run: Run) -> Finished:
        if run.method == "Parallel SGD":
            return finished()
        raise KeyboardInterrupt

    write_data(tmp_path)
    monkeypatch.setattr(image_classification.Runner, "__call__", pressed)
    with pytest.raises(SystemExit, match=r"stopped: the finished runs are in .*found\.csv, and are not run again"):
        image_classification.main(["--data", str(tmp_path), *TOY, "--out", str(tmp_path / "found.csv")])
    assert [row["method"] for row in rows_of(tmp_path / "found.csv")] == ["Parallel SGD"]


STUDIES = [
    path for folder in ("networks", "images", "text", "logistic") for path in sorted((ROOT / "experiments" / folder).glob("[a-z]*.py"))
]
STUDIES.remove(ROOT / "experiments" / "images" / "kernels.py")  # Triton comes with torch for CUDA only


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_examples_in_the_studies_are_true(path: Path) -> None:
    assert doctest.testmod(importlib.import_module(f"{path.parent.name}.{path.stem}")).failed == 0


WITH_RESULTS_OF_ITS_OWN = """
import os, runpy, sys
sys.argv = [*sys.argv[1:], "--out", os.path.join(os.environ["FOLDER"], os.environ["RANK"] + ".csv")]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.processes
def test_real_processes_train_as_the_simulator_does(tmp_path: Path) -> None:
    """And run what the first rank has not, though the other one sees results (the simulator's) of every run."""
    write_data(tmp_path, train=160, test=40)
    arguments = ("--data", str(tmp_path), *TOY, "--nodes", "2", "--timeout", "100")
    ranks = ["-c", WITH_RESULTS_OF_ITS_OWN, STUDY, *arguments, "--engine", "processes"]
    for done in (start(*arguments, "--out", str(tmp_path / "1.csv")), warm.torchrun(2, ranks, env={"FOLDER": str(tmp_path)})):
        assert done.returncode == 0, done.stderr
    simulated, real = ({row["method"]: float(row["loss"]) for row in rows_of(tmp_path / f"{name}.csv")} for name in (1, 0))
    assert len(simulated) == 5
    assert real.keys() == simulated.keys()
    for method, loss in real.items():
        assert loss == pytest.approx(simulated[method], rel=2e-3), method


@pytest.mark.processes
def test_real_processes_train_resnet50_on_a_folder_of_images(tmp_path: Path) -> None:
    write_images(tmp_path / "photos", train=4)
    what = ["--data", tmp_path / "photos", "--net", "resnet50", "--table", "9", "--method", "Gossip-PGA", "--out", tmp_path / "1.csv"]
    small = ["--seeds", "1", "--epochs", "1", "--batch", "2", "--device", "cpu", "--timeout", "100"]
    done = warm.torchrun(2, [STUDY, *what, *small, "--engine", "processes"])
    assert done.returncode == 0, done.stderr
    (row,) = rows_of(tmp_path / "1.csv")
    assert (row["method"], row["nodes"], row["steps"], row["net"], row["data"]) == (
        "Gossip-PGA",
        "2",
        "2",
        "ResNet50",
        "photos, 224 pixels",
    )
    assert 0 < float(row["loss"]) < 3


def on_a_rank(rank: int) -> tuple[int, float, list[float]]:
    """What the first rank says, a mean over ranks, and what chance does after two starts from one seed."""
    drawn = []
    for _ in range(2):
        torch.manual_seed(7)
        OneOfMany(torch.nn.Linear(2, 1), CPU, loss_of, partial(optimizer, momentum=0.9)).start(rumor.gossip_sgd(rumor.ring(4)))
        drawn.append(float(torch.rand(())))
    return as_first_says(rank + 5), mean_over_ranks(torch.tensor(float(rank))), drawn


def test_ranks_agree_on_what_to_run_and_differ_in_chance(four: Cluster) -> None:
    said, means, drawn = zip(*four.run(on_a_rank), strict=True)
    assert said == (5, 5, 5, 5)
    assert means == (1.5, 1.5, 1.5, 1.5)
    assert all(first == again for first, again in drawn)
    assert len({first for first, _ in drawn}) == 4


def test_the_learning_rate_warms_up_and_falls() -> None:
    assert [round(lr_at(k, 100, 1.0), 3) for k in (0, 2, 4, 24, 25, 50, 75)] == [0.1, 0.55, 1.0, 1.0, 0.1, 0.01, 0.001]


def test_the_pages_tables_are_those_of_the_results() -> None:
    page = (ROOT / "docs" / "networks.md").read_text()
    assert filled_in(page, *stores()) == page
