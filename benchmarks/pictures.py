"""Pictures of docs/performance.md and docs/reliability.md, drawn from benchmarks/results. page.py draws them when it writes the tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from limits import shown
from rumor.checkpoint.files import replacing
from rumor.plots import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY

MISSES = "#999999"  # methods that do not reach DDP's accuracy: see accuracy.json
SPEEDUP = {  # the methods of the first picture; dashes and markers tell them apart in grey print
    "Gossip-PGA, 4 bits": (BLUE, "o", "-"),
    "DDP, 4 bits": (GREEN, "s", (0, (7, 2, 1, 2))),
    "DDP, bf16 hook": (SKY, "^", (0, (5, 2))),
    "Gossip-PGA": (PURPLE, "P", (0, (3, 1, 1, 1))),
    "DDP, PowerSGD hook": (MISSES, "v", (0, (1, 1))),
    "Local SGD": (MISSES, "D", (0, (2, 2))),
}
SPEEDUP_NAMES = {
    "DDP, bf16 hook": "DDP, bf16",
    "Gossip-PGA": "Gossip-PGA, 32 bits",
    "DDP, PowerSGD hook": "DDP, PowerSGD (misses DDP's accuracy)",
    "Local SGD": "Local SGD, 32 bits (misses DDP's accuracy)",
}
LIBRARIES = {"Rumor": BLUE, "PyTorch": SKY, "torchft": ORANGE, "fairscale": GREEN, "by hand": PURPLE, "no communication": "#999999"}


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path, **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as aside:
        figure.savefig(aside, **options)


def library(name: str) -> str:
    if name == "computing alone":
        return "no communication"
    if "crude" in name:
        return "by hand"
    if (name.startswith("DDP") and "bits" not in name) or "(torch)" in name:
        return "PyTorch"
    return next((library for library in ("torchft", "fairscale") if f"({library})" in name), "Rumor")


def of_rate(rows: list[dict[str, Any]], rate: str) -> dict[str, dict[str, Any]]:
    """Rows of one rate by name. Of the bucket sizes of DDP, only the fastest is kept."""
    found = {row["what"]: row for row in rows if row["rate"] == rate}
    plain = [name for name in found if name.startswith("DDP, bucket")]
    best = min(plain, key=lambda name: found[name]["median"])
    return {"DDP" if name == best else name: row for name, row in found.items() if name == best or name not in plain}


def draw_steps(results: dict[str, Any], path: Path) -> None:
    """Draw the ms of a training step, with a panel for each rate.

    The leftmost panel decides the order: fastest first. Whiskers reach from the fastest turn to the slowest. A tick in each bar marks the
    limit.
    """
    pyplot = _pyplot()
    from matplotlib.patches import Patch

    rates = list(dict.fromkeys(row["rate"] for row in results["rows"]))
    panels = [of_rate(results["rows"], rate) for rate in rates]
    names = sorted(panels[0], key=lambda name: panels[0][name]["median"])
    size = (2.2 + 2.6 * len(rates), 1.5 + 0.24 * len(names))
    figure, axes = pyplot.subplots(1, len(rates), figsize=size, sharey=True, layout="constrained", squeeze=False)
    for panel, found, rate in zip(axes[0], panels, rates, strict=True):
        _draw_bars(panel, names, found)
        panel.set_title(shown(rate).replace("loopback", "loopback, unshaped"))
    axes[0][0].invert_yaxis()
    shown_here = {library(name) for name in names}
    patches = [Patch(color=color, label=name) for name, color in LIBRARIES.items() if name in shown_here]
    ddp = pyplot.Line2D([], [], color=BLACK, linestyle="--", linewidth=1, label="DDP at its best bucket size")
    limit = pyplot.Line2D([], [], color="white", marker="|", markeredgecolor=BLACK, markersize=10, label="max(computing, bytes / rate)")
    axes[0][0].tick_params(axis="y", labelsize=9)
    figure.legend(handles=[*patches, ddp, limit], loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    _save(figure, path, dpi=160, bbox_inches="tight")
    pyplot.close(figure)


def draw_speedup(results: dict[str, Any], path: Path) -> None:
    """Draw how many times as fast as DDP a training step is, over the rates of the links."""
    pyplot = _pyplot()

    rates = list(dict.fromkeys(row["rate"] for row in results["rows"]))
    found = [of_rate(results["rows"], rate) for rate in rates]
    figure, axis = pyplot.subplots(figsize=(7.2, 4.6), layout="constrained")
    for name, (color, marker, dashes) in SPEEDUP.items():
        own = [(at, panel[name]["times_as_fast_as_ddp"]) for at, panel in enumerate(found) if name in panel]
        if own:
            axis.plot(
                *zip(*own, strict=True),
                marker=marker,
                linestyle=dashes,
                color=color,
                linewidth=2,
                markersize=7,
                label=SPEEDUP_NAMES.get(name, name),
            )
    axis.axhline(1, color=BLACK, linewidth=1)
    axis.annotate("DDP", (len(rates) - 1, 1), xytext=(12, 4), textcoords="offset points", fontsize=12)
    axis.set(yscale="log", ylabel="times as fast as DDP", xlabel="link of each of the 4 hosts")
    axis.set_xticks(range(len(rates)), [shown(rate).replace(" ", "\n") for rate in rates], fontsize=12)
    axis.set_yticks([1, 2, 4, 8], ["1", "2", "4", "8"], fontsize=12)
    axis.set_yticks([], minor=True)
    axis.xaxis.label.set_size(12)
    axis.yaxis.label.set_size(12)
    axis.set_xlim(-0.2, len(rates) - 0.4)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=10)
    _save(figure, path, dpi=150)
    pyplot.close(figure)


def draw_soak(results: dict[str, Any], path: Path) -> None:
    """Draw the share of its throughput that each contestant keeps with the kills."""
    pyplot = _pyplot()

    kept = {name: 100 * found["throughput_kept"] for name, found in results["found"].items()}
    figure, axis = pyplot.subplots(figsize=(7.2, 0.9 + 0.5 * len(kept)), layout="constrained")
    bars = axis.barh(list(kept), list(kept.values()), color=[BLUE, *["#999999"] * (len(kept) - 1)])
    axis.bar_label(bars, [f"{share:.0f} %" for share in kept.values()], padding=4, fontsize=12)
    what = f"{results['processes']} nodes, {results['steps']:,} steps, {len(results['plan'])} kills"
    axis.set_title(f"Throughput kept: {what}", fontsize=12, loc="left")
    axis.set(xlim=(0, 110), xticks=[])
    axis.tick_params(axis="y", labelsize=12, length=0)
    axis.spines[["top", "right", "bottom"]].set_visible(False)
    axis.invert_yaxis()
    _save(figure, path, dpi=150)
    pyplot.close(figure)


def draw_growth(results: dict[str, Any], path: Path) -> None:
    """Draw the ms of a step over the number of hosts, on the links and over loopback, where only the cores take time."""
    pyplot = _pyplot()

    looks = {"DDP": BLACK, "Gossip, delay=1": ORANGE, "Gossip-PGA, delay=1": BLUE, "computing alone": "#999999"}
    rates = list(dict.fromkeys(row["rate"] for row in results["rows"]))
    figure, axes = pyplot.subplots(1, len(rates), figsize=(3.7 * len(rates), 3.4), sharey=True, layout="constrained")
    for axis, rate in zip(axes, rates, strict=True):
        hosts = list(dict.fromkeys(row["hosts"] for row in results["rows"]))
        found = [of_rate([row for row in results["rows"] if row["hosts"] == n], rate) for n in hosts]
        for name, color in looks.items():
            axis.plot(hosts, [1e3 * at[name]["median"] for at in found], "o-", color=color, label=name, markersize=4)
        axis.set(title=shown(rate).replace("loopback", "loopback: the cores alone"), xlabel="hosts", xscale="log", ylim=(0, None))
        axis.set_xticks(hosts, [str(n) for n in hosts])
        axis.set_xticks([], minor=True)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("ms a step")
    axes[0].legend(frameon=False)
    _save(figure, path, dpi=150)
    pyplot.close(figure)


def _draw_bars(axes: Any, names: list[str], found: dict[str, dict[str, Any]]) -> None:
    median = [1e3 * found[name]["median"] for name in names]
    spread = [[1e3 * abs(found[name]["median"] - found[name][end]) for name in names] for end in ("fastest", "slowest")]
    axes.barh(names, median, color=[LIBRARIES[library(name)] for name in names], xerr=spread, error_kw={"linewidth": 1, "alpha": 0.6})
    beside = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 8.5}
    for at, (value, above) in enumerate(zip(median, spread[1], strict=True)):
        # in a white box, so that the line passes behind the number
        axes.annotate(f"{value:.0f}", (value + above, at), bbox={"color": "white", "pad": 0.8}, **beside)
    limits = [(1e3 * found[name]["limit"], at) for at, name in enumerate(names) if "limit" in found[name]]
    axes.scatter([x for x, _ in limits], [at for _, at in limits], marker="|", s=90, color=BLACK, linewidth=1.5, zorder=3)
    axes.axvline(1e3 * found["DDP"]["median"], color=BLACK, linestyle="--", linewidth=1)
    axes.set(xlabel="ms a step", xlim=(0, 1.15 * max(m + a for m, a in zip(median, spread[1], strict=True))))
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.margins(y=0.01)


# ---- the work of a host and its link ------------------------------------------------------------------------------------------------

PARTS = {"forward": SKY, "backward": BLUE, "optimizer": PURPLE, "rumor::pack": GREEN, "rumor::mix": ORANGE, "rumor::wait": "#DDDDDD"}
OVER = 0.006  # the rate of the link is averaged over so many seconds


def draw_trace(results: dict[str, Any], path: Path) -> None:
    """Draw two lanes for each method: the work of the host, and below it the rate at which its link sends."""
    pyplot = _pyplot()
    from matplotlib.patches import Patch

    traces = results["traces"]
    longest = 1e3 * max(trace["seconds"] for trace in traces.values())
    shape = {"height_ratios": [1, 1.3] * len(traces)}
    figure, axes = pyplot.subplots(
        2 * len(traces), 1, figsize=(7.4, 1.6 * len(traces) + 0.5), sharex=True, gridspec_kw=shape, layout="constrained"
    )
    for (name, trace), host, link in zip(traces.items(), axes[::2], axes[1::2], strict=True):
        _draw_host(host, trace["parts"])
        host.set_title(f"{name}: 4 steps, {1e3 * trace['seconds']:.0f} ms", loc="left", fontsize=10)
        times, used = link_use(trace["sent"])
        link.fill_between([1e3 * t for t in times], [8e-6 * rate for rate in used], step="post", color="#777777", linewidth=0)
        link.set(ylabel="sent,\nMbit/s", ylim=(0, None), xlim=(0, longest))
    axes[-1].set_xlabel("ms")
    handles = [Patch(color=color, label=part) for part, color in PARTS.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=3, fontsize=9.5, frameon=False)
    _save(figure, path, dpi=150)
    pyplot.close(figure)


def _draw_host(axes: Any, parts: list[tuple[str, float, float]]) -> None:
    for layer, name in enumerate(PARTS):  # a part inside another part is drawn over it
        bars = [(1e3 * start, 1e3 * (end - start)) for part, start, end in parts if part == name]
        axes.broken_barh(bars, (0, 1), color=PARTS[name], zorder=layer, linewidth=0)
    axes.set(yticks=[], ylabel="host")


def link_use(sent: list[tuple[float, int]]) -> tuple[list[float], list[float]]:
    """Return times, and the bytes per second from each time to the next."""
    times, rates, (since, count) = [], [], sent[0]
    for now, total in sent[1:]:
        if now - since >= OVER:
            times.append(since)
            rates.append((total - count) / (now - since))
            since, count = now, total
    return [*times, since], [*rates, 0.0]
