"""Shapes the network between the processes of the demo: each process sends through a link of a given rate.

Each process moves into a network namespace without a name, and `connect` puts a switch between them. Such a namespace ends with its last
process, and its devices end with it. So nothing is left behind, however the demo ends.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

DEVICE = "eth0"
BURST = "3kb"  # two packets: with a larger bucket, a part of each message would travel for free
QUEUE = "200ms"
CLONE_NEWNET = 0x40000000  # from Linux's sched.h; Python has os.unshare from 3.12 on


def why_not(rate: float) -> str | None:
    """Return why links can't be shaped here, or None if they can. It tries one link in a namespace that ends at once.

    Args:
        rate: bytes per second.
    """
    if sys.platform != "linux" or os.geteuid() != 0:
        return "that needs root on Linux (try: unshare -rn rumor demo)"
    missing = [tool for tool in ("ip", "tc", "nsenter", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found"
    try_link = f"ip link add name {DEVICE} type veth peer name port && tc {_shape(DEVICE, rate)}"
    tried = subprocess.run(["unshare", "--net", "sh", "-c", try_link], capture_output=True, text=True, check=False)
    said = " ".join(tried.stderr.split()) or f"exit code {tried.returncode}"
    return f"this system refuses it ({said})" if tried.returncode else None


def isolate() -> None:
    """Move this thread, and those that it starts from now on, into a network of its own. gloo will use the link that `connect` adds."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "this process can't have a network of its own")
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE


def connect(pids: Sequence[int], rate: float) -> None:
    """Connect the processes, which have called `isolate`. The switch is in the namespace of the first.

    Args:
        pids: ids of the processes.
        rate: bytes per second that each of them can send.
    """
    switch = ["link add name switch type bridge", "link set switch up arp off"]  # else it would answer for the first process
    for i, pid in enumerate(pids):
        switch.append(f"link add name port{i} type veth peer name {DEVICE} netns {pid}")
        switch.append(f"link set port{i} up master switch")
    _inside(pids[0], "ip", switch)
    for i, pid in enumerate(pids):
        _inside(pid, "ip", [f"addr add 10.99.0.{i + 1}/24 dev {DEVICE}", f"link set {DEVICE} up", "link set lo up"])
        _inside(pid, "tc", [_shape(DEVICE, rate)])


def _shape(device: str, rate: float) -> str:
    return f"qdisc add dev {device} root tbf rate {8 * rate:.0f}bit burst {BURST} latency {QUEUE}"


def _inside(pid: int, tool: str, lines: Sequence[str]) -> None:
    """Run commands of `ip` or `tc` in the network of a process."""
    command = ["nsenter", "--net", "--target", str(pid), tool, "-batch", "-"]
    done = subprocess.run(command, input="\n".join(lines) + "\n", capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the links can't be shaped: {tool}: {' '.join(done.stderr.split())}: run the demo with --modelled")
