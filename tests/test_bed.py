"""The test bed of the benchmarks: real processes on hosts of its own, taken down whatever happens."""

import doctest
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import contestants  # noqa: E402
import limits  # noqa: E402
import network  # noqa: E402
import network_tables  # noqa: E402
import on_host  # noqa: E402
import page  # noqa: E402
import peers  # noqa: E402
import reached  # noqa: E402
import sentences  # noqa: E402
from bed import LOOPBACK, Bed  # noqa: E402
from tests import warm  # noqa: E402

HELLO = """
import os, socket
rank, meeting = os.environ["RANK"], (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == "0":
    with socket.create_server(meeting) as door:
        door.settimeout(100)
        caller = door.accept()[0]
else:
    for attempt in range(1000):
        try:
            caller = socket.create_connection(meeting)
            break
        except ConnectionRefusedError:  # the other one has not started yet
            import time
            time.sleep(0.1)
caller.sendall(rank.encode())
assert caller.recv(1).decode() == str(1 - int(rank))
open(os.environ["SAID"] + rank, "w").write(os.environ["RUMOR_BED"])
"""


def spaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def needs_shaping() -> None:
    if Bed(2, "100mbit").why_not:
        pytest.skip(f"no shaped network here: {Bed(2, '100mbit').why_not}")


@pytest.mark.processes
@pytest.mark.parametrize("rate", [LOOPBACK, "100mbit"])
def test_processes_on_all_hosts_meet(rate: str, tmp_path: Path):
    if rate != LOOPBACK:
        needs_shaping()
    with Bed(2, rate) as bed:
        bed.run([sys.executable, "-c", HELLO], timeout=warm.DEADLINE, env={"SAID": str(tmp_path / "rank")})
        if rate != LOOPBACK:
            assert f"rumor{os.getpid()}-h1" in spaces()
    label = "2 processes, loopback, unshaped" if rate == LOOPBACK else "2 hosts, cubic, 100mbit"
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == [label] * 2
    if rate != LOOPBACK:
        assert f"rumor{os.getpid()}" not in spaces()


@pytest.mark.processes
def test_one_that_fails_ends_all_and_the_bed_is_taken_down():
    needs_shaping()
    fails = "import os, time; time.sleep(600 if os.environ['RANK'] == '0' else 0); raise SystemExit(7)"
    with pytest.raises(RuntimeError, match="host 1 failed with exit code 7"), Bed(2, "100mbit") as bed:
        bed.run([sys.executable, "-c", fails], timeout=warm.DEADLINE)
    assert f"rumor{os.getpid()}" not in spaces()


@pytest.mark.processes
def test_one_that_is_late_ends_all():
    with pytest.raises(TimeoutError, match="within 2 s"), Bed(2, LOOPBACK) as bed:
        bed.run([sys.executable, "-c", "import time; time.sleep(600)"], timeout=2)


@pytest.mark.processes
def test_a_rate_that_tc_does_not_know_is_one_line():
    needs_shaping()
    command = [sys.executable, str(ROOT / "benchmarks" / "bed.py"), "--hosts", "2", "--rate", "fast", "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=warm.DEADLINE)
    assert done.returncode == 1
    assert done.stderr.startswith("bed: tc -n rumor")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("name", "tables"), list(zip(page.PAGES, (21, 4, 2), strict=True)))
def test_the_pages_tables_are_those_of_the_results(name: str, tables: int):
    text = (ROOT / "docs" / name).read_text()
    assert len(re.findall("^<!-- table", text, re.M)) == tables
    assert page.filled_in(text) == text


def test_a_new_measurement_changes_the_headline():
    def row(rate: str, what: str, times: float) -> dict[str, object]:
        return {"rate": rate, "what": what, "median": 0.1 / times, "times_as_fast_as_ddp": times}

    rates = {"1gbit": 2.0, "100mbit": 4.0, LOOPBACK: 0.9}
    rows = [
        row(rate, name, x) for rate, times in rates.items() for name, x in (("DDP, bucket_cap_mb=4", 1.0), (network_tables.OURS, times))
    ]
    text = sentences.headline({"rows": rows, "hosts": 4, "H": 6})
    assert "On links of 100 Mbit/s to 1 Gbit/s" in text
    assert "**2.0 to 4.0 times as fast as a step of DDP**: the slower the link, the more. " in text
    assert text.endswith("it is 0.90 times as fast.")
    rows[1]["times_as_fast_as_ddp"] = 5.0  # now more at 1 Gbit/s
    assert "**4.0 to 5.0 times as fast as a step of DDP**. It sends 1/10.7 of DDP's bytes. " in sentences.headline(
        {"rows": rows, "hosts": 4, "H": 6}
    )


def test_a_section_is_left_out_until_it_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(page, "ROOT", tmp_path)
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    text = "<!-- table overhead -->\n<!-- end -->\n<!-- table resnet -->\n<!-- end -->"
    assert page.filled_in(text).splitlines() == [
        *("<!-- table overhead -->", "", "<!-- end -->"),
        *("<!-- table resnet -->", "*Not measured yet: there is no network-resnet.json.*", "<!-- end -->"),
    ]


@pytest.mark.parametrize("module", [limits, reached, sentences])
def test_examples_of_the_benchmarks_hold(module: ModuleType):
    assert doctest.testmod(module).failed == 0


@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["network.py", "step", "--hosts", "1"], "at least 2 hosts"),
        (["network.py", "step", "--rates", "warp9"], "got 'warp9'"),
        (["network.py", "step", "--rates", LOOPBACK, "500mbit"], "run it by itself"),
        (["bed.py", "--hosts", "0", "--", "true"], "at least one host, got 0"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], says: str):
    done = warm.run(arguments, ROOT / "benchmarks")
    assert done.returncode
    assert says in done.stderr.splitlines()[-1]


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_bed_whose_process_is_told_to_end_is_taken_down(number: signal.Signals):
    needs_shaping()
    command = [sys.executable, "bed.py", "--hosts", "2", "--rate", "100mbit", "--", "sleep", "60"]
    bed = subprocess.Popen(command, cwd=ROOT / "benchmarks", preexec_fn=warm.default_signals)
    deadline = time.monotonic() + warm.DEADLINE
    while f"rumor{bed.pid}-h1" not in spaces() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(0.5)
    bed.send_signal(number)
    assert bed.wait(timeout=warm.DEADLINE) == 128 + number
    assert f"rumor{bed.pid}" not in spaces()


def test_the_shapes_of_table_17_are_those_of_the_networks():
    for name, build in on_host.SHAPES.items():
        with torch.device("meta"):
            assert sum(p.numel() for p in build().parameters()) == network.SIZES[name]


@pytest.mark.processes
def test_table_17_at_a_toy_size(tmp_path: Path):
    out = tmp_path / "found.json"
    arguments = ["network.py", "overhead", "--quick", "--hosts", "2", "--rates", LOOPBACK, "--repeats", "1", "--out", str(out)]
    done = warm.run(arguments, ROOT / "benchmarks")
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    rows = {row["what"]: row for row in found["rows"]}
    assert list(rows) == ["no communication", "all-reduce", "gossip", "all-reduce, 4 bits", "gossip, 4 bits"]
    assert rows["no communication"]["median"] >= 0.001
    assert rows["no communication"]["overhead"] == 0
    for name, row in rows.items():
        assert row["overhead"] == pytest.approx(row["median"] - rows["no communication"]["median"]), name
    table = network_tables.overhead(found).splitlines()
    assert "278" in table[2]
    assert "tiny, loopback" in table[4]


def test_overheads_have_the_limit_of_their_bytes():
    """4 hosts send 1 MB at 1 Gbit/s: 8 ms for gossip, 12 ms for an all-reduce."""
    seconds = {name: {"median": median} for name, median in (("no communication", 0.1), ("gossip", 0.11), ("all-reduce", 0.13))}
    _, gossip, all_reduce = network._overheads("1gbit", 4, seconds, 250_000)
    assert (gossip["limit"], all_reduce["limit"]) == (pytest.approx(0.008), pytest.approx(0.012))
    assert (gossip["overhead"], all_reduce["overhead"]) == (pytest.approx(0.01), pytest.approx(0.03))


def test_every_contestant_has_a_limit():
    names = {**contestants.ours(4, 6, 10), **peers.peers(4, 6)}
    sent = {name: limits.copies_sent(name, 4, 6) for name in names}
    assert sent["computing alone"] == 0
    assert sent["SGP+SlowMo (fairscale)"] == sent["Gossip-PGA, delay=1"] == 6.5 / 6
    assert sent["DDP, bf16 hook"] == 0.75
    with pytest.raises(ValueError, match="unknown how much 'Muon' sends"):
        limits.copies_sent("Muon", 4, 6)


def test_what_can_not_be_shaped_is_called_loopback(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("bed._why_not", lambda: "there is no root")
    with Bed(2, "500mbit") as bed:
        assert list(network.rates_of(bed, ["200mbit", "500mbit"])) == [LOOPBACK]
        assert bed.rate == LOOPBACK
    rows = network._steps(bed.rate, 2, {name: {"median": 0.1} for name in ("computing alone", "DDP, bucket_cap_mb=4")})
    assert not any("limit" in row for row in rows)
