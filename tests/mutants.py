"""Breaks the core on purpose, one small change at a time, and looks whether the tests notice.

    python -m tests.mutants                 all of them, each in a copy of the source; prints which test noticed
    python -m tests.mutants --only alarm    those whose file's name contains this
    python -m tests.mutants --tests ...     the tests to run; by default those of `make test` that can notice

A mutant that survives is a hole in the tests. Not a test itself: it takes a while.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
DEADLINE = 900  # seconds for one mutant
FAST = "contracts binding golden oracle mixing schedule topology simulator reductions house"
PROCESSES = "average_state engines_agree averager resume lazy nodes checkpoint failures nodes_failures reliability"


class Mutant(NamedTuple):
    path: str
    before: str
    after: str


UNCHANGED = Mutant("version.py", "VERSION", "VERSION")  # which must survive
MUTANTS = [
    # methods
    Mutant("methods/gossip_pga.py", "(self._read(x, b) if self.bits == 32", "(x.read(b) if self.bits == 32"),
    Mutant("methods/gossip_pga.py", "[self._read(tensors, b) for b in", "[tensors.read(b) for b in"),
    Mutant("methods/gossip_pga.py", "self.topology, step.k + r,", "self.topology, step.k,"),
    Mutant("methods/gossip_pga.py", "if len(tensors):", "if False:"),
    Mutant("methods/gossip_pga.py", "is_model=b < len(nodes.x)", "is_model=True"),
    Mutant(
        "methods/algorithm.py",
        "JoinedBuckets(self.buffers, self.full_state) if len(self.full_state)",
        "self.buffers if len(self.full_state)",
    ),
    Mutant("methods/algorithm.py", 'self.state_mixed == "always" or (step.kind == "global" and at_global)', "True"),
    Mutant("methods/algorithm.py", 'self.state_mixed == "global" or not step.averages_always', "True"),
    Mutant("methods/algorithm.py", 'self.state_mixed == "global" or not step.averages_always', "not step.averages_always"),
    Mutant("methods/gossip_pga.py", "state.schedule.H == 1 and self.delay == 0", "state.schedule.H == 1"),
    Mutant("methods/gossip_pga.py", 'elif step.kind == "global":\n', 'elif step.kind == "gossip":\n'),
    Mutant("methods/gossip_pga.py", "return engine.full(step.lr)", "return None"),
    Mutant("methods/diloco.py", "lerp_(mean.to(x_prev.dtype), self.outer_lr)", "lerp_(mean.to(x_prev.dtype), 1.0)"),
    Mutant("methods/diloco.py", "alpha=self.outer_lr * self.outer_momentum", "alpha=self.outer_momentum"),
    Mutant("methods/slow_momentum.py", "u.mul_(self.momentum)", "u.mul_(1.0)"),
    Mutant("methods/slow_momentum.py", "x_prev.sub_(u, alpha=self.slow_lr * lr)", "x_prev.sub_(u, alpha=lr)"),
    Mutant("methods/push_sum.py", "w_next = w_next + arrived.scalars", "pass"),
    Mutant("methods/push_sum.py", 'state.scalars["w"] = engine.full(1.0)', "pass"),
    Mutant("methods/runner.py", "self.engine.complete_receives(self.k)", "pass"),
    Mutant("methods/runner.py", "tensors.write(b, message.wait().x * (engine.n / count))", "tensors.write(b, message.wait().x)"),
    Mutant("methods/saved_state.py", '"weights": weights,', '"weights": [1.0] * len(weights),'),
    Mutant("methods/algorithm.py", "if self.topology.n != n:", "if False:"),
    Mutant("schedule.py", "math.ceil(period - 1e-9)", "math.ceil(period)"),
    Mutant("schedule.py", "math.floor(period + 0.5 + 1e-9)", "math.ceil(period)"),
    Mutant("schedule.py", "lr_max = max(state.lr_max, signal)", "lr_max = state.lr_max or signal"),
    Mutant("schedule.py", "if state.k < self.warmup or state.samples == 0:", "if state.k < self.warmup:"),
    # engines
    Mutant("engines/engine.py", "return topology.is_complete and topology.n > 2", "return False"),
    Mutant("engines/operators.py", "weights + lost[rows], weights", "weights, weights"),
    Mutant("engines/operators.py", "torch.arange(n).repeat(degree, 1)", "torch.zeros(degree, n, dtype=torch.int64)"),
    Mutant("engines/stacked.py", "sent is None and x.peek(b) is self.x and", ""),
    Mutant("engines/stacked.py", "torch.autograd.graph.increment_version(self.x)", "pass"),
    Mutant("engines/processes/alarm.py", "finite = math.isfinite(head[0])", "finite = True"),
    Mutant("engines/processes/alarm.py", "if head[-1] != k:", "if False:"),
    Mutant("engines/processes/message.py", "< 0.5", "<= 1e-6 * head[0] ** 2"),
    Mutant("engines/processes/message.py", "if count > MOST_SCALARS:", "if False:"),
    Mutant("engines/processes/pending.py", "channel.owed.difference_update(links.send)", "pass"),
    Mutant("engines/processes/pending.py", "part.copy_(channel.out.payload)", "pass"),
    Mutant("engines/processes/process_group.py", "k >= alarm // self.n + topology.reach", "k >= alarm // self.n"),
    Mutant("engines/processes/process_group.py", "channel.tensor.copy_(given.reshape(-1))", "pass"),
    Mutant("engines/processes/transport.py", "_last_engine = 1 + max(last_engines)", "_last_engine = 1"),
    Mutant("engines/processes/liveness.py", "if refusal in (errno.ECONNREFUSED, errno.ECONNRESET)", "if refusal in ()"),
    Mutant("engines/processes/handshake.py", "if value != (first := values[0].get(what)):", "if (first := values[0].get(what)) is None:"),
    Mutant("engines/processes/local_shard.py", "alarm.merge(self._heads)", "pass"),
    Mutant("engines/processes/join.py", "if step != k:", "if False:"),
    # model, averager, checkpoint
    Mutant(
        "model/buckets.py",
        "torch._foreach_lerp_(bucket.pieces, bucket.views(end), lerp.weight)",
        "torch._foreach_lerp_(bucket.pieces, bucket.views(end), 0.5)",
    ),
    Mutant("model/tracked.py", "if t is not was or", "if False and"),
    Mutant("model/forward_hooks.py", "self._settle(buckets)", "pass"),
    Mutant("averager/averager.py", "if runner.k == k:", "if True:"),
    Mutant("averager/replica.py", "if self._averages_lr and", "if False and"),
    Mutant("averager/replica.py", "node.broadcast([*self.model.parameters(), *self.model.buffers()])", "pass"),
    Mutant("checkpoint/checkpoint.py", 'restore_random(state["random"], averager.replica.device)', "pass"),
    Mutant("checkpoint/files.py", "aside.unlink(missing_ok=True)", "pass"),
    Mutant("checkpoint/folder.py", "path.name not in names:", "False:"),
    Mutant("simulator.py", "self._buffers[name].copy_(value)", "pass"),
]


def tested(mutant: Mutant, tests: list[str]) -> str:
    """The first test that fails with the mutant, or 'SURVIVED'."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "src"
        shutil.copytree(ROOT / "src", copy)
        path = copy / "rumor" / mutant.path
        text = path.read_text()
        assert text.count(mutant.before) >= 1, f"{mutant.path} has no {mutant.before!r}"
        path.write_text(text.replace(mutant.before, mutant.after))
        environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no", "-rfE", *tests]
        try:
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=DEADLINE)
        except subprocess.TimeoutExpired:
            return "deadline (a hang is noticed, too)"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
    return failed[1] if failed else ("SURVIVED" if done.returncode == 0 else f"exit {done.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="those whose path contains this")
    parser.add_argument(
        "--tests", nargs="*", default=[f"tests/test_{name}.py" for name in f"{FAST} {PROCESSES}".split()], help="what pytest is given"
    )
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time")
    options = parser.parse_args()

    def report(mutant: Mutant) -> str:
        began = time.monotonic()
        outcome = tested(mutant, options.tests)
        print(f"{mutant.path:<40} {mutant.before.strip()[:60]:<60} {outcome} ({time.monotonic() - began:.0f} s)", flush=True)
        return outcome

    with ThreadPoolExecutor(options.jobs) as pool:
        outcomes = list(pool.map(report, [UNCHANGED, *(mutant for mutant in MUTANTS if options.only in mutant.path)]))
    print(f"{outcomes.count('SURVIVED') - 1} survived" if outcomes[0] == "SURVIVED" else "the tests fail without a mutant, too")


if __name__ == "__main__":
    main()
