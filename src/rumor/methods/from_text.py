"""Reads a method from text, for configuration files and command lines: `method("gossip_pga(ring, H=6)")`."""

from __future__ import annotations

import ast
import difflib
import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from rumor.methods.algorithm import Algorithm
from rumor.methods.diloco import DiLoCo, diloco
from rumor.methods.gossip_pga import GossipPGA, gossip_aga, gossip_pga, gossip_sgd, local_sgd, parallel_sgd
from rumor.methods.push_sum import PushSum, osgp
from rumor.methods.slow_momentum import SlowMo, slowmo
from rumor.schedule import Adaptive, LearningRate, Never, Periodic
from rumor.topology import base_graph, complete, exponential, grid, isolated, one_peer_exponential, ring, torus

LONGEST = 1_000  # characters; a longer text is no method
FUNCTIONS = (parallel_sgd, local_sgd, gossip_sgd, gossip_pga, gossip_aga, slowmo, diloco, osgp)
CLASSES = (GossipPGA, SlowMo, DiLoCo, PushSum)  # as a method prints
TOPOLOGIES = (ring, grid, torus, exponential, one_peer_exponential, base_graph, complete, isolated)
SCHEDULES = (Never, Periodic, Adaptive, LearningRate)
KNOWN: dict[str, Callable[..., Any]] = {f.__name__: f for f in (*FUNCTIONS, *CLASSES, *TOPOLOGIES, *SCHEDULES, partial)}
NAMES = {name.lower().replace("_", ""): name for name in reversed(KNOWN)}  # of GossipPGA and gossip_pga, the function


def method(text: str) -> Algorithm:
    """Read a method from text, as you would write it in Python, or as it prints.

    The text may have the names of methods, topologies and schedules, numbers, and nothing else: no code is run. A topology without a
    number of nodes fits any number of nodes. Names may have dashes or spaces, as in one-peer-exponential, and quotes around them. Graphs
    and matrices of your own can't be read from text.

    >>> import rumor
    >>> read = rumor.method("gossip_pga(ring, H=6, bits=4)")
    >>> read == rumor.gossip_pga(rumor.ring, H=6, bits=4)
    True
    >>> rumor.method("parallel_sgd") == rumor.parallel_sgd()
    True
    >>> method = rumor.slowmo(rumor.ring(8), H=rumor.LearningRate(3, 24))
    >>> rumor.method(repr(method)) == method
    True
    >>> rumor.method("gossip_pga(rnig, H=6)")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: 'gossip_pga(rnig, H=6)' can't be read as a method: there is no ...
    """
    if not isinstance(text, str):
        raise TypeError(f'a method is read from text such as "gossip_pga(ring, H=6)", got {type(text).__name__}')
    if len(text) > LONGEST:
        raise ValueError(f"a text of {len(text)} characters can't be read as a method: the longest has {LONGEST}")
    try:
        found = _value(ast.parse(_without_dashes(text.strip()), mode="eval").body)
        found = _called(found, [], {}) if found in (*FUNCTIONS, *CLASSES) else found
    except (SyntaxError, RecursionError, MemoryError):  # the last two are of the parser: too many brackets
        raise ValueError(
            f'{text!r} can\'t be read as a method: write it as in Python, "gossip_pga(ring, H=6)"{_on_matrices(text)}'
        ) from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{text!r} can't be read as a method: {error}") from None
    if not isinstance(found, Algorithm):
        raise ValueError(f"{text!r} is no method: the methods are {_names(FUNCTIONS)}")
    return found


def _without_dashes(text: str) -> str:
    """Spell names as in Python: one_peer_exponential. A dash or a space between letters is in a name: a method has no operators."""
    return re.sub("(?<=[A-Za-z])[- ](?=[A-Za-z])", "_", text)


def _value(node: ast.expr) -> Any:
    """Evaluate one part of the text. Everything that is not listed here is refused."""
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, bool | int | float)):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        return -_number(node.operand.value)
    if isinstance(node, ast.Tuple):
        return tuple(map(_value, node.elts))
    if isinstance(node, ast.Name | ast.Attribute):
        return _known(ast.unparse(node))
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        if node.value.isidentifier():
            return _known(node.value)
        raise ValueError(f"{ast.unparse(node)} is in quotes: leave them out, as in gossip_pga(ring(8), H=6)")
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
        options = {keyword.arg: _value(keyword.value) for keyword in node.keywords if keyword.arg is not None}
        if len(options) == len(node.keywords):  # else there is a **
            return _called(_known(ast.unparse(node.func)), [_value(argument) for argument in node.args], options)
    raise ValueError(f"{ast.unparse(node)} is neither a number nor a name with its arguments")


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"-{value} is no number")
    return value


def _known(name: str) -> Callable[..., Any]:
    """Look up a name, which may be written as rumor.ring or functools.partial."""
    plain = name.removeprefix("functools.") if name == "functools.partial" else name.removeprefix("rumor.")
    if plain not in KNOWN:
        kinds = (("topologies", TOPOLOGIES), ("methods", FUNCTIONS), ("schedules", SCHEDULES))
        there = "; ".join(f"{_names(group)} ({kind})" for kind, group in kinds)
        near = _nearest(plain)
        meant = f". Did you mean {near}? There" if near else ", but there"
        raise ValueError(f"there is no {name!r}{meant} are {there}{_on_matrices(name)}")
    return KNOWN[plain]


def _nearest(name: str) -> str | None:
    """Return the known name that is nearest to this one, in any case, with or without underscores."""
    near = difflib.get_close_matches(name.lower().replace("_", ""), NAMES, n=1)
    return NAMES[near[0]] if near else None


def _called(function: Callable[..., Any], arguments: list[Any], options: dict[str, Any]) -> Any:
    if function is partial:
        _check_partial(arguments)
    else:
        signature = inspect.signature(function)
        try:
            signature.bind(*arguments, **options)
        except TypeError as error:
            name, takes = function.__name__, ", ".join(signature.parameters)
            meant = f". Did you mean {near}?" if (near := _nearest(name)) not in (None, name) else ""
            raise ValueError(f"{name}: {error}; it takes {takes}{meant}") from None
    return function(*arguments, **options)


def _check_partial(arguments: list[Any]) -> None:
    if len(arguments) != 1 or arguments[0] not in TOPOLOGIES:
        raise ValueError(
            f"partial takes a topology and its options, such as partial(base_graph, peers=2): the topologies are {_names(TOPOLOGIES)}"
        )


def _names(group: tuple[Callable[..., Any], ...]) -> str:
    return ", ".join(each.__name__ for each in group)


def _on_matrices(text: str) -> str:
    return "; a graph or a matrix of your own can't be read from text: build the method in code" if "from_" in text else ""
