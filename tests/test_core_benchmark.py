"""`make bench` still works with the engine, whose transport it replaces."""

import inspect
import json
import sys

import pytest

from rumor.engines.processes.transport import Transport
from tests import warm


@pytest.mark.processes
def test_the_cost_of_a_step_can_be_measured() -> None:
    command = "import json, core; print(json.dumps(core.averager_cost(repeats=1)))"
    done = warm.run(["-c", command], warm.ROOT / "benchmarks")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    assert [row["step"] for row in rows] == ["gossip", "gossip, delay=1", "global average"]
    assert all(row["parameters"] == 25_557_032 and row["ms"] > 0 for row in rows)


def test_the_transport_of_the_gpu_benchmark_has_the_methods_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs a GPU to run, so nothing else here would notice that a method has other arguments by now."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(warm.ROOT / "benchmarks")])
    from gpu import Echo

    replaced = [name for name in vars(Echo) if inspect.isfunction(vars(Echo)[name]) and name != "__init__"]
    assert replaced
    for name in replaced:
        assert list(inspect.signature(getattr(Echo, name)).parameters) == list(inspect.signature(getattr(Transport, name)).parameters), name
