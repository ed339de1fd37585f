"""Write the tables of docs/convex.md from the data files in docs/convex.

    python experiments/logistic/page.py            # rewrites the text between <!-- table X --> and <!-- end -->
    python experiments/logistic/page.py --check    # only reports whether the page is up to date

No number of these tables is typed by hand.
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
    """Tables of a figure with a row for each curve except Parallel SGD: 50 trials on one data set, the median of three, the reference.

    Columns that a figure has no data for are left out. One table would be too wide: the transient stages come first, then the ratios
    and the objective.
    """
    is_synthetic = FIGURES[figure][0].setting.data == "synthetic"  # the reference is of that problem
    known_rows = tables.read(Path(__file__).with_name("reference.csv")) if is_synthetic else []
    reference = {tuple(row[name] for name in KEY): row for row in known_rows}
    objective = tables.read(folder / f"figure-{figure}-objective.csv")
    medians_file = folder / f"figure-{figure}-seeds.csv"
    medians = tables.read(medians_file) if medians_file.exists() else []
    curves = tables.read(folder / f"figure-{figure}.csv")
    has_reference = any(tuple(row[name] for name in KEY) in reference for row in curves if row["method"] != "parallel_sgd")
    varied = {name for name in KEY if len({row[name] for row in curves}) > 1}
    stages: list[tables.Row] = []
    ratios: list[tables.Row] = []
    for r, row in enumerate(curves):
        if row["method"] == "parallel_sgd":
            continue
        known = reference.get(tuple(row[name] for name in KEY), {})
        method: tables.Row = {"method": _label(row, varied)}
        reached: tables.Row = {"T_tr(1)": _stage(row["T_tr_1"])}
        ratio: tables.Row = {"ratio at 9,500": f"{float(str(row['ratio_9500'])):.2f}"}
        if medians:
            reached |= {"3 data sets": _stage(medians[r]["T_tr_1"])}
            ratio |= {"3 data sets": f"{float(str(medians[r]['ratio_9500'])):.2f}"}
        if has_reference:
            reached |= {"reference": _stage(known.get("T_tr_1", "none"))}
            ratio |= {"reference": known.get("ratio_9500") or "-"}
        stages.append(method | reached | {"T_tr(0.25)": _stage(row["T_tr_025"]), "global rounds": _percent(objective[r]["global_rounds"])})
        gap = {"f(x̄) - f*: T_tr(1)": _stage(objective[r]["T_tr_1"]), "f(x̄) - f*: ratio": f"{float(str(objective[r]['ratio_9500'])):.2f}"}
        ratios.append(method | ratio | gap)
    return f"{tables.as_text(stages)}\n\n{tables.as_text(ratios)}"


def _label(row: tables.Row, varied: set[str]) -> str:
    """Method, topology and period; n and the split of the data only if they vary within the figure."""
    parts = [NAMES[str(row["method"])]]
    parts += [] if row["topology"] == "isolated" else [str(row["topology"])]
    parts += [f"H\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}{row['H']}"] if str(row["H"]).isdigit() else []
    parts += [f"n\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}{row['n']}"] if "n" in varied else []
    parts += [_split(row)] if "iid" in varied else []
    return ", ".join(parts)


def _split(row: tables.Row) -> str:
    return "iid" if row["iid"] == "True" else "not iid"


def _percent(value: object) -> str:
    return f"{float(str(value)):.1%}"


def _stage(value: object) -> str:
    if value == "none":
        return "-"
    return "not reached" if value in ("", "not reached") else f"{int(float(str(value))):,}"


def constants_table(folder: Path) -> str:
    """The constants of the problem at x*."""
    rows = tables.read(folder / "constants.csv")
    shown = ("from", "sigma2", "b2", "L", "mu")
    return tables.as_text([{"problem": f"n = {row['n']}, {_split(row)}", **{name: row[name] for name in shown}} for row in rows])


def consensus_table(folder: Path) -> str:
    """The consensus distance, measured and from the closed form, in a table for each split of the data."""
    columns = {"H": "H", "measured": "measured", "closed form": "closed_form", "deviation": "deviation", "bound of the lemma": "lemma_5"}
    texts = []
    rows = tables.read(folder / "consensus.csv")
    for split in dict.fromkeys(map(_split, rows)):
        own = [row for row in rows if _split(row) == split]
        texts.append(tables.as_text([{split: row["topology"], **{name: row[key] for name, key in columns.items()}} for row in own]))
    return "\n\n".join(texts)


def speed_table(results: Path) -> str:
    """Seconds of figure 1 from `make bench`, seconds of all five figures, and microseconds of a step."""
    cpu = json.loads((results / "convex.json").read_text())
    gpu = json.loads((results / "convex-gpu.json").read_text())
    plain, bare = sum(cpu["plain_loops_s"].values()), sum(row["bare_us"] for row in cpu["per_step"]) * STEPS / 1e6
    rows: list[tables.Row] = [
        {"what": "figure 1, two cores", "seconds": _seconds(cpu["figure_1_s"])},
        {"what": "the same steps as a bare torch loop, two cores (measured on one core, halved)", "seconds": f"{bare / 2:.1f}"},
        {
            "what": "the same steps as Python loops over trials and nodes, two cores (a part on one core, scaled)",
            "seconds": f"{plain / 2:,.0f}",
        },
        {"what": "all five figures, two cores", "seconds": _seconds([cpu["all_five_s"]])},
        {"what": f"all five figures, {gpu['machine']['gpu']}", "seconds": _seconds(gpu["all_five_s"])},
        {"what": f"figure 1, {gpu['machine']['gpu']}", "seconds": _seconds(gpu["figure_1_s"])},
    ]
    steps: list[tables.Row] = [
        {
            "n": row["n"],
            "Rumor, µs a step": f"{row['rumor_us']:.0f}",
            "bare loop, µs": f"{row['bare_us']:.0f}",
            "must move, MB": f"{row['must_move_MB']:.2f}",
            "copying that, µs": f"{row['rumor_us'] * row['share_of_copy_bandwidth']:.0f}",
            "share of copy bandwidth": f"{row['share_of_copy_bandwidth']:.0%}",
        }
        for row in cpu["per_step"]
    ]
    return f"{tables.as_text(rows)}\n\n{tables.as_text(steps)}"


def _seconds(values: list[float]) -> str:
    return " / ".join(f"{value:.1f}" for value in values)


def filled_in(text: str, docs: Path) -> str:
    """Return the page with every table rebuilt from its data."""

    def make(name: str) -> str:
        folder = docs / "convex"
        if name == "speed":
            return speed_table(docs.parent / "benchmarks" / "results")
        others = {"constants": constants_table, "consensus": consensus_table}
        return others[name](folder) if name in others else stage_table(name, folder)

    return tables.filled_in(text, make)


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(__doc__)
    page = DOCS / "convex.md"
    text = page.read_text()
    new = filled_in(text, DOCS)
    if sys.argv[1:] == ["--check"]:
        sys.exit(0 if new == text else f"{page.name} does not match its data files: update it with python experiments/logistic/page.py")
    tables.write(page, new)
