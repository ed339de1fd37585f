"""The command line: tables for people, JSON for programs, one line for what is wrong."""

from __future__ import annotations

import argparse
import json
import math
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rumor
from rumor.cli import demo_comparison, main, units
from rumor.cli.command_line import build_parser
from rumor.cli.probe import probe_page
from rumor.cost import TOPOLOGIES
from rumor.probe import Probe

ROOT = Path(__file__).parent.parent
Run = Callable[[str], tuple[int, str, str]]
LINK = "--parameters 25.5M --compute 146ms --bandwidth 10Gbit/s --latency 50us"
TIMES = "--parameters 25.5M --compute 146ms --all-reduce 278ms --gossip 150ms"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """(exit code, stdout, stderr) of a command line."""

    def call(line: str) -> tuple[int, str, str]:
        try:
            code: Any = main(line.split())
        except SystemExit as end:  # argparse's own
            code = end.code
        said = capsys.readouterr()
        return int(code or 0), said.out, said.err

    return call


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (units.bandwidth, "25Gbit/s", 3.125e9),
        (units.bandwidth, "3.125GB/s", 3.125e9),
        (units.bandwidth, "500 Mbit/s", 62.5e6),
        (units.bandwidth, "1MiB/s", 2**20),
        (units.bandwidth, "1kB/s", 1e3),
        (units.seconds, "146ms", 0.146),
        (units.seconds, "50us", 50e-6),
        (units.seconds, "50µs", 50e-6),
        (units.seconds, "1e-3s", 1e-3),
        (units.seconds, "0", 0.0),
        (units.seconds, "2min", 120.0),
        (units.count, "25.5M", 25_500_000),
        (units.count, "7B", 7_000_000_000),
        (units.count, "18,768", 18_768),
        (units.count, "1e3", 1000),
    ],
)
def test_units(parse: Callable[[str], float], text: str, value: float) -> None:
    assert parse(text) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"plan -n 0 {LINK}", "-n must be a whole number >= 1 (and at most 100,000), got 0"),
        (f"plan -n -4 {LINK}", "got -4"),
        (f"plan -n 2.5 {LINK}", "not a whole number"),
        (f"plan {LINK}", "the number of nodes is missing"),
        (f"plan -n 32 {LINK.replace('10Gbit', '-10Gbit')}", "bandwidth must be finite and positive, in bytes/s"),
        (f"plan -n 32 {LINK.replace('10Gbit/s', '0MB/s')}", "bandwidth must be finite and positive"),
        (f"plan -n 32 {LINK.replace('10Gbit/s', '10')}", "'10' has no unit: write 10Mbit/s or 10Gbit/s (bits), or 10MB/s (bytes)"),
        (f"plan -n 32 {LINK.replace('10Gbit/s', '3125000000')}", "'3125000000' has no unit"),
        (f"plan -n 32 {LINK.replace('10Gbit/s', '10bit/s')}", "'10bit/s' is slower than any network (8 kbit/s)"),
        (f"plan -n 32 {LINK.replace('50us', '50s')}", "'50s' is longer than any latency (10 s): write 50us or 1ms"),
        (f"plan -n 32 {LINK.replace('50us', '50')}", "'50' has no unit: write for example 50us or 50ms"),
        (f"plan -n 32 {LINK.replace('10Gbit/s', '10Gbps')}", "'10Gbps' is not in the form that this command reads: write 10Gbit/s"),
        (f"plan -n 32 {LINK.replace('10Gbit/s', '1.5MBps')}", "write 1.5MB/s"),
        ("plan --probe docs", "docs is a folder: name the file that `rumor probe` wrote, for example docs/probe.json"),
        (f"plan -n 32 {LINK.replace('10Gbit/s', '10Gb/s')}", "write 25Gbit/s (bits) or 3.1GB/s (bytes)"),
        (f"plan -n 32 {LINK.replace('50us', '-50us')}", "latency must be finite and not negative"),
        (f"plan -n 32 {LINK} --all-reduce 1s --gossip 1s", "given twice"),
        ("plan -n 32 --parameters 1M --compute 1ms", "the network is missing"),
        ("plan -n 32 --parameters 1M --bandwidth 1GB/s", "the compute time of a step is missing"),
        ("plan -n 32 --compute 1ms --bandwidth 1GB/s", "the size of the model is missing"),
        ("plan -n 32 --compute 1ms --parameters 1M --latency 1ms", "also needs a bandwidth"),
        ("plan -n 32 --compute 1ms --parameters 1M --all-reduce 1ms", "come in pairs"),
        (f"plan -n 32 {TIMES} --gossip hypercube=1ms", "no topology 'hypercube'"),
        (f"plan -n 32 {TIMES} --period 0", "H must be a whole number >= 1"),
        (f"plan -n 32 {TIMES} --out picture.txt", "must end in .png, .svg or .pdf"),
        (f"plan -n 32 {LINK} --ddp 1s", "--ddp is a measured time"),
        ("plan --paper bert -n 4", "leave out --nodes"),
        ("plan --paper gpt", "invalid choice: 'gpt'"),
        ("plan --probe nowhere.json", "nowhere.json"),
        ("plan --probe pyproject.toml", "not a file that this version's `rumor probe` wrote"),
        ("plan -n 4 --model nowhere.py:build --compute 1s --bandwidth 1GB/s", "there is no file nowhere.py"),
        ("topology hypercube -n 8", "no topology 'hypercube': choose from"),
        ("topology ring -n 0", "n >= 1 nodes"),
        ("topology ring -n 1e9", "at most 100,000"),
        ("topology ring", "required: -n"),
        ("topology complete -n 10000", "n^2 links"),
        ("probe", "torchrun --standalone --nproc-per-node 4 -m rumor probe"),
        ("plan -n 4 --parameters 25,5M --compute 1ms --bandwidth 1GB/s", "'25,5M' is not a number"),
        ("plan -n 4 --parameters 1M --compute 1ms --all-reduce 1ms --gossip 1ms --gossip 2ms", "already has a time"),
        ("plan -n 4 --parameters 1M --compute 10ms --all-reduce 1ms --gossip 1ms --ddp 5ms", "can't be less than"),
        ("plan -n 4 --parameters 1M --compute 146 --bandwidth 1GB/s", "'146' has no unit: write 146ms or 146s"),
        ("plan --paper bert --steps 5", "leave out --steps"),
        ("plan --probe docs/planning-probe.json --bits 16", "--bits 16: there are measured times for 32, 8, 4 bits alone"),
        (f"plan -n 32 {TIMES} --bits 4", "there are measured times for 32 bits alone"),
        ("frobnicate", "invalid choice"),
        ("plan --bandwith 3", "unrecognized arguments: --bandwith"),
    ],
)
def test_wrong_input_ends_with_one_line_and_exit_code_2(run: Run, line: str, said: str) -> None:
    code, out, error = run(line)
    assert code == 2
    assert out == ""
    assert said in error
    assert re.fullmatch(r"rumor( \w+)?: error: [^\n]+\n", error), error


def test_rumor_alone_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out, error = capsys.readouterr()
    assert out.startswith("usage: rumor")
    assert all(command in out for command in ("demo", "plan", "probe", "topology"))
    assert error == ""


def commands() -> dict[str, argparse.ArgumentParser]:
    """The parsers of `rumor` and of all its commands."""
    parser = build_parser()
    (subparsers,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return {"rumor": parser, **subparsers.choices}


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("command", commands())
def test_help_fits_the_terminal_and_breaks_no_words(command: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def help_at(width: int) -> str:
        monkeypatch.setenv("COLUMNS", str(width))
        return commands()[command].format_help()

    def words(page: str) -> list[str]:
        return [word for word in page.split() if word != "\\"]  # which continues a command on the next line

    found = help_at(width)
    assert [line for line in found.splitlines() if len(line) > width] == []
    assert words(found) == words(help_at(1000))


def test_commands_in_help_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    page = commands()["plan"].format_help()
    assert "\n  rumor plan --paper resnet50\n" in page
    assert page.replace(" \\\n   ", "").count("--compute 146ms --all-reduce 278ms --gossip 150ms") == 1


def test_the_table_shows_what_the_json_holds(run: Run) -> None:
    code, page, _ = run(f"plan -n 32 {TIMES} --steps 18768 --period 6 --all")
    found = json.loads(run(f"plan -n 32 {TIMES} --steps 18768 --period 6 --json")[1])
    assert code == 0
    assert found["recommendation"]["sentence"] in " ".join(page.split())
    rows = found["predictions"]
    assert {row["topology"] for row in rows} == {None, *TOPOLOGIES}
    assert {row["method"] for row in rows} == {"Parallel SGD", "Local SGD", "Gossip SGD", "Gossip-PGA", "Gossip-AGA", "OSGP"}
    table = page[: page.index("\nTake ")]
    lines = [line for line in table.splitlines() if re.search(r"(DDP|SGD|PGA|AGA|OSGP) +(\d+|-) ", line)]
    assert len(lines) == len(rows)
    for line, row in zip(lines, rows, strict=True):
        assert row["method"].replace("Parallel SGD", "DDP") in line
        assert f" {row['hours']:.2f} " in line
        assert units.show_seconds(row["seconds"]) in line
        assert units.show_bytes(row["bytes"]) in line
    assert [round(row["hours"], 2) for row in rows[:4]] == [2.21, 1.0, 1.54, 1.65]


def test_other_topologies_than_the_best_have_one_row_each(run: Run) -> None:
    plan = f"plan -n 32 {TIMES}"
    rows = json.loads(run(f"{plan} --json")[1])["predictions"]
    page = run(plan)[1]
    others = page[page.index("Gossip-PGA, on other topologies\n") : page.index("\nstep: ")].splitlines()[1:]
    names = [line.split()[0].rstrip("*") for line in others if line]
    assert names == [name.replace("-", "_") for name in TOPOLOGIES if name != "one-peer-exponential"]
    ring = next(row for row in rows if (row["method"], row["topology"]) == ("Gossip-PGA", "ring"))
    assert units.show_seconds(ring["seconds"]) in others[names.index("ring")]
    assert "`--all` shows" in page
    assert "`--all` shows" not in run(f"{plan} --all")[1]


def test_iid_data_have_their_own_transient_stage(run: Run) -> None:
    rows = json.loads(run(f"plan -n 20 {LINK} --json")[1])["predictions"]
    ring = next(row for row in rows if (row["method"], row["topology"]) == ("Gossip SGD", "ring"))
    assert f"{ring['transient_stage']:.1e}" in run(f"plan -n 20 {LINK} --all")[1]
    assert f"{ring['transient_stage_iid']:.1e}" in run(f"plan -n 20 {LINK} --all --iid")[1]
    assert ring["transient_stage"] > ring["transient_stage_iid"]


def test_a_fast_link_is_for_parallel_sgd(run: Run) -> None:
    said = run("plan -n 32 --parameters 25.5M --compute 146ms --bandwidth 400Gbit/s --latency 5us")[1]
    assert "Take DDP: 150 ms a step" in said


@pytest.mark.parametrize(("name", "hours"), [("resnet50", ["2.21", "1.65", "11.40"]), ("bert", ["59.86", "36.34", "64.73"])])
def test_the_paper_s_tables(run: Run, name: str, hours: list[str]) -> None:
    code, page, _ = run(f"plan --paper {name}")
    found = json.loads(run(f"plan --paper {name} --json")[1])
    assert code == 0
    assert all(number in page for number in hours)
    assert "Gossip-AGA can't be predicted" in page
    assert all(row["predicted"] is None or abs(row["deviation"]) < 0.08 for row in found["rows"])
    assert ("scaling" in found) == (name == "resnet50")


def test_a_model_gives_its_own_size(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import torch\ndef build():\n    return torch.nn.Linear(99, 10)\n")
    found = json.loads(run(f"plan -n 4 --model {tmp_path}/mine.py:build --compute 1ms --bandwidth 1GB/s --json")[1])
    assert found["workload"]["parameters"] == 1000
    code, _, error = run(f"plan -n 4 --model {tmp_path}/mine.py:other --compute 1ms --bandwidth 1GB/s")
    assert code == 2
    assert "has no function other" in error


@pytest.mark.parametrize(
    "name", ["ring", "grid", "torus", "exponential", "one_peer_exponential", "one-peer-exponential", "base-graph", "complete", "isolated"]
)
@pytest.mark.parametrize("n", [1, 2, 12])
def test_a_page_for_every_topology(run: Run, name: str, n: int) -> None:
    code, page, _ = run(f"topology {name} -n {n}")
    topology = getattr(rumor, name.replace("-", "_"))(n)
    assert code == 0
    assert f"beta {topology.beta:.5f}" in page
    assert page.rstrip().splitlines()[-1].split()[0] == "inf"
    found = json.loads(run(f"topology {name} -n {n} --json")[1])
    assert found["beta"] == topology.beta
    assert len(found["spectrum"]) == n
    assert found["spectrum"][0] == pytest.approx(1)


def test_constants_over_H_are_those_of_the_theory(run: Run) -> None:
    ring = rumor.ring(20)
    found = json.loads(run("topology ring -n 20 --json")[1])
    assert found["spectrum"][1] == pytest.approx(ring.beta)
    assert found["links"] == 20
    assert [row["H"] for row in found["over_H"]] == [1, 2, 4, 8, 16, 32, 64, None]
    for row in found["over_H"][1:]:
        H = math.inf if row["H"] is None else row["H"]
        assert row["C"] == pytest.approx(rumor.theory.C_beta(ring.beta, H))
        assert row["D"] == pytest.approx(rumor.theory.D_beta(ring.beta, H))
    assert found["over_H"][4]["transient_stage"] == pytest.approx(rumor.theory.transient_stage(rumor.gossip_pga(ring, 16)))


def test_pages_say_what_their_columns_mean(run: Run) -> None:
    page = " ".join(run("topology ring -n 20")[1].split())
    assert "what a step leaves of the disagreement (0: nothing, 1: all)" in page
    assert "about how many steps it takes until training is as good as with a global average at every step" in page
    assert "if the nodes' data are alike (iid)" in " ".join(run("topology ring -n 20 --iid")[1].split())
    plan = " ".join(run(f"plan -n 32 {LINK}")[1].split())
    assert "overlapped: the step if all messages could travel while the nodes compute: a lower limit." in plan
    assert "at best" not in plan


def test_ten_thousand_nodes_leave_out_what_would_take_long(run: Run) -> None:
    page = run("topology grid -n 10000")[1]
    assert "too many for a picture" in page
    assert "left out above" in page
    assert json.loads(run("topology grid -n 10000 --json")[1])["spectrum"] is None
    assert len(json.loads(run("topology ring -n 10000 --json")[1])["spectrum"]) == 10_000


def test_pictures(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert run(f"topology torus -n 12 --out {tmp_path}/torus.png")[0] == 0
    assert run(f"topology grid -n 2000 --out {tmp_path}/grid.svg")[0] == 0
    assert run(f"plan -n 32 {TIMES} --out {tmp_path}/plan.png")[0] == 0
    assert (tmp_path / "torus.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["grid.svg", "plan.png", "torus.png"]


def test_without_matplotlib_one_line_says_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, error = run(f"topology ring -n 8 --out {tmp_path}/ring.png")
    assert code == 2
    assert error == "rumor topology: error: pictures need matplotlib: pip install 'rumor[plots]'\n"


@pytest.mark.processes
def test_python_dash_m_rumor() -> None:
    done = subprocess.run([sys.executable, "-m", "rumor", "--version"], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (0, f"rumor {rumor.__version__}\n")


def test_a_coordinator_that_can_not_listen_says_why(run: Run) -> None:
    code, _, error = run("coordinator --bind no-such-host.invalid:29510")
    fix = "--bind takes HOST:PORT; 0.0.0.0:29510 listens at all its addresses"
    assert code == 2
    assert error == (
        f"rumor coordinator: error: can't listen at no-such-host.invalid:29510: 'no-such-host.invalid' is no address of this host. {fix}\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, error = run(f"coordinator --bind 127.0.0.1:{port}")
    assert code == 2
    assert error == (
        f"rumor coordinator: error: can't listen at 127.0.0.1:{port}: port {port} is in use, perhaps by another coordinator. Stop it, or "
        "give another port with --bind HOST:PORT\n"
    )


@pytest.mark.parametrize("spelling", ["base_graph", "base-graph"])
def test_topologies_are_read_in_both_spellings_and_shown_in_that_of_python(run: Run, spelling: str) -> None:
    plan = "plan -n 6 --parameters 25.5M --compute 146ms --all-reduce 278ms"
    code, page, _ = run(f"{plan} --gossip {spelling}=150ms --all")
    assert code == 0
    assert "\nbase_graph\n" in page
    assert "\none_peer_exponential*\n" in page
    assert "scaled by degree (1 against 1) from base_graph" in " ".join(page.split())
    for line in (page, run("topology nothing -n 4")[2], run(f"{plan} --gossip nothing=1ms")[2], run(f"{plan} --gossip {spelling}=1s")[1]):
        assert "base_graph" in line
        assert not re.search("base-graph|one-peer-exponential", line)
    options = argparse.Namespace(method=[f"gossip_pga({spelling}, H=3)"], topology=spelling, nodes=5, H=None, delay=None, steps=9)
    options.rate, options.modelled = None, True
    prepared = demo_comparison.prepare(options)
    assert prepared.topology == rumor.base_graph(5)
    assert prepared.methods[0].algorithm == rumor.gossip_pga(rumor.base_graph(5), H=3)


PLANNING = ROOT / "docs" / "planning.md", ROOT / "docs" / "reference" / "cost.md"
ON_PAGE = re.compile(r"```(?:console)?\n\$ (?P<line>[^\n]*rumor (?:plan|probe) (?:[^\n]*\\\n)*[^\n]*)\n(?P<shown>.*?)```", re.S)


def test_the_planning_pages_show_what_the_commands_print(run: Run, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pytest --rewrite-pages` writes the outputs anew. Those of a probe come from the file that it wrote."""
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("COLUMNS", raising=False)

    def printed(line: str) -> str:
        command = line.replace("\\\n", "").rpartition("rumor ")[2]
        if command.startswith("probe"):
            path = command.rpartition("--out ")[2]
            return probe_page(Probe.read(path), path)
        code, out, _ = run(command)
        assert code == 0, line
        return out.strip()

    def rewritten(block: re.Match[str]) -> str:
        out = printed(block["line"])
        if "\n...\n" in f"\n{block['shown']}":
            head = (
                "" if block["shown"].startswith("...") else out[: out.index("\nstep: ") + 1]
            )  # without the lines that explain the columns
            advice = out[out.index("\nTake ") + 1 :]
            out = f"{head}...\n{advice}"
        return block[0].replace(block["shown"], f"{out}\n")

    if request.config.getoption("--rewrite-pages"):
        for page in PLANNING:
            page.write_text(ON_PAGE.sub(rewritten, page.read_text()))
        return
    blocks = [block for page in PLANNING for block in ON_PAGE.finditer(page.read_text())]
    assert len(blocks) >= 9
    for block in blocks:
        pattern = re.escape(block["shown"].strip()).replace(re.escape("..."), "(?s:.*)")
        assert re.fullmatch(pattern, printed(block["line"])), f"{block['line']} prints\n{printed(block['line'])}"
