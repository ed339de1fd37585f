"""The demo does what it says, and leaves no process or file behind when it is stopped."""

from __future__ import annotations

import importlib.util
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import rumor
from rumor.cli import main
from rumor.cli.demo import _output_folder
from rumor.cli.demo_comparison import _table, _verdict
from rumor.cli.progress import Progress
from rumor.demo import network
from rumor.demo.digits import TO_TRAIN, split_by_label
from rumor.demo.methods import RECOMMENDED, Method, build_method
from rumor.demo.results import Evaluation, Link, Result
from rumor.demo.training import AT_THE_END, Node, watched_steps
from tests import warm
from tests.cluster import Cluster

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="the demo needs scikit-learn")
METHODS = ["parallel_sgd", "local_sgd", "gossip_sgd", "gossip_pga", "gossip_aga", "slowmo", "osgp"]
LABELS = ["Parallel SGD", "Local SGD", "Gossip SGD", "Gossip-PGA", "Gossip-AGA", "SlowMo", "OSGP"]
FORKED = """
import multiprocessing, sys
import rumor.demo.processes

rumor.demo.processes.get_context = lambda method: multiprocessing.get_context("fork")  # so that they do not import torch again
from rumor.cli import main

sys.exit(main())
"""
LONG = "--method local_sgd --nodes 2 --steps 8000"  # long enough to be stopped on the way


def command(line: str, folder: Path) -> list[str]:
    return [sys.executable, "-m", "rumor", "demo", *line.split(), "--out", str(folder)]


@pytest.mark.processes
def test_methods_may_be_written_out(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    methods = ["gossip_pga(one_peer_exponential,H=3)", "gossip_pga(one_peer_exponential,H=3,bits=4)"]
    done = warm.run(["-c", FORKED, "demo", "--method", *methods, "--nodes", "2", "--steps", "6", "--modelled", "--out", tmp_path / "new"])
    assert done.returncode == 0, done.stderr
    plain, coded = json.loads((tmp_path / "new" / "demo.json").read_text())["results"]
    assert [plain["method"], coded["method"]] == methods
    assert plain["bytes_per_node"] > 5 * coded["bytes_per_node"]
    assert methods[1] in done.stdout


@pytest.mark.processes
def test_every_method_has_a_row_a_curve_and_its_place_in_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    line = f"--method {' '.join(METHODS)} --topology one_peer_exponential --nodes 4 --steps 6 --H 3 --seed 5 --modelled --rate 1Mbit/s"
    done = warm.run(["-c", FORKED, "demo", *line.split(), "--out", tmp_path / "new"])
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "new" / "demo.json").read_text())
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["demo.json", "demo.png"]
    assert (tmp_path / "new" / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert str(tmp_path / "new" / "demo.png") in done.stdout
    assert {"nodes": 4, "steps": 6, "H": 3, "seed": 5, "topology": "one_peer_exponential(4)"}.items() <= found["settings"].items()
    assert found["machine"]["torch"] == torch.__version__
    assert [row["method"] for row in found["results"]] == METHODS
    for row, label in zip(found["results"], LABELS, strict=True):
        shown = re.search(rf"^{label} +([\d.]+)% +([\d.]+)% +[\d.]+ [kM]?B +([\d.]+) +(-|[\d.]+)$", done.stdout, re.M)
        assert shown, done.stdout
        assert float(shown.group(1)) == pytest.approx(100 * row["mean_accuracy"], abs=0.06)
        assert float(shown.group(2)) == pytest.approx(100 * row["worst_accuracy"], abs=0.06)
        assert float(shown.group(3)) == pytest.approx(1e3 * row["seconds_a_step"], abs=0.06)
        assert row["seconds"] == pytest.approx(row["seconds_measured"] + row["bytes_per_node"] / 125e3)
        assert [seen["step"] for seen in row["curve"]] == sorted(watched_steps(6))
        assert all(len(seen["node_accuracies"]) == 4 for seen in row["curve"])
        assert f"{label} (" in done.stderr
    assert "Times are MODELLED for links of 1 Mbit/s" in done.stdout
    assert found["settings"]["seconds"] == "modelled"
    by_name = {row["method"]: row for row in found["results"]}
    size = 4 * found["settings"]["parameters"]
    sent = {name: row["bytes_per_node"] / size / 6 for name, row in by_name.items()}  # models a step; a message has some bytes more
    assert sent["parallel_sgd"] == pytest.approx(1.5, rel=0.01)
    assert sent["local_sgd"] == pytest.approx(0.5, rel=0.01)
    assert sent["gossip_sgd"] == pytest.approx(1.0, rel=0.01)
    assert sent["gossip_pga"] == pytest.approx(2 / 3 + 0.5, rel=0.01)
    assert by_name["parallel_sgd"]["consensus_distance"] < 1e-9
    assert by_name["local_sgd"]["consensus_distance"] > by_name["gossip_pga"]["consensus_distance"] > 1e-9


def test_the_difference_of_accuracies_is_that_of_the_numbers_shown() -> None:
    def result(name: str, accuracy: float) -> Result:
        method = build_method(name, rumor.one_peer_exponential(4), 6, None, 200)
        return Result(method, 4, Link(1e6, None), [Evaluation(200, accuracy, [accuracy] * 4, 0.0, 1e6, 1.0, 1.0)])

    parallel, recommended = result("parallel_sgd", 0.97945), result(RECOMMENDED, 0.97255)  # 97.9% and 97.3%
    assert _table([parallel, recommended]).count("97.9%") == 2
    assert "its accuracy is 0.6 points lower" in _verdict([parallel, recommended])[0]
    assert "its accuracy is the same" in _verdict([parallel, result(RECOMMENDED, 0.97941)])[0]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--nodes 1", "--nodes must be a whole number from 2 to 64 (each node is a process), got 1"),
        ("--nodes 65", "got 65"),
        ("--nodes 2.5", "not a whole number"),
        ("--topology hypercube", "there is no topology 'hypercube': choose from"),
        ("--topology from_networkx", "there is no topology 'from_networkx'"),
        ("--method adam", "the demo has no short name 'adam': choose from parallel_sgd"),
        ("--method gossip_pga gossip-pga", "name each method once"),
        ("--method", "expected at least one argument"),
        ("--method gossip_pga(rnig)", "'gossip_pga(rnig)' can't be read as a method: there is no 'rnig'. Did you mean ring? "),
        ("--method gossip_pga(ring(3)) --nodes 4", "this topology is for n=3 nodes, but the group has 4"),
        ("--H 0", "--H must be a whole number >= 1"),
        ("--H -3", "--H must be a whole number >= 1"),
        ("--steps 0", "--steps must be a whole number >= 1"),
        ("--seed -1", "--seed must be"),
        ("--delay 2", "invalid choice: 2"),
        ("--delay 1 --method local_sgd", "--delay is for gossip_sgd, gossip_pga, gossip_aga, osgp"),
        ("--H 3 --method osgp", "--H is for local_sgd, gossip_pga, slowmo"),
        ("--rate 0", "'0' has no unit: write 0Mbit/s"),
        ("--rate 9kbit/s", "--rate must be from 80kbit/s"),
        ("--kill --method local_sgd", "--kill always runs gossip_pga(one_peer_exponential, H=6, bits=4)"),
        ("--kill --rate 1Gbit/s", "leave out --rate"),
        ("--kill --steps 10", "--kill needs at least 100 steps"),
        ("--out pyproject.toml", "--out pyproject.toml: can't create this folder or write to it"),
        ("--out /dev/null/here", "can't create this folder or write to it"),
    ],
)
def test_wrong_options_end_with_one_line_and_exit_code_2(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(["demo", *line.split()])
    except SystemExit as end:
        code = end.code
    out, error = capsys.readouterr()
    assert (code, out) == (2, "")
    assert said in error
    assert re.fullmatch(r"rumor demo: error: [^\n]+\n", error), error


def test_without_scikit_learn_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "rumor demo: error: the demo trains on scikit-learn's digits: pip install 'rumor[demo]'\n"


@pytest.mark.processes
def test_without_matplotlib_there_are_a_table_and_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("rumor.demo.processes.get_context", lambda method: warm.context)
    assert (
        main(["demo", "--method", "gossip_sgd", "--nodes", "2", "--steps", "2", "--delay", "1", "--modelled", "--out", str(tmp_path)]) == 0
    )
    out, error = capsys.readouterr()
    assert "pip install 'rumor[plots]'" in error
    assert re.search(r"^Gossip SGD +\d", out, re.M)
    assert [path.name for path in tmp_path.iterdir()] == ["demo.json"]
    assert "delay=1" in json.loads((tmp_path / "demo.json").read_text())["results"][0]["call"]


@pytest.mark.processes
@pytest.mark.skipif(network.why_not(1e6) is not None, reason="links can't be shaped here")
def test_a_shaped_link_takes_the_time_that_its_rate_says(tmp_path: Path) -> None:
    line = "--method parallel_sgd --nodes 3 --steps 12 --rate 2Mbit/s"
    done = warm.run(["-c", FORKED, "demo", *line.split(), "--out", tmp_path / "new"])
    assert done.returncode == 0, done.stderr
    assert "link of 2 Mbit/s (tc). Times are measured on it." in done.stdout
    found = json.loads((tmp_path / "new" / "demo.json").read_text())
    (row,) = found["results"]
    assert found["settings"]["seconds"] == "measured"
    assert row["seconds"] == row["seconds_measured"] > 0.9 * row["bytes_per_node"] / 0.25e6


@pytest.mark.processes
def test_a_killed_node_comes_back(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = warm.run(["-c", FORKED, "demo", "--kill", "--nodes", "3", "--steps", "100", "--out", tmp_path / "new"])
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["kill.json", "kill.png"]
    story = json.loads((tmp_path / "new" / "kill.json").read_text())["story"]
    assert 0 < story["killed"][0] < story["restarted"] < story["back"][0]
    assert story["steps_lost_by_survivors"] == 0
    assert {moment["members"] for moment in story["moments"]} == {2, 3}
    assert [moment["members"] for moment in story["moments"]][-1] == 3
    assert re.search(r"^ *[\d.]+ s  step \d+: node 2 is killed \(SIGKILL\)$", done.stdout, re.M), done.stdout
    assert re.search(r"^ *[\d.]+ s  step \d+: node 2 is back", done.stdout, re.M), done.stdout
    members = re.findall(r"^rumor: .*(\d) members", done.stderr, re.M)
    assert members == ["3", "2", "3"], done.stderr  # once for each change, not once for each node
    assert done.stderr.count("node 2 is lost") == 1, done.stderr


def test_two_demos_at_the_same_time_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with _output_folder(None) as first, _output_folder(None) as second:
        assert [str(first), str(second)] == ["rumor-demo", "rumor-demo-2"]
        with pytest.raises(ValueError, match="another demo is writing to this folder"), _output_folder("rumor-demo"):
            pass
        (first / "demo.json").touch()
    with _output_folder(None) as again:
        assert str(again) == "rumor-demo"
    assert [path.name for path in tmp_path.iterdir()] == ["rumor-demo"]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_progress_fits_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("rumor.cli.progress.columns", lambda stream: width)
    line = Progress()
    line.is_live = True
    line.bar("Gossip-PGA, 4 bits (2/5)", 0.5, "accuracy 97.3%, 12 s left")
    line.bar("gossip_pga(one_peer_exponential, H=6, bits=4, delay=1) (2/5)", 0.5, "accuracy 97.3%, 12 s left")
    line.say("a text " * 30)
    shown = capsys.readouterr().err
    assert max(map(len, shown.split("\r"))) < width
    assert "Gossip-PGA, 4 bits (2/5) [##" in shown
    assert shown.count("12 s left") == 4  # each line is written twice: with blanks behind it, and again to place the cursor


def descendants(pid: int) -> set[int]:
    """Return the processes that `pid` or its children have started and that still run."""
    parent: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, above = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if state != "Z":
                parent[int(entry.name)] = int(above)
    found = {child for child, above in parent.items() if above == pid}
    return found.union(*(descendants(child) for child in found)) if found else found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(happens: Callable[[], bool], what: str, seconds: float = warm.DEADLINE) -> None:
    ends = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < ends, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.05)


@contextmanager
def training(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], list[int], Callable[[], str]]]:
    """Start the command on a terminal and wait until its progress bar moves.

    Yields the process, the ids of its two workers, and a function that waits for the end and returns what the terminal shows.
    """
    screen, terminal = pty.openpty()
    process = subprocess.Popen(
        command(LONG, folder),
        stdout=subprocess.DEVNULL,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=warm.default_signals,
        env={**os.environ, "TMPDIR": str(folder.parent)},  # SIGKILL leaves a folder there
    )
    os.close(terminal)
    shown = b""

    def text() -> str:
        nonlocal shown
        process.wait(warm.DEADLINE)
        os.set_blocking(screen, False)
        try:
            while more := os.read(screen, 65536):
                shown += more
        except OSError:
            pass  # closed on the other side, or nothing more
        return shown.decode()

    try:
        ends = time.monotonic() + warm.DEADLINE
        while b"[#" not in shown:
            assert time.monotonic() < ends, shown
            if select.select([screen], [], [], 1.0)[0]:
                shown += os.read(screen, 65536)
        is_worker = re.compile(rb"spawn_main")
        everyone = descendants(process.pid)
        workers = sorted(pid for pid in everyone if is_worker.search(Path(f"/proc/{pid}/cmdline").read_bytes()))
        assert len(workers) == 2
        yield process, workers, text
        wait_until(lambda: not any(map(is_running, everyone)), "the end of all processes")
    finally:
        for pid in (process.pid, *descendants(process.pid)):
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        process.wait(10)
        os.close(screen)


on_linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")


@on_linux
@pytest.mark.processes
def test_a_killed_worker_ends_the_demo_with_one_line(tmp_path: Path) -> None:
    with training(tmp_path) as (process, workers, text):
        os.kill(workers[1], signal.SIGKILL)
        assert process.wait(warm.DEADLINE) == 1
        last = text().rpartition("\r")[0].rpartition("\r")[2]  # a terminal ends lines with \r\n
        assert last == "rumor demo: error: process 1 of 2 was ended by SIGKILL, so the others were stopped: run the demo again"
    assert list(tmp_path.iterdir()) == []


@on_linux
@pytest.mark.processes
@pytest.mark.parametrize(
    ("number", "to_all", "code"),
    [
        (signal.SIGINT, True, 130),
        pytest.param(signal.SIGINT, False, 130, marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, False, 143, marks=pytest.mark.long),
        pytest.param(signal.SIGHUP, False, 129, marks=pytest.mark.long),
        (signal.SIGKILL, False, -9),
    ],
)
def test_a_stopped_demo_leaves_no_process(tmp_path: Path, number: int, to_all: bool, code: int) -> None:
    """Ctrl-C on a terminal sends a signal to all processes, `kill` to one."""
    with training(tmp_path) as (process, _, text):
        os.killpg(process.pid, number) if to_all else os.kill(process.pid, number)
        assert process.wait(warm.DEADLINE) == code
        assert "Traceback" not in text()
    assert list(tmp_path.iterdir()) == []


def _train(rank: int, with_ddp: bool) -> list[torch.Tensor]:
    digits = split_by_label(4, seed=0)[rank]
    node = Node(Method("parallel_sgd", "Parallel SGD", rumor.parallel_sgd(4), with_ddp), seed=1, steps=10)
    draws = torch.Generator().manual_seed(rank)
    for _ in range(10):
        batch = torch.randint(len(digits.x), (32,), generator=draws)
        node.step(torch.from_numpy(digits.x)[batch], torch.from_numpy(digits.y)[batch])
    return [p.detach().clone() for p in node.model.parameters()]


def test_ddp_and_parallel_sgd_train_the_same_model(four: Cluster) -> None:
    for of_ddp, of_averager in zip(four.run(_train, True), four.run(_train, False), strict=True):
        for p, q in zip(of_ddp, of_averager, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def test_each_node_has_few_labels_and_all_have_every_image_once() -> None:
    parts = split_by_label(8, seed=3)
    assert all(len(set(part.y)) <= 3 for part in parts)
    assert sum(len(part.x) for part in parts) == TO_TRAIN
    assert set(np.concatenate([part.y for part in parts])) == set(range(10))
    images = {row.tobytes() for part in parts for row in part.x}
    assert not images & {row.tobytes() for row in parts[0].test_x}
    assert not np.array_equal(parts[0].test_x, split_by_label(8, seed=4)[0].test_x)


@pytest.mark.parametrize("steps", [1, 2, 12, 13, 100, 400])
def test_the_last_steps_are_all_watched_and_others_evenly(steps: int) -> None:
    watched = watched_steps(steps)
    assert watched <= set(range(1, steps + 1))
    assert set(range(max(1, steps - AT_THE_END + 1), steps + 1)) <= watched
    assert len(watched) <= 20 + AT_THE_END
