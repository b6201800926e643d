"""Each rule from both sides: what must be called a leak, and what must not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_vllm_cleanup.memory import Adjustment, Grants, ProcessUse, Reading, combine, judge, judge_all

MIB = 1 << 20
GIB = 1 << 30
CONTEXT = 621 * MIB

IDLE = Reading("cuda:0", ("nvml",), 4 * MIB, 140 * GIB, 0, 0, 0, processes=(), identity="GPU-a")
"""Our device alone, CUDA not up in this process."""


def in_process(allocated=0, reserved=None, below=CONTEXT, children=0, others=0):
    """A device on which this process has a context, and whose figures fit together."""
    reserved = allocated + 2 * MIB if reserved is None else reserved
    own = reserved + below
    uses = [ProcessUse(1, own, "pytest", ours=True)]
    uses += [ProcessUse(2, children, "EngineCore", ours=True)] if children else []
    uses += [ProcessUse(3, others, "stranger", ours=False)] if others else []
    return Reading(
        "cuda:0",
        ("nvml", "torch"),
        4 * MIB + own + children + others,
        140 * GIB,
        own,
        children,
        others,
        allocated,
        reserved,
        tuple(uses),
        "GPU-a",
    )


def in_child(children=0, others=0):
    """A device on which only other processes are."""
    uses = [ProcessUse(2, children, "EngineCore", ours=True)] if children else []
    uses += [ProcessUse(3, others, "stranger", ours=False)] if others else []
    used = 4 * MIB + children + others
    return replace(IDLE, used=used, children=children, others=others, processes=tuple(uses))


def hidden(reading, listed=True):
    """The same seen from a container: the driver's process ids are not ours."""
    uses = tuple(replace(use, pid=use.pid + 90000, ours=False) for use in reading.processes)
    return replace(reading, own=None, children=None, others=None, processes=uses if listed else ())


def said(verdict):
    return verdict.outcome, verdict.reason


# The allocator of this process


def test_an_engine_that_was_drained_is_released():
    verdict = judge(in_process(), in_process(allocated=10_240))
    assert said(verdict) == ("released", "")
    assert (verdict.meter, verdict.stayed, verdict.tolerance) == ("torch allocator", 10_240, MIB)


def test_tensors_that_stay_are_a_leak_in_numbers():
    verdict = judge(in_process(), in_process(allocated=96 * MIB))
    assert said(verdict) == ("leaked", "allocator")
    assert (verdict.device, verdict.baseline, verdict.after, verdict.stayed) == (
        "cuda:0",
        0,
        96 * MIB,
        96 * MIB,
    )


@pytest.mark.parametrize(("stayed", "outcome"), [(MIB, "released"), (MIB + 1, "leaked")])
def test_the_default_tolerance_of_the_allocator_is_one_mib(stayed, outcome):
    assert judge(in_process(), in_process(allocated=stayed)).outcome == outcome


def test_before_cuda_was_up_nothing_was_allocated():
    assert said(judge(IDLE, in_process(allocated=32 * MIB))) == ("leaked", "allocator")
    assert judge(IDLE, in_process()).outcome == "released"


def test_a_tolerance_lets_tensors_pass():
    assert judge(in_process(), in_process(allocated=96 * MIB), tolerance=100 * MIB).outcome == "released"
    assert judge(in_process(), in_process(allocated=10_240), tolerance=0).outcome == "leaked"


def test_an_engine_that_lives_on_by_right_is_not_charged():
    expected = Adjustment(allocated=14 * GIB)
    after = in_process(allocated=14 * GIB, reserved=15 * GIB, below=CONTEXT + 200 * MIB)
    assert judge(in_process(), after, expected=expected).outcome == "released"


def test_a_leak_beside_an_engine_that_lives_on_is_seen():
    verdict = judge(in_process(), in_process(allocated=15 * GIB), expected=Adjustment(allocated=14 * GIB))
    assert said(verdict) == ("leaked", "allocator")
    assert verdict.stayed == GIB


@pytest.mark.parametrize(("grew", "outcome"), [(60 * MIB, "released"), (65 * MIB, "leaked")])
def test_an_engine_that_lives_on_may_grow_a_little_by_working(grew, outcome):
    grants = Grants(working=Adjustment(allocated=64 * MIB))
    verdict = judge(in_process(14 * GIB), in_process(14 * GIB + grew), grants=grants)
    assert verdict.outcome == outcome
    assert (verdict.stayed, verdict.tolerance) == (grew, 64 * MIB)


def test_a_child_engine_that_lives_on_may_load_kernels():
    grants = Grants(working=Adjustment(children=256 * MIB))
    before = in_child(children=14 * GIB)
    assert judge(before, in_child(children=14 * GIB + 200 * MIB), grants=grants).outcome == "released"
    assert said(judge(before, in_child(children=15 * GIB), grants=grants)) == ("leaked", "processes")


def test_what_a_leaving_engine_of_wider_scope_keeps_is_seen():
    before = in_process(allocated=14 * GIB)
    gone = Adjustment(allocated=-14 * GIB)
    assert judge(before, in_process(), expected=gone).outcome == "released"
    assert said(judge(before, in_process(allocated=5 * GIB), expected=gone)) == ("leaked", "allocator")


def test_less_than_before_is_released_with_nothing_stayed():
    verdict = judge(in_process(allocated=GIB), in_process())
    assert (verdict.outcome, verdict.stayed) == ("released", 0)


def test_a_pool_that_is_reserved_without_a_tensor_is_a_leak():
    verdict = judge(in_process(), in_process(allocated=0, reserved=14 * GIB))
    assert said(verdict) == ("leaked", "allocator cache")
    assert verdict.stayed > 13 * GIB


def test_a_segment_in_use_by_half_is_no_leak():
    assert judge(in_process(), in_process(allocated=0, reserved=200 * MIB)).outcome == "released"


def test_an_allocator_that_can_no_longer_be_read_is_not_released():
    lost = replace(in_process(allocated=GIB), allocated=None, reserved=None)
    assert judge(in_process(allocated=GIB), lost).outcome == "unknown"


def test_an_allocator_that_can_no_longer_be_read_does_not_hide_or_invent_driver_level_growth():
    lost = replace(in_process(allocated=9 * GIB), allocated=None, reserved=None)
    assert said(judge(in_process(allocated=GIB), lost)) == ("leaked", "below allocator")


# Our other processes


def test_a_child_that_is_gone_is_released():
    verdict = judge(IDLE, in_child())
    assert (said(verdict), verdict.meter) == (("released", ""), "processes on the device")
    busy = in_process()
    assert judge(busy, busy).outcome == "released"


def test_a_child_that_stays_is_a_leak():
    verdict = judge(IDLE, in_child(children=14 * GIB))
    assert said(verdict) == ("leaked", "processes")
    assert (verdict.meter, verdict.stayed) == ("processes on the device", 14 * GIB)


def test_the_context_of_a_child_alone_is_a_leak():
    assert said(judge(in_process(), in_process(children=30 * MIB))) == ("leaked", "processes")


def test_a_child_of_wider_scope_is_not_charged_and_hides_nothing():
    before = in_child(children=10 * GIB)
    assert judge(before, before).outcome == "released"
    assert judge(IDLE, before, expected=Adjustment(children=10 * GIB)).outcome == "released"
    both = judge(IDLE, in_child(children=12 * GIB), expected=Adjustment(children=10 * GIB))
    assert (said(both), both.stayed) == (("leaked", "processes"), 2 * GIB)


def test_an_engine_that_went_to_sleep_does_not_hide_another_ones_leak():
    before, after = in_child(children=10 * GIB), in_child(children=9 * GIB)
    assert said(judge(before, after, expected=Adjustment(children=-9 * GIB))) == ("leaked", "processes")


def test_a_child_leak_is_seen_while_a_stranger_shrinks():
    verdict = judge(in_child(others=20 * GIB), in_child(children=5 * GIB))
    assert said(verdict) == ("leaked", "processes")


# This process below the allocator


def test_the_first_context_is_granted():
    assert judge(IDLE, in_process(below=CONTEXT)).outcome == "released"


def test_the_first_use_grants_no_gigabytes():
    assert said(judge(IDLE, in_process(below=3 * GIB))) == ("leaked", "below allocator")


def test_a_measured_context_bounds_the_first_use():
    grants = Grants(context=CONTEXT)
    assert judge(IDLE, in_process(below=CONTEXT + 140 * MIB), grants=grants).outcome == "released"
    verdict = judge(IDLE, in_process(below=1900 * MIB), grants=grants)
    assert said(verdict) == ("leaked", "below allocator")


def test_kernels_may_load_later_and_gigabytes_may_not():
    assert judge(in_process(), in_process(below=761 * MIB)).outcome == "released"
    assert said(judge(in_process(), in_process(below=CONTEXT + 600 * MIB))) == ("leaked", "below allocator")


def test_the_context_is_granted_once_not_per_test():
    after = in_process(below=2 * CONTEXT)
    assert said(judge(in_process(), after)) == ("leaked", "below allocator")


def test_a_context_without_torch_is_not_granted_again_and_again():
    before = replace(in_process(), allocated=None, reserved=None)
    after = replace(in_process(below=2 * GIB), allocated=None, reserved=None)
    assert said(judge(before, after)) == ("leaked", "below allocator")


def test_the_first_use_by_torch_beside_another_librarys_context_is_granted():
    before = replace(in_process(below=200 * MIB), allocated=None, reserved=None)
    assert judge(before, in_process(below=900 * MIB)).outcome == "released"
    assert said(judge(before, in_process(below=3 * GIB))) == ("leaked", "below allocator")


def test_an_engine_that_woke_up_has_not_grown():
    # Asleep, 14 GiB of what the allocator counts are not there.
    asleep = in_process(allocated=14 * GIB, below=CONTEXT - 14 * GIB)
    awake = in_process(allocated=14 * GIB, below=CONTEXT + 100 * MIB)
    assert judge(asleep, awake, grants=Grants(context=CONTEXT)).outcome == "released"
    grown = in_process(allocated=14 * GIB, below=CONTEXT + 700 * MIB)
    assert said(judge(asleep, grown, grants=Grants(context=CONTEXT))) == ("leaked", "below allocator")


def test_what_an_engine_that_lives_on_needs_below_the_allocator_can_be_expected():
    after = in_process(below=CONTEXT + GIB)
    assert judge(in_process(), after, expected=Adjustment(below=GIB)).outcome == "released"


# The whole device


@pytest.mark.parametrize("listed", [True, False])
def test_in_a_container_a_child_that_stays_is_a_leak_of_the_device(listed):
    verdict = judge(IDLE, hidden(in_child(children=14 * GIB), listed))
    assert (said(verdict), verdict.meter) == (("leaked", "device"), "device")
    assert verdict.stayed == 14 * GIB


@pytest.mark.parametrize("listed", [True, False])
def test_in_a_container_a_clean_test_is_released(listed):
    assert judge(IDLE, hidden(in_child(), listed)).outcome == "released"
    assert judge(hidden(in_process(), listed), hidden(in_process(), listed)).outcome == "released"


def test_in_a_container_the_first_context_is_granted_once():
    first = hidden(in_process(below=CONTEXT + 140 * MIB))
    assert judge(IDLE, first).outcome == "released"
    assert said(judge(IDLE, hidden(in_process(below=3 * GIB)))) == ("leaked", "device")
    assert said(judge(first, hidden(in_process(below=2 * GIB)))) == ("leaked", "device")
    measured = judge(IDLE, hidden(in_process(below=1300 * MIB)), grants=Grants(context=CONTEXT))
    assert said(measured) == ("leaked", "device")


def test_in_a_container_free_blocks_of_the_allocator_are_not_the_devices_leak():
    after = hidden(in_process(reserved=300 * MIB))
    assert judge(hidden(in_process()), after).outcome == "released"


def test_in_a_container_a_process_without_context_is_granted_none():
    assert judge(IDLE, hidden(in_child(children=300 * MIB))).outcome == "leaked"


def test_in_a_container_small_movements_of_the_driver_pass():
    assert judge(IDLE, hidden(replace(IDLE, used=60 * MIB), listed=False)).outcome == "released"


def test_in_a_container_an_engine_that_lives_on_is_not_charged():
    after = hidden(in_child(children=10 * GIB))
    assert judge(IDLE, after, expected=Adjustment(children=10 * GIB)).outcome == "released"
    assert judge(IDLE, after, expected=Adjustment(children=9 * GIB, below=GIB)).outcome == "released"
    inside = hidden(in_process(allocated=14 * GIB))
    assert judge(hidden(in_process()), inside, expected=Adjustment(allocated=14 * GIB)).outcome == "released"


def test_in_a_container_an_engine_that_woke_up_has_not_grown():
    asleep = hidden(in_process(allocated=14 * GIB, below=CONTEXT - 14 * GIB))
    awake = hidden(in_process(allocated=14 * GIB, below=CONTEXT + 100 * MIB))
    assert judge(asleep, awake, grants=Grants(context=CONTEXT)).outcome == "released"


def test_sizes_that_the_driver_keeps_to_itself_leave_the_decision_to_the_device():
    sizeless = replace(in_process(), own=None)
    assert judge(sizeless, sizeless).outcome == "released"
    grown = replace(sizeless, used=sizeless.used + 5 * GIB)
    assert said(judge(sizeless, grown)) == ("leaked", "device")


# Others


def test_growth_of_a_stranger_is_never_our_leak():
    verdict = judge(in_process(others=GIB), in_process(others=20 * GIB))
    assert said(verdict) == ("foreign", "other processes grew")
    assert (verdict.stayed, verdict.baseline, verdict.after) == (19 * GIB, GIB, 20 * GIB)


def test_our_leak_beside_a_growing_stranger_is_ours():
    assert judge(in_process(), in_process(allocated=GIB, others=20 * GIB)).outcome == "leaked"


def test_a_stranger_that_stays_as_it_was_is_not_mentioned():
    assert judge(in_process(others=GIB), in_process(others=GIB)).outcome == "released"
    assert judge(in_process(others=GIB), in_process()).outcome == "released"


def test_memory_that_nobody_listed_holds_is_neither_released_nor_ours():
    before = in_process()
    held = replace(before, used=before.used + 60 * GIB)
    assert judge(before, held).outcome == "unknown"


def test_what_contexts_cost_the_driver_beside_is_no_news():
    after = in_process()
    assert judge(IDLE, replace(after, used=after.used + 150 * MIB)).outcome == "released"


def test_strangers_of_unknown_size_make_growth_unknown():
    before = replace(in_process(others=GIB), others=None)
    after = replace(in_process(others=5 * GIB), others=None)
    assert judge(before, after).outcome == "unknown"
    assert judge(before, before).outcome == "released"


# Not measurable


def test_nothing_measured_is_unknown():
    assert judge(Reading("cuda:0"), Reading("cuda:0")).outcome == "unknown"
    assert judge(IDLE, Reading("cuda:0")).outcome == "unknown"
    assert judge(Reading("cuda:0"), IDLE).outcome == "unknown"


def test_the_allocator_alone_finds_leaks_but_releases_nothing():
    before = Reading("cuda:0", ("torch",), allocated=0, reserved=0)
    after = Reading("cuda:0", ("torch",), allocated=GIB, reserved=GIB)
    assert judge(before, after).outcome == "leaked"
    verdict = judge(before, before)
    assert verdict.outcome == "unknown"
    assert "other processes" in verdict.reason


def test_without_a_device_figure_the_processes_decide():
    before, after = replace(in_process(), used=None), replace(in_process(children=GIB), used=None)
    assert judge(before, before).outcome == "released"
    assert said(judge(before, after)) == ("leaked", "processes")


def test_an_empty_list_without_a_device_figure_proves_nothing_where_processes_are_hidden():
    idle = hidden(replace(IDLE, used=None), listed=False)
    assert judge(idle, idle).outcome == "unknown"


def test_readings_of_different_devices_are_not_compared():
    other = replace(in_process(children=10 * GIB), identity="GPU-b")
    assert judge(IDLE, other).outcome == "unknown"
    assert said(judge(IDLE, replace(other, allocated=GIB))) == ("leaked", "allocator")


# The host


def host(own, children=0):
    used = None if children is None else own + children
    return Reading("host", ("host",), used, 64 * GIB, own, children)


def test_host_memory_that_came_back_is_released():
    verdict = judge(host(GIB), host(GIB + 60 * MIB))
    assert (verdict.outcome, verdict.meter, verdict.tolerance) == ("released", "private host memory", 64 * MIB)


@pytest.mark.parametrize("after", [host(2 * GIB), host(GIB, children=GIB)])
def test_host_memory_that_stays_is_a_leak_wherever_it_is(after):
    verdict = judge(host(GIB), after)
    assert (said(verdict), verdict.stayed) == (("leaked", "host"), GIB)


def test_one_off_costs_of_the_first_engine_are_granted_on_the_host():
    grants = Grants(host=900 * MIB)
    assert judge(host(GIB), host(GIB + 900 * MIB), grants=grants).outcome == "released"
    assert judge(host(GIB), host(GIB + 1000 * MIB), grants=grants).outcome == "leaked"


def test_an_engine_on_the_host_that_lives_on_may_grow_a_little_by_working():
    grants = Grants(working=Adjustment(host=256 * MIB))
    assert judge(host(GIB), host(GIB + 200 * MIB), grants=grants).outcome == "released"
    assert judge(host(GIB), host(GIB + 300 * MIB), grants=grants).stayed == 300 * MIB


def test_an_engine_on_the_host_that_lives_on_is_not_charged():
    expected = Adjustment(host=4 * GIB)
    assert judge(host(GIB), host(GIB, children=4 * GIB), expected=expected).outcome == "released"
    assert judge(host(GIB, children=4 * GIB), host(GIB), expected=Adjustment(host=-4 * GIB)).stayed == 0


def test_a_child_whose_memory_may_not_be_read_makes_the_host_unknown():
    assert judge(host(GIB), host(GIB, children=None)).outcome == "unknown"


# All devices


def test_the_worst_device_decides_and_leaks_add_up():
    clean, leak = judge(IDLE, IDLE), judge(IDLE, in_child(children=2 * GIB))
    unknown = judge(Reading("cuda:1"), Reading("cuda:1"))
    foreign = judge(in_process(), in_process(others=GIB))
    assert combine([clean, clean]).outcome == "released"
    assert combine([clean, foreign]).outcome == "foreign"
    assert combine([foreign, unknown]).outcome == "unknown"
    verdict = combine([unknown, leak, clean, leak, foreign])
    assert (verdict.outcome, verdict.reason, verdict.stayed) == ("leaked", "processes", 4 * GIB)
    assert len(verdict.devices) == 5


def test_no_device_is_not_released():
    assert combine([]).outcome == "unknown"
    assert judge_all({}, {}).outcome == "unknown"


def test_a_device_is_found_again_under_another_ordinal():
    first, second = replace(IDLE, identity="GPU-a"), in_child(children=10 * GIB)
    second = replace(second, device="cuda:1", identity="GPU-b")
    swapped = {"cuda:0": replace(second, device="cuda:0"), "cuda:1": replace(first, device="cuda:1")}
    assert judge_all({"cuda:0": first, "cuda:1": second}, swapped).outcome == "released"


def test_expectations_and_grants_go_to_their_device():
    before = {"cuda:0": IDLE, "host": host(GIB)}
    after = {"cuda:0": in_child(children=GIB), "host": host(2 * GIB)}
    assert judge_all(before, after).stayed == 2 * GIB
    verdict = judge_all(
        before,
        after,
        expected={"cuda:0": Adjustment(children=GIB)},
        grants={"host": Grants(host=GIB)},
    )
    assert verdict.outcome == "released"


def test_a_device_that_is_no_longer_read_is_not_released():
    verdict = judge_all({"cuda:0": IDLE, "cuda:1": replace(IDLE, device="cuda:1", identity="GPU-b")}, {"cuda:0": IDLE})
    assert verdict.outcome == "unknown"
    assert [device.device for device in verdict.devices] == ["cuda:0", "cuda:1"]


def test_a_device_that_was_not_read_before_is_not_released():
    assert judge_all({}, {"cuda:0": IDLE}).outcome == "unknown"
    assert judge_all({}, {"cuda:0": in_process(allocated=GIB)}).outcome == "leaked"


# A device that other workers of the run use too


def shared(reading):
    return replace(reading, shared=True)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        pytest.param(in_child(), in_child(), ("released", ""), id="nothing"),
        pytest.param(in_child(), in_child(others=5 * GIB), ("foreign", "other processes grew"), id="theirs"),
        pytest.param(in_child(others=5 * GIB), in_child(), ("released", ""), id="theirs went"),
        pytest.param(in_child(others=5 * GIB), in_child(children=GIB), ("leaked", "processes"), id="ours instead"),
        pytest.param(in_process(), in_process(allocated=GIB, others=GIB), ("leaked", "allocator"), id="our tensors"),
    ],
)
def test_on_a_shared_device_our_processes_are_judged_by_themselves(before, after, expected):
    assert said(judge(shared(before), shared(after))) == expected


def test_on_a_shared_device_what_no_listed_process_holds_is_nobodys():
    after = replace(in_child(), used=in_child().used + 3 * GIB)
    assert judge(in_child(), after).outcome == "unknown"
    assert said(judge(shared(in_child()), shared(after))) == ("released", "")


def test_a_shared_device_does_not_decide_where_our_processes_are_not_told_from_theirs():
    before = replace(hidden(in_process()), context=True)
    after = replace(hidden(in_process(children=3 * GIB)), context=True)
    assert judge(before, after).outcome != "released"
    verdict = judge(shared(before), shared(after))
    assert verdict.outcome == "unknown"
    assert "other workers of this run use the device too, and the driver lists no process of this one" in verdict.reason
    assert judge(before, shared(after)).outcome == "unknown"
    # Our tensors are known all the same.
    leaked = replace(hidden(in_process(allocated=GIB)), context=True)
    assert said(judge(shared(before), shared(leaked))) == ("leaked", "allocator")
