"""Many random faults in one elastic job: kills, stops, newcomers, strangers and losses of the coordinator. Every outcome is checked.

    python -m tests.elastic_faults --faults 1000 --seed 1 --out benchmarks/results/faults.json

    python -m tests.elastic_faults --faults 100 --method "4 bits, delay"    # any of tests/elastic.py

After each fault, all nodes that should be members must agree that they are, and go on training, within a deadline. In the end, every
global average of the run is recomputed from what its members had before it; not so with delay=1, where members differ by their last step.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from rumor.membership import limits
from tests.elastic import METHODS, Job, longest_step, survivors_kept_their_steps

LEAST, MOST = 3, 6  # nodes
ALONE_AFTER = 0.5  # seconds without a coordinator until survivors go on alone
DEADLINE = 60.0  # seconds for the members to agree after a fault
PLACES = ("sending", "averaging", "arriving", "connecting", "handing over", "taking over", "attaching")


class Faults:
    """One job, and the faults that happen to it."""

    def __init__(self, job: Job, seed: int, method: str = "pga"):
        self.job, self.chosen, self.method = job, random.Random(seed), method
        self.alive: list[str] = []
        self.stopped: set[str] = set()  # were once stopped for long, and so may have skipped steps
        self.started = 0
        self.counts: Counter[str] = Counter()
        self.slowest = 0.0
        self.kinds: dict[str, Callable[[], None]] = {
            "kill": self.kill,
            "kill two": self.kill_two,
            "kill and start at once": self.replace,
            "die in a certain place": self.doomed,
            "stop for long": self.stop_for_long,
            "stop briefly": self.stop_briefly,
            "newcomers": self.newcomers,
            "stranger": self.stranger,
            "garbage": self.garbage,
            "coordinator": self.coordinator,
            "coordinator, and kill": self.coordinator_and_kill,
        }

    def start(self, count: int, **options: object) -> list[str]:
        names = [f"n{self.started + i}" for i in range(count)]
        self.started += count
        self.job.start(*names, alone_after=ALONE_AFTER, **options)
        return names

    def kill(self) -> None:
        victim = self.chosen.choice(self.alive)
        time.sleep(self.chosen.random() * 0.2)
        self.job.signal(victim, signal.SIGKILL)
        self.alive.remove(victim)

    def kill_two(self) -> None:
        self.kill()
        self.kill()

    def replace(self) -> None:
        self.kill()
        self.alive += self.start(1)

    def doomed(self) -> None:
        """A newcomer that dies at a certain place, some time after it has come in or before."""
        (name,) = self.start(1, die={"where": self.chosen.choice(PLACES), "after": self.chosen.randrange(12)})
        time.sleep(1.0)
        if self.job.nodes[name].is_alive():  # it has not got to that place so often
            self.job.signal(name, signal.SIGKILL)
        self.job.nodes[name].join(30)

    def stop_for_long(self) -> None:
        victim = self.chosen.choice(self.alive)
        self.stopped.add(victim)
        self.job.signal(victim, signal.SIGSTOP)
        time.sleep(limits.SILENCE * (1.2 + self.chosen.random()))
        self.job.signal(victim, signal.SIGCONT)

    def stop_briefly(self) -> None:
        victim = self.chosen.choice(self.alive)
        self.stopped.add(victim)  # on a busy machine it may have been silent for too long
        self.job.signal(victim, signal.SIGSTOP)
        time.sleep(limits.SILENCE * 0.3)
        self.job.signal(victim, signal.SIGCONT)

    def newcomers(self) -> None:
        self.alive += self.start(self.chosen.randrange(1, 4))

    def stranger(self) -> None:
        (name,) = self.start(1, method="local")
        self.job.nodes[name].join(60)
        assert "nodes disagree on the algorithm" in (self.job.folder / f"{name}.refused").read_text()

    def garbage(self) -> None:
        with socket.create_connection(self.job.address) as connection:
            connection.sendall(self.chosen.randbytes(1000) + b"\n")

    def coordinator(self) -> None:
        self.job.stop_coordinator()
        time.sleep(self.chosen.random())
        self.job.start_coordinator(self.job.address)

    def coordinator_and_kill(self) -> None:
        """A node dies while there is no coordinator, which comes back before or after the others have gone on alone."""
        self.job.stop_coordinator()
        self.kill()
        time.sleep(self.chosen.random() * 4 * ALONE_AFTER)
        self.job.start_coordinator(self.job.address)

    # ---- outcomes ------------------------------------------------------------------------------------------------------------------

    def settle(self, what: str) -> float:
        """Wait until all nodes that should be members say so, and go on. Returns the seconds that this took."""
        began = time.monotonic()
        at = {name: self.job.step_of(name) for name in self.alive}
        self.job.wait(lambda: all(self._is_fine(name, at[name]) for name in self.alive), f"{what}: {sorted(self.alive)}", DEADLINE)
        took = time.monotonic() - began
        self.slowest = max(self.slowest, took)
        return took

    def _is_fine(self, name: str, step: int) -> bool:
        assert self.job.nodes[name].is_alive(), f"{name} has died. {self.job.story()}"
        row = self.job.last_row(name)
        return bool(row) and row["now"] > step + 5 and set(row["members"]) == set(self.alive)

    def run(self, faults: int, show: Callable[[str], None] = lambda _: None) -> dict[str, object]:
        self.alive += [f"n{i}" for i in range(4)]
        self.started = 4
        self.job.begin(*self.alive, alone_after=ALONE_AFTER)
        self.settle("the start")
        began = time.monotonic()
        for number in range(faults):
            if len(self.alive) > MOST:
                kinds = ["kill", "kill two"]
            elif len(self.alive) < LEAST:
                kinds = ["newcomers"]
            else:
                kinds = list(self.kinds)
            kind = self.chosen.choice(kinds)
            self.counts[kind] += 1
            self.kinds[kind]()
            took = self.settle(f"fault {number}, {kind}")
            show(f"{number + 1} of {faults}: {kind}, {took:.1f} s; {len(self.alive)} nodes at step {self.job.step_of(self.alive[0])}")
        never_stopped = [name for name in self.job.nodes if name not in self.stopped]
        assert survivors_kept_their_steps(self.job, never_stopped)
        averages = 0 if "delay" in self.method else self.job.check_means(*self.job.nodes, exact="bits" not in self.method)
        return {
            "faults": dict(self.counts),
            "seconds": round(time.monotonic() - began),
            "nodes_started": self.started,
            "steps": max(self.job.step_of(name) for name in self.alive),
            "averages_checked": averages,
            "epochs": sum(line.startswith("epoch") for line in self.job.lines),
            "slowest_recovery": round(self.slowest, 2),
            "longest_step_of_a_survivor": round(longest_step(self.job, never_stopped), 2),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--faults", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--method", choices=list(METHODS), default="pga")
    parser.add_argument("--out", type=Path, help="file for the results")
    options = parser.parse_args()
    limits.SILENCE = 1.0
    with tempfile.TemporaryDirectory() as folder, Job(Path(folder), steps=10**9, pause=0.02, method=options.method) as job:
        found = {
            "seed": options.seed,
            **Faults(job, options.seed, options.method).run(options.faults, lambda line: print(line, flush=True)),
        }
    print(json.dumps(found))
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
