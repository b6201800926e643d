from __future__ import annotations

import pytest

from pytest_vllm_cleanup.checks.quarantine import Leak, Outstanding, Quarantine, farewell, figure_of, outstanding_of
from pytest_vllm_cleanup.memory import Adjustment, Reading
from pytest_vllm_cleanup.memory.rules import DeviceVerdict

MIB, GIB = 1 << 20, 1 << 30
TOTAL = 80 * GIB


def leak(size, owner="test test_a.py::test_x", device="cuda:0", reason="allocator", holder=""):
    return Leak(owner, "test_a.py::test_x", device, size, holder, reason)


def reading(device="cuda:0", allocated=0, cached=0, children=0, context=0, others=0, **more):
    reserved = allocated + cached
    own = context + reserved
    return Reading(
        device=device,
        used=own + children + others,
        total=TOTAL,
        own=own,
        children=children,
        allocated=allocated,
        reserved=reserved,
        **more,
    )


def snapshot(*readings):
    return {entry.device: entry for entry in readings}


def nothing(live):
    return {}


def quarantine(*entries):
    made = Quarantine()
    for entry in entries:
        made.add(entry)
    return made


def test_a_leak_below_its_tolerance_is_none():
    made = quarantine(Outstanding(leak(MIB), 0, tolerance=MIB), Outstanding(leak(MIB + 1), 0, tolerance=MIB))
    assert [entry.left for entry in made.outstanding] == [MIB + 1]


def test_an_engine_that_does_not_fit_because_of_a_leak_is_refused_in_numbers():
    made = quarantine(Outstanding(leak(13 * GIB, holder="test_a.py: module global KEPT[0] -> Tensor"), 0, MIB))
    now = snapshot(reading(allocated=13 * GIB, context=GIB))
    assert made.refusal({"cuda:0": 0.9}, now) == (
        "cuda:0 has 66 GiB of 80 GiB free, and this engine asks for 72 GiB (gpu_memory_utilization 0.9). In its way: "
        "test test_a.py::test_x left 13 GiB on cuda:0, held by test_a.py: module global KEPT[0] -> Tensor. "
        "Mend that leak first; with --vllm-cleanup-on-leak=fail engines are let try all the same."
    )


def test_a_holder_that_was_not_found_is_not_mentioned():
    made = quarantine(Outstanding(leak(13 * GIB), 0, MIB))
    assert "left 13 GiB on cuda:0. Mend" in made.refusal({"cuda:0": 0.9}, snapshot(reading(allocated=13 * GIB)))


@pytest.mark.parametrize(("others", "refused"), [(8 * GIB, False), (8 * GIB + 1, True), (20 * GIB, True)])
def test_an_engine_that_fits_is_let_through(others, refused):
    made = quarantine(Outstanding(leak(12 * GIB), 0, MIB))
    now = snapshot(reading(allocated=12 * GIB, others=others))
    assert bool(made.refusal({"cuda:0": 0.75}, now)) is refused


def test_an_engine_that_would_not_fit_without_the_leak_either_is_left_to_vllm():
    made = quarantine(Outstanding(leak(2 * GIB), 0, MIB))
    assert made.refusal({"cuda:0": 0.9}, snapshot(reading(allocated=2 * GIB, others=7 * GIB)))
    assert made.refusal({"cuda:0": 0.9}, snapshot(reading(allocated=2 * GIB, others=9 * GIB))) is None


def test_several_leaks_are_in_the_way_together():
    entries = [Outstanding(leak(6 * GIB, owner=f"test t::{name}"), 0, MIB) for name in ("one", "two")]
    text = quarantine(*entries).refusal({"cuda:0": 0.9}, snapshot(reading(allocated=12 * GIB)))
    assert "In its way: test t::one left 6 GiB on cuda:0; test t::two left 6 GiB on cuda:0." in text


def test_a_leak_on_another_device_is_not_in_the_way():
    made = quarantine(Outstanding(leak(13 * GIB, device="cuda:1"), 0, MIB))
    now = snapshot(reading(others=13 * GIB), reading("cuda:1", allocated=13 * GIB))
    assert made.refusal({"cuda:0": 0.9}, now) is None
    assert made.refusal({"cuda:0": 0.5, "cuda:1": 0.5}, now) is None
    assert "cuda:1 has 67 GiB" in made.refusal({"cuda:1": 0.9}, now)
    # What stands in the way on the first device is nobody's leak, so the engine would not start in any case.
    assert made.refusal({"cuda:0": 0.9, "cuda:1": 0.9}, now) is None


def test_a_device_that_cannot_be_read_refuses_nothing():
    made = quarantine(Outstanding(leak(13 * GIB), 0, MIB))
    assert made.refusal({"cuda:0": 0.9}, {}) is None
    assert made.refusal({"cuda:0": 0.9}, {"cuda:0": Reading(device="cuda:0", used=TOTAL)}) is None


def test_a_device_is_found_again_under_its_new_name():
    made = quarantine(Outstanding(leak(13 * GIB), 0, MIB, identity="GPU-a"))
    now = snapshot(reading(identity="GPU-b"), reading("cuda:1", allocated=13 * GIB, identity="GPU-a"))
    made.review(now, nothing)
    assert made.outstanding[0].left == 13 * GIB
    assert made.refusal({"cuda:0": 0.9}, now) is None
    assert "cuda:1 has 67 GiB" in made.refusal({"cuda:1": 0.9}, now)


@pytest.mark.parametrize(
    ("allocated", "left"),
    [(30 * GIB, [12 * GIB]), (18 * GIB, [12 * GIB]), (10 * GIB, [4 * GIB]), (6 * GIB + MIB, []), (0, [])],
)
def test_a_leak_is_at_most_what_the_figure_is_above_its_baseline(allocated, left):
    made = quarantine(Outstanding(leak(12 * GIB), 6 * GIB, MIB))
    made.review(snapshot(reading(allocated=allocated)), nothing)
    assert [entry.left for entry in made.outstanding] == left


def test_a_leak_that_came_back_stays_forgotten_when_the_memory_is_taken_again():
    made = quarantine(Outstanding(leak(12 * GIB), 0, MIB))
    made.review(snapshot(reading(allocated=3 * GIB)), nothing)
    made.review(snapshot(reading(allocated=12 * GIB)), nothing)
    assert made.outstanding[0].left == 3 * GIB
    made.review(snapshot(reading()), nothing)
    made.review(snapshot(reading(allocated=12 * GIB)), nothing)
    assert made.outstanding == []
    assert made.notes() == []


def test_what_cannot_be_read_has_not_come_back():
    made = quarantine(Outstanding(leak(12 * GIB), 0, MIB))
    made.review({}, nothing)
    made.review({"cuda:0": Reading(device="cuda:0", used=0, total=TOTAL)}, nothing)
    assert made.outstanding[0].left == 12 * GIB


def test_engines_that_came_or_left_since_are_not_the_leak():
    def expected(live):
        return {"cuda:0": Adjustment(allocated={frozenset({1}): -20 * GIB, frozenset(): 9 * GIB}[live])}

    before, after = (Outstanding(leak(4 * GIB), base, MIB, live) for base, live in ((20 * GIB, {1}), (0, set())))
    before.live, after.live = frozenset(before.live), frozenset(after.live)
    gone = quarantine(before)
    gone.review(snapshot(reading(allocated=4 * GIB)), expected)
    assert gone.outstanding[0].left == 4 * GIB
    came = quarantine(after)
    came.review(snapshot(reading(allocated=9 * GIB)), expected)
    assert came.outstanding == []


@pytest.mark.parametrize(
    ("back", "left"),
    [(5 * GIB, {"second": 2 * GIB}), (2 * GIB, {"first": 5 * GIB}), (7 * GIB, {}), (GIB, {"first": 5, "second": 1})],
)
def test_of_two_leaks_the_one_of_the_size_that_came_back_is_forgotten(back, left):
    first = Outstanding(leak(5 * GIB, owner="first"), GIB, MIB)
    second = Outstanding(leak(2 * GIB, owner="second"), 6 * GIB, MIB)
    made = quarantine(first, second)
    made.review(snapshot(reading(allocated=8 * GIB - back)), nothing)
    found = {entry.leak.owner: entry.left for entry in made.outstanding}
    assert found == {name: size if size >= GIB else size * GIB for name, size in left.items()}
    made.review(snapshot(reading(allocated=8 * GIB - back)), nothing)  # nothing is taken off twice
    assert {entry.leak.owner: entry.left for entry in made.outstanding} == found


def test_leaked_objects_that_are_followed_tell_it_exactly():
    held = {"first": 5 * GIB, "second": 5 * GIB}
    made = quarantine(
        Outstanding(leak(5 * GIB, owner="first"), 0, MIB, held=lambda: held["first"]),
        Outstanding(leak(5 * GIB, owner="second"), 5 * GIB, MIB, held=lambda: held["second"]),
        Outstanding(leak(3 * GIB, owner="third"), 10 * GIB, MIB),
    )
    held["first"] = 0
    made.review(snapshot(reading(allocated=8 * GIB)), nothing)
    assert {entry.leak.owner: entry.left for entry in made.outstanding} == {"second": 5 * GIB, "third": 3 * GIB}


def test_figures_of_different_layers_do_not_mix():
    made = quarantine(
        Outstanding(leak(5 * GIB, owner="tensor"), 0, MIB),
        Outstanding(leak(3 * GIB, owner="process", reason="processes"), 0, MIB),
    )
    made.review(snapshot(reading(allocated=5 * GIB)), nothing)
    assert [entry.leak.owner for entry in made.outstanding] == ["tensor"]


@pytest.mark.parametrize(
    ("reason", "figure"),
    [
        ("allocator", 7),
        ("allocator cache", 3),
        ("processes", 20),
        ("below allocator", 100),
        ("device", 1120),
        ("host", 1130),
    ],
)
def test_each_layer_has_its_figure(reason, figure):
    now = reading(allocated=7, cached=3, children=20, context=100, others=1000)
    assert figure_of(reason, now) == figure
    assert figure_of(reason, Reading(device="cuda:0")) is None


def verdict(reason="allocator", stayed=4 * GIB, after=10 * GIB):
    return DeviceVerdict("leaked", reason, "cuda:0", "meter", stayed, after - stayed, after, MIB)


def test_a_leak_is_measured_from_the_figure_that_it_was_judged_by():
    now = reading(allocated=9 * GIB, identity="GPU-a")  # a part has come back meanwhile
    entry = outstanding_of(verdict(), now, leak(4 * GIB), frozenset({3}))
    assert (entry.baseline, entry.tolerance, entry.live, entry.identity) == (6 * GIB, MIB, frozenset({3}), "GPU-a")
    made = quarantine(entry)
    made.review(snapshot(now), nothing)
    assert made.outstanding[0].left == 3 * GIB


def test_a_leak_of_the_whole_device_is_measured_without_the_neighbours_that_were_left_out():
    now = reading(allocated=GIB, context=GIB, others=30 * GIB)
    entry = outstanding_of(verdict("device", after=5 * GIB), now, leak(4 * GIB, reason="device"), frozenset())
    assert entry.baseline == 27 * GIB
    made = quarantine(entry)
    made.review(snapshot(reading(context=GIB, others=28 * GIB)), nothing)
    assert made.outstanding[0].left == 2 * GIB


@pytest.mark.parametrize(
    ("held", "followed"),
    [([], False), ([4 * GIB], True), ([3 * GIB, GIB - MIB], True), ([3 * GIB], False), ([9 * GIB], True)],
)
def test_objects_are_followed_where_they_add_up_to_the_leak(held, followed):
    entry = outstanding_of(verdict(), reading(), leak(4 * GIB), frozenset(), [lambda size=size: size for size in held])
    assert (entry.held is not None) is followed


def test_what_objects_do_not_explain_stays_with_them():
    size = [4 * GIB - 1000]
    entry = outstanding_of(verdict(), reading(), leak(4 * GIB), frozenset(), [lambda: size[0]])
    assert entry.held() == 4 * GIB
    size[0] = 0
    assert entry.held() == 1000


def test_a_leak_reads_as_a_sentence():
    assert farewell(leak(GIB)) == "test test_a.py::test_x left 1 GiB on cuda:0 (--vllm-cleanup-on-leak=exit)"
    made = quarantine(Outstanding(leak(GIB), 0, MIB))
    assert made.notes() == ["still there from an earlier leak: test test_a.py::test_x left 1 GiB on cuda:0"]
