"""Reads the architecture from the source: layers, cycles, and the longest files and functions.

python -m tests.house
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "rumor"

MODULES = {
    ".".join(("rumor", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(SOURCE.rglob("*.py"))
}
PACKAGES = {name for name, path in MODULES.items() if path.name == "__init__.py"}


def layers() -> list[list[str]]:
    """The rows of the map in CONTRIBUTING.md, lowest first: names of packages and modules below `rumor`."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    block = text[text.index("## How the code is laid out") :].split("\n\n")[2]
    return [re.split(r"\s{2,}", line.strip())[0].split(", ") for line in block.splitlines()]


def row_of(module: str, rows: list[list[str]]) -> int | None:
    """The row of the most specific name in the map that covers `module`."""
    if module in ("rumor", "rumor.__main__"):
        return len(rows)  # the public names are above everything
    parts = module.split(".")[1:]
    for length in range(len(parts), 0, -1):
        for number, names in enumerate(rows):
            if ".".join(parts[:length]) in names:
                return number
    return None


def unit_of(module: str, rows: list[list[str]]) -> str:
    """The name in the map that covers `module`."""
    parts = module.split(".")[1:]
    names = {name for row in rows for name in row}
    return next((".".join(parts[:i]) for i in range(len(parts), 0, -1) if ".".join(parts[:i]) in names), module)


def imports(module: str) -> Iterator[str]:
    """Modules of ours that `module` imports, at the top or inside functions, for types or not."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            source = node.module or ""
            if source in MODULES:
                submodules = [f"{source}.{alias.name}" for alias in node.names]
                yield from (name if name in MODULES else source for name in submodules)


def upward_imports() -> list[str]:
    """Imports from a higher row, or from another package of the same row."""
    rows, found = layers(), []
    for module in MODULES:
        for imported in imports(module):
            mine, theirs = row_of(module, rows), row_of(imported, rows)
            assert mine is not None, f"{module} is not in the map of CONTRIBUTING.md"
            assert theirs is not None, f"{imported} is not in the map of CONTRIBUTING.md"
            if theirs > mine or (theirs == mine and unit_of(module, rows) != unit_of(imported, rows)):
                found.append(f"{module} imports {imported}")
    return found


def cycle() -> list[str]:
    """A cycle of imports, or nothing. A package stands for its __init__: importing a submodule from inside it does not count."""
    graph = {module: {name for name in imports(module) if not module.startswith(f"{name}.") or name not in PACKAGES} for module in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def functions() -> Iterator[tuple[int, str]]:
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                yield (node.end_lineno or 0) - node.lineno + 1, f"{module}.{node.name}"


def conditional_statements() -> list[str]:
    """Conditional expressions that stand alone as a statement."""
    return [
        f"{module}:{node.lineno}"
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.IfExp)
    ]


def top_modules() -> list[str]:
    return [path.stem for path in sorted(SOURCE.glob("*.py")) if not path.stem.startswith("__")]


def top_packages() -> list[str]:
    return [path.parent.name for path in sorted(SOURCE.glob("*/__init__.py"))]


def longest_files() -> list[tuple[int, str]]:
    return sorted(((len(path.read_text().splitlines()), module) for module, path in MODULES.items()), reverse=True)


def main() -> None:
    print(f"modules at the top   {len(top_modules())}: {', '.join(top_modules())}")
    print(f"packages             {len(top_packages())}: {', '.join(top_packages())}")
    print(f"files                {len(MODULES)}")
    for what, found in (("longest files", longest_files()), ("longest functions", sorted(functions(), reverse=True))):
        print(f"{what:<20} {', '.join(f'{name} ({length})' for length, name in found[:3])}")
    print(f"cycles               {len(cycle())} {cycle() or ''}")
    print(f"imports that go up   {len(upward_imports())} {upward_imports() or ''}")


if __name__ == "__main__":
    main()
