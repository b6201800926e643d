"""From a verdict to who holds the memory, with real tensors of the host and a real child process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import weakref

import pytest

from pytest_vllm_cleanup.diagnosis import diagnose
from pytest_vllm_cleanup.diagnosis.diagnose import who_holds, who_holds_engines
from pytest_vllm_cleanup.diagnosis.findings import Finding
from pytest_vllm_cleanup.diagnosis.tensors import Inventory
from pytest_vllm_cleanup.memory import HOST, DeviceVerdict, ProcessUse, Reading, Verdict

torch = pytest.importorskip("torch")

MIB = 1 << 20
KEPT: list[object] = []


@pytest.fixture(autouse=True)
def nothing_kept():
    yield
    KEPT.clear()


def leak(size, before=(), after=()):
    """A verdict that so many bytes stayed on the host, and readings with these processes beside this one."""
    device = DeviceVerdict("leaked", "host", HOST, "private host memory", size, 0, size, 0)
    me = ProcessUse(os.getpid(), size, "python", ours=True)
    readings = [{HOST: Reading(device=HOST, processes=(me, *uses))} for uses in (before, after)]
    return Verdict("leaked", "host", size, (device,)), *readings


def diagnosed(size, inventory, **uses):
    return who_holds(*leak(size, **uses), inventory, {})


def test_what_is_new_is_named_and_what_was_there_is_not():
    KEPT.append(torch.ones(8 * MIB, dtype=torch.uint8))
    inventory = Inventory.take([HOST])
    KEPT.append({"logits": torch.ones(4 * MIB, dtype=torch.uint8)})
    (finding,) = diagnosed(4 * MIB, inventory).findings
    assert finding.bytes == 4 * MIB
    assert finding.holder.endswith("test_diagnose.py: module global KEPT[1]['logits'] -> Tensor")


def test_a_list_of_many_is_one_finding_with_all_their_bytes():
    inventory = Inventory.take([HOST])
    KEPT.extend(torch.ones(MIB // 2, dtype=torch.uint8) for _ in range(100))
    (finding,) = diagnosed(50 * MIB, inventory).findings
    assert (finding.count, finding.bytes) == (100, 50 * MIB)


def test_different_holders_are_named_biggest_first():
    inventory = Inventory.take([HOST])
    KEPT.append({"small": torch.ones(2 * MIB, dtype=torch.uint8)})
    test_different_holders_are_named_biggest_first.big = torch.ones(4 * MIB, dtype=torch.uint8)
    try:
        found = [finding.holder for finding in diagnosed(6 * MIB, inventory).findings]
    finally:
        del test_different_holders_are_named_biggest_first.big
    assert len(found) == 2
    assert "test_different_holders_are_named_biggest_first.big" in found[0]
    assert "KEPT[0]['small']" in found[1]


def test_a_process_that_came_is_named_with_its_command():
    inventory = Inventory.take([HOST])
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()", "serve"], stdin=subprocess.PIPE)
    try:
        use = ProcessUse(process.pid, 5 * MIB, "python", ours=True)
        holder = diagnosed(5 * MIB, inventory, after=(use,)).holder
    finally:
        process.communicate()
    assert holder.startswith(f"process {process.pid} (")
    assert " with 5 MiB, started " in holder
    assert "child of this process: " in holder
    assert holder.endswith("serve")


def test_nothing_found_stays_referenced():
    inventory = Inventory.take([HOST])
    tensor = torch.ones(MIB, dtype=torch.uint8)
    gone = weakref.ref(tensor)
    KEPT.append(tensor)
    del tensor
    diagnosis = diagnosed(MIB, inventory)
    assert diagnosis.findings
    KEPT.clear()
    assert gone() is None


def test_an_engine_is_named_by_who_refers_to_it():
    class Engine:
        pass

    engine = Engine()
    KEPT.append(engine)
    diagnosis = who_holds_engines({"LLMEngine number 1": weakref.ref(engine)})
    assert diagnosis.findings[0].what == "still alive: LLMEngine number 1"
    assert any("KEPT[0]" in holder for holder in diagnosis.findings[0].holders)


def test_a_stopped_clock_does_not_stop_the_search(monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    inventory = Inventory.take([HOST])
    KEPT.append(torch.ones(MIB, dtype=torch.uint8))
    assert diagnosed(MIB, inventory).holder


def test_what_explains_little_is_shown_and_not_named_and_what_explains_nothing_is_not_shown():
    inventory = Inventory.take([HOST])
    KEPT.append({"some": torch.ones(10 * MIB, dtype=torch.uint8)})
    for size, shown, holder in ((40, 1, True), (41, 1, False), (1000, 1, False), (1001, 0, False)):
        diagnosis = diagnosed(size * MIB, inventory)
        assert (len(diagnosis.findings), bool(diagnosis.holder)) == (shown, holder)


def test_of_very_many_tensors_a_part_is_enough_where_there_was_no_time_for_more():
    many, one = (Finding("uint8 tensor", 10 * MIB, HOST, ("KEPT[0]",), count=count) for count in (5000, 1))
    assert [finding.minor for finding in diagnose._weighed([many, one], 900 * MIB, cut_short=True)] == [False, True]
    assert [finding.minor for finding in diagnose._weighed([many, one], 900 * MIB)] == [True, True]


def test_where_there_was_no_time_to_find_a_tensor_it_is_said(monkeypatch):
    inventory = Inventory.take([HOST])
    KEPT.append(torch.ones(MIB, dtype=torch.uint8))
    assert diagnosed(MIB, inventory).remarks == ()
    monkeypatch.setattr(diagnose, "LIMIT", -1.0)
    found = diagnosed(MIB, inventory)
    assert found.findings == ()
    assert found.remarks == ("not all tensors on host were looked at: the search was cut short",)
