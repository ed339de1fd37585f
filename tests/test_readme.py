"""The README stays short, and the demo that it begins with prints its table. What else it tells users to type: test_docs.py."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run(arguments: list[str], folder: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_demo_prints_its_table(tmp_path: Path) -> None:
    said = run([sys.executable, "-m", "rumor", "demo", "--nodes", "4", "--steps", "60"], tmp_path)
    rows = re.findall(r"^(Parallel SGD|Local SGD|Gossip SGD|Gossip-PGA|Gossip-AGA) +([\d.]+)%", said, re.M)
    assert len(rows) == 5, said
    assert all(float(accuracy) > 50 for _, accuracy in rows)
    assert sorted(path.name for path in (tmp_path / "rumor-demo").iterdir()) == ["demo.json", "demo.png"]


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
