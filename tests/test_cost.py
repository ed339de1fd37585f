"""The time model: hours of the paper, bytes by hand, what is recommended where, and what it refuses."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

import rumor
from rumor.cost import TOPOLOGIES, Link, Measured, Prediction, Workload, degree, period_for, predict, recommend
from rumor.cost.paper import BERT, RESNET50, TRAININGS, Training, averaging_share, reproduce, reproduce_scaling

GBIT = 1e9 / 8  # bytes/s


def find(rows: list[Prediction], method: str, topology: str | None = None) -> Prediction:
    return next(row for row in rows if row.method == method and row.topology == topology)


@pytest.mark.parametrize(
    ("training", "wanted"),
    [
        (RESNET50, {"Parallel SGD": 2.21, "Gossip SGD": 1.54, "Gossip-PGA": 1.65, "Local SGD": 1.00}),
        (BERT, {"Parallel SGD": 59.9, "Gossip SGD": 31.6, "Gossip-PGA": 36.3, "Local SGD": 21.6}),
    ],
    ids=TRAININGS,
)
def test_hours_of_the_paper_from_its_step_times(training: Training, wanted: dict[str, float]) -> None:
    rows = {row.method: row for row in reproduce(training)}
    for method, hours in wanted.items():
        assert rows[method].predicted == pytest.approx(hours, rel=0.005)
    for method, row in rows.items():
        if method.startswith(("OSGP", "Gossip-AGA")):
            assert row.predicted is None
            assert row.why
        else:
            assert abs(row.deviation or 0) < 0.08, row


def test_osgp_lies_between_full_overlap_and_none() -> None:
    osgp = next(row for row in reproduce(RESNET50) if row.method == "OSGP")
    assert osgp.why
    assert "0.78 h" in osgp.why
    assert "1.54 h" in osgp.why
    assert 0.78 < osgp.reported < 1.54


def test_hours_of_aga_contradict_its_stated_share_of_averaging() -> None:
    assert averaging_share(RESNET50) == pytest.approx(0.030, abs=5e-4)
    assert averaging_share(BERT) == pytest.approx(0.024, abs=5e-4)


def test_scaling_table_from_a_fit() -> None:
    found = reproduce_scaling()
    assert [round(1e3 * s) for s in found.all_reduce_seconds] == [132, 156, 209, 276]
    assert [round(1e3 * s) for s in found.gossip_seconds] == [120, 127, 123, 142]
    assert all(abs(row.deviation or 0) < 0.08 for rows in found.rows.values() for row in rows)
    # the least-squares solution, by hand: no small change of either number fits better
    n = torch.tensor([4.0, 8, 16, 32], dtype=torch.float64)
    measured = torch.tensor(found.all_reduce_seconds, dtype=torch.float64)

    def error(transfer: float, latency: float) -> float:
        return float((2 * (n - 1) / n * transfer + 2 * (n - 1) * latency - measured).square().sum())

    least = error(found.transfer, found.latency)
    assert all(error(found.transfer * a, found.latency * b) > least for a, b in ((1.01, 1), (0.99, 1), (1, 1.01), (1, 0.99)))


def test_bytes_and_seconds_by_hand() -> None:
    rows = predict(8, Workload(1_000_000, compute=0.1, steps=3600), Link(bandwidth=40e6, latency=1e-3), H=4)
    parallel, local = find(rows, "Parallel SGD"), find(rows, "Local SGD")
    mean = 1.75 * 4e6 / 40e6 + 14e-3  # 2 * 7/8 copies, 14 messages
    assert parallel.bytes == 7_000_000
    assert local.bytes == 1_750_000
    assert parallel.seconds == pytest.approx(0.1 + mean)
    assert parallel.hours == pytest.approx(0.1 + mean)
    assert local.seconds == pytest.approx(0.1 + mean / 4)
    for name, messages in {"one-peer-exponential": 1, "ring": 2, "grid": 3, "torus": 3, "exponential": 3, "base-graph": 1}.items():
        gossip = messages * 4e6 / 40e6 + 1e-3
        assert find(rows, "Gossip SGD", name).bytes == messages * 4_000_000, name
        assert find(rows, "Gossip SGD", name).seconds == pytest.approx(0.1 + gossip)
        assert find(rows, "Gossip-PGA", name).bytes == pytest.approx(0.75 * messages * 4e6 + 0.25 * 7e6)
        assert find(rows, "Gossip-PGA", name).seconds == pytest.approx(0.1 + 0.75 * gossip + 0.25 * mean)
        assert find(rows, "Gossip-PGA", name).seconds_overlapped == pytest.approx(0.75 * max(0.1, gossip) + 0.25 * max(0.1, mean))
        assert find(rows, "OSGP", name).seconds_overlapped == pytest.approx(max(0.1, gossip))


def test_bytes_are_those_that_the_engine_counts() -> None:
    """The simulator's own counters, which know nothing of the time model; 40 steps are whole periods and cycles."""
    n, H, model = 8, 5, torch.nn.Linear(9, 1)
    rows = predict(n, Workload.of(model, compute=0.1), Link(1e6), H=H)
    for name in ("ring", "one-peer-exponential", "exponential"):
        sim = rumor.Simulator(model, rumor.gossip_pga(TOPOLOGIES[name](n), H=H))
        for _ in range(40):
            sim.step()
        assert sim.metrics.bytes_sent / 40 == pytest.approx(find(rows, "Gossip-PGA", name).bytes, rel=0.02), name


def test_the_time_model_agrees_with_the_transient_stages_of_the_theory() -> None:
    rows = predict(20, Workload(1000, compute=0.1), Link(1e6), H=16)
    ring = rumor.ring(20)
    for row, algorithm in (
        (find(rows, "Gossip SGD", "ring"), rumor.gossip_sgd(ring)),
        (find(rows, "Gossip-PGA", "ring"), rumor.gossip_pga(ring, 16)),
        (find(rows, "Local SGD"), rumor.local_sgd(20, 16)),
    ):
        assert row.transient_stage == rumor.theory.transient_stage(algorithm)
        assert row.transient_stage_iid == rumor.theory.transient_stage(algorithm, iid=True)
    assert find(rows, "Parallel SGD").transient_stage == 0
    assert find(rows, "OSGP", "ring").transient_stage is None


@pytest.mark.parametrize("field", ["parameters", "compute", "steps"])
def test_more_work_never_takes_less_time(field: str) -> None:
    base: dict[str, Any] = {"parameters": 1000, "compute": 0.1, "steps": 50}
    hours = []
    for factor in (1, 2, 10):
        rows = predict(12, Workload(**{**base, field: factor * base[field]}), Link(1e5, 1e-3), H=6)
        hours.append([row.hours for row in rows])
    assert all(a < b < c for a, b, c in zip(*hours, strict=True))


def test_a_faster_link_or_a_longer_period_never_takes_more_time() -> None:
    work = Workload(1_000_000, compute=0.1)
    slow, fast = (predict(16, work, Link(b, 1e-4), H=6) for b in (1e6, 1e9))
    assert all(a.seconds > b.seconds and a.seconds_overlapped >= b.seconds_overlapped for a, b in zip(slow, fast, strict=True))
    seconds = [find(predict(16, work, Link(1e7, 1e-2), H=H), "Gossip-PGA", "one-peer-exponential").seconds for H in (2, 3, 10, 60)]
    assert seconds == sorted(seconds, reverse=True)
    assert all(row.seconds_overlapped <= row.seconds for row in slow)


def test_the_period_is_the_smallest_that_adds_a_tenth() -> None:
    for compute, gossip, mean in ((0.146, 0.150, 0.278), (0.01, 0.001, 0.5), (1.0, 0.1, 0.2), (0.0, 1.0, 7.3)):
        H = period_for(compute, gossip, mean)
        assert (mean - gossip) / H <= 0.1 * (compute + gossip) * (1 + 1e-6)
        assert H == 1 or (mean - gossip) / (H - 1) > 0.1 * (compute + gossip)


def test_a_fast_link_is_for_parallel_sgd() -> None:
    roce = Link(4 * 100 * GBIT, latency=5e-6)
    advice = recommend(32, RESNET50.workload, roce)
    assert (advice.method, advice.call) == ("Parallel SGD", "rumor.parallel_sgd(32)")
    assert "exact" in advice.reason
    assert "fast compared with the computation" in advice.reason


def test_the_paper_s_own_times_are_for_gossip_pga_over_one_peer() -> None:
    for training, H in ((RESNET50, 5), (BERT, 9)):  # the paper takes 6 for both
        advice = recommend(training.n, training.workload, training.measured)
        assert (advice.method, advice.topology, advice.H) == ("Gossip-PGA", "one-peer-exponential", H)
        algorithm = eval(advice.call)  # what the user is told to paste
        assert algorithm == rumor.gossip_pga(rumor.one_peer_exponential(training.n), H=H)


def test_parallel_sgd_costs_what_ddp_was_measured_to_cost() -> None:
    """DDP hides part of its all-reduce; global rounds of Gossip-PGA, which come after the optimizer, don't."""
    work, times = Workload(1_000_000, compute=0.1), (0.08, {"one-peer-exponential": 0.04})
    without, hidden = (recommend(8, work, Measured(*times, ddp_seconds=ddp)) for ddp in (None, 0.03))
    assert (without.method, hidden.method) == ("Gossip-PGA", "Parallel SGD")
    assert hidden.seconds == pytest.approx(0.13)
    rows = predict(8, work, Measured(*times, ddp_seconds=0.03), H=4)
    assert find(rows, "Gossip-PGA", "one-peer-exponential").seconds == pytest.approx(0.1 + 0.75 * 0.04 + 0.25 * 0.08)
    assert not hidden.notes, "delay=1 was not measured, and DDP is the better advice"


def test_codes_cost_their_bytes_and_the_work_of_coding() -> None:
    work, link = Workload(1_000_000, compute=0.1), Link(bandwidth=1e6, latency=1e-3, coding=2e-8)
    code = 1_000_000 * (128 + 5) / 256  # bytes: 256 numbers of 4 bits, two scales in float16 and an exponent
    found = predict(8, work, link, H=4, bits=4)
    rows = {(row.name, row.topology): row for row in found}
    gossip, mean = code / 1e6 + 1e-3 + 0.02, 2 * 7 / 8 * code / 1e6 + 2e-3 + 0.04
    parallel, local = rows["Parallel SGD, 4 bits", None], rows["Local SGD, 4 bits", None]
    pga, ring = (rows["Gossip-PGA, 4 bits", name] for name in ("one-peer-exponential", "ring"))
    assert parallel.seconds == pytest.approx(0.1 + mean)
    assert local.seconds == pytest.approx(0.1 + mean / 4)
    assert pga.seconds == pytest.approx(0.1 + 0.75 * gossip + 0.25 * mean)
    assert pga.bytes == pytest.approx((0.75 + 0.25 * 2 * 7 / 8) * code)
    assert ring.seconds - pga.seconds == pytest.approx(0.75 * code / 1e6)
    assert [row for row in found if row.bits == 32] == predict(8, work, link, H=4), "the other rows stay as they are"
    measured = Measured(0.2, {"ring": 0.1}, coded_seconds={4: (0.02, 0.05)})
    rows = {(row.name, row.topology): row for row in predict(8, work, measured, H=4, bits=4)}
    assert rows["Gossip-PGA, 4 bits", "ring"].seconds == pytest.approx(0.1 + 0.75 * 2 * 0.02 + 0.25 * 0.05)
    assert predict(8, work, measured, H=4, bits=8) == predict(8, work, measured, H=4), "8 bits were not measured"


def test_codes_are_recommended_where_they_pay() -> None:
    slow, quick = Link(1 * GBIT, latency=50e-6), Link(400 * GBIT, latency=5e-6)
    advice = recommend(32, RESNET50.workload, slow)
    assert (advice.method, advice.bits) == ("Gossip-PGA", 4)
    assert eval(advice.call) == rumor.gossip_pga(rumor.one_peer_exponential(32), H=advice.H, bits=4)
    assert "with messages of 4 bits" in advice.reason
    plain = recommend(32, RESNET50.workload, slow, bits=32)
    assert plain.bits == 32
    assert "bits" not in plain.call
    assert advice.seconds < plain.seconds / 2
    assert recommend(32, RESNET50.workload, quick).bits == 32, "a quick network gains nothing"
    assert recommend(32, RESNET50.workload, Link(1 * GBIT, 50e-6, coding=1e-6)).bits == 32, "coding takes longer than it saves"


def test_parallel_sgd_with_codes_is_recommended_where_gossip_saves_nothing_more() -> None:
    seen = Measured(0.8, {"one-peer-exponential": 0.5}, coded_seconds={4: (0.05, 0.06)})
    advice = recommend(8, Workload(1_000_000, compute=0.1), seen)
    assert (advice.method, advice.bits, advice.seconds) == ("Parallel SGD", 4, pytest.approx(0.16))
    assert eval(advice.call) == rumor.parallel_sgd(8, bits=4)
    assert "rumor.ddp_hook_state(bits=4)" in advice.reason


def test_of_equally_quick_topologies_the_one_that_mixes_faster_is_taken() -> None:
    alike = Measured(2.0, dict.fromkeys(TOPOLOGIES, 0.1))
    advice = recommend(100, Workload(1000, compute=0.1), alike)
    assert advice.topology == "exponential"
    assert "transient stage" in advice.reason


def test_topologies_within_two_percent_are_equally_quick() -> None:
    work, seen = Workload(1000, compute=0.1), dict.fromkeys(TOPOLOGIES, 0.5) | {"one-peer-exponential": 0.1}
    assert recommend(100, work, Measured(2.0, seen | {"exponential": 0.1 * 1.03})).topology == "exponential"  # 1.5 % of the step
    assert recommend(100, work, Measured(2.0, seen | {"exponential": 0.1 * 1.10})).topology == "one-peer-exponential"


def test_a_period_of_one_is_parallel_sgd() -> None:
    advice = recommend(4, Workload(1_000_000, compute=0.1), Measured(0.05, {"one-peer-exponential": 0.06}, ddp_seconds=0.5))
    assert (advice.method, advice.call, advice.H) == ("Parallel SGD", "rumor.parallel_sgd(4)", 1)
    assert advice.seconds == pytest.approx(0.15)
    assert "DDP was timed at 600 ms" in advice.reason


def test_a_period_that_is_asked_for_is_taken() -> None:
    advice = recommend(32, RESNET50.workload, RESNET50.measured, H=12)
    assert (advice.method, advice.H) == ("Gossip-PGA", 12)


def test_half_precision_is_summed_in_float32() -> None:
    half, link = Workload(1_000_000, compute=0.1, bytes_per_parameter=2), Link(1e6)
    parallel, local = predict(4, half, link, H=5, topologies=[])
    assert parallel.bytes == pytest.approx(1.5 * 2e6)  # DDP: gradients in their own precision
    assert local.bytes == pytest.approx(1.5 * 4e6 / 5)
    assert local.seconds == pytest.approx(0.1 + 6.0 / 5)


def test_transient_stages_of_the_same_order_do_not_decide() -> None:
    """In the paper's Table 9 the ring is 1 % slower than one peer: twice the bytes, for a stage that is hardly shorter."""
    seen = Measured(0.278, {"one-peer-exponential": 0.150, "ring": 0.153})
    assert recommend(32, RESNET50.workload, seen).topology == "one-peer-exponential"


@pytest.mark.parametrize("n", [8, 12, 50])
def test_one_peer_exponential_is_preferred_to_base_graph(n: int) -> None:
    """Both send one message a step. The bound on the transient stage is for the worst phase, which is no shorter in base_graph's cycle."""
    seen = Measured(2.0, {"one-peer-exponential": 0.1, "base-graph": 0.1})
    assert recommend(n, Workload(1000, compute=0.1), seen).topology == "one-peer-exponential"
    assert find(predict(n, Workload(1000, compute=0.1), seen, H=6), "Gossip-PGA", "base-graph").note is None


def test_a_bound_on_the_period_is_kept_and_a_dear_all_reduce_is_told() -> None:
    advice = recommend(1024, Workload(1_000_000, compute=1e-3), Link(25 * GBIT, latency=0.05), bits=32)
    assert advice.H == 64
    assert any("average_rounds=10" in note and "gossip_aga" in note for note in advice.notes)
    assert recommend(32, RESNET50.workload, RESNET50.measured, max_period=3).H == 3


def test_times_that_were_not_measured_are_scaled_by_degree_and_say_so() -> None:
    rows = predict(32, RESNET50.workload, RESNET50.measured)
    ring = find(rows, "Gossip SGD", "ring")
    assert ring.seconds == pytest.approx(0.146 + 0.300)
    assert ring.note is not None
    assert "not measured" in ring.note
    assert find(rows, "Gossip SGD", "one-peer-exponential").note is None


def test_one_two_and_three_nodes() -> None:
    alone = predict(1, Workload(10, compute=0.5), Link(1e3, 1.0))
    assert {row.seconds for row in alone} == {0.5}
    assert {row.bytes for row in alone} == {0}
    assert recommend(1, Workload(10, compute=0.5), Link(1e3, 1.0)).method == "Parallel SGD"
    for n in (2, 3):
        assert recommend(n, Workload(10, compute=0.5), Link(1e3, 1.0)).seconds > 0.5


def test_a_model_in_place_of_numbers() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.Linear(10, 10).requires_grad_(False)).to(torch.bfloat16)
    work = Workload.of(model, compute=0.2, steps=7)
    assert (work.parameters, work.bytes_per_parameter, work.bytes, work.steps) == (110, 2, 220, 7)
    assert any("float32" in note for note in recommend(4, work, Link(10.0), bits=32).notes)


def test_degree_counts_messages_of_the_busiest_node() -> None:
    assert [degree(build(16)) for build in TOPOLOGIES.values()] == [1, 2, 4, 4, 4, 1]
    assert degree(rumor.isolated(5)) == 0


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: Link(-1.0), "bandwidth must be finite and positive, in bytes/s, got bandwidth=-1"),
        (lambda: Link(0.0), "bandwidth"),
        (lambda: Link(math.nan), "bandwidth"),
        (lambda: Link(1.0, -1e-3), "latency must be finite and not negative"),
        (lambda: Workload(0, 0.1), "parameters must be a whole number >= 1"),
        (lambda: Workload(10, -0.1), "compute must be finite and not negative"),
        (lambda: Workload(10, 0.1, 0), "bytes_per_parameter"),
        (lambda: Workload.of(torch.nn.ReLU(), 0.1), "no parameters that require gradients"),
        (lambda: Measured(0.1, {"hypercube": 0.1}), "'hypercube', which is not a topology"),
        (lambda: Measured(0.1, {}), "at least one topology"),
        (lambda: predict(0, Workload(10, 0.1), Link(1.0)), "n must be a whole number >= 1, got n=0"),
        (lambda: predict(4, Workload(10, 0.1), Link(1.0), H=0), "H must be a whole number >= 1"),
        (lambda: predict(4, Workload(10, 0.1), Link(1.0), topologies=[rumor.ring(5)]), "is for n=5 nodes, but n=4"),
        (lambda: recommend(4, Workload(10, 0.1), Link(1.0), max_period=0), "max_period must be a whole number >= 1"),
    ],
)
def test_wrong_input_names_the_value_and_the_rule(call: Any, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        call()
    assert "\n" not in str(error.value)
