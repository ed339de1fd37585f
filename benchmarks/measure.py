"""The shared parts of all benchmarks: timing in turns, a description of the machine, and saving results."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rumor.checkpoint.files import replacing


def interleaved(contestants: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Returns the median seconds of each. They run in turns, so that a slow moment of the machine affects all of them."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for repeat in range(repeats + 2):  # the first two warm up
        for name, run in contestants.items():
            began = time.perf_counter()
            run()
            if repeat >= 2:
                times[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in times.items()}


def machine() -> dict[str, Any]:
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {"torch": torch.__version__, "threads": torch.get_num_threads(), "processor": _processor(), "cores": os.cpu_count(), **gpu}


def _processor() -> str:
    """The name of the processor, from Linux if possible."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def save(out: Path, results: dict[str, Any]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as aside:
        aside.write_text(json.dumps(results, indent=1) + "\n")
