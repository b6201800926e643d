from __future__ import annotations

from pytest_vllm_cleanup.checks.charges import Mark, charges, levels
from pytest_vllm_cleanup.memory import DeviceVerdict, Verdict

MIB = 1 << 20


def leak(stayed, meter="torch allocator", device="cuda:0", tolerance=1):
    return DeviceVerdict("leaked", "allocator", device, meter, stayed * MIB, 0, stayed * MIB, tolerance * MIB)


def verdict(*devices):
    return Verdict("leaked", "allocator", sum(device.stayed for device in devices), devices)


def before(owner, missing, meter="torch allocator"):
    return Mark(owner, None, {("cuda:0", meter): missing * MIB})


def shares(marks, *devices):
    return [(charge.owner, charge.bytes // MIB) for charge in charges(marks, verdict(*devices))]


def test_without_fixtures_all_is_the_tests():
    assert shares([], leak(5)) == [("", 5)]


def test_what_goes_missing_with_a_fixture_is_the_fixtures():
    assert shares([before("a", 0)], leak(5)) == [("a", 5)]


def test_what_was_missing_before_is_the_tests():
    assert shares([before("a", 5)], leak(5)) == [("", 5)]


def test_each_is_charged_its_own():
    assert shares([before("a", 2), before("b", 52)], leak(122)) == [("", 2), ("a", 50), ("b", 70)]


def test_what_came_back_late_is_nobodys():
    assert shares([before("a", 150)], leak(100)) == [("", 100)]
    assert shares([before("a", 50, "processes on the device")], leak(100)) == [("a", 100)]


def test_a_share_within_the_tolerance_is_nobodys_unless_there_is_no_other():
    assert shares([before("a", 60)], leak(200, tolerance=64)) == [("a", 140)]
    assert shares([before("a", 30)], leak(70, tolerance=64)) == [("a", 40)]


def test_what_the_test_does_after_a_fixture_ended_is_the_tests():
    assert shares([before("a", 0), before("", 10)], leak(14)) == [("", 4), ("a", 10)]


def test_a_device_that_did_not_leak_charges_nobody():
    fine = DeviceVerdict("released", "", "cuda:1", "torch allocator", 0, 0, 0, 0)
    assert levels(verdict(fine, leak(3))) == {
        ("cuda:1", "torch allocator"): 0,
        ("cuda:0", "torch allocator"): 3 * MIB,
    }
    assert charges([], Verdict("released", "", 0, (fine,))) == []
