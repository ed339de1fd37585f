"""A soak test: random processes of a job of 8 are killed again and again, and torchrun restarts the job from its last checkpoint.

    OMP_NUM_THREADS=1 python benchmarks/soak.py --out benchmarks/results/soak.json          # 2,000 steps, 8 kills; 5 minutes on two cores

It records the latest checkpoint at each kill, the checkpoint of each restart, the accuracy of this job and of an undisturbed one, and the
memory of each process (its resident set, from 100 steps after its start to its end).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import machine, save
from rumor.checkpoint.folder import LATEST

ROOT = Path(__file__).parents[1]
SETTLED = 100  # steps after which a process has allocated what it needs


def started(folder: Path, processes: int, steps: int, restarts: int) -> subprocess.Popen[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    torchrun += ["--max-restarts", str(restarts)]
    job = ["--folder", str(folder / "checkpoints"), "--steps", str(steps), "--timeout", "30", "--memory", str(folder)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with (folder / "errors").open("w") as errors:
        return subprocess.Popen(
            [*torchrun, str(ROOT / "examples" / "elastic.py"), *job], stdout=subprocess.PIPE, stderr=errors, text=True, env=env
        )


def step_of(folder: Path) -> int:
    """The step of the latest checkpoint."""
    latest = folder / "checkpoints" / LATEST
    return int(json.loads(latest.read_text())["step"]) if latest.exists() else 0


def wait_for(job: subprocess.Popen[str], folder: Path, step: int, deadline: float) -> bool:
    """Waits for a checkpoint of that step. Returns False if the job ended before."""
    while job.poll() is None and step_of(folder) < step:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the job is at step {step_of(folder)} and did not reach step {step} in time")
        time.sleep(0.05)
    return job.poll() is None


def run(folder: Path, processes: int, steps: int, kills: list[int], deadline: float) -> dict[str, Any]:
    """Runs the job, and kills one of its processes soon after each of these steps."""
    folder.mkdir()
    began, chosen = time.monotonic(), random.Random(0)
    killed_after: list[int] = []
    job = started(folder, processes, steps, len(kills))
    try:
        for step in kills:
            if not wait_for(job, folder, step, deadline):
                break
            time.sleep(chosen.random())  # so that the kill hits anywhere in a step, or in the writing of a checkpoint
            workers = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split() if job.poll() is None else []
            if workers:  # there are none while the job restarts or has just ended
                killed_after.append(step_of(folder))
                os.kill(int(chosen.choice(workers)), signal.SIGKILL)
        said, _ = job.communicate(timeout=max(1.0, deadline - time.monotonic()))
    finally:
        job.kill()
    if job.returncode:
        raise RuntimeError(f"the job ended with exit code {job.returncode}:\n{(folder / 'errors').read_text()[-2000:]}")
    accuracy = re.search(r"accuracy of the mean model: ([\d.]+)%", said)
    assert accuracy is not None, said
    starts = [int(step) for step in re.findall(r"nodes, from step (\d+)", said)]
    return {
        "seconds": time.monotonic() - began,
        "killed_after": killed_after,  # the latest checkpoints at the kills
        "starts": starts,
        "accuracy": float(accuracy[1]) / 100,
        "memory": [memory for path in sorted(folder.glob("memory-*.txt")) if (memory := growth(path)) is not None],
    }


def growth(path: Path) -> float | None:
    """The growth of a process's memory from SETTLED to its end, as a share; None if it ended earlier."""
    lines = [tuple(map(int, line.split())) for line in path.read_text().splitlines()]
    settled = [size for step, size in lines if step >= lines[0][0] + SETTLED]
    return settled[-1] / settled[0] - 1 if len(settled) > 1 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="file for the results")
    parser.add_argument("--processes", type=int, default=8, help="number of processes")
    parser.add_argument("--steps", type=int, default=2_000, help="number of steps")
    parser.add_argument("--kills", type=int, default=8, help="number of kills")
    parser.add_argument("--minutes", type=float, default=30.0, help="time limit of the whole test")
    options = parser.parse_args()
    kills = [round(options.steps * (i + 0.5) / options.kills) for i in range(options.kills)]
    deadline = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder:
        found = {
            name: run(Path(folder) / name, options.processes, options.steps, at, deadline)
            for name, at in (("undisturbed", []), ("killed", kills))
        }
    for name, end in found.items():
        worst = max(end["memory"], default=float("nan"))
        print(
            f"{name:12} {end['seconds']:5.0f} s, {len(end['starts'])} starts from steps {end['starts']}, "
            f"accuracy {end['accuracy']:.1%}, memory of {len(end['memory'])} processes grew by {worst:+.2%} at most"
        )
    save(options.out, {"machine": machine(), "processes": options.processes, "steps": options.steps, "kills": kills, **found})


if __name__ == "__main__":
    main()
