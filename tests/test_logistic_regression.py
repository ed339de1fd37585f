"""The convex study is what it says: its problems, its transient stages, its steps, its files."""

import csv
import lzma
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import rumor

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "experiments"))

from logistic import figures, page, problem, run, store, tables, transient  # noqa: E402
from tests import warm  # noqa: E402

SCRIPT = ROOT / "experiments" / "logistic_regression.py"
COLUMNS = ["method", "topology", "n", "H", "iid", "T_tr_1", "T_tr_025", "ratio_9500"]


def study(*arguments: str) -> subprocess.CompletedProcess[str]:
    return warm.run([SCRIPT, *arguments])


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def small() -> problem.Problem:
    return problem.synthetic(6, iid=False, M=300, d=4)


@pytest.fixture(scope="module")
def panel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One panel of figure 1, made by the command that the documentation gives."""
    folder = tmp_path_factory.mktemp("study")
    done = study("--figure", "1", "--n", "20", "--trials", "8", "--out", str(folder))
    assert done.returncode == 0, done.stderr
    assert "100%" in done.stderr  # the bar
    return folder


# --- problems


def loss_of_all(given: problem.Problem, x: torch.Tensor) -> torch.Tensor:
    """f, written out sample by sample."""
    losses = [torch.log1p(torch.exp(-(row @ x))) for row in given.rows.reshape(-1, given.d)]
    return torch.stack(losses).mean() + given.l2 / 2 * x @ x


@pytest.mark.parametrize("l2", [0.0, 0.05])
def test_the_minimizer_has_no_gradient(small: problem.Problem, l2: float):
    x = problem.Problem("", small.rows, l2).minimizer.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of_all(problem.Problem("", small.rows, l2), x), x)
    assert gradient.norm() < 1e-12


def test_the_gap_is_the_loss_above_its_minimum(small: problem.Problem):
    given = problem.Problem("", small.rows, 0.05)
    for x in (torch.zeros(4, dtype=torch.float64), given.minimizer + 0.3, given.minimizer + 3.0):
        expected = loss_of_all(given, x) - loss_of_all(given, given.minimizer)
        assert torch.allclose(given.gap(x[None])[0], expected, rtol=1e-9)


def test_the_gap_from_few_samples_is_close_to_that_from_all():
    many = problem.synthetic(20, iid=False)
    assert len(many._few_rows) == problem.SUBSET < len(many.all_rows)
    directions = torch.nn.functional.normalize(torch.randn(6, many.d, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    for size, tolerance in ((1.0, 0.06), (0.3, 0.02), (0.03, 0.003)):
        x = many.minimizer + size * directions
        exact = torch.nn.functional.softplus(-(many.all_rows @ x.mT)).mean(0)
        exact -= torch.nn.functional.softplus(-(many.all_rows @ many.minimizer)).mean()
        assert ((many.gap(x) - exact) / exact).abs().max() < tolerance


def test_data_is_as_the_paper_draws_it():
    same, differing = problem.synthetic(4, iid=True), problem.synthetic(4, iid=False)
    for given in (same, differing):
        assert given.rows.shape == (4, 8000, 10)
        assert given.rows.var() == pytest.approx(10, rel=0.02)
        assert torch.equal(given.rows, problem.synthetic(4, given is same).rows)
    own = torch.stack([problem.Problem("", rows[None]).minimizer for rows in differing.rows])  # each node's own minimum: its unit vector
    assert own.norm(dim=1) == pytest.approx(1, rel=0.1)
    assert (own @ own.mT - torch.eye(4)).abs().max() > 0.1
    alike = torch.stack([problem.Problem("", rows[None]).minimizer for rows in same.rows])
    assert (alike - alike[0]).norm(dim=1).max() < 0.25


def test_libsvm_files_are_dealt_out_by_chance_or_by_label(tmp_path: Path):
    lines = [f"{int(i % 4 == 0)} 1:{i + 1} {2 + i % 3}:0.5" for i in range(41)]  # labels 0 and 1; one sample too many for 4 nodes
    with lzma.open(tmp_path / "toy.xz", "wt") as file:
        file.write("\n".join(lines) + "\n")
    for split, kinds in (("iid", 2), ("label", 1)):
        rows = problem.from_libsvm(tmp_path / "toy.xz", 4, split, l2=0.1).rows
        assert rows.shape == (4, 10, 4)
        labels = rows[..., 0].sign()  # y h, and the first feature is positive
        assert labels.unique().tolist() == [-1, 1]
        assert sum(len(node.unique()) == 1 for node in labels) >= (3 if kinds == 1 else 0)
    with lzma.open(tmp_path / "one.xz", "wt") as file:
        file.write("1 1:1\n" * 40)
    with pytest.raises(ValueError, match="two labels"):
        problem.from_libsvm(tmp_path / "one.xz", 4, "iid", l2=0.1)
    with pytest.raises(ValueError, match="'iid' or 'label'"):
        problem.from_libsvm(tmp_path / "toy.xz", 4, "class", l2=0.1)


# --- the run is the core's


class Linear(nn.Module):
    def __init__(self, d: int):
        super().__init__()
        self.x = nn.Parameter(torch.zeros(d, dtype=torch.float64))


@pytest.mark.parametrize("l2", [0.0, 0.05])
def test_the_study_steps_as_the_simulator_does(small: problem.Problem, l2: float):
    given = problem.Problem("", small.rows, l2)
    algorithms = [rumor.parallel_sgd(6), rumor.local_sgd(6, 4), rumor.gossip_sgd(rumor.ring(6)), rumor.gossip_pga(rumor.grid(6), 4)]
    samples = torch.randint(300, (60, 3, 6), dtype=torch.int16, generator=torch.Generator().manual_seed(1))
    walk = run.Walk(given, algorithms, 3)
    walk.walk(0, samples, torch.full((60,), 0.2, dtype=torch.float64))
    for algorithm, X in zip(algorithms, walk.X, strict=True):
        sim = rumor.Simulator(Linear(4), algorithm)
        optimizer = torch.optim.SGD(sim.parameters(), lr=0.2, weight_decay=l2)
        for sample in samples[:, 2]:  # the last trial
            batch = given.rows[torch.arange(6), sample.long()][:, None]  # [n, 1, d]
            losses = sim(lambda model, rows: torch.nn.functional.softplus(-(rows @ model.x)).mean(), batch)
            losses.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            sim.step(losses)
        assert torch.allclose(sim.X, X[2], atol=1e-12)


def test_each_trial_of_gossip_aga_has_its_own_period(small: problem.Problem):
    algorithm = rumor.gossip_aga(rumor.ring(6), warmup=4, H_init=2, H_max=16)
    samples = torch.randint(300, (50, 2, 6), dtype=torch.int16, generator=torch.Generator().manual_seed(2))
    lr = torch.full((50,), 0.1, dtype=torch.float64)
    both = run.Walk(small, [algorithm], 2)
    both.walk(0, samples, lr)
    for trial in range(2):
        alone = run.Walk(small, [algorithm], 1)
        alone.walk(0, samples[:, trial : trial + 1], lr)
        assert torch.equal(alone.X[0, 0], both.X[0, trial])
    states = [state.schedule for _, state in both.methods[0].parts]
    assert states[0].H != states[1].H or states[0].F_init != states[1].F_init


def test_all_methods_see_the_same_samples(small: problem.Problem):
    alone = run.run(small, [rumor.gossip_sgd(rumor.ring(6))], trials=3, steps=100)[0]
    among = run.run(small, [rumor.parallel_sgd(6), rumor.gossip_sgd(rumor.ring(6)), rumor.local_sgd(6, 7)], trials=3, steps=100)[1]
    assert torch.allclose(alone.node_error, among.node_error, rtol=1e-12)
    assert alone.node_error.shape == (10, 3)  # steps 0, 11, ..., 99


def test_one_average_of_gossip_leaves_the_error_of_the_mean(small: problem.Problem):
    result = run.run(small, [rumor.gossip_sgd(rumor.ring(6))], trials=2, steps=12)[0]
    walk = run.Walk(small, [rumor.gossip_sgd(rumor.ring(6))], 2)
    draw = torch.Generator().manual_seed(0)
    walk.walk(0, torch.randint(300, (12, 2, 6), generator=draw, dtype=torch.int16)[:11], torch.full((11,), 0.2, dtype=torch.float64))
    walk.methods[0].algorithm.finish(*walk.methods[0].parts[0])
    left = (walk.X[0] - small.minimizer).square().sum(-1).mean(-1)
    assert torch.allclose(left, result.mean_error[1])


# --- transient stages


def test_a_transient_stage_ends_where_95_percent_stay_below():
    parallel = np.ones(910)
    curve = np.where(np.arange(910) < 500, 3.0, 1.1)
    # a mean of 20 records is at most 2 where at most 9 of them are 3.0: from the one of records 491 to 510 on, centred at 501
    assert transient.transient_stage(curve, parallel, 1) == 501 * 11
    curve[700:715] = 9.0  # 34 of the 400 means that follow are too large: that is over 5 %
    assert transient.transient_stage(curve, parallel, 1) > 700 * 11
    curve[701:715] = 1.1  # one record too large makes no mean too large
    assert transient.transient_stage(curve, parallel, 1) == 501 * 11
    assert transient.transient_stage(curve, parallel, 0.05) is None
    assert transient.transient_stage(parallel, parallel, 0.25) == 0


def test_a_crossing_at_the_very_end_does_not_count():
    parallel = np.ones(910)
    for k, is_reached in ((9_600, False), (9_520, False), (9_480, True)):
        curve = np.where(np.arange(910) < k // 11, 3.0, 1.0)  # the mean of 20 is at most 2 where 10 of them are 1: centred at k
        assert (transient.transient_stage(curve, parallel, 1) is not None) == is_reached


def test_the_ratio_is_that_of_220_steps_around():
    curve = np.ones(910)
    curve[9_500 // 11 : 9_500 // 11 + 10] = 3.0  # the later half of the window
    assert transient.ratio_at(9_500, curve, np.ones(910)) == pytest.approx(2.0)


def test_the_learning_rate_is_halved_after_each_thousand_steps():
    lr = run.learning_rates(10_000)
    assert lr[[0, 999, 1000, 1999, 2000, 9999]].tolist() == [0.2, 0.2, 0.1, 0.1, 0.05, 0.2 / 2**9]


def test_records_are_what_the_nodes_hold(small: problem.Problem):
    steps = 230
    result = run.run(small, [rumor.gossip_sgd(rumor.ring(6))], trials=2, steps=steps, seed=5)[0]
    walk = run.Walk(small, [rumor.gossip_sgd(rumor.ring(6))], 2)
    draw = torch.Generator().manual_seed(5)
    samples = torch.randint(300, (steps, 2, 6), generator=draw, dtype=torch.int16)
    for k in range(steps):
        X = walk.X[0]  # [trials, n, d]
        if k % 11 == 0:
            for trial in range(2):
                errors = [float((x - small.minimizer).square().sum()) for x in X[trial]]
                assert float(result.node_error[k // 11, trial]) == pytest.approx(sum(errors) / 6)
        if k % 110 == 0:
            assert torch.allclose(result.gap[k // 110], small.gap(X.mean(1)))
        walk.step(samples[k], torch.tensor(0.2, dtype=torch.float64))


# --- figures, files, command line


@pytest.fixture
def made_up(tmp_path: Path) -> tuple[store.Store, figures.Curve]:
    """A store with Parallel SGD at 1, and Gossip SGD of which every number tells where it came from."""
    kept, setting = store.Store(tmp_path, 2, 0, "cpu"), figures.Setting(20, False)
    flat, gap = torch.ones(910, 2, dtype=torch.float64), torch.ones(91, 2, dtype=torch.float64)
    kept.save(figures.parallel(setting), run.Result(flat, flat, gap, 1.0))
    wide = torch.tensor([2.0, 4.0], dtype=torch.float64).expand(910, 2)  # over trials: mean 3, deviation sqrt(2)
    late = torch.where(torch.arange(91)[:, None] < 40, 5.0, 1.0).double().expand(91, 2)
    kept.save(figures.gossip(setting), run.Result(wide, 7 * flat, late, 0.0))
    return kept, figures.gossip(setting)


def test_a_curve_with_one_final_average_is_read_from_the_means_errors(made_up):
    kept, gossip = made_up
    assert kept.load(gossip).error.mean() == 3.0
    assert kept.load(figures.gossip(gossip.setting, final_average=True)).error.mean() == 7.0


def test_the_objectives_stage_is_in_steps(made_up):
    kept, gossip = made_up
    found = kept.load(gossip).objective_versus(kept.load(figures.parallel(gossip.setting)))
    assert found["T_tr_1"] == 41 * 110  # the mean of values 40 and 41, the first of 1.0 alone
    assert found["ratio_9500"] == 1.0


def test_the_curves_file_has_mean_and_deviation_over_trials(made_up):
    kept, gossip = made_up
    first = tables.of(gossip, tables.curves(kept, [figures.Panel("", (gossip,))]))[0]
    assert (first["k"], first["error_mean"], first["error_std"]) == (110, "3", "1.4142")


def test_real_data_is_split_as_the_panel_says(tmp_path: Path):
    sys.path.insert(0, str(SCRIPT.parent))
    import logistic_regression as script

    (tmp_path / "below").mkdir()
    with lzma.open(tmp_path / "below" / "a9a.txt.xz", "wt") as file:
        file.write("\n".join(f"{1 if i % 2 else -1} 1:1 2:{i}" for i in range(400)) + "\n")
    for iid in (True, False):
        job = script.Job(store.Store(tmp_path, 2, 0, "cpu"), figures.Setting(20, iid, "a9a"), [], tmp_path)
        labels = job.problem().rows[..., 0]
        assert (labels.std(dim=1) == 0).all() == (not iid)


def test_every_figure_has_the_papers_curves():
    of = {
        name: {(c.method, c.topology, c.H, c.setting.n, c.setting.iid) for p in panels for c in p.curves}
        for name, panels in figures.FIGURES.items()
    }
    ring = {(m, t, H) for m, t, H in (("parallel_sgd", None, None), ("gossip_sgd", "ring", None), ("gossip_pga", "ring", 16))}
    for name, iid in (("1", False), ("4", True)):
        assert of[name] == {(*curve, n, iid) for curve in ring for n in (20, 50, 100)}
    assert {(t, n) for m, t, H, n, iid in of["5"] if m == "gossip_sgd"} == {
        (t, n) for t in ("exponential", "grid", "ring") for n in (20, 100)
    }
    assert {(m, H) for m, t, H, n, iid in of["6"]} == {("parallel_sgd", None), ("local_sgd", 16), ("gossip_pga", 16)}
    assert {(m, H) for m, t, H, n, iid in of["7"] if m != "parallel_sgd"} == {
        (m, H) for m in ("local_sgd", "gossip_pga") for H in (16, 32, 64)
    }
    for panels in figures.FIGURES.values():
        for curve in figures.curves_of(panels):
            assert curve.algorithm.topology.name.startswith(f"{curve.row['topology']}({curve.setting.n}")


@pytest.mark.processes
def test_one_panel_agrees_with_the_reference(panel: Path):
    rows = read(panel / "figure-1.csv")
    assert list(rows[0]) == COLUMNS
    found = {row["method"]: row for row in rows}
    assert set(found) == {"parallel_sgd", "gossip_sgd", "gossip_pga"}
    assert {row["n"] for row in rows} == {"20"}
    assert {row["iid"] for row in rows} == {"False"}
    # within one stage of the learning rate's staircase of the reference, and in its order
    assert abs(int(found["gossip_sgd"]["T_tr_1"]) - 6996) <= 1000
    assert abs(int(found["gossip_pga"]["T_tr_1"]) - 4983) <= 1000
    assert int(found["gossip_pga"]["T_tr_1"]) < int(found["gossip_sgd"]["T_tr_1"])
    assert float(found["gossip_sgd"]["ratio_9500"]) == pytest.approx(1.16, abs=0.08)
    assert float(found["gossip_pga"]["ratio_9500"]) == pytest.approx(1.03, abs=0.04)
    assert (panel / "figure-1.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.processes
def test_a_finished_run_is_not_run_again(panel: Path):
    before = {path: path.stat().st_mtime_ns for path in (panel / "runs").iterdir()}
    table = (panel / "figure-1.csv").read_text()
    assert study("--figure", "1", "--n", "20", "--trials", "8", "--out", str(panel), "--no-pictures").returncode == 0
    assert {path: path.stat().st_mtime_ns for path in (panel / "runs").iterdir()} == before
    assert (panel / "figure-1.csv").read_text() == table
    next(iter(before)).unlink()  # as if it had been stopped before this one
    assert study("--figure", "1", "--n", "20", "--trials", "8", "--out", str(panel), "--no-pictures").returncode == 0
    assert (panel / "figure-1.csv").read_text() == table
    assert sum(path.stat().st_mtime_ns != before[path] for path in (panel / "runs").iterdir()) == 1


@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--trials", "1"], "at least 2"),
        (["--figure", "a9a"], "needs --data"),
        (["--figure", "2"], "invalid choice"),
        (["--n", "7", "--figure", "1"], "no panel for n"),
        (["--device", "cuda"], "can't use that here"),
        (["--device", "abacus"], "can't use that here"),
        (["--trials", "0"], "at least 2"),
        (["--seeds", "0"], "at least 1"),
        (["--jobs", "0"], "at least 1"),
        (["--n", "20", "30", "--figure", "1"], "no panel for n = 30"),
    ],
)
def test_wrong_input_ends_with_one_line(arguments: list[str], says: str, tmp_path: Path):
    if arguments[-1] == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = study("--out", str(tmp_path), *arguments)
    assert done.returncode == 2
    assert says in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.processes
def test_a_folder_that_cannot_be_is_refused_before_the_run(tmp_path: Path):
    (tmp_path / "file").write_text("")
    done = study("--figure", "1", "--n", "20", "--out", str(tmp_path / "file"))
    assert done.returncode == 2
    assert "give a folder" in done.stderr.strip().splitlines()[-1]


@pytest.mark.processes
def test_a_run_that_was_cut_short_is_run_again(panel: Path):
    cut = next(path for path in (panel / "runs").iterdir() if "gossip_pga" in path.name)
    whole, table = cut.read_bytes(), (panel / "figure-1.csv").read_text()
    cut.write_bytes(whole[: len(whole) // 2])
    assert study("--figure", "1", "--n", "20", "--trials", "8", "--out", str(panel), "--no-pictures").returncode == 0
    assert len(cut.read_bytes()) == len(whole)
    assert (panel / "figure-1.csv").read_text() == table


def test_other_data_is_another_run(tmp_path: Path):
    kept = [store.Store(tmp_path, 8, 0, "cpu", {"a9a": source}) for source in ("-1", "-2")]
    curve = figures.parallel(figures.Setting(20, True, "a9a"))
    assert kept[0].path(curve) != kept[1].path(curve)


@pytest.mark.processes
def test_an_interrupt_ends_it_at_once_and_keeps_what_is_finished(tmp_path: Path):
    command = [sys.executable, str(SCRIPT), "--figure", "1", "--trials", "30", "--jobs", "2", "--out", str(tmp_path), "--no-pictures"]
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=warm.default_signals
    )
    try:
        deadline = time.monotonic() + warm.DEADLINE
        while not list(tmp_path.glob("runs/[!.]*-50-*.npz")):  # n = 50 is done (a file that is being written begins with a dot)
            assert time.monotonic() < deadline
            assert running.poll() is None
            time.sleep(0.05)
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does: to all of its processes
        _, said = running.communicate(timeout=warm.DEADLINE)
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
    assert running.returncode == 1
    assert "to continue after the finished runs" in said
    assert "Traceback" not in said
    assert not list(tmp_path.glob("runs/*-100-*.npz"))
    assert not list(tmp_path.glob("runs/.*"))


def test_the_pages_tables_are_those_of_the_data_files():
    text = (ROOT / "docs" / "convex.md").read_text()
    assert text.count("<!-- table") >= 8
    assert page.filled_in(text, ROOT / "docs") == text
    for figure, has_reference in (("1", True), ("extra", True), ("a9a", False), ("w8a", False)):  # it is of the synthetic problem
        assert ("reference" in page.stage_table(figure, ROOT / "docs" / "convex")) == has_reference


def test_medians_count_what_is_not_reached_as_late():
    assert tables.median([5000, "", 7000]) == 7000
    assert tables.median([5000, "", ""]) == ""
    assert tables.median([1.5, 1.25, 9.0]) == 1.5
