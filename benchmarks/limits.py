"""Lower bounds on the time of a step: the compute time, and the time to send the bytes at the rate of the links."""

from __future__ import annotations

import math

from bed import LOOPBACK
from rumor.engines.codes import BLOCK, CODES

UNITS = {"mbit": 1e6, "gbit": 1e9}


def bytes_per_second(rate: str) -> float:
    """Parses a rate in tc's notation.

    >>> bytes_per_second("200mbit")
    25000000.0
    """
    if rate == LOOPBACK:
        return math.inf
    number, unit = rate[:-4], rate[-4:]
    if unit not in UNITS or not number.replace(".", "", 1).isdigit():
        raise ValueError(f"a rate is a number with one of {', '.join(UNITS)}, for example 200mbit, or {LOOPBACK}: got {rate!r}")
    return float(number) * UNITS[unit] / 8


def shown(rate: str) -> str:
    """Formats a rate.

    >>> shown("200mbit"), shown("1gbit"), shown("loopback")
    ('200 Mbit/s', '1 Gbit/s', 'loopback')
    """
    return rate.replace("mbit", " Mbit/s").replace("gbit", " Gbit/s")


def copies_sent(contestant: str, n: int, H: int) -> float:
    """The number of copies of the model that a host sends in a step, on average. `contestant` is a name of the tables.

    >>> copies_sent("DDP, bucket_cap_mb=4", 4, 6), copies_sent("Gossip SGD, delay=1", 4, 6), copies_sent("Gossip-PGA", 4, 6)
    (1.5, 1.0, 1.0833333333333333)
    >>> round(copies_sent("DDP, 4 bits", 4, 6), 4), round(copies_sent("Gossip-PGA, 4 bits, delay=1", 4, 6), 4)
    (0.1948, 0.1407)
    """
    name, comma, rest = contestant.partition(" bits")
    if comma:
        name, _, bits = name.rpartition(", ")
        return copies_sent(name + rest, n, H) * CODES[int(bits)].nbytes(BLOCK) / (4 * BLOCK)
    all_reduce = 2 * (n - 1) / n
    if "PowerSGD" in contestant or contestant == "computing alone":
        return 0.0  # or almost nothing
    if contestant.startswith(("DDP", "Parallel", "mean", "gloo")):
        return all_reduce / 2 if "bf16" in contestant else all_reduce
    if contestant.startswith(("Local", "PostLocal", "DiLoCo")):
        return all_reduce / H
    if "PGA" in contestant or "SlowMo" in contestant:
        return (H - 1 + all_reduce) / H
    if contestant.startswith(("Gossip", "OSGP", "SGP")):
        return 1.0  # on a one-peer graph, without the rare global averages of Gossip-AGA
    raise ValueError(f"it is unknown how much {contestant!r} sends: add it to copies_sent")


def shortest_step(contestant: str, n: int, H: int, model_bytes: int, rate: str, computing: float) -> float:
    """The lower bound in seconds."""
    return max(computing, copies_sent(contestant, n, H) * model_bytes / bytes_per_second(rate))
