"""Time to accuracy: trains Fashion-MNIST on hosts with slow links (bed.py), with Rumor's methods, DDP and other libraries.

    sudo python benchmarks/accuracy.py --data FOLDER                # half an hour on two cores; you can stop it at any time
    sudo python benchmarks/accuracy.py --data FOLDER --network large        # a network with three times as many parameters; some methods
    sudo python benchmarks/accuracy.py --data FOLDER --hosts 8 --methods DDP OSGP "SGP (fairscale)"
    python benchmarks/accuracy.py --data FOLDER --loopback          # over loopback, unshaped: no root needed
    python benchmarks/accuracy.py --data FOLDER --quick             # a tiny run of everything

First it finds the link rates at which an all-reduce takes 1.9 and 3.3 times as long as computing (the paper's Table 17), and times a step
there. Then it trains every method with every seed. Last it times a step at the rates of the bandwidth curve. Finished runs are kept in
--runs and are not measured again. It can't tell versions of the code apart, so use a new folder for a new version.
It writes benchmarks/results/accuracy.json and the pictures (accuracy-large.json for the large network, without pictures); page.py makes
the tables.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import statistics
import sys
import tempfile
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

import fashion
from bed import LOOPBACK, Bed
from measure import machine, save
from reached import best_ddp
from rumor.checkpoint.files import replacing
from train_on_host import TIMED, contestants

HERE = Path(__file__).parent
RATIOS = (1.9, 3.3)  # all-reduce over computing: ResNet-50 and BERT in the paper's Table 17
CURVE = ("100mbit", "200mbit", "500mbit", "1gbit", "2gbit", LOOPBACK)
CURVE_HOSTS = 4
ON_THE_PAGE = (
    *("DDP", "DDP, 4 bits", "DDP, bf16 hook", "DDP, PowerSGD hook", "Parallel SGD", "Local SGD", "Gossip SGD", "Gossip-AGA", "Gossip-PGA"),
    *("Gossip-PGA, delay=1", "Gossip-PGA, 8 bits", "Gossip-PGA, 4 bits", "LocalSGD (torchft)"),
)
LARGE = ("DDP", "DDP, 4 bits", "DDP, bf16 hook", "Gossip-PGA, 4 bits")  # and no bandwidth curve, to save time
QUICK = ("DDP", "Gossip-PGA", "Gossip-PGA, delay=1")
QUICK_STEPS = 24
CLOSE_ENOUGH = 0.05  # relative error of the ratio


class Study:
    """The measurements to make, and the file of each one. Files with other settings are not read."""

    def __init__(self, options: argparse.Namespace):
        self.data, self.seeds, self.hosts, self.quick = fashion.find(options.data), options.seeds, options.hosts, options.quick
        self.steps = QUICK_STEPS if options.quick else fashion.STEPS
        self.ratios: tuple[float | None, ...] = (None,) if options.loopback else RATIOS
        self.chosen, self.widths = options.methods, fashion.NETWORKS[options.network]
        every = contestants(max(self.hosts), self.steps)
        self.known = ("DDP", *(name for name in every if not name.startswith(("computing", "DDP, bucket")) and name != "DDP"))
        settings = (self.widths, fashion.BATCH, fashion.LR, fashion.WARM_UP, fashion.H, fashion.AGA_WARM_UP, fashion.marks(self.steps))
        version = zlib.crc32(repr(settings).encode())
        self.folder = options.runs / f"{version:08x}"

    @property
    def methods(self) -> list[str]:
        wanted = self.chosen or self.known
        unknown = set(wanted) - set(self.known)
        if unknown:
            raise ValueError(f"--methods: there is no {', '.join(sorted(unknown))}: choose from {', '.join(self.known)}")
        return [name for name in self.known if name in wanted]

    def at_ratio(self, hosts: int, ratio: float) -> Path:
        return self.folder / f"{hosts}-hosts" / f"ratio-{ratio:g}.json"

    def at_rate(self, rate: str) -> Path:
        return self.folder / f"{CURVE_HOSTS}-hosts" / f"rate-{rate}.json"

    def run(self, hosts: int, ratio: float | None, seed: int, method: str) -> Path:
        plain = re.sub(r"[^a-z0-9]+", "-", method.lower()).strip("-")
        return self.folder / f"{hosts}-hosts" / f"ratio-{ratio or LOOPBACK}" / f"seed-{seed}" / f"{plain}.json"

    def all_runs(self) -> list[Path]:
        return [
            self.run(hosts, ratio, seed, method)
            for hosts in self.hosts
            for ratio in self.ratios
            for method in self.methods
            for seed in range(self.seeds)
        ]

    def timings(self) -> list[Path]:
        """The files of the timings: our Table 17 and the bandwidth curve."""
        if None in self.ratios:
            return []
        curve = [self.at_rate(rate) for rate in CURVE] if CURVE_HOSTS in self.hosts and self.widths == fashion.NETWORKS["small"] else []
        return [self.at_ratio(hosts, ratio) for hosts in self.hosts for ratio in RATIOS] + curve


def on_all_hosts(bed: Bed, job: dict[str, Any], timeout: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.json"
        file.write_text(json.dumps(job))
        quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # otherwise torch warns that the hosts of the bed have no names
        bed.run([sys.executable, str(HERE / "train_on_host.py"), str(file)], timeout, quiet)


def time_steps(bed: Bed, study: Study, methods: Sequence[str], repeats: int) -> dict[str, Any]:
    """Times a step of each method, and an all-reduce of the model."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        job = {"data": str(study.data), "widths": study.widths, "methods": methods, "calls": 4 * fashion.H, "repeats": repeats}
        job |= {"out": str(out)}
        on_all_hosts(bed, job, 900)
        found: dict[str, Any] = json.loads(out.read_text())
    return found


def find_rates(bed: Bed, study: Study, bar: tqdm) -> None:
    """Finds the link rate for each ratio, and times all steps at that rate.

    The time of an all-reduce is about proportional to 1 / rate, so a few corrections are enough. The compute time varies from job to job,
    so the median of all jobs is used.
    """
    computing: list[float] = []
    for ratio in (ratio for ratio in RATIOS if not study.at_ratio(bed.hosts, ratio).exists()):
        mbit = 1_200 / ratio  # a first guess
        for _ in range(3):
            bed.set_rate(f"{mbit:.0f}mbit")
            seconds = time_steps(bed, study, ["computing alone"], 6)["seconds"]
            computing.append(seconds["computing alone"]["median"])
            found = seconds["all-reduce alone"]["median"] / statistics.median(computing)
            tqdm.write(f"{bed.label}: an all-reduce takes {found:.2f} times as long as computing; the goal is {ratio}")
            if abs(found / ratio - 1) < CLOSE_ENOUGH:
                break
            mbit *= found / ratio
        bed.set_rate(f"{mbit:.0f}mbit")
        timing = time_steps(bed, study, TIMED, 4)
        save(study.at_ratio(bed.hosts, ratio), {"hosts": bed.hosts, "ratio": ratio, "rate": bed.rate, **timing})
        bar.update()


def train(bed: Bed, study: Study, ratio: float | None, seed: int, bar: tqdm) -> None:
    """Trains all methods with one seed in one job, in random order. If one fails, the others are tried again without it."""
    bucket = 1.0
    if ratio is not None:
        known = json.loads(study.at_ratio(bed.hosts, ratio).read_text())
        bed.set_rate(known["rate"])
        bucket = float(best_ddp(known["seconds"]).split("=")[1])
    methods = study.methods
    random.Random(seed).shuffle(methods)
    files = {method: study.run(bed.hosts, ratio, seed, method) for method in methods}
    for _ in range(3):
        missing = [method for method in methods if not files[method].exists()]
        if not missing:
            return
        bar.set_description(f"{bed.label}, seed {seed}")
        job = {"data": str(study.data), "steps": study.steps, "bucket": bucket, "hosts": bed.hosts, "ratio": ratio, "rate": bed.rate}
        job |= {"seed": seed, "widths": study.widths, "files": {method: str(files[method]) for method in missing}}
        try:
            with counted([files[method] for method in missing], bar):
                on_all_hosts(bed, job, 120 + 120 * len(missing))
        except (RuntimeError, TimeoutError) as error:
            failed = next((method for method in missing if not files[method].exists()), missing[-1])
            tqdm.write(f"{bed.label}, seed {seed}, {failed}: {error}", file=sys.stderr)
            methods = [method for method in methods if method != failed]


@contextmanager
def counted(files: Sequence[Path], bar: tqdm) -> Iterator[None]:
    """Updates the bar when a file appears."""
    over = threading.Event()

    def watch() -> None:
        seen, last = 0, False
        while not last:
            last = over.wait(0.5)
            there = sum(file.exists() for file in files)
            bar.update(there - seen)
            seen = there

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def measure(study: Study) -> None:
    pieces = study.timings() + study.all_runs()
    with tqdm(total=len(pieces), initial=sum(file.exists() for file in pieces), unit=" runs") as bar:
        for hosts in study.hosts:
            with Bed(hosts, LOOPBACK if None in study.ratios else "1gbit") as bed:
                if None not in study.ratios and not bed.shaped:
                    raise OSError(f"the links can't be shaped: {bed.why_not}; use --loopback to train without shaping")
                if None not in study.ratios:
                    find_rates(bed, study, bar)
                for seed in range(study.seeds):
                    for ratio in study.ratios:
                        train(bed, study, ratio, seed, bar)
        for rate in CURVE:
            if study.at_rate(rate) in study.timings() and not study.at_rate(rate).exists():
                bar.set_description(f"a step at {rate}")
                with Bed(CURVE_HOSTS, rate) as bed:
                    timing = time_steps(bed, study, TIMED, 2)
                save(study.at_rate(rate), {"hosts": CURVE_HOSTS, "rate": rate, **timing})
                bar.update()


def collect(study: Study) -> dict[str, Any]:
    """Collects everything that is finished."""

    def there(files: Sequence[Path]) -> list[Any]:
        return [json.loads(file.read_text()) for file in files if file.exists()]

    settings = {"parameters": fashion.parameters_of(study.widths), "widths": study.widths, "batch": fashion.BATCH, "steps": study.steps}
    settings |= {"lr": fashion.LR, "H": fashion.H, "seeds": study.seeds, "machine": machine()}
    timings = there(study.timings())
    for timing in timings:
        timing.pop("machine")
    curve = [timing for timing in timings if "ratio" not in timing]
    return {"settings": settings, "ratios": [t for t in timings if "ratio" in t], "curve": curve, "runs": there(study.all_runs())}


def as_lines(results: dict[str, Any]) -> str:
    """Formats JSON with one line per row."""
    parts = []
    for name, value in results.items():
        rows = ",\n".join(json.dumps(row) for row in value) if isinstance(value, list) else None
        parts.append(f'"{name}": ' + (f"[\n{rows}\n]" if rows is not None else json.dumps(value)))
    return "{\n" + ",\n".join(parts) + "\n}\n"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with the four unpacked IDX files of Fashion-MNIST, also in a subfolder")
    parser.add_argument("--hosts", type=int, nargs="+", default=[4], help="numbers of hosts")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    parser.add_argument("--network", choices=list(fashion.NETWORKS), default="small", help="network to train")
    parser.add_argument("--methods", nargs="+", help="methods, by their names in the tables (those of the page)")
    parser.add_argument("--loopback", action="store_true", help="train over loopback, unshaped, instead of at the two ratios")
    parser.add_argument("--quick", action="store_true", help="two hosts over loopback, two seeds, a few steps")
    parser.add_argument("--report", action="store_true", help="measure nothing; write the results and pictures of the finished runs")
    parser.add_argument("--runs", type=Path, default=Path("runs/accuracy"), help="folder for finished runs")
    parser.add_argument(
        "--results", type=Path, help="file for the results (benchmarks/results/accuracy[-large].json; with --loopback a file in --runs)"
    )
    parser.add_argument(
        "--pictures", type=Path, help="folder for the pictures (docs/performance; for the large network or with --loopback: --runs)"
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.hosts, options.seeds, options.loopback = [2], 2, True
    large = options.network == "large"
    options.methods = options.methods or (QUICK if options.quick else LARGE if large else ON_THE_PAGE)
    file = "accuracy-large.json" if large else "accuracy.json"
    options.results = options.results or (options.runs if options.loopback else HERE / "results") / file
    options.pictures = options.pictures or (options.runs if options.loopback or large else HERE.parent / "docs" / "performance")
    if options.seeds < 2:
        parser.error(f"--seeds must be at least 2, for a standard error, got {options.seeds}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    study = Study(options)
    if not options.report:
        measure(study)
    results = collect(study)
    if not results["runs"]:
        raise ValueError(f"there are no finished runs in {study.folder}: run this command without --report first")
    options.results.parent.mkdir(parents=True, exist_ok=True)
    with replacing(options.results) as aside:
        aside.write_text(as_lines(results))
    import accuracy_pictures
    import accuracy_tables

    print(accuracy_tables.everything(results))
    accuracy_pictures.draw(results, options.pictures)
    missing = [file for file in study.timings() + study.all_runs() if not file.exists()]
    if missing:
        raise RuntimeError(f"{len(missing)} runs are missing, the first one is {missing[0]}: run the same command again to retry them")


if __name__ == "__main__":
    for stop in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # a shell makes background processes ignore Ctrl-C
        if stop != signal.SIGHUP or signal.getsignal(stop) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(stop, signal.default_int_handler)  # so that the bed is taken down
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped: run the same command again to continue after the finished runs")
    except (OSError, ValueError, RuntimeError, TimeoutError) as error:  # errors that the user can fix
        sys.exit(f"accuracy: {error}")
