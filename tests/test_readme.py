"""The README stays short, and its demo prints a table. test_docs.py runs the other commands of the README."""

import re
from pathlib import Path

import pytest

from tests import warm
from tests.test_demo import FORKED


@pytest.mark.processes
def test_the_demo_prints_its_table(tmp_path: Path) -> None:
    done = warm.run(["-c", FORKED, "demo", "--nodes", "4", "--steps", "20", "--modelled"], tmp_path)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^(Parallel SGD|Local SGD|Gossip SGD|Gossip-PGA|Gossip-PGA, 4 bits) +([\d.]+)%", done.stdout, re.M)
    assert len(rows) == 5, done.stdout
    assert all(float(accuracy) > 50 for _, accuracy in rows)
    assert sorted(path.name for path in (tmp_path / "rumor-demo").iterdir()) == ["demo.json", "demo.png"]


def test_the_readme_stays_short() -> None:
    assert len((warm.ROOT / "README.md").read_text().splitlines()) <= 150
