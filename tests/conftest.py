"""Fixtures: one set of processes for the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.cluster import Cluster


@pytest.fixture(scope="session")
def _clusters() -> Iterator[list[Cluster]]:
    clusters: list[Cluster] = []
    yield clusters
    for cluster in clusters:
        cluster.stop()


@pytest.fixture
def four(_clusters: list[Cluster]) -> Cluster:
    """Four real processes over gloo, the same for all tests unless one of these breaks them."""
    if not _clusters or not all(process.is_alive() for process in _clusters[-1].processes):
        _clusters.append(Cluster(4))
    return _clusters[-1]


@pytest.fixture(scope="session")
def six() -> Iterator[Cluster]:
    """2 nodes of 3 ranks, or 3 of 2; its very last test breaks it."""
    cluster = Cluster(6)
    yield cluster
    cluster.stop(kill=True)


@pytest.fixture
def brittle() -> Iterator[Cluster]:
    """Four processes of their own for what may break them; a time-out of 6 s."""
    cluster = Cluster(4, timeout=6.0)
    yield cluster
    cluster.stop(kill=True)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-golden", action="store_true", help="write the golden trajectories anew")
