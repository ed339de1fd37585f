"""`make bench` still works with the engine, whose transport it replaces."""

import json

import pytest

from tests import warm


@pytest.mark.processes
def test_the_cost_of_a_step_can_be_measured() -> None:
    command = "import json, core; print(json.dumps(core.averager_cost(repeats=1)))"
    done = warm.run(["-c", command], warm.ROOT / "benchmarks")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    assert [row["step"] for row in rows] == ["gossip", "gossip, delay=1", "global average"]
    assert all(row["parameters"] == 25_557_032 and row["ms"] > 0 for row in rows)
