"""Reads and writes numbers with units: 25Gbit/s, 50us, 146ms, 25.5M."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable

_PREFIX = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_DECIMAL = {name: factor for name, factor in _PREFIX.items() if "i" not in name}
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}
COUNTS = {**_DECIMAL, "B": 1e9}  # a billion, as in "a 7B model"
BYTES_PER_SECOND = {**{f"{p}B/s": f for p, f in _PREFIX.items()}, **{f"{p}bit/s": f / 8 for p, f in _DECIMAL.items()}}


NUMBER = r"[+-]?(?:\d{1,3}(?:,\d{3})+|[\d_]*)(?:\.\d*)?"  # accepts 18,768, but not 1,5, which could be read as 15


SLOWEST = 1e3  # bytes per second
LONGEST_LATENCY = 10.0  # seconds
COUNT_EXAMPLES = "for example 18768, 100k, 25.5M or 7B"
NODES_EXAMPLES = "for example 32"


def _parser(units: dict[str, float], what: str, examples: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        found = re.fullmatch(rf"\s*({NUMBER}(?:[eE][+-]?\d+)?)\s*(\S*)\s*", text)
        if not found or found.group(2) not in units:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}: write {examples}")
        try:
            return float(found.group(1).replace(",", "")) * units[found.group(2)]
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}: write {examples}") from None

    return parse


_seconds = _parser(SECONDS, "a time", "146ms, 50us or 1.5s")
_bandwidth = _parser(BYTES_PER_SECOND, "a bandwidth", "25Gbit/s (bits) or 3.1GB/s (bytes); a single b could mean either")
_count = _parser(COUNTS, "a number", COUNT_EXAMPLES)
_nodes = _parser({"": 1.0, "k": 1e3}, "a whole number", NODES_EXAMPLES)


def _is_plain(text: str) -> bool:
    """Whether this is a number without a unit."""
    return re.fullmatch(r"\s*[-+]?[\d.,_]+(?:[eE][-+]?\d+)?\s*", text) is not None


def seconds(text: str) -> float:
    """Parses a time, in seconds. A plain number is refused, but for 0: 146 is more likely to mean milliseconds."""
    if text.strip() == "0":
        return 0.0
    if _is_plain(text):
        raise argparse.ArgumentTypeError(f"{text!r} has no unit: write {text.strip()}ms or {text.strip()}s")
    return _seconds(text)


def bandwidth(text: str) -> float:
    """Parses a bandwidth, in bytes per second. One that no network has is taken for a mistake."""
    if _is_plain(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} has no unit: write {text.strip()}Mbit/s or {text.strip()}Gbit/s (bits), or {text.strip()}MB/s (bytes)"
        )
    if (usual := re.fullmatch(rf"\s*({NUMBER})\s*([kKMGT]?)([bB])ps\s*", text)) is not None:
        unit = "bit/s" if usual[3] == "b" else "B/s"
        raise argparse.ArgumentTypeError(f"{text!r} is not in the form that this command reads: write {usual[1]}{usual[2]}{unit}")
    found = _bandwidth(text)
    if 0 < found < SLOWEST:
        raise argparse.ArgumentTypeError(f"{text!r} is slower than any network ({show_rate(SLOWEST)}): write 25Gbit/s or 500Mbit/s")
    return found


def latency(text: str) -> float:
    """Parses a latency, in seconds. One that no network has is taken for a mistake."""
    if _is_plain(text) and text.strip() != "0":
        raise argparse.ArgumentTypeError(f"{text!r} has no unit: write for example {text.strip()}us or {text.strip()}ms")
    found = seconds(text)
    if found > LONGEST_LATENCY:
        raise argparse.ArgumentTypeError(f"{text!r} is longer than any latency ({LONGEST_LATENCY:g} s): write 50us or 1ms")
    return found


def count(text: str) -> int:
    """Parses a whole number of parameters or steps."""
    return _whole(_count(text), text, COUNT_EXAMPLES)


def nodes(text: str) -> int:
    """Parses a whole number of nodes, or of steps between two global averages."""
    return _whole(_nodes(text), text, NODES_EXAMPLES)


def _whole(value: float, text: str, examples: str) -> int:
    if not math.isfinite(value) or abs(value - round(value)) > 1e-6 * max(1.0, abs(value)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number: write {examples}")
    return round(value)


def show_seconds(value: float) -> str:
    """Formats a time.

    >>> show_seconds(0.146), show_seconds(5e-05), show_seconds(1.9138)
    ('146 ms', '50 us', '1.91 s')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= 0.9995 * scale:
            return f"{_three(value / scale)} {unit}"
    return f"{_three(value / 1e-9)} ns" if value else "0 s"


def show_bytes(value: float) -> str:
    """Formats a number of bytes.

    >>> show_bytes(102e6), show_bytes(1_234)
    ('102 MB', '1.23 kB')
    """
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= 0.9995 * scale:
            return f"{_three(value / scale)} {unit}"
    return f"{_three(value)} B"


def show_rate(value: float) -> str:
    """Formats a rate, which is in bytes per second, in bits per second.

    >>> show_rate(6.25e6), show_rate(1.25e9)
    ('50 Mbit/s', '10 Gbit/s')
    """
    for unit, scale in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if 8 * value >= 0.9995 * scale:
            return f"{_three(8 * value / scale)} {unit}"
    return f"{_three(8 * value)} bit/s"


def show_nodes(n: int) -> str:
    """Formats a number of nodes.

    >>> show_nodes(1), show_nodes(32)
    ('1 node', '32 nodes')
    """
    return f"{n} node{'s' * (n != 1)}"


def show_count(value: float) -> str:
    """Formats a number of things.

    >>> show_count(25_500_000), show_count(18_768)
    ('25.5 M', '18,768')
    """
    for unit, scale in (("G", 1e9), ("M", 1e6)):
        if value >= scale:
            return f"{value / scale:.4g} {unit}"
    return f"{value:,.0f}"


def _three(value: float) -> str:
    """Formats three digits, without an exponent."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.3g}"
