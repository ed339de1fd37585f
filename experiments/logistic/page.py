"""Writes the tables of docs/convex.md from the data files beside it, so that no figure there is typed in:

python experiments/logistic/page.py            # rewrite what stands between <!-- table X --> and <!-- end -->
python experiments/logistic/page.py --check    # only say whether it is up to date
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from logistic import tables
from logistic.figures import FIGURES, NAMES
from logistic.run import STEPS

DOCS = Path(__file__).parents[2] / "docs"
KEY = ("method", "topology", "n", "H", "iid")


def stage_table(figure: str, folder: Path) -> str:
    """Each curve but Parallel SGD's: 50 trials on one data set, the median of three, the reference; then the objective's."""
    is_synthetic = FIGURES[figure][0].setting.data == "synthetic"  # the reference is of that problem
    known_rows = tables.read(Path(__file__).with_name("reference.csv")) if is_synthetic else []
    reference = {tuple(row[name] for name in KEY): row for row in known_rows}
    objective = tables.read(folder / f"figure-{figure}-objective.csv")
    medians_file = folder / f"figure-{figure}-seeds.csv"
    medians = tables.read(medians_file) if medians_file.exists() else []
    rows = []
    for r, row in enumerate(tables.read(folder / f"figure-{figure}.csv")):
        if row["method"] == "parallel_sgd":
            continue
        known = reference.get(tuple(row[name] for name in KEY), {})
        seeds = medians[r] if medians else {}
        cells = {
            "method": _label(row),
            "n": row["n"],
            "global rounds": f"{float(str(objective[r]['global_rounds'])):.1%}",
            "T_tr(1)": _stage(row["T_tr_1"]),
            "T_tr(0.25)": _stage(row["T_tr_025"]),
            "ratio at 9,500": f"{float(str(row['ratio_9500'])):.2f}",
            "median of 3 data sets: T_tr(1)": _stage(seeds["T_tr_1"]) if seeds else "",
            "median of 3 data sets: ratio": f"{float(str(seeds['ratio_9500'])):.2f}" if seeds else "",
            "reference: T_tr(1)": _stage(known.get("T_tr_1", "none")),
            "reference: ratio": known.get("ratio_9500") or "-",
            "f(x̄) - f*: T_tr(1)": _stage(objective[r]["T_tr_1"]),
            "f(x̄) - f*: ratio": f"{float(str(objective[r]['ratio_9500'])):.2f}",
        }
        rows.append({name: cell for name, cell in cells.items() if medians or not name.startswith("median")})
    if not any(row["reference: T_tr(1)"] != "-" for row in rows):
        rows = [{name: cell for name, cell in row.items() if "reference" not in name} for row in rows]
    return tables.as_text(rows)


def _label(row: tables.Row) -> str:
    name, split = NAMES[str(row["method"])], "iid" if row["iid"] == "True" else "not iid"
    topology = "" if row["topology"] == "isolated" else f", {row['topology']}"
    period = f", H = {row['H']}" if str(row["H"]).isdigit() else ""
    return f"{name}{topology}{period}, {split}"


def _stage(value: object) -> str:
    if value == "none":
        return "-"
    return "not reached" if value in ("", "not reached") else f"{int(float(str(value))):,}"


def plain_table(name: str, folder: Path) -> str:
    return tables.as_text(tables.read(folder / f"{name}.csv"))


def speed_table(results: Path) -> str:
    """What `make bench` measured of figure 1, and what a GPU took for all five."""
    cpu = json.loads((results / "convex.json").read_text())
    gpu = json.loads((results / "convex-gpu.json").read_text())
    plain, bare = sum(cpu["plain_loops_s"].values()), sum(row["bare_us"] for row in cpu["per_step"]) * STEPS / 1e6
    rows: list[tables.Row] = [
        {"what": "figure 1, two cores", "seconds": _seconds(cpu["figure_1_s"])},
        {"what": "the same steps as a bare torch loop, two cores (one core's time halved)", "seconds": f"{bare / 2:.1f}"},
        {
            "what": "the same steps as Python loops over trials and nodes, two cores (a part of it on one core, scaled)",
            "seconds": f"{plain / 2:,.0f}",
        },
        {"what": "all five figures, two cores", "seconds": _seconds([cpu["all_five_s"]])},
        {"what": f"all five figures, {gpu['machine']['gpu']}", "seconds": _seconds(gpu["all_five_s"])},
        {"what": f"figure 1, {gpu['machine']['gpu']}", "seconds": _seconds(gpu["figure_1_s"])},
    ]
    steps: list[tables.Row] = [
        {
            "n": row["n"],
            "Rumor, µs a step of all three methods": f"{row['rumor_us']:.0f}",
            "bare loop, µs": f"{row['bare_us']:.0f}",
            "must move, MB": f"{row['must_move_MB']:.2f}",
            "that at copy speed, µs": f"{row['rumor_us'] * row['share_of_copy_bandwidth']:.0f}",
            "share of copy bandwidth": f"{row['share_of_copy_bandwidth']:.0%}",
        }
        for row in cpu["per_step"]
    ]
    return f"{tables.as_text(rows)}\n\n{tables.as_text(steps)}"


def _seconds(values: list[float]) -> str:
    return " / ".join(f"{value:.1f}" for value in values)


def filled_in(text: str, docs: Path) -> str:
    """The page with every table made anew: a figure's stages, a CSV file as it is, or what the benchmark found."""

    def make(name: str) -> str:
        folder = docs / "convex"
        if name == "speed":
            return speed_table(docs.parent / "benchmarks" / "results")
        return stage_table(name, folder) if (folder / f"figure-{name}.csv").exists() else plain_table(name, folder)

    return tables.filled_in(text, make)


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(__doc__)
    page = DOCS / "convex.md"
    text = page.read_text()
    new = filled_in(text, DOCS)
    if sys.argv[1:] == ["--check"]:
        sys.exit(0 if new == text else f"{page.name} does not match its data files: python experiments/logistic/page.py mends it")
    tables.write(page, new)
