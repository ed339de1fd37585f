"""The paper's logistic-regression study (figures 1, 4, 5, 6, 7), and our additions.

Expect Gossip-PGA to reach Parallel SGD long before Gossip SGD and Local SGD do. The lead grows with the size and sparsity of the network.
Figure 1 takes about ten seconds on two cores, all five figures less than a minute.

    python experiments/logistic_regression.py --quick                              # a small version of everything, under 20 seconds
    python experiments/logistic_regression.py --figure 1                           # one figure, 50 trials
    python experiments/logistic_regression.py --figure 1 --n 20 --trials 8 --out FOLDER
    python experiments/logistic_regression.py --figure a9a w8a --data FOLDER       # real data: LIBSVM files a9a.txt.xz and w8a.xz

It writes figure-1.csv (one row per curve), figure-1-objective.csv, figure-1-curves.csv, figure-1.png, and so on. Finished runs are kept in
FOLDER/runs and are not repeated, so you can stop the command at any time and start it again.
"""

from __future__ import annotations

import argparse
import lzma
import multiprocessing
import os
import signal
import sys
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import torch
from tqdm import tqdm

from logistic import figures, tables
from logistic.figures import Curve, Panel, Setting
from logistic.problem import Problem, from_libsvm, synthetic
from logistic.run import STEPS, run
from logistic.store import Store
from rumor.checkpoint.files import remove_unfinished

FILES = {"a9a": "a9a.txt.xz", "w8a": "w8a.xz"}
L2 = 0.01  # for real data, where some features occur with one label only: without it there is no minimum
TRIALS, QUICK_TRIALS = 50, 8
_steps_done: multiprocessing.Queue[int]  # a worker reports its steps here, for the progress bar


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    sources = {name: f"-{L2}-{zlib.crc32(find(name, options.data).read_bytes()):08x}" for name in options.figure if name in FILES}
    stores = [Store(options.out, options.trials, seed, torch.device(options.device).type, sources) for seed in range(options.seeds)]
    chosen = {name: [p for p in figures.FIGURES[name] if wanted(p.setting, options)] for name in options.figure}
    curves = figures.curves_of([panel for panels in chosen.values() for panel in panels])
    work = [job for store in stores for job in jobs(store, curves, options.data)]
    compute(work, options)
    for name, panels in chosen.items():
        report(name, panels, stores, options)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--figure", nargs="+", default=list(figures.THE_PAPERS), choices=list(figures.FIGURES), help="figures to make")
    parser.add_argument("--n", type=int, nargs="+", help="make only the panels with these numbers of nodes")
    parser.add_argument("--trials", type=int, help=f"number of trials; {TRIALS} if not given, with --quick {QUICK_TRIALS}")
    parser.add_argument("--seeds", type=int, default=1, help="number of data sets; with more than one, figure-X-seeds.csv has the medians")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_TRIALS} trials, and n = 20 only (for figure 1 or 4 alone: all n)")
    parser.add_argument("--out", type=Path, default=Path("logistic-regression"), help="folder for the results")
    parser.add_argument("--data", type=Path, help=f"folder with the real data: {', '.join(FILES.values())}")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    parser.add_argument("--jobs", type=int, default=cores(), help="number of processes on a CPU")
    parser.add_argument("--no-pictures", action="store_true", help="write tables and data only")
    options = parser.parse_args(arguments)
    check(options, parser)
    return options


def check(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Reports wrong options in one line, before anything runs."""
    if options.trials is None:
        options.trials = QUICK_TRIALS if options.quick else TRIALS
    for name, least, why in (("trials", 2, ", for a standard deviation"), ("seeds", 1, ""), ("jobs", 1, "")):
        if getattr(options, name) < least:
            parser.error(f"--{name} must be at least {least}{why}, got {getattr(options, name)}")
    for name in (name for name in options.figure if name in FILES):
        try:
            find(name, options.data)
        except FileNotFoundError as error:
            parser.error(str(error))
    for name in options.figure:
        sizes = sorted({panel.setting.n for panel in figures.FIGURES[name]})
        for n in options.n or ():
            if n not in sizes:
                parser.error(f"figure {name} has no panel for n = {n}: it has {', '.join(map(str, sizes))}")
    if options.device != "cpu" and (options.device.split(":")[0] != "cuda" or not torch.cuda.is_available()):
        parser.error(f"--device {options.device}: torch can't use that here; --device cpu works everywhere")
    try:
        (options.out / "runs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {options.out}: {error.strerror}; give a folder that you can write to")


def find(name: str, folder: Path | None) -> Path:
    """Finds the file of a data set in `folder` or its subfolders."""
    found = sorted(folder.rglob(FILES[name])) if folder is not None else []
    if not found:
        raise FileNotFoundError(f"--figure {name} needs --data FOLDER with {FILES[name]} in it")
    return found[0]


def cores() -> int:
    """The number of cores that this process may use; the number of all cores if the system does not tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def wanted(setting: Setting, options: argparse.Namespace) -> bool:
    if options.n:
        return setting.n in options.n
    return not options.quick or setting.n == 20 or options.figure in (["1"], ["4"])


class Job:
    """All missing curves of one setting. They share their data and their samples."""

    def __init__(self, store: Store, setting: Setting, curves: list[Curve], data: Path | None):
        self.store, self.setting, self.curves, self.data = store, setting, curves, data

    @property
    def size(self) -> int:
        return self.setting.n * len(self.curves) * (1 if self.setting.data == "synthetic" else 10)

    def problem(self) -> Problem:
        setting, seed = self.setting, self.store.seed
        if setting.data == "synthetic":
            return synthetic(setting.n, setting.iid, seed)
        return from_libsvm(find(setting.data, self.data), setting.n, "iid" if setting.iid else "label", L2, seed)

    def run(self, device: str, progress) -> None:  # type: ignore[no-untyped-def]
        problem = self.problem().to(device)
        results = run(problem, [curve.algorithm for curve in self.curves], self.store.trials, seed=self.store.seed, progress=progress)
        for curve, result in zip(self.curves, results, strict=True):
            self.store.save(curve, result)


def jobs(store: Store, curves: list[Curve], data: Path | None) -> Iterator[Job]:
    missing = dict.fromkeys(curve.run for curve in curves if not store.has(curve.run))
    for setting in dict.fromkeys(curve.setting for curve in missing):
        yield Job(store, setting, [curve for curve in missing if curve.setting == setting], data)


def compute(work: list[Job], options: argparse.Namespace) -> None:
    """Runs all jobs with one progress bar: on a GPU one by one, on a CPU in parallel, with one thread each (the tensors are small)."""
    work = sorted(work, key=lambda job: -job.size)
    with tqdm(total=sum(STEPS * job.size for job in work), unit_scale=True, unit=" node steps", disable=not work) as bar:
        if options.device != "cpu" or min(options.jobs, len(work)) <= 1:
            for job in work:
                bar.set_description(str(job.setting))
                job.run(options.device, lambda steps, size=job.size: bar.update(steps * size))  # type: ignore[misc]
            return
        _compute_in_parallel(work, options, bar)


def _compute_in_parallel(work: list[Job], options: argparse.Namespace, bar: tqdm) -> None:
    # Fork if possible: a new interpreter would spend more time on imports than on a figure.
    start = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(start)
    done = context.Queue()
    # The handler only sets a flag, which the loop below checks. An exception raised by the handler could be lost in clean-up code.
    interrupted = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    with ProcessPoolExecutor(min(options.jobs, len(work)), context, _start_worker, (done,)) as pool:
        running: set[Future[None]] = {pool.submit(_work, job) for job in work}
        try:
            while running:
                finished, running = wait(running, timeout=0.2)
                while not done.empty():
                    bar.update(done.get())
                for future in finished:
                    future.result()  # raises the error of a worker
                if interrupted.is_set():
                    raise KeyboardInterrupt
        except BaseException:
            for worker in multiprocessing.active_children():
                worker.terminate()  # its current run is lost, finished runs are on disk
                worker.join()
                remove_unfinished(options.out / "runs", worker.pid)
            raise
        finally:
            signal.signal(signal.SIGINT, before)
            pool.shutdown(cancel_futures=True)


def _start_worker(done: multiprocessing.Queue[int]) -> None:
    global _steps_done
    _steps_done = done
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes, but only the parent handles it and stops the others
    torch.set_num_threads(1)


def _work(job: Job) -> None:
    job.run("cpu", lambda steps: _steps_done.put(steps * job.size))


def report(name: str, panels: list[Panel], stores: list[Store], options: argparse.Namespace) -> None:
    """Writes the files of a figure and prints its table."""
    store, path = stores[0], options.out / f"figure-{name}.csv"
    rows = tables.stages(store, panels)
    tables.write(path, tables.as_csv(rows))
    tables.write(path.with_stem(f"{path.stem}-objective"), tables.as_csv(tables.stages(store, panels, objective=True)))
    tables.write(path.with_stem(f"{path.stem}-curves"), tables.as_csv(tables.curves(store, panels)))
    if len(stores) > 1:
        tables.write(path.with_stem(f"{path.stem}-seeds"), tables.as_csv(tables.over_seeds(stores, panels)))
    print(f"\n{figures.CLAIMS[name]}\n\n{tables.as_text(rows)}")
    if not options.no_pictures:
        from logistic import pictures

        pictures.draw(name, panels, options.out)
    print("\nT_tr_1, T_tr_025: the iteration from which the node error stays within 2 and 1.25 times that of Parallel SGD")
    print(f"wrote {path.parent}/{path.stem}*")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped: run the same command again to continue after the finished runs")
    except (OSError, ValueError, ArithmeticError, EOFError, lzma.LZMAError, BrokenProcessPool) as error:  # errors that the user can fix
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
