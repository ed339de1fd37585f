"""Compares Rumor on a slow network (bed.py) with its alternatives and with the limits of the links.

    sudo python benchmarks/network.py exchange       # one gossip step and one global average, compared with bytes / rate
    sudo python benchmarks/network.py step           # a training step: DDP at its best, Gossip, Gossip-PGA, without and with overlap
    sudo python benchmarks/network.py resnet         # the same for ResNet-50
    sudo python benchmarks/network.py growth         # the same for 2, 4, 8 and 16 hosts
    sudo python benchmarks/network.py trace          # the work of a host and its link during a few steps
    sudo python benchmarks/network.py peers          # a training step of other libraries and of Rumor
    sudo python benchmarks/network.py elastic        # a training step in a fixed group, and with members that may come and go
    sudo python benchmarks/network.py overhead       # the paper's Table 17: gossip and all-reduce of ResNet-50's and BERT-base's parameters

         python benchmarks/network.py loopback       # the same step over loopback, for a small and a large model

Each command writes benchmarks/results/network-*.json. All contestants of a table run in the same job on the same bed, in turns.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bed import CONGESTION, LOOPBACK, Bed, take_down_when_told_to_end
from limits import bytes_per_second, copies_sent, shortest_step
from measure import save

HERE = Path(__file__).parent
PARAMETERS, RESNET_PARAMETERS = 1_863_690, 25_557_032  # of examples/model_to_plan.py, and of ResNet-50
H, NEVER = 6, 1_000_000  # the latter is a period that is never reached
COMPUTING = {
    "resnet50": 0.146,
    "bert_base": 0.445,
}  # seconds of a step without communication, for `overhead`: those of the paper's Table 17
SIZES = {"resnet50": RESNET_PARAMETERS, "bert_base": 109_482_240, "tiny": 1_010}
RATES = ("200mbit", "500mbit", "1gbit")
PEER_RATES = ("100mbit", "200mbit", "500mbit", "1gbit", LOOPBACK)
SLOW = "500mbit"  # on slower links than this, some contestants of `peers` are left out to save time:
LEFT_OUT_ON_SLOW_LINKS = ("bucket_cap_mb=1", "delay=1", "OSGP", "SlowMo", "SGP", "Gossip SGD")
LEFT_OUT_OF_RESNET = (  # to save memory: four hosts share one machine
    *("bucket_cap_mb=1", "bucket_cap_mb=4", "Gossip, ", "Gossip-PGA, delay=0", "Gossip-PGA, 8 bits", "4 bits, delay=1"),
    *("Parallel SGD", "lazy", "crude"),
)
LEFT_OUT_OF_LOOPBACK = (  # likewise
    *("bucket_cap_mb=1", "bucket_cap_mb=4", "Gossip, ", "Gossip-PGA, 8 bits", "4 bits, delay=1", "Parallel SGD", "crude"),
)


def on_all_hosts(bed: Bed, timeout: float, *arguments: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        bed.run([sys.executable, str(HERE / "on_host.py"), *arguments, "--out", str(out)], timeout)
        found: dict[str, Any] = json.loads(out.read_text())
    return found


def rates_of(bed: Bed, rates: list[str]) -> Iterator[str]:
    """Sets and yields one rate after the other. If the links can't be shaped, it yields "loopback" only."""
    if LOOPBACK in rates and len(rates) > 1:
        raise ValueError(f"--rates has {LOOPBACK} and others, but hosts with shaped links can't use loopback: run it by itself")
    for rate in rates if bed.shaped else [LOOPBACK]:
        bed.set_rate(rate)
        yield rate


def exchange(hosts: int, rates: list[str], repeats: int) -> dict[str, Any]:
    copies = {"one_peer_exponential": 1.0, "ring": 2.0, "exponential": 2.0}
    rows = []
    with Bed(hosts, rates[0]) as bed:
        for rate in rates_of(bed, rates):
            found = on_all_hosts(bed, 900, "exchange", "--repeats", str(repeats))
            for size, seconds in found["seconds"].items():
                for what, spread in seconds.items():
                    row = {"rate": rate, "bytes": int(size), "what": what, **spread}
                    if bed.shaped:
                        row["limit"] = (copies.get(what) or copies_sent(what, hosts, 1)) * int(size) / bytes_per_second(rate)
                        row["ratio"] = spread["median"] / row["limit"]
                    rows.append(row)
                    limit = f"limit {row['limit']:7.3f}  x{row['ratio']:.2f}" if "limit" in row else ""
                    print(f"{rate:>8} {int(size) / 1e6:5.0f} MB {what:22} {spread['median']:7.3f} s  {limit}", flush=True)
    return {"machine": found["machine"], "bed": bed.name, "rows": rows}


def step(hosts: int, rates: list[str], repeats: int, congestion: str) -> dict[str, Any]:
    rows = []
    with Bed(hosts, rates[0], congestion) as bed:
        for rate in rates_of(bed, rates):
            found = on_all_hosts(bed, 600, "step", "--repeats", str(repeats))
            rows += _steps(rate, hosts, found["seconds"])
    return {"machine": found["machine"], "bed": bed.name, "parameters": PARAMETERS, "H": H, "rows": rows}


def resnet(hosts: int, rates: list[str], repeats: int) -> dict[str, Any]:
    """Times a step of ResNet-50: few images, so that two cores can compute for all hosts."""
    rows = []
    with Bed(hosts, rates[0]) as bed:
        for rate in rates_of(bed, rates):
            found = on_all_hosts(bed, 1800, "step", "--model", "resnet50", "--repeats", str(repeats), "--without", *LEFT_OUT_OF_RESNET)
            rows += _steps(rate, hosts, found["seconds"], RESNET_PARAMETERS)
    return {"machine": found["machine"], "bed": bed.name, "parameters": RESNET_PARAMETERS, "H": H, "rows": rows}


def _steps(rate: str, hosts: int, seconds: dict[str, Any], parameters: int = PARAMETERS) -> list[dict[str, Any]]:
    """Compares each contestant with max(computing, bytes / rate), and with DDP at its best bucket size."""
    compute, is_link = seconds["computing alone"]["median"], bytes_per_second(rate) < math.inf
    ddp = min(spread["median"] for name, spread in seconds.items() if name.startswith("DDP, bucket"))
    rows = []
    for name, spread in seconds.items():
        row = {"rate": rate, "hosts": hosts, "what": name, **spread, "times_as_fast_as_ddp": ddp / spread["median"]}
        if is_link:
            row["limit"] = shortest_step(name, hosts, H, 4 * parameters, rate, compute)
            row["ratio"] = spread["median"] / row["limit"]
            row["ceiling"] = ddp / row["limit"]  # the largest possible speed-up over DDP
        rows.append(row)
        limit = f"limit {1e3 * row['limit']:4.0f}  x{row['ratio']:.2f}" if is_link else ""
        print(
            f"{hosts:3} hosts {rate:>8} {name:26} {1e3 * spread['median']:5.0f} ms  {limit}  {row['times_as_fast_as_ddp']:.2f} x DDP",
            flush=True,
        )
    return rows


def growth(rate: str, repeats: int) -> dict[str, Any]:
    """Times a step on links of one rate and over loopback. Loopback shows how much of a step is the work of the cores."""
    rows = []
    for hosts in (2, 4, 8, 16):
        for links in (rate, LOOPBACK):
            with Bed(hosts, links) as bed:
                found = on_all_hosts(bed, 900, "step", "--repeats", str(repeats), "--without", "lazy", "crude")
            rows += [{"bed": found["bed"], **row} for row in _steps(bed.rate, hosts, found["seconds"])]
    return {"machine": found["machine"], "parameters": PARAMETERS, "H": H, "rows": rows}


def loopback(hosts: int, repeats: int) -> dict[str, Any]:
    """Times a step over loopback, where the network costs only the cores' time."""
    rows = []
    with Bed(hosts, LOOPBACK) as bed:
        for model in ("mlp", "resnet50"):
            found = on_all_hosts(bed, 900, "step", "--model", model, "--repeats", str(repeats), "--without", *LEFT_OUT_OF_LOOPBACK)
            rows += [{"model": model, **row} for row in _steps(LOOPBACK, hosts, found["seconds"])]
    return {"machine": found["machine"], "bed": bed.name, "H": H, "rows": rows}


def trace(hosts: int, rate: str) -> dict[str, Any]:
    with Bed(hosts, rate) as bed:
        found = on_all_hosts(bed, 120, "trace")
    return {"machine": found["machine"], "bed": bed.name, "rate": bed.rate, "traces": found["seconds"]}


def peers(hosts: int, rates: list[str], repeats: int) -> dict[str, Any]:
    """Times a step of other libraries and of Rumor. Each rate has its own bed, because a shaped bed can't use loopback."""
    rows = []
    for rate in rates:
        without = LEFT_OUT_ON_SLOW_LINKS if bytes_per_second(rate) < bytes_per_second(SLOW) else ()
        with Bed(hosts, rate) as bed:
            found = on_all_hosts(bed, 1200, "peers", "--repeats", str(repeats), "--without", *without)
        rows += [{"bed": found["bed"], **row} for row in _steps(bed.rate, hosts, found["seconds"])]
    return {"machine": found["machine"], "hosts": hosts, "parameters": PARAMETERS, "H": H, "rows": rows}


def overhead(hosts: int, rates: list[str], repeats: int, models: dict[str, float]) -> dict[str, Any]:
    """Times what gossip and an all-reduce add to a step, as in the paper's Table 17. `models` maps shapes to seconds of computing.

    Two cores serve all hosts, so computing is a sleep. Nothing overlaps with it.
    """
    rows = []
    with Bed(hosts, rates[0]) as bed:
        for rate in rates_of(bed, rates):
            for shapes, compute in models.items():
                job = ("overhead", "--shapes", shapes, "--compute", str(compute), "--repeats", str(repeats))
                found = on_all_hosts(bed, 3600, *job)
                rows += [{"model": shapes, "compute": compute, **row} for row in _overheads(rate, hosts, found["seconds"], SIZES[shapes])]
    return {"machine": found["machine"], "bed": bed.name, "rows": rows}


def elastic(hosts: int, rates: list[str], repeats: int) -> dict[str, Any]:
    """Times what `rumor.elastic` costs while no member comes or goes."""
    rows = []
    with Bed(hosts, rates[0]) as bed:
        for rate in rates_of(bed, rates):
            found = on_all_hosts(bed, 900, "elastic", "--repeats", str(repeats))
            for name, spread in found["seconds"].items():
                cost = spread["median"] / found["seconds"][name.removesuffix(", elastic")]["median"] - 1
                rows.append({"rate": rate, "hosts": hosts, "what": name, **spread, "cost": cost})
                print(f"{hosts:3} hosts {rate:>8} {name:28} {1e3 * spread['median']:6.1f} ms ({cost:+.1%})", flush=True)
    return {"machine": found["machine"], "bed": bed.name, "H": H, "rows": rows}


def _overheads(rate: str, hosts: int, seconds: dict[str, Any], parameters: int) -> list[dict[str, Any]]:
    """Subtracts the step without communication, and gives the least possible time of the bytes."""
    rows = []
    for name, spread in seconds.items():
        row = {"rate": rate, "hosts": hosts, "what": name, **spread, "overhead": spread["median"] - seconds["no communication"]["median"]}
        if bytes_per_second(rate) < math.inf and name != "no communication":
            contestant = name.replace("gossip", "Gossip").replace("all-reduce", "Parallel SGD")
            row["limit"] = copies_sent(contestant, hosts, NEVER) * 4 * parameters / bytes_per_second(rate)
        rows.append(row)
        print(f"{hosts:3} hosts {rate:>8} {name:20} {1e3 * spread['median']:7.0f} ms ({1e3 * row['overhead']:+.0f})", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "what",
        choices=("exchange", "step", "resnet", "growth", "loopback", "peers", "trace", "elastic", "overhead"),
        help="what to measure",
    )
    parser.add_argument("--hosts", type=int, default=4, help="number of hosts")
    parser.add_argument("--rates", nargs="+", help="rates of the links in tc's notation, or loopback")
    parser.add_argument("--congestion", default=CONGESTION, help="TCP congestion control, for step")
    parser.add_argument("--repeats", type=int, default=5, help="number of turns")
    parser.add_argument("--quick", action="store_true", help="a tiny model, for overhead: a smoke test")
    parser.add_argument("--out", type=Path, help="file for the results")
    options = parser.parse_args()
    if options.hosts < 2 or options.repeats < 1:
        parser.error(f"this needs at least 2 hosts and 1 repeat, got --hosts {options.hosts} --repeats {options.repeats}")
    for rate in options.rates or ():
        bytes_per_second(rate)  # raises on a wrong rate, before anything is measured
    take_down_when_told_to_end()
    if options.what == "exchange":
        results = exchange(options.hosts, options.rates or list(RATES), options.repeats)
    elif options.what == "step":
        results = step(options.hosts, options.rates or ["500mbit", "1gbit"], options.repeats, options.congestion)
    elif options.what == "resnet":
        results = resnet(options.hosts, options.rates or ["500mbit"], options.repeats)
    elif options.what == "loopback":
        results = loopback(options.hosts, options.repeats)
    elif options.what == "trace":
        results = trace(options.hosts, (options.rates or ["500mbit"])[0])
    elif options.what == "peers":
        results = peers(options.hosts, options.rates or list(PEER_RATES), options.repeats)
    elif options.what == "elastic":
        results = elastic(options.hosts, options.rates or ["500mbit", "1gbit"], options.repeats)
    elif options.what == "overhead":
        models = {"tiny": 0.001} if options.quick else COMPUTING
        results = overhead(options.hosts, options.rates or ["500mbit", "1gbit"], options.repeats, models)
    else:
        results = growth((options.rates or ["500mbit"])[0], options.repeats)
    shaped = options.what == "loopback" or any(row.get("rate") != LOOPBACK for row in results.get("rows", [results]))
    save(options.out or HERE / "results" / f"network-{options.what}{'' if shaped else '-over-loopback'}.json", results)


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError, RuntimeError, TimeoutError) as error:  # errors that the user can fix
        sys.exit(f"network: {error}")
