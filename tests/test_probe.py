"""`rumor probe` on real processes, and `rumor plan` on what it wrote."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

import rumor
from rumor.cli import main
from rumor.cost.network import distinct
from rumor.probe import Probe, Timing
from rumor.probe.elastic_group import ElasticError, elastic_averager
from tests import warm

MODEL = """
import os, sys, time, torch

def build():
    model = torch.nn.Linear(400, 50)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    def step():
        opt.zero_grad()
        model(torch.randn(8, 400)).square().mean().backward()
        opt.step()
    return model, step

def slow_on_one_rank():
    model, step = build()
    return model, lambda: time.sleep(0.05 if os.environ["RANK"] == "1" else 0.0)

def stuck_on_one_rank():
    model, step = build()
    steps = []
    def stuck():
        steps.append(step())
        if os.environ["RANK"] == "1" and len(steps) > 5:
            time.sleep(1000)
    return model, stuck

def stuck_among_members():
    model, step = build()
    def stuck():
        step()
        frame = sys._getframe()
        while frame is not None and frame.f_code.co_name != "_both":  # it calls this step, and then the averager's
            frame = frame.f_back
        if os.environ["RANK"] == "1" and frame is not None and frame.f_locals["averager"].is_elastic:
            time.sleep(1000)
    return model, stuck

def broken_on_one_rank():
    if os.environ["RANK"] == "1":
        raise FileNotFoundError("no data here")
    return build()
"""


def probe(n: int, arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return warm.torchrun(n, ["-m", "rumor", "probe", *arguments], folder)


@pytest.mark.processes
def test_a_stand_in_on_four_processes_and_a_plan_from_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):  # where other processes disturb the clock, a small message may take longer than a large one
        done = probe(4, ["--parameters", "50k", "--batch", "4", "--repeats", "2", "--out", "found.json"], tmp_path)
        assert done.returncode == 0, done.stderr
        if "bandwidth can't be computed" not in " ".join(done.stdout.split()):
            break
    assert "a stand-in: use --model for your own" in " ".join(done.stdout.split())
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["n"], found["backend"], found["device"], found["bytes_per_parameter"]) == (4, "gloo", "cpu", 4)
    assert found["parameters"] == pytest.approx(50_000, rel=0.02)
    assert list(found["gossip"]) == distinct(4)
    assert list(found["coded"]) == ["8", "4"]
    coded = [timing for times in found["coded"].values() for timing in (times["gossip"], times["all_reduce"])]
    for timing in (found["compute"], found["ddp"], found["all_reduce"], found["small_gossip"], *found["gossip"].values(), *coded):
        assert 0 < timing["fastest"] <= timing["median"] <= timing["slowest"] < 10
    steps = list(found["steps"])
    assert [("bits=4" in text, "delay=1" in text) for text in steps] == [(False, False), (False, True), (True, False), (True, True)]
    assert all(rumor.method(text).bind(4) for text in steps)
    assert set(found["elastic"]) < set(steps)
    assert len(found["elastic"]) == 1
    assert found["left_out"] == {}
    for timing in (*found["steps"].values(), *found["elastic"].values(), found["coded_ddp"]["4"]):
        assert 0 < timing["fastest"] <= timing["median"] <= timing["slowest"] < 10
    assert "elastic" in done.stdout
    assert found["bandwidth"] > 0
    assert found["latency"] == found["small_gossip"]["median"]

    def plan(more: str) -> dict[str, Any]:
        assert main(["plan", "--probe", str(tmp_path / "found.json"), "--json", *more.split()]) == 0
        return dict(json.loads(capsys.readouterr().out))

    seen = plan("")
    assert sum(row["is_measured"] for row in seen["predictions"]) > len(found["steps"]), "these, DDP, and the elastic group"
    assert seen["network"]["step_seconds"] == {text: timing["median"] for text, timing in found["steps"].items()}
    assert seen["network"]["kind"] == "measured"
    assert seen["workload"]["compute"] == found["compute"]["median"]
    assert seen["network"]["ddp_seconds"] == max(0, found["ddp"]["median"] - found["compute"]["median"])
    assert seen["network"]["coded_seconds"] == {b: [t["gossip"]["median"], t["all_reduce"]["median"]] for b, t in found["coded"].items()}
    link = plan("-n 64")["network"]
    assert 0 <= link.pop("coding") < 1e-3
    assert link == {"kind": "link", "bandwidth": found["bandwidth"], "latency": found["latency"]}
    advice = plan("--compute 1ms --bandwidth 1Mbit/s")["recommendation"]
    assert (advice["method"], advice["bits"]) == ("Gossip-PGA", 4)
    assert plan("--compute 1ms --bandwidth 1Mbit/s --bits 32")["recommendation"]["bits"] == 32
    assert plan("--compute 100s --bandwidth 400Gbit/s")["recommendation"]["method"] == "Parallel SGD"


@pytest.mark.processes
def test_a_model_of_one_s_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    done = probe(2, ["--model", "mine.py:build", "--repeats", "2", "--json"], tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == json.loads((tmp_path / "probe.json").read_text())
    assert (found["n"], found["parameters"], found["model"], found["is_stand_in"]) == (2, 20_050, "mine.py:build", False)
    assert found["ddp"] is None  # step() takes no model
    assert found["coded_ddp"] == {}


@pytest.mark.processes
def test_the_slowest_rank_counts(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    done = probe(2, ["--model", "mine.py:slow_on_one_rank", "--repeats", "2", "--json"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["compute"]["fastest"] >= 0.05


@pytest.mark.processes
def test_an_error_on_one_rank_ends_all_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    done = probe(2, ["--model", "mine.py:broken_on_one_rank"], tmp_path)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if "rumor probe: error" in line]
    assert len(lines) == 1
    assert "rank 1" in lines[0]
    assert "FileNotFoundError: no data here" in lines[0]
    assert not (tmp_path / "probe.json").exists()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("model", "timeout", "said"),
    [
        ("stuck_on_one_rank", "4s", "rank 0 of 2 lost touch"),
        pytest.param("stuck_among_members", "8s", "lost touch with the others", marks=pytest.mark.long),  # members need seconds to meet
    ],
)
def test_a_rank_that_is_stuck_ends_all_at_the_time_out(tmp_path: Path, model: str, timeout: str, said: str) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    done = probe(2, ["--model", f"mine.py:{model}", "--timeout", timeout, "--repeats", "1"], tmp_path)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if "rumor probe: error" in line]
    assert len(lines) == 1
    assert said in lines[0]


def a_probe(small: float = 0.001) -> Probe:
    def timing(seconds: float) -> Timing:
        return Timing(seconds, 0.9 * seconds, 1.1 * seconds)

    return Probe(
        n=4,
        parameters=1002,
        bytes_per_parameter=4.0,
        model="x",
        is_stand_in=True,
        backend="gloo",
        device="cpu",
        torch="2",
        repeats=3,
        compute=timing(1),
        ddp=None,
        all_reduce=timing(0.02),
        gossip={"one-peer-exponential": timing(0.011)},
        small_gossip=timing(small),
        small_all_reduce=timing(0.006),
        large_gossip=timing(0.011),
        large_bytes=4008.0,
    )


def test_the_link_comes_from_a_small_and_a_large_model(tmp_path: Path) -> None:
    link = a_probe().link()
    assert (link.bandwidth, link.latency) == (pytest.approx(4000 / 0.010), 0.001)
    a_probe().write(tmp_path / "probe.json")
    assert Probe.read(tmp_path / "probe.json") == a_probe()
    a_probe(small=0.02).write(tmp_path / "noisy.json")
    assert json.loads((tmp_path / "noisy.json").read_text())["bandwidth"] is None
    with pytest.raises(ValueError, match="took no longer than one of 8"):
        a_probe(small=0.02).link()


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"n": None, "surprise": 1},
        {"compute": 3},
        {"n": "4"},
        {"bytes_per_parameter": None},
        {"ddp": {"median": float("nan"), "fastest": 1.0, "slowest": 1.0}},  # which would read as: DDP costs nothing
        {"all_reduce": {"median": -1.0, "fastest": 1.0, "slowest": 1.0}},
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    a_probe().write(tmp_path / "probe.json")
    (tmp_path / "probe.json").write_text(json.dumps({**json.loads((tmp_path / "probe.json").read_text()), **change}))
    with pytest.raises(ValueError, match="run it again"):
        Probe.read(tmp_path / "probe.json")


def test_a_file_of_an_older_version_is_read(tmp_path: Path) -> None:
    a_probe().write(tmp_path / "probe.json")
    found = json.loads((tmp_path / "probe.json").read_text())
    for name in ("coded", "coded_ddp", "steps", "elastic", "left_out"):
        del found[name]
    (tmp_path / "probe.json").write_text(json.dumps(found))
    assert Probe.read(tmp_path / "probe.json") == a_probe()


def test_topologies_that_are_the_same_are_read_as_one(tmp_path: Path) -> None:
    """Older versions timed all six between two nodes, and noise chose one of them."""
    fast, slow = Timing(0.01, 0.01, 0.01), Timing(0.02, 0.02, 0.02)
    steps = {"gossip_pga(torus, H=2)": fast, "gossip_pga(ring, H=2, bits=4)": slow}
    old = dataclasses.replace(a_probe(), n=2, gossip={"one-peer-exponential": slow, "ring": fast, "torus": fast}, steps=steps)
    old.write(tmp_path / "probe.json")
    found = Probe.read(tmp_path / "probe.json")
    assert found.gossip == {"one-peer-exponential": slow}
    assert found.steps == {"gossip_pga(one_peer_exponential, H=2)": fast, "gossip_pga(one_peer_exponential, H=2, bits=4)": slow}


def test_whole_steps_and_the_elastic_group_are_read_back(tmp_path: Path) -> None:
    timing = Timing(1.0, 0.9, 1.1)
    text = "gossip_pga(ring, H=3, bits=4)"
    whole = dataclasses.replace(a_probe(), coded_ddp={4: timing}, steps={text: timing}, elastic={text: timing}, left_out={"a": "b"})
    whole.write(tmp_path / "probe.json")
    assert Probe.read(tmp_path / "probe.json") == whole
    seen = whole.measured()
    assert (seen.step(text), seen.step(text, is_elastic=True), seen.ddp(4), seen.timed(4)) == (1.0, 1.0, 0.0, ("ring", 3))
    assert whole.measured(has_whole_steps=False).step(text) is None, "they are for another compute time"


@pytest.mark.processes
def test_without_an_elastic_group_the_probe_says_why(tmp_path: Path) -> None:
    """The coordinator listens where MASTER_ADDR says that rank 0 is. This one can't be reached."""
    (tmp_path / "mine.py").write_text(MODEL.replace("import os", "import os; os.environ['MASTER_ADDR'] = 'nowhere.invalid'\nimport os"))
    done = probe(2, ["--model", "mine.py:build", "--repeats", "1", "--timeout", "6s"], tmp_path)
    assert done.returncode == 0, done.stderr
    ddp, elastic = [line for line in done.stdout.splitlines() if line.startswith("left out")]
    assert ddp.startswith("left out: DDP: step() takes no model. Let build() return a step(model)")
    assert elastic.startswith("left out: the elastic group: ")
    found = json.loads((tmp_path / "probe.json").read_text())
    assert found["elastic"] == {}
    assert len(found["steps"]) == 4


def test_an_elastic_group_is_for_gloo() -> None:
    engine = SimpleNamespace(transport=SimpleNamespace(backend="nccl"))
    with pytest.raises(ElasticError, match="exchange over gloo, and this probe is of nccl"), contextlib.ExitStack() as stack:
        stack.enter_context(elastic_averager(engine, nn.Linear(1, 1), rumor.gossip_pga(rumor.ring), 1.0))  # type: ignore[arg-type]
