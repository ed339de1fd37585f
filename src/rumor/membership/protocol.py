"""What members and the coordinator tell each other: JSON objects, one a line, each with a "kind".

A member says:

    hello    who it is, its set-up, and the epoch that it belongs to, if any; first thing on every connection
    beat     that it is alive, its step, and whether it computes or waits
    ready    that it waits for the next epoch, at step k: "between" two steps, "before" a global average, "after" one, to "finish" with a
             last average, at the "end", or to "join"; and the step of the last global average that it has completed
    failed   that it could not connect to the other members of an epoch
    bye      that it leaves, and why

The coordinator says:

    welcome  that the member may stay
    refused  why it may not
    beat     that the coordinator is alive
    news     how many newcomers wait, and how many nodes are here and needed
    lost     that an epoch is broken, and why
    dropped  that this member is no longer one, and why: it may join again
    epoch    the members of the next epoch
    same     that the members stay the same
    passed   that others have completed the global average that this member waits for: it goes on alone to the next
    alone    that this member has finished while the others take further steps: they go on without it
    over     that the job has ended
    ended    that the job had ended before this node came

An epoch is a set of members with a process group between them. Epochs are numbered.
"""

from __future__ import annotations

import json
from typing import Any, Literal, NamedTuple

PROTOCOL = 2
PORT = 29510
LONGEST_LINE = 2**20  # bytes; a set-up with a long model description has some thousands

Stage = Literal["between", "before", "after", "finish", "end", "join"]
Message = dict[str, Any]


class Address(NamedTuple):
    """Where a process listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, default_port: int = PORT) -> Address:
    """Read HOST:PORT, HOST or [IPV6]:PORT.

    >>> parse_address("node0:29510"), parse_address("10.0.0.1"), parse_address("[::1]:7")
    (Address(host='node0', port=29510), Address(host='10.0.0.1', port=29510), Address(host='::1', port=7))
    """
    if not isinstance(text, str):
        raise TypeError(f'the coordinator\'s address is a string, such as "node0:{default_port}", got {text!r}')
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]") or (":" in host and not host.startswith("[")):
        host, port = text, str(default_port)
    host = host.removeprefix("[").removesuffix("]")
    if not host or set(host) & set("/ \t") or not port.isdecimal() or not 0 <= int(port) < 2**16:
        raise ValueError(f"the coordinator's address is HOST:PORT, such as node0:{default_port}, got {text!r}")
    return Address(host, int(port))


def encode(kind: str, **values: Any) -> bytes:
    return json.dumps({"kind": kind, **values}).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Read one line. Raises ValueError if it is not one of ours."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a message of Rumor: {line[:40]!r}") from error
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ValueError(f"not a message of Rumor: {line[:40]!r}")
    return message
