from __future__ import annotations

import pytest

from pytest_vllm_cleanup.checks.ledger import FIRST_ENGINE_LIMIT, WORKING_ALLOWANCE, Ledger, footprint
from pytest_vllm_cleanup.diagnosis.tensors import Inventory
from pytest_vllm_cleanup.engines.registry import CloseReport, EngineHandle, Owner, State
from pytest_vllm_cleanup.memory import Adjustment, Gauge, Reading

GIB, MIB = 1 << 30, 1 << 20
TEST = Owner("test_a.py::test_a", "call", None, "function")
MODULE = Owner("test_a.py::test_a", "setup", "engine", "module")


class Dial:
    """A meter whose figures are set by hand."""

    name = "dial"
    reason = ""

    def __init__(self, device="cuda:0"):
        self.device = device
        self.figures = {}

    def available(self):
        return True

    def read(self, ours):
        return {self.device: Reading(device=self.device, meters=("dial",), **self.figures)}


@pytest.fixture
def dial():
    return Dial()


@pytest.fixture
def ledger(dial):
    return Ledger(Gauge([dial], frozenset))


def build(ledger, dial, number, owner, **figures):
    handle = EngineHandle(number, "LLMEngine", owner)
    ledger.before_build(handle)
    dial.figures = {**dial.figures, **figures}
    ledger.after_build(handle)
    handle.state, handle.in_process = State.LIVE, True
    return handle


def close(ledger, dial, handle, alive=(), **figures):
    dial.figures = {**dial.figures, **figures}
    handle.report = CloseReport(alive=list(alive))
    ledger.after_close(handle)


def test_an_engine_of_a_test_is_expected_to_be_gone(ledger, dial):
    start = ledger.live()
    build(ledger, dial, 1, TEST, allocated=14 * GIB, reserved=14 * GIB)
    assert ledger.expected(start) == {}


def test_an_engine_of_a_wider_scope_is_expected_to_stay_with_what_building_it_added(ledger, dial):
    dial.figures = {"allocated": GIB, "reserved": GIB}
    start = ledger.live()
    build(ledger, dial, 1, MODULE, allocated=15 * GIB, reserved=15 * GIB)
    assert ledger.expected(start) == {"cuda:0": Adjustment(allocated=14 * GIB)}
    assert ledger.grants({"cuda:0": Reading("cuda:0")}, 0)["cuda:0"].working.allocated == WORKING_ALLOWANCE


def test_a_test_that_starts_with_a_live_engine_has_it_in_its_baseline(ledger, dial):
    build(ledger, dial, 1, MODULE, allocated=14 * GIB)
    assert ledger.expected(ledger.live()) == {}


def test_a_test_in_which_an_engine_of_wider_scope_ends_must_be_smaller_by_its_footprint(ledger, dial):
    handle = build(ledger, dial, 1, MODULE, allocated=14 * GIB)
    start = ledger.live()
    close(ledger, dial, handle, allocated=0)
    assert ledger.expected(start) == {"cuda:0": Adjustment(allocated=-14 * GIB)}


def test_an_engine_that_comes_and_goes_within_a_test_changes_nothing(ledger, dial):
    start = ledger.live()
    close(ledger, dial, build(ledger, dial, 1, MODULE, allocated=14 * GIB), allocated=0)
    assert ledger.expected(start) == {}


def test_an_engine_that_failed_to_start_is_not_expected_to_hold_anything(ledger, dial):
    handle = EngineHandle(1, "LLMEngine", MODULE)
    ledger.before_build(handle)
    dial.figures = {"allocated": GIB}
    handle.state = State.FAILED
    ledger.after_build(handle)
    assert ledger.expected(frozenset()) == {}


def test_the_context_that_comes_with_the_first_engine_is_not_part_of_the_engine():
    before = Reading("cuda:0", own=0)
    after = Reading("cuda:0", own=15 * GIB, allocated=14 * GIB, reserved=14 * GIB)
    assert footprint(before, after) == Adjustment(allocated=14 * GIB)


def test_graphs_below_the_allocator_are_part_of_a_later_engine():
    before = Reading("cuda:0", own=700 * MIB, allocated=0, reserved=2 * MIB)
    after = Reading("cuda:0", own=GIB + 800 * MIB, allocated=GIB, reserved=GIB)
    assert footprint(before, after).below == 102 * MIB


def test_where_processes_are_hidden_the_device_tells_what_a_child_engine_takes():
    before = Reading("cuda:0", used=GIB)
    after = Reading("cuda:0", used=15 * GIB)
    assert footprint(before, after).children == 14 * GIB


class TestBlameless:
    """What is not to blame, with tensors of the host."""

    @pytest.fixture
    def dial(self):
        pytest.importorskip("torch")
        return Dial("host")

    @staticmethod
    def tensor(number):
        import torch

        return torch.ones(number * MIB, dtype=torch.uint8)

    @staticmethod
    def sizes(ledger, *arguments):
        return [storage.bytes // MIB for storage in ledger.blameless(*arguments).new()]

    def test_what_an_engine_or_fixture_of_wider_scope_made_is_theirs(self, ledger):
        inventory, start, kept = Inventory.take(["host"]), ledger.live(), []
        for number, owner in ((1, MODULE), (2, TEST)):
            handle = EngineHandle(number, "LLMEngine", owner)
            ledger.before_build(handle)
            kept.append(self.tensor(number))
            ledger.after_build(handle)
        is_set_up = ledger.account_fixture()
        kept.append(self.tensor(3))
        fixture = is_set_up()
        kept.append(self.tensor(4))
        assert self.sizes(ledger, inventory, start) == [4, 2]
        ledger.end_fixture(fixture)
        assert self.sizes(ledger, inventory, start) == [4, 3, 2]

    def test_of_a_fixture_that_leaked_only_what_others_made_inside_it_is_theirs(self, ledger):
        is_set_up = ledger.account_fixture()
        kept = [self.tensor(1)]
        inside_is_set_up = ledger.account_fixture()
        kept.append(self.tensor(2))
        inside_is_set_up()
        fixture = is_set_up()
        inventory, start = Inventory.take(["host"]), ledger.live()
        ledger.end_fixture(fixture)
        assert self.sizes(ledger, inventory, start) == []
        assert self.sizes(ledger, inventory, start, [fixture]) == [1]
        assert len(kept) == 2


class TestHost:
    @pytest.fixture
    def dial(self):
        return Dial("host")

    def granted(self, ledger, start=0):
        return ledger.grants({"host": Reading("host")}, start)["host"].host

    def test_what_the_first_engine_leaves_for_good_is_granted_once(self, ledger, dial):
        dial.figures = {"used": GIB}
        close(ledger, dial, build(ledger, dial, 1, TEST, used=2 * GIB), used=GIB + 100 * MIB)
        assert self.granted(ledger) == 100 * MIB
        close(ledger, dial, build(ledger, dial, 2, TEST, used=2 * GIB), used=GIB + 300 * MIB)
        assert self.granted(ledger) == 100 * MIB

    def test_a_check_is_granted_only_what_came_after_its_start(self, ledger, dial):
        dial.figures = {"used": GIB}
        close(ledger, dial, build(ledger, dial, 1, TEST, used=2 * GIB), used=GIB + 100 * MIB)
        assert self.granted(ledger, start=ledger.granted) == 0

    def test_the_grant_is_limited(self, ledger, dial):
        dial.figures = {"used": GIB}
        close(ledger, dial, build(ledger, dial, 1, TEST, used=3 * GIB), used=3 * GIB)
        assert self.granted(ledger) == FIRST_ENGINE_LIMIT

    def test_an_engine_of_which_something_is_alive_is_granted_nothing(self, ledger, dial):
        dial.figures = {"used": GIB}
        close(ledger, dial, build(ledger, dial, 1, TEST, used=2 * GIB), alive=["model"], used=GIB + 100 * MIB)
        assert self.granted(ledger) == 0

    def test_imports_between_the_baseline_and_the_first_engine_are_granted(self, ledger, dial):
        baseline = {"host": Reading("host", used=50 * MIB)}
        dial.figures = {"used": 550 * MIB}
        build(ledger, dial, 7, TEST, used=GIB)
        ledger.grant_imports(baseline, ledger.first_since(6))
        assert self.granted(ledger) == 500 * MIB
        assert ledger.first_since(7) is None
        assert ledger.newest() == 7
