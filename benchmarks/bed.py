"""A cluster on one machine: N hosts as network namespaces behind one switch, with every link shaped in both directions.

    sudo python benchmarks/bed.py --hosts 4 --rate 500mbit -- python script.py        # runs script.py on every host, as torchrun would

The processes and TCP are real; all hosts share the cores. The bed is always taken down at the end. It needs root and iproute2 (`ip`, `tc`).
Without them, or with --rate loopback, the processes run on this host over its loopback device, unshaped, and a message says so.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

LOOPBACK = "loopback"
BURST = "256kb"  # size of a token bucket: small compared with a message, large enough for 1 Gbit/s
QUEUE = "100ms"
NETWORK = "10.99.0.0/24"
CONGESTION = "cubic"  # Linux's default, set explicitly because the machine may use another


class Bed:
    """N hosts. Use it in a `with` block; `run` starts one process on each host and waits for all of them."""

    def __init__(self, hosts: int, rate: str, congestion: str = CONGESTION):
        if hosts < 1:
            raise ValueError(f"a bed needs at least one host, got {hosts}")
        self.hosts, self.congestion = hosts, congestion
        self.why_not = _why_not() if rate != LOOPBACK else None
        self.shaped = rate != LOOPBACK and self.why_not is None
        self.rate = rate if self.shaped else LOOPBACK
        self._name = f"rumor{os.getpid()}"

    @property
    def name(self) -> str:
        return f"{self.hosts} hosts, {self.congestion}" if self.shaped else f"{self.hosts} processes, loopback, unshaped"

    @property
    def label(self) -> str:
        """The name of this bed in tables and pictures."""
        return f"{self.name}, {self.rate}" if self.shaped else self.name

    def __enter__(self) -> Bed:
        if self.why_not:
            print(f"the links can't be shaped: {self.why_not}; running over loopback, unshaped", file=sys.stderr)
        if self.shaped:
            try:
                self._build()
            except BaseException:
                self._take_down()
                raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.shaped:
            self._take_down()

    def set_rate(self, rate: str) -> None:
        """Sets the rate of every link, if there are links."""
        if self.shaped:
            self.rate = rate
            for i in range(self.hosts):
                self._shape(i)

    def run(self, command: Sequence[str], timeout: float, env: Mapping[str, str] | None = None) -> None:
        """Runs `command` on every host with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set. If one fails or is late, all are killed."""
        shared = {**(env or {}), "WORLD_SIZE": str(self.hosts), "MASTER_PORT": str(free_port()), "MASTER_ADDR": self.address(0)}
        processes: list[subprocess.Popen[Any]] = []
        try:
            for i in range(self.hosts):
                processes.append(self.start(i, command, {**shared, "RANK": str(i), "LOCAL_RANK": "0"}))
            _wait_for_all(processes, timeout)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
            for process in processes:
                process.wait()

    def start(self, i: int, command: Sequence[str], env: Mapping[str, str], **options: Any) -> subprocess.Popen[Any]:
        """Starts `command` on host i in the background. `options` are those of subprocess.Popen."""
        inside = ["ip", "netns", "exec", self._host(i)] if self.shaped else []
        own = {"RUMOR_BED": self.label, "OMP_NUM_THREADS": "1"} | ({"GLOO_SOCKET_IFNAME": "eth0"} if self.shaped else {})
        return subprocess.Popen([*inside, *command], env={**os.environ, **own, **env}, **options)

    def address(self, i: int) -> str:
        """The address of host i."""
        return _address(i) if self.shaped else "127.0.0.1"

    def cut(self, i: int, mend: bool = False) -> None:
        """Disconnects host i from the switch silently; with `mend` it connects the host again."""
        _ip("-n", self._switch, "link", "set", f"port{i}", "up" if mend else "down")

    def kill(self, i: int) -> None:
        """Kills all processes of host i, as a power failure would."""
        pids = subprocess.run(["ip", "netns", "pids", self._host(i)], capture_output=True, text=True, check=False).stdout.split()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def _host(self, i: int) -> str:
        return f"{self._name}-h{i}"

    @property
    def _switch(self) -> str:
        return f"{self._name}-switch"

    def _build(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for i in range(self.hosts):
            host = self._host(i)
            _ip("netns", "add", host)
            _ip("link", "add", "eth0", "netns", host, "type", "veth", "peer", "name", f"port{i}", "netns", self._switch)
            _ip("-n", self._switch, "link", "set", f"port{i}", "master", "bridge", "up")
            _ip("-n", host, "addr", "add", f"{_address(i)}/24", "dev", "eth0")
            _ip("-n", host, "link", "set", "eth0", "up")
            _ip("-n", host, "link", "set", "lo", "up")
            _ip("-n", host, "route", "replace", NETWORK, "dev", "eth0", "src", _address(i), "congctl", self.congestion)
            self._shape(i)

    def _shape(self, i: int) -> None:
        for place, device in ((self._host(i), "eth0"), (self._switch, f"port{i}")):
            bucket = ["tbf", "rate", self.rate, "burst", BURST, "latency", QUEUE]
            _call("tc", "-n", place, "qdisc", "replace", "dev", device, "root", *bucket)

    def _take_down(self) -> None:
        """Removes all namespaces, even if an earlier step has failed."""
        for name in (*(self._host(i) for i in range(self.hosts)), self._switch):
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)


def _why_not() -> str | None:
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"{' and '.join(missing)} not found (Debian: apt-get install iproute2)" if missing else None


def _wait_for_all(processes: Sequence[subprocess.Popen[Any]], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while any(process.poll() is None for process in processes):
        failed = [i for i, process in enumerate(processes) if process.poll() not in (None, 0)]
        if failed:
            time.sleep(1.0)  # so that the other hosts can print their errors
            raise RuntimeError(f"host {failed[0]} failed with exit code {processes[failed[0]].returncode}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all hosts finished within {timeout:g} s")
        time.sleep(0.05)
    failed = [i for i, process in enumerate(processes) if process.returncode]
    if failed:
        raise RuntimeError(f"host {failed[0]} failed with exit code {processes[failed[0]].returncode}")


def _address(i: int) -> str:
    return NETWORK.replace("0/24", str(i + 1))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("", 0))
        return int(s.getsockname()[1])


def _ip(*arguments: str) -> None:
    _call("ip", *arguments)


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)} failed: {done.stderr.strip()}")


def take_down_when_told_to_end() -> None:
    """Takes the bed down on SIGTERM, and on SIGHUP unless that is ignored, as with nohup."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: sys.exit(128 + number))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hosts", type=int, default=4, help="number of hosts")
    parser.add_argument("--rate", default="500mbit", help="rate of every link in tc's notation (200mbit, 1gbit), or loopback")
    parser.add_argument("--congestion", default=CONGESTION, help="TCP congestion control: cubic (Linux's default), bbr, reno")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which all processes are killed")
    parser.add_argument("command", nargs="+", help="after --: the command to run on every host")
    options = parser.parse_args()
    take_down_when_told_to_end()
    try:
        with Bed(options.hosts, options.rate, options.congestion) as bed:
            bed.run(options.command, options.timeout)
    except (RuntimeError, TimeoutError, OSError, ValueError) as error:
        sys.exit(f"bed: {error}")


if __name__ == "__main__":
    main()
