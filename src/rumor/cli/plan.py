"""`rumor plan`: predicts the cost of every method and topology, and recommends one."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from rumor.cli.paper import paper_page
from rumor.cli.table import paragraph, table
from rumor.cli.units import bandwidth, count, nodes, seconds, show_bytes, show_count, show_seconds
from rumor.cli.user_model import load_model
from rumor.cost import TOPOLOGIES, Link, Measured, Network, Prediction, Recommendation, Workload, predict, recommend
from rumor.cost.paper import TRAININGS
from rumor.cost.recommendation import FEWEST_BITS
from rumor.plots import draw_plan
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

Units: 25Gbit/s means bits, 3.1GB/s means bytes. A bandwidth without a unit is in bytes/s, a time without a unit in seconds."""


def add_plan(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan",
        help="predict the cost of every method and topology, and recommend one",
        description="Predicts the time per step, bytes, hours and transient stage of every method and topology, and recommends one.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
        default=str(FEWEST_BITS),
        help=f"bits of a number in the smallest messages to compare, 32 for float32 alone (default {FEWEST_BITS})",
    )
    parser.add_argument("--max-period", type=nodes, metavar="H", help="longest H to recommend, for example to limit the transient stage")
    parser.add_argument("--iid", action="store_true", help="assume that all nodes draw from the same data, for the transient stage")
    parser.add_argument("--out", metavar="FILE", help="also draw the times of a step into FILE.png, .svg or .pdf (needs matplotlib)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def _add_network_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--bandwidth", type=bandwidth, help="bandwidth of a node's link: 25Gbit/s (bits), 3.1GB/s (bytes), or a plain number of bytes/s"
    )
    parser.add_argument(
        "--latency", type=seconds, metavar="TIME", help="latency of a message, for example 50us (default: the probe's, or 0)"
    )
    parser.add_argument("--all-reduce", type=seconds, metavar="TIME", help="measured time of an all-reduce, instead of --bandwidth")
    parser.add_argument(
        "--gossip",
        action="append",
        metavar="[TOPOLOGY=]TIME",
        help="measured time of a gossip step (default topology: one-peer-exponential); may be repeated",
    )
    parser.add_argument(
        "--ddp",
        type=seconds,
        metavar="TIME",
        help="measured time of a whole step of DistributedDataParallel, in addition to --all-reduce and --gossip",
    )
    parser.add_argument("--probe", metavar="FILE", help="file that `rumor probe` wrote; other options override its values")


@dataclass(frozen=True)
class Inputs:
    """The cluster and the workload to plan for, and the source of the numbers."""

    n: int
    workload: Workload
    network: Network
    source: str


def run(options: argparse.Namespace) -> int:
    if options.paper:
        given = [name for name in INPUTS if getattr(options, name) not in (None, False)]
        if given:
            raise ValueError(f"--paper uses the paper's own numbers: leave out --{given[0].replace('_', '-')}")
        print(paper_page(options.paper, options.json))
        return 0
    inputs = read_inputs(options)
    planned, bits = (inputs.n, inputs.workload, inputs.network), int(options.bits)
    advice = recommend(*planned, H=options.period, max_period=options.max_period, iid=options.iid, bits=bits)
    H = options.period or (advice.H if advice.H > 1 else None)  # so that the recommendation is a row of the table
    rows = predict(*planned, H=H, H_max=max(64, H or 0), bits=bits)
    is_chosen = (advice.method, advice.topology, advice.H, advice.bits)
    chosen = next((row for row in rows if (row.method, row.topology, row.H, row.bits) == is_chosen), None)
    if options.out:
        title = f"{inputs.n} nodes, {show_count(inputs.workload.parameters)} parameters; {inputs.source}"
        draw_plan(rows, chosen, inputs.workload.compute, title, options.out)
    print(_json(inputs, rows, advice) if options.json else _page(inputs, rows, chosen, advice, options.iid))
    if options.out and not options.json:
        print(f"\nwrote {options.out}")
    return 0


def read_inputs(options: argparse.Namespace) -> Inputs:
    probe = Probe.read(options.probe) if options.probe else None
    n = options.nodes if options.nodes is not None else probe.n if probe else None
    if n is None:
        raise ValueError("the number of nodes is missing: give -n 32 or --probe FILE")
    if not 1 <= n <= MOST_NODES:
        raise ValueError(f"-n must be a whole number >= 1 (and at most {MOST_NODES:,}), got {n}")
    workload = _workload(options, probe)
    network, source = _network(options, probe, n, workload)
    return Inputs(n, workload, network, source)


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


def _network(options: argparse.Namespace, probe: Probe | None, n: int, workload: Workload) -> tuple[Network, str]:
    by_times, by_link = options.all_reduce is not None or options.gossip is not None, options.bandwidth is not None
    if by_times and by_link:
        raise ValueError("the network is given twice: give either --bandwidth and --latency, or --all-reduce and --gossip")
    if options.ddp is not None and not by_times:
        raise ValueError("--ddp is a measured time and needs the other measured times: give --all-reduce and --gossip, too")
    if by_link:
        known = probe.small_gossip.median if probe else 0.0
        link = Link(options.bandwidth, known if options.latency is None else options.latency)
        return link, f"a link of {_show_bandwidth(link)}, latency {show_seconds(link.latency)}"
    if options.latency is not None:
        raise ValueError("--latency describes a link, which also needs a bandwidth: give --bandwidth 25Gbit/s, too")
    if by_times:
        return _measured_network(options, workload), "times from the options"
    if probe is None:
        raise ValueError("the network is missing: give --bandwidth 25Gbit/s, or --all-reduce 278ms --gossip 150ms, or --probe FILE")
    if (n, workload.bytes) == (probe.n, probe.parameters * probe.bytes_per_parameter):
        return probe.measured(), f"times from {options.probe}"
    link = probe.link()
    return link, (
        f"a link of {_show_bandwidth(link)}, latency {show_seconds(link.latency)}, from {options.probe}, because its times are for "
        f"{probe.n} nodes and {show_bytes(probe.parameters * probe.bytes_per_parameter)}"
    )


def _measured_network(options: argparse.Namespace, workload: Workload) -> Measured:
    if options.all_reduce is None or options.gossip is None:
        raise ValueError("measured times come in pairs: give both --all-reduce 278ms and --gossip 150ms")
    if options.ddp is not None and not options.ddp >= workload.compute:
        raise ValueError(
            f"--ddp {options.ddp:g} s is the time of a whole step and can't be less than the compute time in it, {workload.compute:g} s"
        )
    ddp = None if options.ddp is None else options.ddp - workload.compute
    return Measured(options.all_reduce, _gossip_times(options.gossip), ddp)


def _gossip_times(texts: list[str]) -> dict[str, float]:
    times: dict[str, float] = {}
    for text in texts:
        name, time = _gossip_time(text)
        if name in times:
            raise ValueError(f"--gossip {text}: {name} already has a time; name another topology, for example --gossip ring=300ms")
        times[name] = time
    return times


def _gossip_time(text: str) -> tuple[str, float]:
    name, _, time = text.rpartition("=")
    name = name.replace("_", "-") or "one-peer-exponential"
    if name not in TOPOLOGIES:
        raise ValueError(f"--gossip {text}: there is no topology {name!r}; choose from {', '.join(TOPOLOGIES)}")
    try:
        return name, seconds(time)
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"--gossip {text}: {error}") from None


def _show_bandwidth(link: Link) -> str:
    return f"{link.bandwidth * 8 / 1e9:.3g} Gbit/s ({show_bytes(link.bandwidth)}/s)"


def _json(inputs: Inputs, rows: list[Prediction], advice: Recommendation) -> str:
    network = {"kind": type(inputs.network).__name__.lower(), **asdict(inputs.network)}  # type: ignore[call-overload]
    found = {
        "n": inputs.n,
        "workload": asdict(inputs.workload),
        "network": network,
        "recommendation": asdict(advice),
        "predictions": [asdict(row) for row in rows],
    }
    return json.dumps(found, indent=1)


def _page(inputs: Inputs, rows: list[Prediction], chosen: Prediction | None, advice: Recommendation, iid: bool) -> str:
    w = inputs.workload
    head = (
        f"{inputs.n} nodes, {show_count(w.parameters)} parameters of {w.bytes_per_parameter:g} bytes ({show_bytes(w.bytes)}), "
        f"{show_seconds(w.compute)} of computing, {w.steps:,} steps; {inputs.source}"
    )
    notes = dict.fromkeys(f"{row.topology}: {row.note}" for row in rows if row.note)
    lines = [paragraph(head), "", _table(rows, chosen, iid), "", _legend(iid), *(paragraph(f"* {note}") for note in notes), ""]
    lines += [paragraph(f"Take {advice.method}: {advice.call}"), paragraph(f"  because {advice.reason}.", "  ")]
    return "\n".join([*lines, *(paragraph(f"  Note: {note}.", "  ") for note in advice.notes)])


def _legend(iid: bool) -> str:
    data = "all nodes draw from the same data (iid)" if iid else "each node has its own data (non-iid)"
    lines = [
        "step: time without overlap (Parallel SGD: time of DDP, if measured).",
        "overlapped: best case with delay=1 or DDP's buckets.",
        "sent: bytes that the busiest node sends per step.",
        f"transient: order of the steps before the method is as good as Parallel SGD, if {data}. Compare rows by it; it is not a "
        "number of steps.",
        "Gossip-AGA moves between its two rows. OSGP takes between `step` and `overlapped`. SlowMo costs as much as Gossip-PGA.",
        "<: recommended.",
    ]
    return "\n".join(paragraph(line, "  ") for line in lines)


def _table(rows: list[Prediction], chosen: Prediction | None, iid: bool) -> str:
    head = ("method", "H", "step", "overlapped", "sent", "hours", "transient", "")
    lines: list[tuple[str, ...]] = []
    last: str | None = None
    for row in rows:
        if row.topology and row.topology != last:
            lines += [(), (f"over {row.topology}{'*' if row.note else ''}:",)]
        stage = row.transient_stage_iid if iid else row.transient_stage
        lines.append(
            (
                row.name,
                "-" if row.H is None else str(row.H),
                show_seconds(row.seconds),
                show_seconds(row.seconds_overlapped),
                show_bytes(row.bytes),
                f"{row.hours:.2f}" if row.hours < 1000 else f"{row.hours:,.0f}",
                "-" if stage is None else f"{stage:.1e}" if stage else "0",
                "<" if row is chosen else "",
            )
        )
        last = row.topology
    return table(head, lines)
