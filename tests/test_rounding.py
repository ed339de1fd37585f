"""experiments/rounding.py: nearest against stochastic rounding."""

import sys
from pathlib import Path

import pytest
import torch

from tests import warm

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "experiments"))
pytest.importorskip("sklearn")

import rounding  # noqa: E402
from rumor.engines.codes import CODES  # noqa: E402


def test_stochastic_rounding_has_no_bias_and_nearest_rounding_has_the_smaller_error() -> None:
    x = torch.randn(1, 1_000)
    code = rounding.Stochastic(CODES[4], 0)
    mean = torch.stack([code.round_trip(x.clone()) for _ in range(400)]).mean(0)
    nearest = CODES[4].round_trip(x.clone())
    assert (mean - x).norm() < (nearest - x).norm() / 4
    assert rounding.error("nearest") < 0.8 * rounding.error("stochastic")


def test_the_study_runs_and_does_not_touch_the_page(tmp_path: Path) -> None:
    before = rounding.PAGE.read_text()
    done = warm.run([ROOT / "experiments" / "rounding.py", "--seeds", "1", "--steps", "7", "--out", tmp_path / "found.csv"])
    assert done.returncode == 0, done.stderr
    rows = rounding.tables.read(tmp_path / "found.csv")
    assert len({row["apart"] for row in rows}) == len(rows) == 6, "each way of rounding gives other models"
    assert rounding.PAGE.read_text() == before


def test_the_page_has_the_table_of_the_results() -> None:
    text = rounding.PAGE.read_text()
    assert rounding.filled_in(text) == text
