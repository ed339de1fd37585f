"""Time to accuracy: the target rule, reading IDX files, tables, and the whole of it in small over loopback."""

import json
import math
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import accuracy_tables  # noqa: E402
import fashion  # noqa: E402
import reached  # noqa: E402
from tests import warm  # noqa: E402


def write_idx(path: Path, values: np.ndarray) -> None:
    path.write_bytes(bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}i", *values.shape) + values.astype(np.uint8).tobytes())


def write_data(folder: Path, train: int = 600, test: int = 200) -> None:
    """Ten classes of images, each brighter in rows of its own."""
    random = np.random.default_rng(0)
    for part, count in (("train", train), ("t10k", test)):
        labels = random.integers(10, size=count)
        images = random.integers(60, size=(count, 28, 28))
        images[np.arange(count), 2 * labels] += 150
        write_idx(folder / f"{part}-images-idx3-ubyte", images)
        write_idx(folder / f"{part}-labels-idx1-ubyte", labels)


def run_of(method: str, seed: int, accuracies: list[float], seconds_a_step: float, ratio: float = 1.9) -> dict:
    steps = [10 * (i + 1) for i in range(len(accuracies))]
    seconds = [seconds_a_step * k for k in steps]
    row = {"method": method, "hosts": 4, "ratio": ratio, "rate": "700mbit", "seed": seed}
    return row | {"steps": steps, "seconds": seconds, "accuracy": accuracies}


RUNS = [
    *(run_of("DDP", seed, [0.5, 0.8, 0.88 + 0.01 * seed], 0.4) for seed in range(3)),
    *(run_of("Gossip-PGA", seed, [0.5, 0.879, 0.88], 0.2) for seed in range(3)),
    *(run_of("Local SGD", seed, [0.5, 0.7, [0.70, 0.86, 0.95][seed]], 0.1) for seed in range(3)),
]
SECONDS = {
    "computing alone": {"median": 0.1},
    "all-reduce alone": {"median": 0.19},
    "DDP, bucket_cap_mb=1": {"median": 0.4},
    "DDP, bucket_cap_mb=4": {"median": 0.3},
    **{name: {"median": 0.2} for name in ("Gossip SGD", "Gossip-PGA", "Gossip-PGA, delay=1", "Gossip-PGA, 4 bits")},
}


def test_the_target_is_two_standard_errors_below_parallel_sgds_mean():
    assert reached.target_of([0.88, 0.89, 0.90]) == pytest.approx(0.89 - 2 * 0.01 / math.sqrt(3))
    assert reached.target(RUNS, 4) == pytest.approx(0.89 - 2 * 0.01 / math.sqrt(3))


def test_a_seed_at_two_rates_is_one_sample():
    twice = [*RUNS, *(run_of("DDP", seed, [0.5, 0.8, 0.88 + 0.01 * seed], 0.8, ratio=3.3) for seed in range(3))]
    assert reached.target(twice, 4) == reached.target(RUNS, 4)


def test_a_target_of_one_seed_is_refused():
    with pytest.raises(ValueError, match="at least 2 seeds on 4 hosts, got 1"):
        reached.target(RUNS[:1], 4)


def test_the_first_evaluation_at_the_target_or_above_counts():
    run = run_of("DDP", 0, [0.5, 0.8, 0.9, 0.85], 0.4)
    assert reached.first(run, "steps", 0.8) == 20
    assert reached.first(run, "seconds", 0.81) == pytest.approx(12.0)
    assert reached.first(run, "seconds", 0.91) == math.inf


def test_a_run_that_never_gets_there_counts_as_later_than_all():
    assert reached.middle([1.0, math.inf, 2.0]) == 2.0
    assert reached.middle([1.0, math.inf]) == math.inf
    assert reached.middle([1.0, 2.0]) == 1.5
    rows = {row["method"]: row for row in reached.summary(RUNS, 4, 1.9)}
    assert rows["Gossip-PGA"]["times as fast, to target"] == pytest.approx(12.0 / 4.0)
    assert rows["Gossip-PGA"]["times as fast, whole run"] == pytest.approx(2.0)
    assert rows["Local SGD"]["not reached"] == 2
    assert rows["Local SGD"]["times as fast, to target"] == 0.0


def test_the_curve_is_steps_to_the_target_times_seconds_a_step():
    points = reached.over_bandwidth(RUNS, [{"hosts": 4, "rate": "1gbit", "seconds": SECONDS}])
    assert {point["method"]: point["seconds"] for point in points} == {"DDP": pytest.approx(9.0), "Gossip-PGA": pytest.approx(4.0)}


def test_tables_say_what_was_not_reached():
    timing = {"hosts": 4, "ratio": 1.9, "rate": "700mbit", "seconds": SECONDS}
    results = {"runs": RUNS, "ratios": [timing], "curve": [timing], "settings": {"parameters": 2_187_500}}
    text = accuracy_tables.everything(results)
    assert "| not reached in 2 of 3 " in text
    assert "): **3.00** " in text
    assert accuracy_tables.sometimes_missed(results) == [("Local SGD", 2, 3)]
    assert accuracy_tables.never_reached(results) == []
    assert accuracy_tables.ceilings(results, "Gossip-PGA") == [
        pytest.approx(2.77, abs=0.005)
    ]  # a copy of the model takes 0.1 s, DDP 0.3 s a step
    assert "Target, 4 hosts: 87.85 % (Parallel SGD ends at 89.00 %, 3 seeds)." in text
    table = [[cell.strip() for cell in line.split("|")] for line in accuracy_tables.iteration(results).splitlines()]
    assert table[2][1:5] == ["paper, ResNet-50, 25 Gbit/s (1.9)", "146", "424 (+278)", "296 (+150)"]
    assert table[-1][1:5] == ["4 hosts, 700 Mbit/s (1.9)", "100", "300 (+200)", "200 (+100)"]


def test_idx_files_are_read_as_they_were_written(tmp_path: Path):
    values = np.arange(24).reshape(2, 3, 4)
    write_idx(tmp_path / "values", values)
    assert np.array_equal(fashion.read_idx(tmp_path / "values"), values)
    (tmp_path / "text").write_text("no images")
    with pytest.raises(ValueError, match="must begin with 00 00 08, not 6e 6f 20"):
        fashion.read_idx(tmp_path / "text")


def test_hosts_hold_all_images_once_and_every_pass_has_them_all(tmp_path: Path):
    write_data(tmp_path)
    shards = [fashion.shard(tmp_path, rank, 4, seed=3) for rank in range(4)]
    images = np.concatenate([images.numpy() for images, _ in shards])
    whole = fashion.load(tmp_path, "train")[0].numpy()
    assert np.array_equal(np.sort(images.sum(1)), np.sort(whole.sum(1)))
    batches = fashion.batches(shards[0], 50, seed=0)
    one_pass = np.concatenate([next(batches)[0].numpy() for _ in range(3)])
    assert np.array_equal(np.sort(one_pass.sum(1)), np.sort(shards[0][0].numpy().sum(1)))


def test_the_schedule_warms_up_and_ends_at_zero():
    rates = [fashion.lr_at(k, 100) for k in range(101)]
    assert max(rates) == pytest.approx(fashion.LR)
    assert rates[:15] == sorted(rates[:15])
    assert rates[100] == pytest.approx(0.0)
    assert fashion.marks(100)[-1] == 100
    assert len(fashion.marks(24)) == len(set(fashion.marks(24)))


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    return warm.run([ROOT / "benchmarks" / "accuracy.py", *arguments])


@pytest.mark.processes
def test_missing_data_are_one_clear_line(tmp_path: Path):
    done = start("--data", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith(f"accuracy: Fashion-MNIST is missing: {tmp_path} does not have all of train-images-idx3-ubyte")
    assert done.stderr.count("\n") == 1


@pytest.mark.long
@pytest.mark.processes
def test_a_quick_run_over_loopback_and_again_without_measuring(tmp_path: Path):
    (tmp_path / "data").mkdir()
    write_data(tmp_path / "data")
    methods = ("DDP", "Gossip-PGA", "Gossip-PGA, delay=1", "PostLocalSGD (torch)")
    arguments = ["--quick", "--data", str(tmp_path), "--runs", str(tmp_path / "runs"), "--methods", *methods]
    done = start(*arguments)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "runs" / "accuracy.json").read_text())
    assert {(run["method"], run["seed"]) for run in results["runs"]} == {(name, seed) for name in methods for seed in (0, 1)}
    for run in results["runs"]:
        assert len(run["steps"]) == len(run["seconds"]) == len(run["accuracy"])
        assert run["accuracy"][-1] > 0.5
    assert (tmp_path / "runs" / "accuracy.png").exists()
    again = start(*arguments)
    assert again.returncode == 0, again.stderr
    assert again.stdout == done.stdout
