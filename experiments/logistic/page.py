"""Writes the tables of docs/convex.md from the data files beside it, so that no figure there is typed in:

python experiments/logistic/page.py            # rewrite what stands between <!-- table X --> and <!-- end -->
python experiments/logistic/page.py --check    # only say whether it is up to date
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from logistic import tables

DOCS = Path(__file__).parents[2] / "docs"
KEY = ("method", "topology", "n", "H", "iid")
NAMES = {
    "parallel_sgd": "Parallel",
    "local_sgd": "Local",
    "gossip_sgd": "Gossip",
    "gossip_pga": "Gossip-PGA",
    "gossip_aga": "Gossip-AGA",
    "gossip_sgd_final_average": "Gossip, one final average",
}


def stage_table(figure: str, folder: Path) -> str:
    """Each curve but Parallel SGD's: 50 trials on one data set, the median of three, the reference; then the objective's."""
    reference = {tuple(row[name] for name in KEY): row for row in tables.read(Path(__file__).with_name("reference.csv"))}
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
            "T_tr(1)": _stage(row["T_tr_1"]),
            "T_tr(0.25)": _stage(row["T_tr_025"]),
            "ratio at 9,500": f"{float(str(row['ratio_9500'])):.2f}",
            "3 data sets: T_tr(1)": _stage(seeds["T_tr_1"]) if seeds else "",
            "3 data sets: ratio": f"{float(str(seeds['ratio_9500'])):.2f}" if seeds else "",
            "reference: T_tr(1)": _stage(known.get("T_tr_1", "none")),
            "reference: ratio": known.get("ratio_9500") or "-",
            "f(x̄) - f*: T_tr(1)": _stage(objective[r]["T_tr_1"]),
            "f(x̄) - f*: ratio": f"{float(str(objective[r]['ratio_9500'])):.2f}",
        }
        rows.append({name: cell for name, cell in cells.items() if medians or not name.startswith("3 data sets")})
    if not any(row["reference: T_tr(1)"] != "-" for row in rows):
        rows = [{name: cell for name, cell in row.items() if "reference" not in name} for row in rows]
    return markdown(rows)


def _label(row: tables.Row) -> str:
    name, split = NAMES[str(row["method"])], "iid" if row["iid"] == "True" else "not iid"
    topology = "" if row["topology"] == "isolated" else f", {row['topology']}"
    period = f", H = {row['H']}" if str(row["H"]).isdigit() else ""
    return f"{name}{topology}{period}, {split}"


def _stage(value: object) -> str:
    if value == "none":
        return "-"
    return "not reached" if value in ("", "not reached") else f"{int(float(str(value))):,}"


def markdown(rows: list[tables.Row]) -> str:
    lines = ["| " + " | ".join(str(cell) for cell in row.values()) + " |" for row in rows]
    return "\n".join(["| " + " | ".join(rows[0]) + " |", "|" + " --- |" * len(rows[0]), *lines])


def filled_in(text: str, folder: Path) -> str:
    def table(match: re.Match[str]) -> str:
        return f"<!-- table {match[1]} -->\n{stage_table(match[1], folder)}\n<!-- end -->"

    return re.sub(r"<!-- table (\S+) -->\n.*?<!-- end -->", table, text, flags=re.DOTALL)


if __name__ == "__main__":
    page = DOCS / "convex.md"
    text = page.read_text()
    new = filled_in(text, DOCS / "convex")
    if sys.argv[1:] == ["--check"]:
        sys.exit(0 if new == text else f"{page.name} does not match its data files: python experiments/logistic/page.py mends it")
    tables.write(page, new)
