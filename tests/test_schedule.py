"""Schedules: which steps are global."""

import math

import pytest

from rumor import Adaptive, Never, Periodic
from rumor.schedule import Schedule


def rounds(schedule: Schedule, losses: list[float]) -> tuple[list[int], list[int | None]]:
    """Steps that were global, and the period after each step."""
    state, steps, periods = schedule.start(), [], []
    for k, loss in enumerate(losses):
        if schedule.is_global(state):
            steps.append(k)
        state = schedule.next(state, loss)
        periods.append(state.H)
    return steps, periods


def test_periodic_is_global_where_k_plus_1_is_a_multiple_of_H() -> None:
    assert rounds(Periodic(4), [1.0] * 13)[0] == [3, 7, 11]
    assert rounds(Periodic(1), [1.0] * 3)[0] == [0, 1, 2]
    assert rounds(Never(), [1.0] * 100)[0] == []


def test_adaptive_grows_with_the_falling_loss() -> None:
    steps, periods = rounds(Adaptive(warmup=4, H_init=2), [8.0] * 4 + [2.0] * 20)
    assert steps[:3] == [1, 3, 5]  # F_init = 8 from steps 1 and 3; at step 5 the period becomes ceil(8 / 2 * 2) = 8
    assert periods[5] == 8
    assert steps[3:] == [13, 21]


def test_F_init_is_the_mean_of_the_warm_up() -> None:
    """Algorithm 2's halving from 0 would give F_init = 7 and a period of 14."""
    _, periods = rounds(Adaptive(warmup=4, H_init=2), [0.0, 4.0, 0.0, 12.0, 0.0, 1.0])
    assert periods[-1] == 16  # ceil(mean(4, 12) / 1 * 2)


@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_a_warm_up_shorter_than_H_init_still_takes_one_sample(warmup: int) -> None:
    steps, periods = rounds(Adaptive(warmup=warmup, H_init=4), [5.0] * 40)
    assert steps == list(range(3, 40, 4))
    assert set(periods) == {4}


@pytest.mark.parametrize("loss", [0.0, -1.0, math.nan, math.inf, None])
def test_a_loss_that_makes_no_sense_changes_nothing(loss: float) -> None:
    steps, periods = rounds(Adaptive(warmup=4, H_init=2), [1.0] * 4 + [loss] * 8)
    assert steps == [1, 3, 5, 7, 9, 11]
    assert set(periods) == {2}


def test_the_period_stays_within_1_and_H_max() -> None:
    assert rounds(Adaptive(warmup=2, H_init=2, H_max=16), [1.0] * 2 + [1e-300] * 3)[1][-1] == 16
    assert rounds(Adaptive(warmup=2, H_init=2), [1e-300] * 2 + [1e300] * 3)[1][-1] == 1
    assert rounds(Adaptive(warmup=2, H_init=2), [1e300] * 2 + [1e-300] * 3)[1][-1] == 64


@pytest.mark.parametrize("noise", [-3e-16, 0.0, 3e-16])
def test_rounding_does_not_part_two_nodes(noise: float) -> None:
    assert rounds(Adaptive(warmup=2, H_init=3), [0.0, 0.0, 0.7, 0.0, 0.0, 0.7 * (1 + noise)])[1][-1] == 3


def test_the_theorys_exponent_is_gentler() -> None:
    assert rounds(Adaptive(warmup=2, H_init=2, exponent=0.25), [16.0] * 2 + [1.0] * 2)[1][-1] == 4


@pytest.mark.parametrize("wrong", [0, -3, 2.5, True, None])
def test_H_must_be_a_whole_number_from_1_on(wrong: object) -> None:
    with pytest.raises(ValueError, match="H must be a whole number >= 1"):
        Periodic(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="H_init must be a whole number >= 1"):
        Adaptive(10, H_init=wrong)  # type: ignore[arg-type]


def test_other_wrong_input_is_refused() -> None:
    with pytest.raises(ValueError, match="H_init=8 is above H_max=4"):
        Adaptive(10, H_init=8, H_max=4)
    with pytest.raises(ValueError, match="warmup"):
        Adaptive(-1)
    with pytest.raises(ValueError, match="exponent must be positive"):
        Adaptive(1, exponent=0)
