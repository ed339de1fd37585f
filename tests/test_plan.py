"""What `rumor plan` recommends, from steps that were measured as a whole; and how it prints at any width."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import rumor
from rumor.cli import main
from rumor.cli.plan_picture import drawback, rows_to_draw
from rumor.cost import Link, Measured, Recommendation, Workload, predict, recommend
from rumor.cost.reasons import DEFAULT_PERIOD, ITS_LONGEST, MOST_ACCURATE

ROOT = Path(__file__).parent.parent
WORK = Workload(1_000_000, compute=0.1)
FLOAT32, CODED = "gossip_pga(one_peer_exponential, H=6)", "gossip_pga(one_peer_exponential, H=3, bits=4)"


def delayed(text: str) -> str:
    return f"{text[:-1]}, delay=1)"


def measured(ddp: float = 0.25, hook: float = 0.15, plain: float = 0.22, coded: float = 0.11, **more: Any) -> Measured:
    """Times of whole steps, of a network whose parts would recommend the same."""
    steps = {FLOAT32: plain, delayed(FLOAT32): 0.9 * plain, CODED: coded, delayed(CODED): 0.7 * coded}
    options = {"coded_seconds": {4: (0.01, 0.03)}, "step_seconds": steps, "elastic_seconds": {CODED: 0.112}, **more}
    return Measured(0.15, {"one-peer-exponential": 0.1}, ddp - 0.1, coded_ddp_seconds={4: hook - 0.1}, **options)


def said(advice: Recommendation) -> str:
    return " ".join([advice.sentence, advice.basis, advice.reason, *advice.notes])


def test_the_fastest_measured_step_is_recommended_in_one_sentence() -> None:
    advice = recommend(4, WORK, measured())
    assert advice.sentence == "Take gossip_pga(one_peer_exponential, H=3, bits=4): 110 ms a step, DDP 250 ms"
    assert advice.basis == "both are measured steps"
    assert (advice.method, advice.topology, advice.H, advice.bits, advice.seconds) == ("Gossip-PGA", "one-peer-exponential", 3, 4, 0.11)


def test_the_method_of_the_sentence_is_text_that_rumor_reads() -> None:
    for network in (measured(), measured(coded=0.5, hook=0.5, plain=0.12), Link(1e6), Measured(0.278, {"ring": 0.15})):
        advice = recommend(8, WORK, network)
        assert f"Take {advice.text}: " in advice.sentence
        algorithm = rumor.method(advice.text)
        assert algorithm.bind(8) == eval(advice.call), "the text and the Python expression are the same method"
    own = recommend(4, WORK, Measured(0.05, {"one-peer-exponential": 0.06}, ddp_seconds=0.5))
    assert own.text == "parallel_sgd"
    assert rumor.method(own.text).bind(4) == rumor.parallel_sgd(4)


def test_measured_steps_count_more_than_sums_of_parts() -> None:
    """By its parts a step with 4 bits takes 0.12 s. As a whole it took 0.24 s, and DDP 0.25 s."""
    advice = recommend(4, WORK, measured(coded=0.24, hook=0.26, plain=0.24))
    assert (advice.text, advice.seconds) == ("DDP", pytest.approx(0.25))
    assert "gossip_pga(one_peer_exponential, H=6) 240 ms" in advice.sentence


def test_ddp_with_the_hook_is_recommended_where_it_is_as_fast() -> None:
    advice = recommend(4, WORK, measured(hook=0.115))
    assert advice.sentence == "Take DDP with 4 bits (rumor.ddp_hook): 115 ms a step, DDP 250 ms"
    assert "rumor.ddp_hook_state(bits=4)" in advice.reason
    assert "With Adam or AdamW, give the hook the optimizer: rumor.ddp_hook_state(bits=4, optimizer=opt)" in advice.reason
    assert "this is for SGD" not in said(advice), "it is the advice for Adam, too"


def test_delay_is_shown_and_never_recommended() -> None:
    for network in (measured(), measured(coded=0.24, hook=0.26, plain=0.24)):
        advice = recommend(4, WORK, network)
        assert "delay" not in advice.text
        rows = predict(4, WORK, network, H=3, bits=4)
        assert {row.name for row in rows if row.delay} == {"Gossip-PGA, delay=1", "Gossip-PGA, 4 bits, delay=1"}
        (note,) = [note for note in advice.notes if "delay=1" in note] or [""]
        assert ("was not shown to be as good" in note) == bool(note)
    assert any("is faster, a step of 77 ms, but was not shown to be as good" in note for note in recommend(4, WORK, measured()).notes)


def test_a_slower_delay_is_not_mentioned() -> None:
    steps = {CODED: 0.11, delayed(CODED): 0.12}
    assert "delay" not in said(recommend(4, WORK, measured(step_seconds=steps)))


def test_adam_and_the_elastic_group_have_one_line_each() -> None:
    notes = recommend(4, WORK, measured()).notes
    assert [note for note in notes if "Adam" in note] == [
        "this is for SGD. With Adam or AdamW, take DDP with 4 bits (rumor.ddp_hook), 150 ms a step, and give the hook the optimizer: "
        "rumor.ddp_hook_state(bits=4, optimizer=opt). See docs/choosing.md"
    ]
    assert sum("rumor.elastic), this step takes 112 ms" in note for note in notes) == 1
    assert "Adam" not in said(recommend(4, WORK, Link(1e12))), "DDP is the advice"
    own = Measured(0.05, {"one-peer-exponential": 0.06}, ddp_seconds=0.5)
    assert recommend(4, WORK, own).text == "parallel_sgd", "which averages models, and is not DDP for Adam"
    assert recommend(4, WORK, own).notes == ("this is for SGD. With Adam or AdamW, take DDP, 600 ms a step. See docs/choosing.md",)


def test_the_most_accurate_setting_is_named_where_gossip_with_few_bits_is_taken() -> None:
    advice = recommend(4, WORK, measured())
    (note,) = [note for note in advice.notes if MOST_ACCURATE in note]
    assert "Averager(..., optimizer=opt)" in note
    assert "docs/beyond.md" in note
    schedule = rumor.LearningRate(1, ITS_LONGEST, power=0.48)
    assert rumor.method(MOST_ACCURATE) == rumor.gossip_pga(rumor.one_peer_exponential, H=schedule, bits=4)
    for without in (
        recommend(4, WORK, measured(), bits=32),
        recommend(4, WORK, measured(), max_period=12),
        recommend(4, WORK, measured(hook=0.115)),
        recommend(4, WORK, Link(1e12)),
    ):
        assert "LearningRate" not in said(without), without.sentence


def test_predicted_times_of_two_nodes_are_no_reason_to_leave_ddp() -> None:
    """An all-reduce between them sends as many bytes as a gossip step. The time model guesses what else gossip may save."""
    work = Workload(25_500_000, compute=0.146)
    coded = recommend(2, work, Link(125e6))
    rows = {(row.name, row.topology): row for row in predict(2, work, Link(125e6), bits=4)}
    parallel, gossip = rows["Parallel SGD, 4 bits", None], rows["Gossip-PGA, 4 bits", "one-peer-exponential"]
    assert parallel.bytes == gossip.bytes
    assert parallel.seconds > 1.1 * gossip.seconds, "a case in which the time model prefers gossip"
    assert coded.text == "DDP with 4 bits (rumor.ddp_hook)"
    assert "between 2 nodes it sends as many bytes as DDP" in coded.reason
    far = recommend(2, WORK, Link(1e9, latency=0.1))
    assert (far.text, far.bits, far.notes) == ("DDP", 32, ())
    assert "between 2 nodes it sends as many bytes as DDP" in far.reason
    assert recommend(2, work, Link(125e6, coding=1e-6)).text == "DDP", "codes that take longer than they save"


def test_measured_times_of_two_nodes_decide_as_those_of_more_nodes() -> None:
    assert recommend(2, WORK, measured()).text == CODED
    assert recommend(2, WORK, measured(hook=0.115)).text == "DDP with 4 bits (rumor.ddp_hook)"


def test_three_nodes_may_gossip_because_an_all_reduce_sends_a_third_more() -> None:
    advice = recommend(3, Workload(25_500_000, compute=0.146), Link(62.5e6), bits=32)
    assert advice.method == "Gossip-PGA"
    assert recommend(3, Workload(25_500_000, compute=0.146), Link(3.125e9)).text == "DDP"


def test_the_basis_tells_measured_steps_from_sums_and_predictions() -> None:
    assert recommend(4, WORK, measured(step_seconds={})).basis == "120 ms is the sum of measured parts, 250 ms a measured step"
    assert recommend(4, WORK, Measured(0.5, {"ring": 0.1})).basis == "both are sums of measured parts"
    assert recommend(32, WORK, Link(1e8)).basis == "both are predicted, without overlap"


def test_a_period_of_one_s_own_is_not_that_of_the_probe() -> None:
    advice = recommend(4, WORK, measured(), H=5)
    assert advice.text == "gossip_pga(one_peer_exponential, H=5, bits=4)"
    assert advice.seconds == pytest.approx(0.11 + (1 / 5 - 1 / 3) * (0.03 - 0.01))
    assert advice.basis == "107 ms is from a measured step with H = 3, 250 ms a measured step"
    assert recommend(4, WORK, measured(), max_period=2).H == 2


def test_a_period_that_was_cut_short_for_the_probe_is_not_recommended() -> None:
    """By rule 3, H is 15 here. A probe times no more than 12 steps in a row."""
    text = "gossip_pga(one_peer_exponential, H=12)"
    advice = recommend(4, WORK, Measured(0.24, {"one-peer-exponential": 0.06}, 0.9, step_seconds={text: 0.2}))
    assert (advice.H, advice.seconds) == (12, pytest.approx(0.2))
    advice = recommend(4, WORK, Measured(0.3, {"one-peer-exponential": 0.06}, 0.9, step_seconds={text: 0.2}))
    assert (advice.H, advice.seconds) == (15, pytest.approx(0.2 - (1 / 12 - 1 / 15) * 0.24))


def test_rows_say_whether_they_were_measured() -> None:
    rows = {row.label: row for row in predict(4, WORK, measured(), H=3, bits=4) if row.topology in (None, "one-peer-exponential")}
    for label in ("DDP", "DDP, 4 bits", "Gossip-PGA, 4 bits", "Gossip-PGA, 4 bits, elastic"):
        assert rows[label].is_measured, label
    assert not rows["Local SGD"].is_measured
    assert all(row.seconds_overlapped <= row.seconds for row in rows.values())
    assert [row.H for row in predict(4, WORK, measured(), H=3, bits=4) if (row.label, row.is_measured) == ("Gossip-PGA", True)] == [6]


def test_ddp_is_compared_with_the_fastest_gossip_that_may_be_recommended() -> None:
    advice = recommend(4, WORK, measured(ddp=0.25, hook=0.3, plain=0.26, coded=0.24))
    assert advice.sentence == "Take DDP: 250 ms a step, gossip_pga(one_peer_exponential, H=3, bits=4) 240 ms"
    assert advice.against is not None
    assert (advice.against.text, advice.against.seconds) == (CODED, 0.24)
    assert "its step is only 4.2% slower than that of Gossip-PGA, and it is exact" in advice.reason


def test_ddp_is_not_taken_where_gossip_with_4_bits_is_more_than_a_tenth_faster() -> None:
    """Neither step in a chain is a tenth: 4 bits against float32, and float32 against DDP. From end to end they are a sixth."""
    advice = recommend(4, WORK, measured(ddp=0.70, hook=0.75, plain=0.64, coded=0.60))
    assert advice.sentence == "Take gossip_pga(one_peer_exponential, H=6): 640 ms a step, DDP 700 ms"
    assert "With messages of 4 bits it would be less than 10% faster, 600 ms" in advice.reason


def test_global_rounds_never_cost_less_than_nothing() -> None:
    """The probe's noise: a gossip step of 110 ms, and an all-reduce of 100 ms."""
    for network, options in (
        (Measured(0.1, {"one-peer-exponential": 0.11}, 0.9, step_seconds={"gossip_pga(one_peer_exponential, H=2)": 0.2}), {}),
        (Measured(0.1, {"one-peer-exponential": 0.1}, 0.9), {"H": 4}),
        (Measured(0.3, {"one-peer-exponential": 0.299}, 0.9), {"H": 6}),
    ):
        reason = recommend(4, WORK, network, **options).reason
        assert "add -" not in reason
        assert ("global averages have no measurable cost" in reason) == (network.all_reduce_seconds < 0.3)
    assert "Global averages add less than 0.1% to a gossip step" in reason


def test_a_period_other_than_the_default_has_a_reason() -> None:
    assert inspect.signature(rumor.gossip_pga).parameters["H"].default == DEFAULT_PERIOD
    paper = Measured(0.278, {"one-peer-exponential": 0.150}, 0.278)
    work, start = Workload(25_500_000, 0.146), "and not the default 6, because"
    rule = f"H is 5 {start} it is the smallest period whose global averages add at most 10% to a gossip step: 8.6% (H = 4: 10.8%)."
    assert rule in recommend(32, work, paper).reason
    assert f"H is 12 {start} you gave this period. Global averages add 3.6%" in recommend(32, work, paper, H=12).reason
    assert f"H is 3 {start} no longer period is allowed. Global averages add 14.4%" in recommend(32, work, paper, max_period=3).reason
    dear = recommend(1024, Workload(1_000_000, compute=1e-3), Link(3.125e9, latency=0.05), bits=32)
    assert f"H is 64 {start} no longer period is recommended." in dear.reason
    timed = Measured(0.15, {"one-peer-exponential": 0.1}, 0.9, step_seconds={"gossip_pga(one_peer_exponential, H=4)": 0.2})
    assert f"H is 4 {start} `rumor probe` timed this period. Global averages add 6.2%" in recommend(4, WORK, timed).reason
    assert "default" not in recommend(32, work, paper, H=6).reason


def test_the_fastest_gossip_step_is_said_only_where_it_is() -> None:
    times = {"one-peer-exponential": 0.1, "ring": 0.2, "grid": 0.2, "torus": 0.2, "exponential": 0.2, "base-graph": 0.11}
    for base_graph, said_of_it in (
        (0.11, "one_peer_exponential (1 message per step) has the fastest gossip step, 200 ms."),
        (0.1, "No topology has a faster gossip step than one_peer_exponential (1 message per step), 200 ms."),
        (0.097, "one_peer_exponential (1 message per step) has a gossip step of 200 ms close to the fastest."),
        (0.08, "one_peer_exponential (1 message per step) has a gossip step of 200 ms, base_graph one of 180 ms."),
    ):
        reason = recommend(8, WORK, Measured(0.5, {**times, "base-graph": base_graph}, 0.9)).reason
        assert said_of_it in reason, reason
        assert ("has the fastest" in reason) == (base_graph == 0.11)


def test_between_two_nodes_there_is_one_topology(capsys: pytest.CaptureFixture[str]) -> None:
    """All of them are the same, so noise must not choose between them."""
    noisy = {"one-peer-exponential": 0.012, "ring": 0.010, "torus": 0.009, "base-graph": 0.011}
    assert recommend(2, WORK, Measured(0.1, noisy, 0.9)).topology == "one-peer-exponential"
    assert {row.topology for row in predict(2, WORK, Measured(0.1, noisy))} == {None, "one-peer-exponential"}
    line = "plan -n 2 --parameters 1M --compute 10ms --all-reduce 110ms --gossip ring=100ms --ddp 900ms --period 3"
    assert main(line.split()) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert "With 2 nodes, ring, grid, torus, exponential and base_graph are the same as one_peer_exponential." in page
    assert "All topologies are the same for 2 nodes." in page
    assert "scaled by degree" not in page
    assert main([*line.split(), "--gossip", "2ms"]) == 2
    assert "one_peer_exponential already has a time" in capsys.readouterr().err


def test_one_node_is_one_node(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "-n", "1", "--parameters", "1M", "--compute", "1ms", "--bandwidth", "1GB/s", "--steps", "1"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("1 node, ")
    assert " 1 step; " in page


PROBE = f"plan --probe {ROOT}/docs/planning-probe-500mbit.json"
LINK = "plan -n 32 --parameters 25.5M --compute 146ms --bandwidth 10Gbit/s --latency 50us"


@pytest.mark.parametrize("width", [60, 80, 140])
@pytest.mark.parametrize("line", [PROBE, LINK, "plan --paper resnet50"])
def test_the_page_fits_the_terminal(line: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(line.split()) == 0
    page = capsys.readouterr().out
    wide = [each for each in page.splitlines() if len(each) > width and " " in each.strip()]  # a path alone can't be broken
    assert wide == []
    assert max(map(len, page.splitlines())) > 0.6 * min(width, 100)
    assert ("do not fit into 60 characters: overlapped, sent" in " ".join(page.split())) == (width == 60 and "paper" not in line)


def test_where_there_is_no_terminal_lines_have_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(PROBE.split()) == 0
    assert 70 < max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_the_recommendation_is_marked_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(PROBE.split()) == 0
    page = capsys.readouterr().out
    (marked,) = [line for line in page.splitlines() if line.endswith("  <")]
    assert marked.split()[:3] == ["Gossip-PGA,", "4", "bits"]
    assert len(re.findall(r"^Take ", page, re.M)) == 1
    assert main([*PROBE.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["recommendation"]
    assert f"\n{found['sentence']}; both are measured steps, by rumor probe (4 processes" in page.replace("ms;\nboth", "ms; both")


def test_samples_that_overlap_are_pointed_out(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for name in ("planning-probe.json", "planning-probe-500mbit.json"):
        main(["plan", "--probe", str(ROOT / "docs" / name)])
        shown.append(" ".join(capsys.readouterr().out.split()))
    both = "This choice may be chance: the samples of DDP (67.3 ms to 90.6 ms) and of gossip_pga(one_peer_exponential, H=2, bits=4)"
    assert both in shown[0], "on the fast network both steps take as long"
    assert "may be chance" not in shown[1], "on the slow one, the slowest step is faster than DDP's fastest"


def test_the_picture_has_few_methods_and_says_why_faster_ones_are_not_taken() -> None:
    steps = {CODED: 0.12, delayed(CODED): 0.1, FLOAT32: 0.22}
    rows = predict(4, WORK, measured(step_seconds=steps), H=3, bits=4)
    chosen = next(row for row in rows if row.text == CODED)
    drawn = rows_to_draw(rows, chosen)
    assert [row.seconds for row in drawn] == sorted(row.seconds for row in drawn)
    assert chosen in drawn
    assert len({(row.label, row.topology) for row in drawn}) == len(drawn) <= 12
    remarks = {row.label: drawback(row, chosen) for row in drawn}
    assert remarks["Gossip-PGA, 4 bits, delay=1"] == "a little less accurate"
    assert remarks["Local SGD, 4 bits"] == "takes more steps to be as good"
    assert remarks["DDP"] == ""
    parallel = next(row for row in rows if row.method == "Parallel SGD")
    assert drawback(chosen, replace(parallel, seconds=1.05 * chosen.seconds)) == "less than 10% faster"
