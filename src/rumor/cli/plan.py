"""`rumor plan`: predicts the cost of every method and topology, and recommends one."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from rumor.cli import plan_picture
from rumor.cli.paper import paper_page
from rumor.cli.plan_page import Inputs, json_page, page
from rumor.cli.units import bandwidth, count, latency, nodes, seconds, show_bytes, show_seconds
from rumor.cli.user_model import load_model
from rumor.cost import TOPOLOGIES, Link, Measured, Network, Prediction, Recommendation, Workload, predict, recommend
from rumor.cost.network import in_python, same_as
from rumor.cost.paper import TRAININGS
from rumor.cost.reasons import ddp_with
from rumor.cost.recommendation import FEWEST_BITS, gossip_to_compare
from rumor.probe import Probe

MOST_NODES = 100_000  # with more nodes the transient stages take minutes
STEPS = 10_000
INPUTS = (
    *("nodes", "parameters", "model", "bytes_per_parameter", "compute", "bandwidth", "latency", "all_reduce", "gossip", "ddp", "probe"),
    *("period", "max_period", "out", "steps", "iid"),
)
EPILOG = """examples:
  rumor plan -n 32 --parameters 25.5M --compute 146ms --bandwidth 10Gbit/s --latency 50us
  rumor plan -n 32 --parameters 25.5M --compute 146ms --all-reduce 278ms --gossip 150ms
  rumor plan --probe probe.json --steps 100k
  rumor plan --paper resnet50

Units: 25Gbit/s means bits, 3.1GB/s means bytes. Times and rates need a unit."""


def add_plan(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan",
        help="predict the cost of every method and topology, and recommend one",
        description="Predicts the time per step, bytes, hours and transient stage of every method and topology, and recommends one.",
        epilog=EPILOG,
        usage="rumor plan [options]",
    )
    parser.add_argument("-n", "--nodes", type=nodes, help="number of nodes")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--parameters", type=count, help="number of parameters of the model, for example 25.5M or 7B")
    size.add_argument("--model", metavar="FILE.py:FUNCTION", help="count the parameters of the model that FUNCTION() returns")
    parser.add_argument("--bytes-per-parameter", type=float, metavar="BYTES", help="bytes per parameter (default 4, float32)")
    parser.add_argument("--compute", type=seconds, metavar="TIME", help="time of a forward, backward and optimizer step, for example 146ms")
    parser.add_argument("--steps", type=count, help=f"number of steps of the run (default {STEPS:,})")
    _add_network_options(parser)
    parser.add_argument("--paper", choices=tuple(TRAININGS), help="compare the paper's run times (Tables 7, 10 and 11) with the model's")
    parser.add_argument(
        "--period", type=nodes, metavar="H", help="period of Gossip-PGA and Local SGD (default: by the recommendation's rule)"
    )
    parser.add_argument(
        "--bits",
        choices=("32", "16", "8", "4"),
        help=f"bits of a number in the smallest messages to compare, 32 for float32 alone (default {FEWEST_BITS})",
    )
    parser.add_argument("--max-period", type=nodes, metavar="H", help="longest H to recommend, for example to limit the transient stage")
    parser.add_argument("--iid", action="store_true", help="assume that all nodes draw from the same data, for the transient stage")
    parser.add_argument("--out", metavar="FILE", help="also draw the times of a step into FILE.png, .svg or .pdf (needs matplotlib)")
    parser.add_argument("--all", action="store_true", help="print every method on every topology")
    parser.add_argument("--json", action="store_true", help="print JSON, which always has every method on every topology")
    parser.set_defaults(run=run)


def _add_network_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bandwidth", type=bandwidth, help="bandwidth of a node's link, with its unit: 25Gbit/s (bits) or 3.1GB/s (bytes)")
    parser.add_argument(
        "--latency", type=latency, metavar="TIME", help="latency of a message, for example 50us (default: the probe's, or 0)"
    )
    parser.add_argument("--all-reduce", type=seconds, metavar="TIME", help="measured time of an all-reduce, instead of --bandwidth")
    parser.add_argument(
        "--gossip",
        action="append",
        metavar="[TOPOLOGY=]TIME",
        help="measured time of a gossip step (default topology: one_peer_exponential); may be repeated",
    )
    parser.add_argument(
        "--ddp",
        type=seconds,
        metavar="TIME",
        help="measured time of a whole step of DistributedDataParallel, in addition to --all-reduce and --gossip",
    )
    parser.add_argument("--probe", metavar="FILE", help="file that `rumor probe` wrote; other options override its values")


def run(options: argparse.Namespace) -> int:
    if options.paper:
        given = [name for name in INPUTS if getattr(options, name) not in (None, False)]
        if given:
            raise ValueError(f"--paper uses the paper's own numbers: leave out --{given[0].replace('_', '-')}")
        print(paper_page(options.paper, options.json))
        return 0
    inputs = read_inputs(options)
    planned, bits = (inputs.n, inputs.workload, inputs.network), _bits(options, inputs.network)
    advice = recommend(*planned, H=options.period, max_period=options.max_period, iid=options.iid, bits=bits)
    if inputs.probe is not None and (doubt := _doubt(inputs.probe, advice)) is not None:
        advice = replace(advice, notes=(*advice.notes, doubt))
    H = options.period or advice.H  # so that the recommendation is a row of the table
    if H == 1 and options.period is None:
        H = _period(advice.against) or gossip_to_compare(*planned, advice.bits, options.max_period)[1]
    rows = predict(*planned, H=H, H_max=max(64, H), bits=bits)
    is_chosen = (advice.method, advice.topology, advice.H, advice.bits, advice.seconds)
    chosen = next((row for row in rows if (row.method, row.topology, row.H, row.bits, row.seconds) == is_chosen), None)
    if options.out:
        plan_picture.draw(inputs, rows, chosen, options.iid, options.out)
    print(json_page(inputs, rows, advice) if options.json else page(inputs, rows, chosen, advice, options.iid, options.all))
    if options.out and not options.json:
        print(f"\nwrote {options.out}")
    return 0


def _bits(options: argparse.Namespace, network: Network) -> int:
    """The bits of the smallest messages to compare. Measured times may lack those that --bits asks for."""
    bits = FEWEST_BITS if options.bits is None else int(options.bits)
    if options.bits is not None and bits < 32 and isinstance(network, Measured) and bits not in network.coded_seconds:
        there = ", ".join(map(str, sorted({32, *network.coded_seconds}, reverse=True)))
        raise ValueError(
            f"--bits {bits}: there are measured times for {there} bits alone; choose one of these, or give --bandwidth instead"
        )
    return bits


def _period(row: Prediction | None) -> int | None:
    """The period of Gossip-PGA; None for DDP, which has none."""
    return row.H if row is not None and row.method == "Gossip-PGA" else None


def _doubt(probe: Probe, advice: Recommendation) -> str | None:
    """Say so if the samples of the two methods of the sentence overlap, because another probe may then lead to another plan.

    One slow sample alone, more than twice as slow as the median, is no reason to doubt.
    """
    samples = {"DDP": probe.ddp, **{ddp_with(bits): timing for bits, timing in probe.coded_ddp.items()}, **probe.steps}
    names = (advice.text, advice.against.text if advice.against else "")
    mine, other = map(samples.get, names)
    if mine is None or other is None:
        return None
    faster, slower = sorted((mine, other), key=lambda timing: timing.median)
    if slower.fastest > min(faster.slowest, 2 * faster.median):
        return None
    spans = (
        f"{name} ({show_seconds(each.fastest)} to {show_seconds(each.slowest)})" for name, each in zip(names, (mine, other), strict=True)
    )
    return (
        f"this choice may be chance: the samples of {' and of '.join(spans)} overlap. Probe again on idle machines, with more than "
        f"--repeats {probe.repeats}"
    )


def read_inputs(options: argparse.Namespace) -> Inputs:
    probe = Probe.read(options.probe) if options.probe else None
    n = options.nodes if options.nodes is not None else probe.n if probe else None
    if n is None:
        raise ValueError("the number of nodes is missing: give -n 32 or --probe FILE")
    if not 1 <= n <= MOST_NODES:
        raise ValueError(f"-n must be a whole number >= 1 (and at most {MOST_NODES:,}), got {n}")
    workload = _workload(options, probe)
    network, source, measured_by = _network(options, probe, n, workload)
    has_whole_steps = isinstance(network, Measured) and bool(network.step_seconds)
    return Inputs(n, workload, network, source, measured_by, probe if has_whole_steps else None)


def _workload(options: argparse.Namespace, probe: Probe | None) -> Workload:
    compute = options.compute if options.compute is not None else probe.compute.median if probe else None
    if compute is None:
        raise ValueError("the compute time of a step is missing: give --compute 146ms or --probe FILE")
    if options.model:
        workload = Workload.of(load_model(options.model)[0], compute, _steps(options))
    elif options.parameters is not None:
        workload = Workload(options.parameters, compute, steps=_steps(options))
    elif probe:
        workload = replace(probe.workload(_steps(options)), compute=compute)
    else:
        raise ValueError("the size of the model is missing: give --parameters 25.5M, --model FILE.py:FUNCTION or --probe FILE")
    return workload if options.bytes_per_parameter is None else replace(workload, bytes_per_parameter=options.bytes_per_parameter)


def _steps(options: argparse.Namespace) -> int:
    return STEPS if options.steps is None else int(options.steps)


def _network(options: argparse.Namespace, probe: Probe | None, n: int, workload: Workload) -> tuple[Network, str, str]:
    by_times, by_link = options.all_reduce is not None or options.gossip is not None, options.bandwidth is not None
    if by_times and by_link:
        raise ValueError("the network is given twice: give either --bandwidth and --latency, or --all-reduce and --gossip")
    if options.ddp is not None and not by_times:
        raise ValueError("--ddp is a measured time and needs the other measured times: give --all-reduce and --gossip, too")
    if by_link:
        known = probe.small_gossip.median if probe else 0.0
        link = Link(options.bandwidth, known if options.latency is None else options.latency)
        return link, _show_link(link), f"from {_show_link(link)}"
    if options.latency is not None:
        raise ValueError("--latency describes a link, which also needs a bandwidth: give --bandwidth 25Gbit/s, too")
    if by_times:
        return _measured_network(options, n, workload), "times from the options", "from the options"
    if probe is None:
        raise ValueError("the network is missing: give --bandwidth 25Gbit/s, or --all-reduce 278ms --gossip 150ms, or --probe FILE")
    if (n, workload.bytes) == (probe.n, probe.parameters * probe.bytes_per_parameter):
        is_whole = workload.compute == probe.compute.median  # else its whole steps are not those of this plan
        return probe.measured(is_whole), f"times from {options.probe}", f"by rumor probe ({probe.where})"
    link = probe.link()
    size = show_bytes(probe.parameters * probe.bytes_per_parameter)
    source = f"{_show_link(link)}, from {options.probe}, because its times are for {probe.n} nodes and {size}"
    return link, source, f"from the link that rumor probe measured ({probe.where})"


def _measured_network(options: argparse.Namespace, n: int, workload: Workload) -> Measured:
    if options.all_reduce is None or options.gossip is None:
        raise ValueError("measured times come in pairs: give both --all-reduce 278ms and --gossip 150ms")
    if options.ddp is not None and not options.ddp >= workload.compute:
        raise ValueError(
            f"--ddp {options.ddp:g} s is the time of a whole step and can't be less than the compute time in it, {workload.compute:g} s"
        )
    ddp = None if options.ddp is None else options.ddp - workload.compute
    return Measured(options.all_reduce, _gossip_times(options.gossip, n), ddp)


def _gossip_times(texts: list[str], n: int) -> dict[str, float]:
    times, first = dict[str, float](), same_as(n)
    for text in texts:
        given, time = _gossip_time(text)
        name = first[given]
        if name in times:
            same = "" if name == given else f", and {in_python(given)} is the same for {n} nodes"
            another = "" if len(set(first.values())) == 1 else "; name another topology, for example --gossip ring=300ms"
            raise ValueError(f"--gossip {text}: {in_python(name)} already has a time{same}{another}")
        times[name] = time
    return times


def _gossip_time(text: str) -> tuple[str, float]:
    name, _, time = text.rpartition("=")
    name = name.replace("_", "-") or "one-peer-exponential"
    if name not in TOPOLOGIES:
        raise ValueError(f"--gossip {text}: there is no topology {in_python(name)!r}; choose from {in_python(', '.join(TOPOLOGIES))}")
    try:
        return name, seconds(time)
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"--gossip {text}: {error}") from None


def _show_link(link: Link) -> str:
    rate = f"{link.bandwidth * 8 / 1e9:.3g} Gbit/s ({show_bytes(link.bandwidth)}/s)"
    return f"a link of {rate}, latency {show_seconds(link.latency)}"
