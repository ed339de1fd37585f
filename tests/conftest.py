"""Fixtures: clusters of processes, which tests share. Also marks the tests that start processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.cluster import Cluster

collect_ignore = [
    "integrations_huggingface.py",
    "integrations_lightning.py",
    "on_gpu.py",
    "preload.py",
]  # scripts: not imported for doctests


@pytest.fixture(scope="session")
def _alive() -> Iterator[Callable[[int], Cluster]]:
    """Returns a cluster of n processes: the one of the test before, unless that test has broken it."""
    clusters: dict[int, Cluster] = {}

    def alive(n: int) -> Cluster:
        if n in clusters and not all(process.is_alive() for process in clusters[n].processes):
            clusters.pop(n).stop(kill=True)
        if n not in clusters:
            clusters[n] = Cluster(n)
        return clusters[n]

    yield alive
    for cluster in clusters.values():
        cluster.stop()


@pytest.fixture
def three(_alive: Callable[[int], Cluster]) -> Cluster:
    return _alive(3)


@pytest.fixture
def four(_alive: Callable[[int], Cluster]) -> Cluster:
    """Four real processes over gloo."""
    return _alive(4)


@pytest.fixture
def five(_alive: Callable[[int], Cluster]) -> Cluster:
    return _alive(5)


@pytest.fixture
def six(_alive: Callable[[int], Cluster]) -> Cluster:
    """Six processes: 2 nodes of 3 ranks, or 3 nodes of 2."""
    return _alive(6)


@pytest.fixture
def brittle() -> Iterator[Cluster]:
    """Four processes for a single test, which may break them."""
    cluster = Cluster(4, timeout=60.0)
    yield cluster
    cluster.stop(kill=True)


@pytest.fixture
def hasty() -> Iterator[Cluster]:
    """Like `brittle`, with a time-out of 3 s, for tests in which a process waits for the time-out."""
    cluster = Cluster(4, timeout=3.0)
    yield cluster
    cluster.stop(kill=True)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-golden", action="store_true", help="write the golden trajectories anew")
    parser.addoption("--rewrite-pages", action="store_true", help="write the outputs of rumor plan and rumor probe on the pages anew")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that use clusters, and sort the files.

    Workers of pytest-xdist take one file after the other. Files with many tests of processes come first and short files last, so that all
    workers end at about the same time.
    """
    of_file: Counter[Path] = Counter()
    for item in items:
        if {"_alive", "brittle", "hasty", "strangers"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("processes")
        of_file[item.path] += item.get_closest_marker("processes") is not None
    items.sort(key=lambda item: -of_file[item.path])
