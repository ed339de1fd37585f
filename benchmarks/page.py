"""Write the tables of docs/performance.md and docs/reliability.md from benchmarks/results, and draw the pictures.

    python benchmarks/page.py            # rewrites the text between <!-- table X --> and <!-- end -->

No number of these tables is typed by hand.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT / "experiments"))

import accuracy_tables  # noqa: E402
import pictures  # noqa: E402
from bed import LOOPBACK  # noqa: E402
from limits import shown  # noqa: E402
from logistic import tables  # noqa: E402

PAGES = ("performance.md", "reliability.md")
ALONE = "computing alone"
MIXING = ("pack", "mix, delay=0", "mix, delay=1")
NAMES = {"one_peer_exponential": "gossip, one peer", "ring": "gossip, ring", "exponential": "gossip, exponential", "mean": "average of all"}
MODELS = {"resnet50": "ResNet-50", "bert_base": "BERT-base", "tiny": "tiny"}


def exchange(results: dict[str, Any]) -> str:
    """Seconds of one exchange, and how many times bytes / rate that is."""
    rows = [["", "MB", *_rates(results)]]
    for what in dict.fromkeys(row["what"] for row in results["rows"]):
        for size in dict.fromkeys(row["bytes"] for row in results["rows"]):
            found = [row for row in results["rows"] if (row["what"], row["bytes"]) == (what, size)]
            spread = ((row["fastest"] / row["limit"], row["slowest"] / row["limit"]) for row in found)
            cells = [
                f"{row['median']:.3g} s: **{row['ratio']:.2f}** ({a:.2f} to {b:.2f})" for row, (a, b) in zip(found, spread, strict=True)
            ]
            rows.append([NAMES.get(what, what), f"{size / 1e6:.0f}", *cells])
    return _text(rows)


def step(results: dict[str, Any]) -> str:
    """A table for each rate: ms of a training step beside the limit and beside DDP."""
    tables_of_rates = []
    for rate in dict.fromkeys(row["rate"] for row in results["rows"]):
        rows = [[shown(rate), "ms a step (fastest to slowest)", "limit, ms", "times the limit", "times as fast as DDP", "most possible"]]
        for row in results["rows"]:
            if row["rate"] == rate:
                limit, ratio = f"{1e3 * row['limit']:.0f}", f"**{row['ratio']:.2f}**"
                rows.append([row["what"], _range(row), limit, ratio, f"**{row['times_as_fast_as_ddp']:.2f}**", f"{row['ceiling']:.2f}"])
        tables_of_rates.append(_text(rows))
    return "\n\n".join(tables_of_rates)


def loopback(results: dict[str, Any]) -> str:
    """ms of a training step of both models where the network costs nothing."""
    models = {"mlp": "MLP", "resnet50": "ResNet-50"}
    rows = [["", *(cell for name in models.values() for cell in (f"{name}: ms a step", f"{name}: times as fast as DDP"))]]
    for what in dict.fromkeys(row["what"] for row in results["rows"]):
        found = {row["model"]: row for row in results["rows"] if row["what"] == what}
        rows.append([what, *(cell for m in models for cell in (_range(found[m]), f"{found[m]['times_as_fast_as_ddp']:.2f}"))])
    return _text(rows)


def mixing(results: dict[str, Any]) -> str:
    """Microseconds of packing and mixing, and their share of the bandwidth of a plain copy (from gpu.json)."""
    rows = [["", "dtype", "a copy", *MIXING]]
    for model, kinds in results["mixing"].items():
        for kind, found in kinds.items():
            cells = [f"{1e6 * found[what]['seconds']:.0f} us: **{found[what]['share_of_copy']:.2f}**" for what in MIXING]
            rows.append([model, kind, f"{found['copy_bytes_per_second'] / 1e12:.2f} TB/s", *cells])
    return _text(rows)


def host(results: dict[str, Any]) -> str:
    """ms of `averager.step()` (from gpu.json): with a neighbour that echoes, and in processes that share the GPU over gloo."""
    rows = [["", "delay", "averager.step(), host, ms", "device, ms", "whole training step, ms"]]
    for model, delays in results["step, alone"].items():
        rows += [[model, delay[-1], f"{1e3 * took['host']:.1f}", f"{1e3 * took['device']:.1f}", "-"] for delay, took in delays.items()]
    gloo = results["step, gloo"]
    for delay in ("delay=0", "delay=1"):
        took, name = gloo[delay], f"gloo, {gloo['processes']} processes on the one GPU: ResNet-50"
        rows.append([name, delay[-1], f"{1e3 * took['host in averager.step']:.0f}", "-", f"{1e3 * took['step']:.0f}"])
    return _text(rows)


def growth(results: dict[str, Any]) -> str:
    """ms of a step on the links; in brackets the time beyond computing alone, on the links and over loopback ("cores")."""
    hosts = list(dict.fromkeys(row["hosts"] for row in results["rows"]))
    ms = {(row["what"], row["hosts"], row["rate"] == LOOPBACK): 1e3 * row["median"] for row in results["rows"]}
    rows = [["ms a step", *(f"{n} hosts" for n in hosts)]]
    for what in dict.fromkeys(row["what"] for row in results["rows"]):
        cells = []
        for n in hosts:
            beyond, cores = (ms[what, n, where] - ms[ALONE, n, where] for where in (False, True))
            cells.append(f"{ms[what, n, False]:.0f}" + ("" if what == ALONE else f" (+{beyond:.0f}, cores {cores:+.0f})"))
        rows.append([what, *cells])
    return _text(rows)


def overhead(results: dict[str, Any]) -> str:
    """ms of a step without communication, with an all-reduce and with gossip; in brackets what they add. The paper's numbers come first."""
    names = list(dict.fromkeys(row["what"] for row in results["rows"]))
    rows = [["ms a step", *names], ["paper: ResNet-50, 32 nodes", "146", "424 (+278)", "296 (+150)", *["-"] * (len(names) - 3)]]
    rows += [["paper: BERT-large, 32 nodes", "445", "1914 (+1469)", "1012 (+566)", *["-"] * (len(names) - 3)]]
    for model, rate, hosts in dict.fromkeys((row["model"], row["rate"], row["hosts"]) for row in results["rows"]):
        found = {row["what"]: row for row in results["rows"] if (row["model"], row["rate"]) == (model, rate)}
        times = [(1e3 * found[name]["median"], 1e3 * found[name]["overhead"]) for name in names]
        cells = [f"{whole:.0f}" + (f" ({added:+.0f})" if added else "") for whole, added in times]
        rows.append([f"{MODELS[model]}, {hosts} hosts, {shown(rate)}", *cells])
    return _text(rows)


def peers(results: dict[str, Any]) -> str:
    """ms of a training step in each library, then a list of the settings."""
    rows, settings = [["ms a step", *_rates(results), "distance from the mean"]], dict[str, list[str]]()
    for what in dict.fromkeys(row["what"] for row in results["rows"]):
        found = [row for row in results["rows"] if row["what"] == what]
        at = {shown(row["rate"]): f"{_range(row)}: **{row['times_as_fast_as_ddp']:.2f}**{_ceiling(row)}" for row in found}
        cells = [at.get(rate, "-") for rate in _rates(results)]
        apart, finished = (max(row[when] for row in found) for when in ("consensus", "consensus_finished"))
        distance = f"{apart:.0e}" + (f", {finished:.0e} after `finish()`" if finished != apart else "")
        rows.append([what, *cells, distance.replace("0e+00", "0")])
        settings.setdefault(found[0]["description"], []).append(what)
    notes = [f"- **{'; '.join(names)}**: {description}." for description, names in settings.items()]
    return "\n".join([_text(rows), "", "Settings, and what was replaced:", "", *notes])


def soak(results: dict[str, Any]) -> str:
    """What each contestant keeps of its speed with the kills, and what the survivors lose; then the jobs in seconds, and accuracy."""
    what = f"{results['processes']} nodes, {results['steps']:,} steps, {len(results['plan'])} kills"
    kept = [[what, "throughput kept", "job speed kept", "restarts of survivors", "their steps lost", "seconds to the next average"]]
    jobs = [["", "seconds", "accuracy", "largest memory growth of a survivor"]]
    for name, found in results["found"].items():
        killed = found["killed"]
        gaps = f"{killed['median_seconds_to_next_average']:.1f}, at most {max(killed['seconds_to_next_average']):.1f}"
        lost = [str(killed["restarts_of_survivors"]), f"{killed['steps_of_survivors_lost']:,}"]
        kept.append([name, f"**{found['throughput_kept']:.0%}**", f"{found['job_speed_kept']:.0%}", *lost, gaps])
        for when in ("undisturbed", "killed"):
            memory, accuracy = found[when]["memory_growth"], f"{found[when]['accuracy']:.1%}"
            jobs.append([f"{name}, {when}", f"{found[when]['seconds']:.0f}", accuracy, "-" if memory is None else f"{memory:+.2%}"])
    return f"{_text(kept)}\n\n{_text(jobs)}"


def _text(rows: list[list[str]]) -> str:
    head, *body = rows
    return tables.as_text([dict(zip(head, row, strict=True)) for row in body])


def _ceiling(row: dict[str, Any]) -> str:
    return f" of {row['ceiling']:.2f}" if "ceiling" in row else ""


def _range(row: dict[str, Any]) -> str:
    return f"{1e3 * row['median']:.0f} ({1e3 * row['fastest']:.0f} to {1e3 * row['slowest']:.0f})"


def _rates(results: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(shown(row["rate"]) for row in results["rows"]))


def results_of(name: str) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((RESULTS / f"network-{name}.json").read_text())
    return results


def filled_in(text: str) -> str:
    """Return the page with all its tables rebuilt from the results."""

    def make(name: str) -> str:
        if name.startswith("accuracy-"):
            return accuracy_tables.make(name.removeprefix("accuracy-"), json.loads((RESULTS / "accuracy.json").read_text()))
        if name == "soak":
            return soak(json.loads((RESULTS / "soak.json").read_text()))
        if name.startswith("gpu-"):
            return {"mixing": mixing, "host": host}[name.removeprefix("gpu-")](json.loads((RESULTS / "gpu.json").read_text()))
        of_network = {"exchange": exchange, "step": step, "resnet": step, "loopback": loopback, "growth": growth, "peers": peers}
        of_network["overhead"] = overhead
        return of_network[name](results_of(name))

    def make_if_measured(name: str) -> str:
        try:
            return make(name)
        except FileNotFoundError as error:
            return f"*Not measured yet: there is no {Path(error.filename).relative_to(ROOT)}.*"

    return tables.filled_in(text, make_if_measured)


if __name__ == "__main__":
    for page in (ROOT / "docs" / name for name in PAGES):
        tables.write(page, filled_in(page.read_text()))
    drawn = {"trace": pictures.draw_trace, "peers": pictures.draw_steps, "step": pictures.draw_steps, "growth": pictures.draw_growth}
    for name, draw in drawn.items():
        if (RESULTS / f"network-{name}.json").exists():
            draw(results_of(name), ROOT / "docs" / "performance" / f"{name}.png")
