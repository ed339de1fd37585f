"""Write the tables of docs/convex.md and draw its pictures from the data files in docs/convex.

    python experiments/logistic/page.py            # rewrites the text between <!-- table X --> and <!-- end -->, and the pictures
    python experiments/logistic/page.py --check    # only reports whether the page is up to date

No number of these tables is typed by hand.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from logistic import pictures, tables
from logistic.figures import FIGURES, NAMES, SIZES
from logistic.run import STEPS

DOCS = Path(__file__).parents[2] / "docs"
ANSWER = {"Local SGD": ("local_sgd", "isolated"), "Gossip SGD": ("gossip_sgd", "ring"), "Gossip-PGA": ("gossip_pga", "ring")}
KEY = ("method", "topology", "n", "H", "iid")


def answer_table(folder: Path) -> str:
    """T_tr(1) on the ring with data that differs from node to node, by the number of nodes."""
    rows = [row for figure in ("1", "6") for row in tables.read(folder / f"figure-{figure}.csv")]
    shown: list[tables.Row] = []
    for n in SIZES:
        cells = {
            title: next(
                (_stage(row["T_tr_1"]) for row in rows if (row["method"], row["topology"], row["n"]) == (*method, str(n))), "not run"
            )
            for title, method in ANSWER.items()
        }
        shown.append({"nodes": n, **cells})
    return tables.as_text(shown)


def stage_table(figure: str, folder: Path) -> str:
    """A row for each curve except Parallel SGD: T_tr(1) and the reference; for real data, the ratios at the end.

    Of our additions ("extra"), only those where the data differ from node to node.
    """
    is_synthetic = FIGURES[figure][0].setting.data == "synthetic"  # the reference is of that problem
    known_rows = tables.read(Path(__file__).with_name("reference.csv")) if is_synthetic else []
    reference = {tuple(row[name] for name in KEY): row for row in known_rows}
    objective = tables.read(folder / f"figure-{figure}-objective.csv")
    curves = tables.read(folder / f"figure-{figure}.csv")
    listed = [r for r, row in enumerate(curves) if row["method"] != "parallel_sgd" and not (figure == "extra" and row["iid"] == "True")]
    varied = {name for name in KEY if len({curves[r][name] for r in listed}) > 1}
    shown: list[tables.Row] = []
    for r in listed:
        row = curves[r]
        found: tables.Row = {"method": _label(row, varied), "T_tr(1)": _stage(row["T_tr_1"])}
        if is_synthetic:
            found["reference"] = _stage(reference.get(tuple(row[name] for name in KEY), {}).get("T_tr_1", "none"))
        else:
            found |= {"ratio": _ratio(row), "ratio of f(x̄) - f*": _ratio(objective[r])}
        shown.append(found)
    return tables.as_text(shown)


def _ratio(row: tables.Row) -> str:
    return f"{float(str(row['ratio_9500'])):.2f}"


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


def _stage(value: object) -> str:
    if value == "none":
        return "-"
    return "not reached" if value in ("", "not reached") else f"{int(float(str(value))):,}"


def consensus_table(folder: Path) -> str:
    """The consensus distance, measured and from the closed form, where the data differ from node to node."""
    columns = {"topology": "topology", "H": "H", "measured": "measured", "closed form": "closed_form", "deviation": "deviation"}
    rows = [row for row in tables.read(folder / "consensus.csv") if row["iid"] != "True"]
    return tables.as_text([{name: row[key] for name, key in columns.items()} for row in rows])


def speed_table(results: Path) -> str:
    """Seconds of figure 1 from `make bench`, and seconds of all five figures."""
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
    return tables.as_text(rows)


def _seconds(values: list[float]) -> str:
    return " / ".join(f"{value:.1f}" for value in values)


def filled_in(text: str, docs: Path) -> str:
    """Return the page with every table rebuilt from its data."""

    def make(name: str) -> str:
        folder = docs / "convex"
        if name == "speed":
            return speed_table(docs.parent / "benchmarks" / "results")
        others = {"answer": answer_table, "consensus": consensus_table}
        return others[name](folder) if name in others else stage_table(name, folder)

    return tables.filled_in(text, make)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="only report whether the page is up to date")
    is_check = parser.parse_args().check
    page = DOCS / "convex.md"
    text = page.read_text()
    new = filled_in(text, DOCS)
    if is_check:
        sys.exit(0 if new == text else f"{page.name} does not match its data files: update it with python experiments/logistic/page.py")
    tables.write(page, new)
    for name, panels in FIGURES.items():
        pictures.draw(name, panels, page.with_suffix(""))


if __name__ == "__main__":
    main()
