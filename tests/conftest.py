"""Fixtures: one set of processes for the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.cluster import Cluster


@pytest.fixture(scope="session")
def four() -> Iterator[Cluster]:
    """Four real processes over gloo."""
    cluster = Cluster(4)
    yield cluster
    cluster.stop()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-golden", action="store_true", help="write the golden trajectories anew")
