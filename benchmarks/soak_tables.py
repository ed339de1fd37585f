"""Tables and sentences about members that come and go, for docs/reliability.md, from soak.json, faults.json and network-elastic.json."""

from __future__ import annotations

from typing import Any

from limits import shown
from network_tables import as_text

Results = dict[str, Any]
FAULTS = {  # as the page calls them
    "kill": "kills",
    "kill two": "two kills at once",
    "kill and start at once": "kills with a new start at once",
    "die in a certain place": "deaths at chosen places in the code",
    "stop for long": "long stops",
    "stop briefly": "short stops",
    "stranger": "nodes with another method",
    "garbage": "garbage on the port",
    "coordinator": "restarts of the coordinator",
    "coordinator, and kill": "kills without a coordinator",
}


def percent(share: float, form: str = ".0") -> str:
    return f"{100 * share:{form}f} %"


def kept(results: Results) -> str:
    """What each contestant keeps of its speed with the kills, and what the survivors lose."""
    what = f"{results['processes']} nodes, {results['steps']:,} steps, {len(results['plan'])} kills"
    rows = [[what, "throughput kept", "restarts of survivors", "their steps lost", "seconds to the next average"]]
    for name, found in results["found"].items():
        killed = found["killed"]
        gaps = f"{killed['median_seconds_to_next_average']:.1f}, at most {max(killed['seconds_to_next_average']):.1f}"
        lost = [str(killed["restarts_of_survivors"]), f"{killed['steps_of_survivors_lost']:,}"]
        rows.append([name, f"**{percent(found['throughput_kept'])}**", *lost, gaps])
    return as_text(rows)


def jobs(results: Results) -> str:
    """Seconds, accuracy and memory of each job, undisturbed and with the kills."""
    rows = [["undisturbed, with kills", "seconds", "accuracy", "memory growth"]]
    for name, found in results["found"].items():
        both = [found[when] for when in ("undisturbed", "killed")]
        memory = ("-" if job["memory_growth"] is None else percent(job["memory_growth"], "+.1") for job in both)
        cells = ([f"{job['seconds']:.0f}" for job in both], [percent(job["accuracy"], ".1") for job in both], memory)
        rows.append([name, *(", ".join(cell) for cell in cells)])
    return as_text(rows)


def soak_headline(results: Results) -> str:
    """Say what the kills cost each contestant."""
    ours, *others = results["found"].items()
    killed, undisturbed = ours[1]["killed"], ours[1]["undisturbed"]
    theirs = " and ".join(f"{percent(found['throughput_kept'])} ({name})" for name, found in others)
    return (
        f"With {len(results['plan'])} kills in {results['steps']:,} steps of {results['processes']} nodes, a job with `{ours[0]}` keeps "
        f"**{percent(ours[1]['throughput_kept'])} of its throughput**. The same kills leave {theirs}.\n"
        f"The next average of all survivors comes {killed['median_seconds_to_next_average']:.1f} s after a kill, at most "
        f"{max(killed['seconds_to_next_average']):.1f} s.\n"
        f"The accuracy is {percent(killed['accuracy'], '.1')}, undisturbed {percent(undisturbed['accuracy'], '.1')}."
    )


def faults(results: Results) -> str:
    """Say what the random faults were, and what was checked."""
    counts = results["faults"]
    kinds = ", ".join(f"{FAULTS.get(name, name)} ({counts[name]})" for name in sorted(counts, key=lambda name: [*FAULTS, name].index(name)))
    return (
        f"**{sum(counts.values()):,} random faults in one job**, in {results['seconds'] / 60:.0f} minutes: {kinds}.\n"
        "To fit many faults in, a silent node was lost after 1 s, and survivors without a coordinator went on alone after 0.5 s.\n"
        f"After each one, all living nodes were members again and went on. {results['nodes_started']:,} processes were started, and "
        f"{results['averages_checked']:,} global averages were\nrecomputed and were right. No node that lived on lost a step, and its "
        f"longest step took {results['longest_step_of_a_survivor']:.0f} s. The slowest node was a member again after "
        f"{results['slowest_recovery']:.0f} s."
    )


def cost(results: Results) -> str:
    """Say what `rumor.elastic` adds to a step in which nothing happens, at each rate of the links."""
    elastic = [row for row in results["rows"] if row["what"].endswith(", elastic")]
    added = []
    for rate in dict.fromkeys(row["rate"] for row in elastic):
        each = [f"{percent(row['cost'], '+.1')} ({row['what'].removesuffix(', elastic')})" for row in elastic if row["rate"] == rate]
        added.append(f"by {' and '.join(each)} at {shown(rate)}")
    return f"While nothing fails, the time of a step on {elastic[0]['hosts']} hosts changes {', '.join(added)}, beside a fixed group."
