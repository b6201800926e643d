"""Ways through a graph of holders: cheapest first, and bounded in time."""

from __future__ import annotations

import math
import time

from pytest_vllm_cleanup.diagnosis import ways

# 0 is held by 1 and 2, these by 3, that by 0; 4 holds 2.
HOLDERS = [[1, 2], [3], [3, 4], [0], []]


def found(price=lambda _: 1.0, detour=lambda _: 0.0, until=math.inf, holders=HOLDERS):
    return [
        (place, ways.path(place, toward)) for place, toward in ways.cheapest_first([0], holders, price, detour, until)
    ]


def test_each_object_is_met_once_by_its_shortest_way():
    assert found() == [(0, [0]), (1, [1, 0]), (2, [2, 0]), (3, [3, 1, 0]), (4, [4, 2, 0])]


def test_an_object_that_many_hold_is_gone_on_from_later():
    assert found(price=lambda place: 9.0 if place == 1 else 1.0)[3] == (3, [3, 2, 0])


def test_a_detour_is_taken_where_it_is_the_only_way():
    assert found(detour=lambda place: 5.0 * (place == 1)) == [
        (0, [0]),
        (2, [2, 0]),
        (3, [3, 2, 0]),
        (4, [4, 2, 0]),
        (1, [1, 0]),
    ]


def test_it_ends_when_time_is_up():
    line = [[number + 1] for number in range(100_000)] + [[]]
    assert len(found(until=time.monotonic() - 1, holders=line)) < 1000
    assert sum(1 for _ in ways.cheapest_first([0], line, lambda _: 1.0, lambda _: 0.0, math.inf)) == 100_001


def test_all_that_lead_to_a_target_are_reached():
    assert ways.reached([0], HOLDERS, math.inf) == {0, 1, 2, 3, 4}
    assert ways.reached([2], HOLDERS, math.inf) == {0, 1, 2, 3, 4}
    assert ways.reached([4], HOLDERS, math.inf) == {4}
    line = [[number + 1] for number in range(100_000)] + [[]]
    assert len(ways.reached([0], line, time.monotonic() - 1)) < 1000
    assert len(ways.reached([0], line, math.inf)) == 100_001
