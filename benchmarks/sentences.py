"""Sentences of docs/performance.md, made from benchmarks/results, so that a new measurement changes them, too."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import accuracy_tables
import reached
from bed import LOOPBACK
from limits import bytes_per_second, copies_sent, shown
from network_tables import OURS, rates_of
from pictures import of_rate

Results = dict[str, Any]
BF16, DELAYED = "DDP, bf16 hook", "Gossip-PGA, delay=1"


def span(values: Iterable[float], digits: int = 1) -> str:
    """Format the smallest and the largest value.

    >>> span([2.14, 8.28]), span([1.04, 1.02])
    ('2.1 to 8.3', '1.0')
    """
    shortest = list(dict.fromkeys(f"{value:.{digits}f}" for value in sorted(values)))
    return shortest[0] if len(shortest) == 1 else f"{shortest[0]} to {shortest[-1]}"


def listed(words: Iterable[str]) -> str:
    """Join words as in a sentence.

    >>> listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"])
    ('a', 'a and b', 'a, b and c')
    """
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def called(names: Iterable[str]) -> str:
    """List methods in a sentence. A comma in a name would look like the end of it.

    >>> called(["Local SGD", "DDP, PowerSGD hook"])
    'Local SGD and DDP with PowerSGD hook'
    """
    return listed(name.replace(", ", " with ", 1) for name in names)


def headline(peers: Results) -> str:
    """The gain of a step on links, and on the fastest network of the table."""
    rates = sorted((rate for rate in rates_of(peers) if rate != LOOPBACK), key=bytes_per_second)
    times = [_times(peers, rate, OURS) for rate in rates]
    grows = ": the slower the link, the more" if all(slow > fast for slow, fast in pairwise(times)) else ""
    text = (
        f"On links of {shown(rates[0])} to {shown(rates[-1])}, a training step of Gossip-PGA with messages of 4 bits is\n"
        f"**{span(times)} times as fast as a step of DDP**{grows}. It sends 1/{_fewer_bytes(peers):.1f} of DDP's bytes."
    )
    if LOOPBACK in rates_of(peers):
        text += f" Over loopback, the fastest network that one machine has, it is {_times(peers, LOOPBACK, OURS):.2f} times as fast."
    return text


def _fewer_bytes(peers: Results) -> float:
    sent = [copies_sent(name, peers["hosts"], peers["H"]) for name in ("DDP", OURS)]
    return sent[0] / sent[1]


def points(accuracy: Results, large: Results, resnet: Results, exchange: Results, step: Results, peers: Results) -> str:
    """The other headlines: time to accuracy, a larger model, and the distance to the limit."""
    ratios = [timing for timing in accuracy["ratios"] if reached.pick(accuracy["runs"], ratio=timing["ratio"])]
    at = [f"{timing['seconds']['all-reduce alone']['median'] / timing['seconds']['computing alone']['median']:.1f}" for timing in ratios]
    gains = {name: listed(f"{gain:.1f}" for gain in gains_to_target(accuracy, name)) for name in (OURS, BF16)}
    larger = listed(f"{gain:.1f}" for gain in gains_to_target(large, OURS))
    never = accuracy_tables.never_reached(accuracy)
    lines = [
        f"- **[Time to the same accuracy](#time-to-accuracy)** on Fashion-MNIST: {gains[OURS]} times as fast as DDP,\n"
        f"  where an all-reduce takes {listed(at)} times as long as computing. DDP with bf16 gradients: {gains[BF16]} times.\n"
        f"  With [a larger network](#a-larger-network), Gossip-PGA with 4 bits is {larger} times as fast as DDP, at similar ratios."
        + (f"\n  {called(never)} never reach that accuracy." if never else ""),
        *(_of_resnet(resnet, rate) for rate in rates_of(resnet)),
        _of_limits(exchange, step, peers),
    ]
    return "\n".join(lines)


def _of_resnet(results: Results, rate: str) -> str:
    others = {"DDP, 4 bits": "DDP with Rumor's 4-bit hook", BF16: "with torch's bf16 hook"}
    found = of_rate(results["rows"], rate)
    beside = ", ".join(f"{shown_as}: {_times(results, rate, name):.1f} times" for name, shown_as in others.items() if name in found)
    return f"- **[ResNet-50](#resnet-50)** at {shown(rate)}: {_times(results, rate, OURS):.1f} times as fast as DDP. {beside}."


def _of_limits(exchange: Results, step: Results, peers: Results) -> str:
    largest = max(row["bytes"] for row in exchange["rows"])
    ratios = [row["ratio"] for row in exchange["rows"] if row["bytes"] == largest and row["what"] == "one_peer_exponential"]
    delayed, coded = ([of_rate(step["rows"], rate)[name]["ratio"] for rate in rates_of(step)] for name in (DELAYED, OURS))
    beside = [of_rate(peers["rows"], rate)[OURS]["ratio"] for rate in rates_of(peers) if rate != LOOPBACK]
    return (
        f"- **Close to the limit of the link**: a one-peer exchange of {largest / 1e6:.0f} MB takes {span(ratios, 2)} times bytes / rate.\n"
        f"  A [training step](#a-training-step-against-the-limit) takes {span(delayed, 2)} times its limit with `delay=1`, and "
        f"{span(coded, 2)} times with `bits=4`\n"
        f"  ({span(beside, 2)} times in the longer job [with the other libraries](#compared-with-other-libraries), also on slower links)."
    )


def small_messages(exchange: Results) -> str:
    smallest = min(row["bytes"] for row in exchange["rows"])
    ratios = [row["ratio"] for row in exchange["rows"] if row["bytes"] == smallest]
    return f"Messages of {smallest / 1e6:.0f} MB take {span(ratios, 2)} times bytes / rate: there the work of the cores shows."


def gains_to_target(accuracy: Results, method: str) -> list[float]:
    """How many times as fast as DDP a method reaches the target, at each ratio."""
    found = []
    for hosts, ratio in dict.fromkeys((run["hosts"], run["ratio"]) for run in accuracy["runs"]):
        found += [row["times as fast, to target"] for row in reached.summary(accuracy["runs"], hosts, ratio) if row["method"] == method]
    return found


def to_target(accuracy: Results) -> str:
    """What the table of times to the target shows."""
    gains = {name: gains_to_target(accuracy, name) for name in (OURS, "Gossip-PGA", BF16)}
    of = {name: listed(f"{gain:.2f}" for gain in found) for name, found in gains.items()}
    beside = listed(f"{ours / theirs:.2f}" for ours, theirs in zip(gains[OURS], gains[BF16], strict=True))
    never = accuracy_tables.never_reached(accuracy)
    missed = [f"{name} ({count} of {seeds} seeds)" for name, count, seeds in accuracy_tables.sometimes_missed(accuracy)]
    return "\n".join(
        [
            f"- **Gossip-PGA with 4 bits** reaches the target {of[OURS]} times as fast as DDP, and {beside} times as fast as DDP with bf16",
            "  gradients. The paper's Gossip-PGA and Gossip-AGA gained 1.3 to 2.0 (its Tables 7 and 11).",
            "- **The cores set the pace here, not the links**: four hosts share two cores. If only computing and the links took time,",
            f"  4 bits would gain {listed(f'{most:.1f}' for most in accuracy_tables.ceilings(accuracy, OURS))}.",
            f"- **In float32**, Gossip-PGA gains {of['Gossip-PGA']}, DDP with bf16 gradients {of[BF16]}.",
            *([f"- **{called(never)}** never reach the target."] if never else []),
            *([f"- **Some seeds miss the target**: {called(missed)}."] if missed else []),
        ]
    )


def larger(results: Results) -> str:
    """What the study of the larger network shows."""
    ours, bf16 = gains_to_target(results, OURS), gains_to_target(results, BF16)
    never = accuracy_tables.never_reached(results)
    size = f"{results['settings']['parameters'] / 1e6:.2f} M"
    not_there = f" {called(never)} never {'reaches' if len(never) == 1 else 'reach'} it." if never else ""
    return (
        f"The same study with a network of {size} parameters and some of the methods. Its steps are longer, so the fixed cost of a\n"
        f"message weighs less. Gossip-PGA with 4 bits reaches the target {listed(f'{gain:.2f}' for gain in ours)} times as fast as DDP,\n"
        f"and {listed(f'{one / other:.2f}' for one, other in zip(ours, bf16, strict=True))} times as fast as DDP with bf16 gradients."
        f"{not_there}\n{accuracy_tables.target_line(results)}"
    )


def bandwidth(accuracy: Results) -> str:
    """The time to the target on the slowest and the fastest links."""
    if not accuracy["curve"]:
        return accuracy_tables.NOT_YET
    found = reached.over_bandwidth(accuracy["runs"], accuracy["curve"])
    rates = sorted({point["rate"] for point in found} - {LOOPBACK}, key=bytes_per_second)
    seconds = {
        name: [point["seconds"] for rate in rates for point in reached.pick(found, method=name, rate=rate)]
        for name in (OURS, reached.PARALLEL)
    }
    ours, ddp = seconds[OURS], seconds[reached.PARALLEL]
    if not all(map(math.isfinite, ours)):
        return "With 4 bits, most seeds do not reach the target."
    how = "hardly depends on the link" if max(ours) < 1.2 * min(ours) else "depends on the link"
    return (
        f"With 4 bits, the time to the target {how}: {span(ours)} s from {shown(rates[0])} to {shown(rates[-1])}.\n"
        f"DDP takes {ddp[0]:.0f} s on the slowest link and {ddp[-1]:.1f} s on the fastest."
    )


def growth(results: Results) -> str:
    """The step on 2 and 4 hosts, and where the cores take longer than the link."""
    hosts = sorted({row["hosts"] for row in results["rows"]})
    rate = next(rate for rate in rates_of(results) if rate != LOOPBACK)
    at = {n: of_rate([row for row in results["rows"] if row["hosts"] == n], rate) for n in hosts}
    ms = {name: [f"{1e3 * at[n][name]['median']:.0f}" for n in hosts] for name in ("Gossip, delay=1", "DDP", "computing alone")}
    few, many = listed(map(str, hosts[:2])), listed(map(str, hosts))
    return (
        f"On {few} hosts at {shown(rate)}, a gossip step with `delay=1` takes {listed(ms['Gossip, delay=1'][:2])} ms, a step of DDP "
        f"{listed(ms['DDP'][:2])} ms.\nComputing alone takes {listed(ms['computing alone'])} ms on {many} hosts, "
        "because two cores compute for all of them.\nSo beyond 4 hosts this machine measures its cores, no longer the links."
    )


def gpu(results: Results) -> str:
    """The cost of `averager.step()` on a GPU for the host and for the device."""
    alone = [
        f"{1e3 * took['host']:.1f} ms of CPU time and {1e3 * took['device']:.1f} ms of GPU time ({model.split(',')[0]})"
        for model, delays in results["step, alone"].items()
        for took in (delays["delay=0"],)
    ]
    gloo = results["step, gloo"]
    steps = " and ".join(f"{1e3 * gloo[delay]['step']:.0f} ms with `{delay}`" for delay in ("delay=0", "delay=1"))
    return (
        f"Without waiting, `averager.step()` needs {listed(alone)}.\n"
        f"Over gloo, with {gloo['processes']} processes that share one GPU, a training step of ResNet-50 takes {steps}."
    )


def _times(results: Results, rate: str, name: str) -> float:
    times: float = of_rate(results["rows"], rate)[name]["times_as_fast_as_ddp"]
    return times
