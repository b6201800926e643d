"""Where the driver names no process, as in many containers."""

from __future__ import annotations

from pytest_vllm_cleanup.checks.ledger import Ledger, footprint
from pytest_vllm_cleanup.engines.registry import CloseReport, EngineHandle, Owner, State
from pytest_vllm_cleanup.memory import Adjustment, Gauge, ProcessUse, Reading, judge_all

MIB = 1 << 20
CONTEXT = 761  # MiB, as measured on an H200


class Dial:
    name = "dial"
    reason = ""

    def __init__(self):
        self.snapshot = {}

    def available(self):
        return True

    def read(self, ours):
        return self.snapshot


def shows(used, tensors=None):
    allocated = None if tensors is None else tensors * MIB
    return {"cuda:0": Reading("cuda:0", ("dial",), used=used * MIB, allocated=allocated, reserved=allocated)}


def test_the_context_that_came_with_an_engine_of_a_fixture_is_no_leak_when_the_engine_goes():
    dial = Dial()
    ledger = Ledger(Gauge([dial], frozenset))
    dial.snapshot = before = shows(5)
    handle = EngineHandle(1, "LLMEngine", Owner("test_a.py::test_a", "setup", "engine", "module"))
    start = ledger.live()
    ledger.before_build(handle)
    dial.snapshot = alive = shows(5 + CONTEXT + 7000, tensors=7000)
    ledger.after_build(handle)
    handle.state, handle.in_process = State.LIVE, True
    first = judge_all(before, alive, expected=ledger.expected(start), grants=ledger.grants(alive, 0, start))
    assert first.outcome == "released"

    start = ledger.live()
    handle.report = CloseReport()
    dial.snapshot = gone = shows(5 + CONTEXT, tensors=0)
    ledger.after_close(handle)
    last = judge_all(alive, gone, expected=ledger.expected(start), grants=ledger.grants(gone, 0, start))
    assert last.outcome == "released"


def test_an_engine_in_child_processes_is_charged_to_its_fixture_all_the_same():
    dial = Dial()
    ledger = Ledger(Gauge([dial], frozenset))
    dial.snapshot = before = shows(5)
    handle = EngineHandle(1, "LLMEngine", Owner("test_a.py::test_a", "setup", "engine", "module"))
    start = ledger.live()
    ledger.before_build(handle)
    dial.snapshot = alive = shows(5 + CONTEXT + 7000)
    ledger.after_build(handle)
    verdict = judge_all(before, alive, expected=ledger.expected(start), grants=ledger.grants(alive, 0, start))
    assert verdict.outcome == "released"


def test_a_neighbour_that_grows_while_an_engine_is_built_is_no_part_of_the_engine():
    engine = ProcessUse(812, None, "VLLM::EngineCore", ours=True)

    def reads(used, listed, **fields):
        uses = tuple(ProcessUse(pid, size * MIB, None, ours=False) for pid, size in listed.items())
        return Reading("cuda:0", ("dial",), used=(used + sum(listed.values())) * MIB, processes=uses, **fields)

    before = reads(5, {7: 1000}, own=0, children=0, context=False, living=())
    after = reads(5, {7: 4000, 91234: 7000}, context=False, living=(engine,))
    assert footprint(before, after) == Adjustment(children=7000 * MIB)
