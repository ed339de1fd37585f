"""`make bench` still fits the engine that it takes the transport out of."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_the_cost_of_a_step_can_be_measured() -> None:
    command = "import json, core; print(json.dumps(core.averager_cost(repeats=1)))"
    done = subprocess.run([sys.executable, "-c", command], cwd=BENCHMARKS, capture_output=True, text=True, timeout=115, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    assert [row["step"] for row in rows] == ["gossip", "gossip, delay=1", "global average"]
    assert all(row["parameters"] == 25_557_032 and row["ms"] > 0 for row in rows)
