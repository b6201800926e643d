from __future__ import annotations

import subprocess
import sys

import pytest

from pytest_vllm_cleanup.checks.debts import Debt, debts_of
from pytest_vllm_cleanup.checks.ledger import Ledger
from pytest_vllm_cleanup.diagnosis.tensors import Inventory
from pytest_vllm_cleanup.memory import HOST, Adjustment, Change, DeviceVerdict

MIB = 1 << 20


def test_a_leaked_tensor_holds_its_bytes_until_it_is_gone():
    torch = pytest.importorskip("torch")
    inventory = Inventory.take([HOST])
    tensor = torch.ones(2 * MIB, dtype=torch.uint8)
    (debt,) = debts_of(DeviceVerdict("leaked", "host", HOST, "", 2 * MIB, 0, 2 * MIB, 0), inventory)
    assert debt.held() == 2 * MIB
    assert debt.adjustment(MIB) == Adjustment(host=MIB)
    del tensor
    assert debt.held() == 0


def leak_of(size, where=HOST, reason="host", tolerance=0):
    return DeviceVerdict("leaked", reason, where, "", size, 0, size, tolerance)


def test_on_the_host_only_tensors_that_add_up_to_the_leak_are_followed():
    torch = pytest.importorskip("torch")
    inventory = Inventory.take([HOST])
    written, never = torch.ones(2 * MIB, dtype=torch.uint8), torch.empty(8 * MIB, dtype=torch.uint8)
    assert debts_of(leak_of(2 * MIB, tolerance=MIB), inventory) == []
    (debt,) = debts_of(leak_of(9 * MIB, tolerance=MIB), inventory)
    assert debt.held() == 9 * MIB  # and not the 10 of the tensors
    del written
    assert debt.held() == 8 * MIB
    assert never.numel() == 8 * MIB


def test_a_storage_that_gave_its_memory_back_holds_nothing():
    torch = pytest.importorskip("torch")
    inventory = Inventory.take([HOST])
    tensor = torch.ones(2 * MIB, dtype=torch.uint8)
    (debt,) = debts_of(leak_of(2 * MIB), inventory)
    tensor.untyped_storage().resize_(0)
    assert debt.held() == 0


def test_the_same_memory_is_owed_once():
    torch = pytest.importorskip("torch")
    inventory, ledger = Inventory.take([HOST]), Ledger(Flat())
    tensor = torch.ones(2 * MIB, dtype=torch.uint8)
    for _ in range(2):
        ledger.owe(debts_of(leak_of(2 * MIB), inventory))
    grown = Inventory.take([HOST])
    tensor.resize_(5 * MIB)
    ledger.owe(debts_of(leak_of(3 * MIB), grown))
    assert sorted(ledger.debts().values()) == [2 * MIB, 3 * MIB]


def test_a_leaked_process_holds_its_growth_until_it_has_ended():
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    grown = (Change(process.pid, "python", 0, 5 * MIB),)
    device = DeviceVerdict("leaked", "processes", "cuda:0", "", 5 * MIB, 0, 5 * MIB, 0, processes=grown)
    (debt,) = debts_of(device, Inventory.of_nothing(["cuda:0"]))
    try:
        assert debt.held() == 5 * MIB
        assert debt.adjustment(MIB) == Adjustment(children=MIB)
    finally:
        process.communicate()
    assert debt.held() == 0


def test_what_no_object_explains_cannot_be_followed():
    device = DeviceVerdict("leaked", "below allocator", "cuda:0", "", MIB, 0, MIB, 0)
    assert debts_of(device, Inventory.of_nothing(["cuda:0"])) == []


class Flat:
    """A gauge on which nothing moves."""

    meters = ()

    def read(self):
        return {}


def test_what_comes_back_of_an_earlier_leak_makes_no_room_for_a_later_one():
    held = [100]
    ledger = Ledger(Flat())
    ledger.owe([Debt("cuda:0", "allocated", lambda: held[0])])
    at_start = ledger.debts()
    assert ledger.expected(frozenset(), at_start) == {}
    held[0] = 30
    assert ledger.expected(frozenset(), at_start) == {"cuda:0": Adjustment(allocated=-70)}
    assert ledger.expected(frozenset(), ledger.debts()) == {}


def test_a_debt_that_is_paid_is_forgotten():
    ledger = Ledger(Flat())
    ledger.owe([Debt("cuda:0", "allocated", lambda: 0)])
    assert ledger.debts() == {}
