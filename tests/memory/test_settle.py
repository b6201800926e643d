from __future__ import annotations

import pytest

from pytest_vllm_cleanup.memory.settle import Settled, settle


class World:
    """A clock that only sleeping moves, and a figure that depends on it."""

    def __init__(self, figure_at, cost=0.0):
        self.now = 100.0
        self.figure_at = figure_at
        self.cost = cost
        self.pauses = []

    def read(self):
        self.now += self.cost
        return self.figure_at(self.now - 100.0)

    def sleep(self, seconds):
        self.pauses.append(seconds)
        self.now += seconds

    def settle(self, timeout=10.0, flat_after=2.0):
        return settle(
            self.read,
            lambda figure: figure == 0,
            lambda figure: figure,
            timeout=timeout,
            flat_after=flat_after,
            clock=lambda: self.now,
            sleep=self.sleep,
        )


def test_a_clean_test_costs_one_reading_and_no_wait():
    world = World(lambda _at: 0)
    settled = world.settle()
    assert (settled.trend, settled.value, settled.waited, len(settled.samples)) == ("back", 0, 0.0, 1)
    assert world.pauses == []


def test_memory_that_comes_back_in_one_step_is_waited_for():
    settled = World(lambda at: 0 if at >= 1.4 else 500).settle()
    assert settled.trend == "back"
    assert 1.4 <= settled.waited < 1.4 + 0.26


def test_pauses_grow_from_50_to_250_ms():
    world = World(lambda at: 1000 - at)
    world.settle(timeout=3.0)
    assert world.pauses[0] == pytest.approx(0.05)
    assert max(world.pauses) == pytest.approx(0.25)
    # The last pause is what is left until the deadline.
    assert world.pauses[:-1] == sorted(world.pauses[:-1])


def test_a_stuck_figure_ends_waiting_early():
    settled = World(lambda _at: 500).settle(timeout=60.0, flat_after=2.0)
    assert settled.trend == "flat"
    assert 2.0 <= settled.waited < 2.3
    assert settled.rate == 0.0


def test_a_figure_is_stuck_only_after_four_reads_however_slow_they_are():
    settled = World(lambda _at: 500, cost=3.0).settle(timeout=60.0, flat_after=2.0)
    assert settled.trend == "flat"
    assert len(settled.samples) == 4


def test_a_fall_followed_by_a_plateau_is_stuck():
    settled = World(lambda at: 900 if at < 1 else 500).settle(timeout=60.0, flat_after=2.0)
    assert settled.trend == "flat"
    assert 3.0 <= settled.waited < 3.6


def test_a_falling_figure_is_waited_for_to_the_deadline():
    settled = World(lambda at: 1_000_000 - round(1000 * at)).settle(timeout=5.0, flat_after=1.0)
    assert settled.trend == "falling"
    assert settled.waited == pytest.approx(5.0)
    assert settled.rate == pytest.approx(1000, rel=0.02)


def test_the_rate_leaves_the_plateau_before_the_fall_out():
    settled = World(lambda at: 5000 if at < 1 else 6000 - round(1000 * at)).settle(timeout=2.0, flat_after=2.0)
    assert settled.trend == "falling"
    assert settled.rate == pytest.approx(1000, rel=0.25)


def test_a_growing_figure_times_out():
    settled = World(lambda at: 1000 + round(1000 * at)).settle(timeout=3.0)
    assert (settled.trend, settled.rate) == ("timeout", 0.0)


def test_a_figure_that_is_taken_again_is_not_called_falling():
    settled = World(lambda at: 1000 if at < 1 else 400 if at < 2.9 else 900).settle(3.0, flat_after=5.0)
    assert settled.trend == "timeout"


def test_without_time_one_reading_is_made():
    settled = World(lambda _at: 500).settle(timeout=0.0)
    assert (settled.trend, len(settled.samples)) == ("timeout", 1)


def test_memory_that_is_back_at_the_last_read_is_back():
    settled = World(lambda at: 0 if at >= 3.0 else 1000 - round(100 * at)).settle(timeout=3.0)
    assert settled.trend == "back"
    assert settled.waited == pytest.approx(3.0)


def test_an_unknown_figure_is_not_waited_for_to_the_deadline():
    settled = World(lambda _at: None).settle(timeout=60.0)
    assert (settled.trend, settled.rate) == ("flat", 0.0)


def test_time_inside_reads_counts():
    settled = World(lambda at: 1000 - round(at), cost=2.0).settle(timeout=5.0, flat_after=9.0)
    assert settled.waited < 5.0 + 2.0 + 0.01


def test_how_long_the_last_figure_has_stood_is_known():
    assert World(lambda at: 900 if at < 1 else 500).settle(timeout=60.0, flat_after=2.0).stood == pytest.approx(
        2.1, abs=0.2
    )
    assert World(lambda at: 1_000_000 - round(1000 * at)).settle(timeout=5.0, flat_after=1.0).stood == 0.0
    assert Settled(value=0, waited=0.0, samples=(), trend="back").stood == 0.0
