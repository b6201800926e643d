from __future__ import annotations

import pytest

from pytest_vllm_cleanup.memory import Adjustment, Grants, ProcessUse, Reading, context_bytes, growth_of
from pytest_vllm_cleanup.memory.expectation import CONTEXT_LIMIT

MIB = 1 << 20


def test_adjustments_add_up_figure_by_figure():
    one, two = Adjustment(1, 2, 3, 4), Adjustment(10, -20, 30, 40)
    assert one.plus(two) == Adjustment(11, -18, 33, 44)


def test_a_context_is_what_the_allocator_does_not_hold():
    assert context_bytes(Reading("cuda:0", own=623 * MIB, reserved=2 * MIB)) == 621 * MIB
    assert context_bytes(Reading("cuda:0", own=MIB, reserved=14 * MIB)) == 0
    assert context_bytes(Reading("cuda:0", own=MIB)) is None
    assert context_bytes(Reading("cuda:0", reserved=MIB)) is None


def test_an_unmeasured_context_is_granted_up_to_the_limit():
    assert Grants().first_use == CONTEXT_LIMIT
    assert Grants(context=600 * MIB, overhead=100 * MIB).first_use == 700 * MIB
    assert Grants(context=9 * CONTEXT_LIMIT).known_context == CONTEXT_LIMIT


def reading(device="cuda:0", **sizes):
    uses = tuple(ProcessUse(int(pid[1:]), size, None, ours=True) for pid, size in sizes.items())
    return Reading(device, processes=uses)


def test_growth_of_living_processes_is_expected_where_they_live():
    before, after = reading(p1=10, p2=5), reading(p1=17, p2=50, p3=4)
    assert growth_of({1, 3}, before, after) == Adjustment(children=11)
    assert growth_of({1}, after, before) == Adjustment(children=-7)
    assert growth_of({1}, reading("host", p1=10), reading("host", p1=12)) == Adjustment(host=2)


@pytest.mark.parametrize("before", [reading(p1=None), Reading("cuda:0")])
def test_growth_from_an_unknown_size_is_not_expected(before):
    assert growth_of({1}, before, reading(p1=17)) == Adjustment()


def test_strangers_of_the_same_number_are_not_expected_to_grow():
    stranger = Reading("cuda:0", processes=(ProcessUse(1, 99, None, ours=False),))
    assert growth_of({1}, reading(), stranger) == Adjustment()
