"""Schedules: which steps are global."""

import math

import pytest

import rumor
from rumor import Adaptive, LearningRate, Never, Periodic
from rumor.schedule import Schedule, ScheduleState


def rounds(schedule: Schedule, signals: list[float]) -> tuple[list[int], list[int | None]]:
    """Steps that were global, and the period after each step."""
    state, steps, periods = schedule.start(), [], []
    for k, signal in enumerate(signals):
        if schedule.is_global(state):
            steps.append(k)
        state = schedule.next(state, signal)
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


# ---- a period that follows the learning rate ----------------------------------------------------------------------------------------


def test_the_period_grows_as_the_learning_rate_falls() -> None:
    steps, periods = rounds(LearningRate(2, 8), [0.4] * 4 + [0.2] * 6 + [0.01] * 10)
    assert steps == [1, 3, 5, 9, 13]  # 2, from step 5 on 4, from step 13 on 8: 2 * 40 is above H_max
    assert periods[4:6] == [2, 4]
    assert periods[-1] == 8


def test_while_the_learning_rate_warms_up_the_period_is_H_min() -> None:
    _, periods = rounds(LearningRate(2, 64), [0.01 * k for k in range(1, 11)] + [0.05] * 2)
    assert periods == [2] * 11 + [4]  # lr_max = 0.1, the last one of the warm-up


def test_the_period_shrinks_again_if_the_learning_rate_is_raised() -> None:
    assert rounds(LearningRate(1, 8), [0.8, 0.2, *[0.8] * 6])[1] == [1, 4, 4, 4, 4, 1, 1, 1]


def test_power_2_is_the_quadratic_synchronization_rule() -> None:
    assert rounds(LearningRate(1, 64, power=2), [0.4, 0.1])[1] == [1, 16]
    assert rounds(LearningRate(2, 64, power=0.5), [0.4, 0.4, 0.1, 0.1])[1][-1] == 4


def test_the_shortest_period_lasts_until_the_learning_rate_has_clearly_fallen() -> None:
    """With a cosine, rounding up would leave H = 1 right after the highest learning rate."""
    periods = [rounds(LearningRate(1, 24, power=0.48), [1.0, lr])[1][-1] for lr in (1.0, 0.99, 0.44, 0.42, 0.1, 0.01, 0.001)]
    assert periods == [1, 1, 1, 2, 3, 9, 24]


@pytest.mark.parametrize("lr", [0.0, -1.0, math.nan, math.inf, None])
def test_a_learning_rate_that_makes_no_sense_changes_nothing(lr: float) -> None:
    assert rounds(LearningRate(2, 64), [0.4] * 2 + [0.2] * 2 + [lr] * 8) == ([1, 3, 7, 11], [2, 2, 2, *[4] * 9])
    assert set(rounds(LearningRate(2, 64), [lr] * 8)[1]) == {2}


@pytest.mark.parametrize(("power", "period"), [(1e-3, 4), (1.0, 64), (300.0, 64)])
def test_no_learning_rate_overflows(power: float, period: int) -> None:
    assert rounds(LearningRate(1, 64, power=power), [1e308, 5e-324])[1][-1] == period  # (2e631)^0.001 = 4.3
    assert rounds(LearningRate(1, 10**400), [1e300, 1.0])[1][-1] >= 10**299


@pytest.mark.parametrize("noise", [-3e-16, 0.0, 3e-16])
def test_rounding_does_not_lengthen_a_period_that_follows_the_learning_rate(noise: float) -> None:
    lrs = [0.0, 0.3, 0.0, 0.3 * (1 + noise), 0.0, 0.1 * (1 + noise), *[0.3] * 6]
    assert rounds(LearningRate(2, 64), lrs)[1][-1] == 2
    assert rounds(LearningRate(2, 64), lrs)[1][5] == 6


def test_a_schedule_resumes_from_another_one() -> None:
    by_lr = LearningRate(3, 24)
    state = ScheduleState(k=100, C=9, H=12, lr_max=0.4)
    assert by_lr.resumed(state) == state
    assert LearningRate(3, 6).resumed(state) == state._replace(H=6, C=5)
    assert LearningRate(16, 24).resumed(state) == state._replace(H=16)
    assert by_lr.resumed(ScheduleState(k=100, C=9, H=12)) == ScheduleState(k=100, C=2, H=3)
    assert by_lr.resumed(Adaptive(4).start()._replace(k=7, C=3, H=9, samples=2, F_init=1.0)).H == 3
    assert Adaptive(4).resumed(state).H == 4
    assert Periodic(6).resumed(state) == ScheduleState(k=100, C=5, H=6)


def test_a_state_that_was_saved_before_lr_max_came_still_loads() -> None:
    saved = {"k": 7, "C": 1, "H": 4, "F_init": 2.0, "samples": 3}
    assert ScheduleState(**saved) == ScheduleState(7, 1, 4, 2.0, 3, 0.0)


def test_which_signal_a_schedule_follows() -> None:
    assert [s.signal for s in (Never(), Periodic(3), Adaptive(3), LearningRate(3, 24))] == [None, None, "loss", "lr"]
    assert [s.needs_loss for s in (Never(), Periodic(3), Adaptive(3), LearningRate(3, 24))] == [False, False, True, False]
    by_lr = rumor.local_sgd(4, LearningRate(3, 24))
    assert (by_lr.needs_loss, by_lr.needs_lr) == (False, True)
    assert rumor.gossip_pga(rumor.ring, H=Adaptive(3)).needs_loss
    assert not rumor.diloco(4, 3).needs_lr


def test_a_wrong_learning_rate_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="H_min must be a whole number >= 1, got H_min=0"):
        LearningRate(0, 4)
    with pytest.raises(ValueError, match="H_min=8 is above H_max=4, the longest period allowed: raise H_max"):
        LearningRate(8, 4)
    for power in (0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="power must be positive"):
            LearningRate(3, 24, power=power)


@pytest.mark.parametrize("H", ["6", 2.5, True, LearningRate], ids=str)
def test_H_takes_a_number_or_a_schedule(H: object) -> None:
    methods = (lambda: rumor.gossip_pga(rumor.ring, H), lambda: rumor.local_sgd(H=H), lambda: rumor.slowmo(rumor.ring, H))
    for build in (*methods, lambda: rumor.diloco(H=H)):
        with pytest.raises(ValueError, match=r"whole number >= 1, or a schedule such as rumor.LearningRate\(3, 24\), got H="):
            build()  # type: ignore[no-untyped-call]
