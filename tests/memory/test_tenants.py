"""Neighbours on the device: never our leak, and never a hiding place for one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_vllm_cleanup.memory import Adjustment, ProcessUse, Reading, judge

MIB = 1 << 20
GIB = 1 << 30
CONTEXT = 600 * MIB
ME = 1


def device(ours=None, theirs=None, unlisted=0, tensors=None, living=None, **fields):
    """A device whose driver tells our processes from others: ``{pid: bytes}`` of ours and of theirs."""
    ours, theirs = ours or {}, theirs or {}
    living = [pid for pid in ours if pid != ME] if living is None else living
    uses = [ProcessUse(pid, size, f"ours{pid}", ours=True) for pid, size in ours.items()]
    uses += [ProcessUse(pid, size, f"theirs{pid}", ours=False) for pid, size in theirs.items()]
    children = [size for pid, size in ours.items() if pid != ME]
    return Reading(
        "cuda:0",
        ("nvml",),
        4 * MIB + sum(size or 0 for size in (*ours.values(), *theirs.values())) + unlisted,
        140 * GIB,
        ours.get(ME, 0),
        None if None in children else sum(children),
        None if None in theirs.values() else sum(theirs.values()),
        tensors,
        tensors,
        tuple(uses),
        listed=True,
        context=ME in ours,
        living=tuple(ProcessUse(pid, None, f"ours{pid}", ours=True) for pid in living),
        **fields,
    )


def hidden(how, ours=None, theirs=None, **fields):
    """The same where the driver lists the host's numbers (``listed``), nobody (``empty``), or no list (``refused``).

    Our processes are listed 90000 higher. With ``sizeless`` the numbers are ours, without what each one holds.
    """
    reading = device(ours, theirs, **fields)
    if how == "sizeless":
        uses = tuple(replace(use, bytes=None) for use in reading.processes)
        own = None if reading.own else 0
        return replace(
            reading,
            processes=uses,
            own=own,
            children=None if reading.children else 0,
            others=None if reading.others else 0,
        )
    uses = tuple(replace(use, pid=use.pid + 90000 * use.ours, ours=False, name=None) for use in reading.processes or ())
    uses = {"listed": uses, "empty": (), "refused": None}[how]
    reading = replace(reading, processes=uses, listed=False if uses is not None else None)
    if reading.absent and uses is not None:
        return replace(reading, own=0, children=0, others=sum(use.bytes for use in uses))
    return replace(reading, own=None, children=None, others=None)


HIDDEN = ["listed", "empty", "refused"]


def said(verdict):
    return verdict.outcome, [(change.pid, change.before, change.after) for change in verdict.processes]


# Where our processes can be told from others


@pytest.mark.parametrize("start", [{}, {7: 3 * GIB}, {7: 3 * GIB, 8: 20 * GIB}])
@pytest.mark.parametrize("end", [{}, {7: 3 * GIB}, {7: 9 * GIB}, {7: GIB}, {9: 30 * GIB}, {7: GIB, 9: 5 * GIB}])
@pytest.mark.parametrize("mine", [{}, {ME: CONTEXT}, {ME: CONTEXT, 2: 5 * GIB}])
def test_whatever_neighbours_do_our_leak_is_ours_alone(start, end, mine):
    before = device(mine, start)
    clean = judge(before, device(mine, end))
    grew = sum(end.values()) - sum(start.values()) > 64 * MIB
    assert clean.outcome == ("foreign" if grew else "released")
    assert all(change.pid in end for change in clean.processes)
    leak = judge(before, device({**mine, 3: 14 * GIB}, end))
    assert (said(leak), leak.stayed, leak.why) == (("leaked", [(3, 0, 14 * GIB)]), 14 * GIB, "")
    assert str(leak.processes[0]) == "pid 3 (ours3): 0 B -> 14 GiB"


def test_each_neighbour_that_grew_is_named_and_no_other_one():
    verdict = judge(device({}, {7: GIB, 8: 9 * GIB}), device({}, {7: 2 * GIB, 8: 8 * GIB, 9: 30 * GIB}))
    assert said(verdict) == ("foreign", [(9, 0, 30 * GIB), (7, GIB, 2 * GIB)])
    assert (verdict.stayed, verdict.meter) == (30 * GIB, "other processes on the device")


def test_an_engine_that_comes_and_goes_beside_a_growing_neighbour_has_left_nothing():
    fixture = Adjustment(children=-10 * GIB)
    verdict = judge(device({2: 10 * GIB}, {7: GIB}), device({}, {7: 11 * GIB}), expected=fixture)
    assert said(verdict) == ("foreign", [(7, GIB, 11 * GIB)])


def test_memory_that_nobody_is_listed_for_is_not_hidden_by_a_neighbour_that_ends():
    verdict = judge(device({ME: CONTEXT}, {7: 20 * GIB}), device({ME: CONTEXT}, unlisted=15 * GIB))
    assert (verdict.outcome, verdict.stayed, verdict.may_come_back) == ("unknown", 15 * GIB, True)
    assert "no process that is listed on it did" in verdict.reason
    assert "--pid=host" in verdict.reason


def test_neighbours_that_are_never_listed_were_there_before():
    before = device({ME: CONTEXT}, unlisted=9 * GIB)
    verdict = judge(before, device({ME: CONTEXT}, unlisted=20 * GIB))
    assert (verdict.outcome, verdict.reason) == ("foreign", "processes that are not listed here grew")


def test_numbers_that_turn_out_to_be_ours_only_later_are_compared_all_the_same():
    # At the baseline nothing of ours had been seen in the list yet.
    before = replace(hidden("listed", theirs={7: GIB}), own=None, children=None, others=None, context=True)
    assert judge(before, device({}, {7: GIB})).outcome == "released"
    assert said(judge(before, device({2: 5 * GIB}, {7: GIB}))) == ("leaked", [(2, 0, 5 * GIB)])
    ended = Adjustment(children=-5 * GIB)
    assert (
        judge(replace(before, used=before.used + 5 * GIB), device({}, {7: GIB}), expected=ended).outcome == "released"
    )


# Where nothing on the device can be ours


@pytest.mark.parametrize("how", HIDDEN)
@pytest.mark.parametrize("start", [{}, {7: 3 * GIB}])
def test_growth_without_any_process_of_ours_is_foreign(how, start):
    before = hidden(how, theirs=start)
    assert judge(before, hidden(how, theirs=start)).outcome == "released"
    verdict = judge(before, hidden(how, theirs={**start, 9: 14 * GIB}))
    assert verdict.outcome == "foreign"
    assert verdict.stayed == 14 * GIB
    assert verdict.why
    if how == "listed":
        assert said(verdict)[1] == [(9, 0, 14 * GIB)]
        assert not verdict.may_come_back
    else:
        # It can be the memory of a process of ours that has just ended.
        assert verdict.may_come_back


@pytest.mark.parametrize("how", HIDDEN)
def test_an_engine_of_wider_scope_that_ended_hides_no_neighbour(how):
    gone = Adjustment(children=-10 * GIB)
    before = hidden(how, {2: 10 * GIB}, {7: GIB})
    assert judge(before, hidden(how, theirs={7: GIB}), expected=gone).outcome == "released"
    assert judge(before, hidden(how, theirs={7: 9 * GIB}), expected=gone).outcome == "foreign"


# Where an engine's process is still alive


@pytest.mark.parametrize("how", HIDDEN)
@pytest.mark.parametrize(("start", "end"), [({}, {}), ({7: 3 * GIB}, {7: 3 * GIB}), ({7: 3 * GIB}, {7: 9 * GIB})])
def test_an_orphaned_engine_is_a_leak_though_its_number_is_hidden(how, start, end):
    verdict = judge(hidden(how, theirs=start), hidden(how, {2: 14 * GIB}, end))
    assert said(verdict) == ("leaked", [(2, 0, None)])
    assert verdict.reason == "device"
    assert verdict.why
    if how == "listed":
        assert verdict.stayed == 14 * GIB  # without what the neighbour took


def test_where_a_neighbour_comes_beside_an_orphan_the_report_says_that_both_may_be_counted():
    verdict = judge(hidden("listed"), hidden("listed", {2: 14 * GIB}, {9: 3 * GIB}))
    assert (said(verdict), verdict.stayed) == (("leaked", [(2, 0, None)]), 17 * GIB)
    assert "more processes are listed than can be ours" in verdict.why


def test_an_orphan_without_sizes_is_a_leak_beside_a_neighbour_without_sizes():
    before = hidden("sizeless", theirs={7: 3 * GIB})
    verdict = judge(before, hidden("sizeless", {2: 14 * GIB}, {7: 3 * GIB}))
    assert said(verdict) == ("leaked", [(2, 0, None)])
    assert verdict.why == "the driver does not say how much each process holds, and how much others hold is not told"


def test_an_orphan_is_not_hidden_by_a_neighbour_that_made_room_for_it():
    before = hidden("listed", theirs={7: 14 * GIB})
    assert judge(before, hidden("listed", {2: 14 * GIB})).outcome == "leaked"
    unseen = judge(hidden("empty", theirs={7: 14 * GIB}), hidden("empty", {2: 14 * GIB}))
    assert unseen.outcome == "unknown"
    assert "a leak may be hidden" in unseen.reason


def test_an_engine_that_lives_on_by_right_is_no_orphan():
    wider = Adjustment(children=10 * GIB)
    after = hidden("listed", {2: 10 * GIB}, {7: 8 * GIB})
    assert said(judge(hidden("listed", theirs={7: GIB}), after, expected=wider)) == ("foreign", [(7, GIB, 8 * GIB)])
    assert judge(hidden("empty"), hidden("empty", {2: 10 * GIB}), expected=wider).outcome == "released"


# Where this process has a context


@pytest.mark.parametrize("how", HIDDEN)
def test_a_context_and_a_stable_neighbour_are_released(how):
    before = hidden(how, {ME: CONTEXT}, {7: GIB}, tensors=0)
    assert judge(before, before).outcome == "released"


def test_a_neighbour_from_before_our_context_is_told_from_us():
    before = hidden("listed", theirs={7: GIB})
    verdict = judge(before, hidden("listed", {ME: CONTEXT}, {7: 9 * GIB}, tensors=0))
    assert said(verdict) == ("foreign", [(7, GIB, 9 * GIB)])
    leak = judge(before, hidden("listed", {ME: 5 * GIB}, {7: 9 * GIB}, tensors=0))
    assert (leak.outcome, leak.reason, leak.stayed) == ("leaked", "device", 5 * GIB)


def test_a_neighbour_that_comes_while_only_we_can_be_listed_is_told_from_us():
    before = hidden("listed", {ME: CONTEXT}, tensors=0)
    verdict = judge(before, hidden("listed", {ME: CONTEXT}, {9: 5 * GIB}, tensors=0))
    assert said(verdict) == ("foreign", [(9, 0, 5 * GIB)])
    leak = judge(before, hidden("listed", {ME: 4 * GIB}, {9: 5 * GIB}, tensors=0))
    assert (leak.outcome, leak.reason) == ("leaked", "device")


def test_where_several_could_be_ours_growth_is_unknown_and_says_what_to_do():
    before = hidden("listed", {ME: CONTEXT}, {7: GIB}, tensors=0)
    verdict = judge(before, hidden("listed", {ME: CONTEXT}, {7: 6 * GIB}, tensors=0))
    assert (verdict.outcome, verdict.stayed, verdict.may_come_back) == ("unknown", 5 * GIB, True)
    assert "the device grew by 5 GiB, and more processes are listed than can be ours" in verdict.reason
    assert "give these tests a device of their own" in verdict.reason


def test_where_several_could_be_ours_one_may_shrink_for_the_other_to_grow():
    before = hidden("listed", {ME: CONTEXT}, {7: 6 * GIB}, tensors=0)
    verdict = judge(before, hidden("listed", {ME: CONTEXT + 4 * GIB}, {7: GIB}, tensors=0))
    assert verdict.outcome == "unknown"
    assert "a leak may be hidden" in verdict.reason


def test_a_flushed_allocator_makes_no_room_in_which_a_leak_could_hide():
    before = hidden("listed", {ME: CONTEXT + 4 * GIB}, {7: 6 * GIB}, tensors=4 * GIB)
    assert judge(before, hidden("listed", {ME: CONTEXT}, {7: 6 * GIB}, tensors=0)).outcome == "released"


@pytest.mark.parametrize("how", ["empty", "refused"])
def test_a_device_that_was_in_use_before_us_is_not_ours_alone(how):
    before = hidden(how, theirs={7: 9 * GIB})
    verdict = judge(before, hidden(how, {ME: 8 * GIB}, {7: 9 * GIB}, tensors=0))
    assert verdict.outcome == "unknown"
    assert "9.0 GiB were in use before that no process of ours can have held" in verdict.reason


@pytest.mark.parametrize("how", HIDDEN)
def test_a_device_of_our_own_is_judged_as_a_whole(how):
    before = hidden(how, {ME: CONTEXT}, tensors=0)
    verdict = judge(before, hidden(how, {ME: CONTEXT + 4 * GIB}, tensors=0))
    assert (verdict.outcome, verdict.reason, verdict.stayed) == ("leaked", "device", 4 * GIB)
    assert (
        verdict.why
        == {
            "listed": "the driver lists no process of this one's process table",
            "empty": "the driver lists no process here",
            "refused": "the driver does not list processes here",
        }[how]
    )


def test_tensors_of_ours_are_a_leak_whatever_is_hidden():
    before = hidden("empty", {ME: CONTEXT}, {7: 9 * GIB}, tensors=0)
    verdict = judge(before, hidden("empty", {ME: CONTEXT + GIB}, {7: 30 * GIB}, tensors=GIB))
    assert (verdict.outcome, verdict.reason, verdict.stayed) == ("leaked", "allocator", GIB)
