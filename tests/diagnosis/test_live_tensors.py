from __future__ import annotations

import gc
import subprocess
import sys
import time
import weakref

import pytest

from pytest_vllm_cleanup.diagnosis import known, walk
from pytest_vllm_cleanup.diagnosis.allocations import Books, Pool
from pytest_vllm_cleanup.diagnosis.known import BIG, Known
from pytest_vllm_cleanup.diagnosis.tensors import Inventory, StorageWatch, tensors_on

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def _no_garbage():
    gc.collect()


@pytest.fixture
def inventory():
    return Inventory.take(["host"])


def tensors_of(storage):
    return tensors_on([storage])[0]


def only(inventory):
    (storage,) = inventory.new()
    return storage


def test_what_was_there_before_is_not_new():
    old = torch.ones(1000)
    inventory = Inventory.take(["host"])
    new = torch.ones(2000)
    storage = only(inventory)
    assert (storage.device, storage.bytes, storage.address) == ("cpu", 8000, new.data_ptr())
    assert old.numel() == 1000


def test_an_old_address_given_to_a_new_tensor_is_new():
    old = torch.ones(64 * 2**20, dtype=torch.uint8)
    address = old.data_ptr()
    inventory = Inventory.take(["host"])
    del old
    kept = []
    for _ in range(20):
        kept.append(torch.ones(64 * 2**20, dtype=torch.uint8))
        if kept[-1].data_ptr() == address:
            break
        kept.pop()
    else:
        pytest.skip("the address was not given out again")
    assert only(inventory).address == address


def test_the_biggest_comes_first_and_is_described(inventory):
    kept = [torch.ones(10), torch.ones(4096, 4096, dtype=torch.float16), torch.ones(500)]
    found = inventory.new()
    assert [storage.bytes for storage in found] == [32 * 2**20, 2000, 40]
    assert str(found[0]) == "float16 tensor of shape (4096, 4096)"
    assert len(kept) == 3


def test_views_are_counted_with_what_they_look_at(inventory):
    kept = torch.ones(100, 100)
    views = [kept[5:], kept.T]
    storage = only(inventory)
    assert (storage.tensors, storage.shape, storage.bytes) == (3, (100, 100), 40000)
    assert str(storage) == "float32 tensor of shape (100, 100) with 2 more on its memory"
    found = tensors_of(storage)
    assert {id(thing) for thing in found} == {id(thing) for thing in (kept, *views)}


def test_a_view_whose_base_is_gone_stands_for_its_whole_storage(inventory):
    with torch.inference_mode():  # in which a view does not keep the tensor that it is a view of
        kept = torch.ones(100, 100)[7]
    storage = only(inventory)
    assert (storage.bytes, storage.shape) == (40000, (100,))
    assert tensors_of(storage)[0] is kept


def test_a_parameter_is_called_one(inventory):
    layer = torch.nn.Linear(50, 100, bias=False)
    assert str(only(inventory)) == "float32 Parameter of shape (100, 50)"
    assert tensors_of(only(inventory)) == [layer.weight]


def test_a_parameter_goes_before_its_data(inventory):
    layer = torch.nn.Linear(50, 100, bias=False)
    data = layer.weight.data
    assert str(only(inventory)) == "float32 Parameter of shape (100, 50) with 1 more on its memory"
    assert data.numel() == 5000


def test_a_storage_without_a_tensor_is_found(inventory):
    kept = torch.ones(100).untyped_storage()
    assert str(only(inventory)) == "storage without a tensor"
    assert tensors_of(only(inventory))[0] is kept


def test_several_are_found_in_one_walk(inventory):
    kept = [torch.ones(20), torch.ones(10)]
    first, second = tensors_on(inventory.new())
    assert (first[0] is kept[0], second[0] is kept[1], len(first), len(second)) == (True, True, 1, 1)


def test_what_is_frozen_is_found(inventory):
    kept = torch.ones(1000)
    gc.freeze()
    try:
        assert only(inventory).address == kept.data_ptr()
    finally:
        gc.unfreeze()


def test_a_tensor_that_only_an_autograd_graph_holds_is_found(inventory):
    leaf = torch.ones(100, requires_grad=True)
    inner = leaf * 2
    outer = (inner * inner).grad_fn
    reference = weakref.ref(inner)
    del inner
    assert sorted(storage.bytes for storage in inventory.new()) == [400, 400]
    assert reference() is not None
    assert outer is not None


class Nosy(torch.Tensor):
    asked = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.asked += 1
        return super().__torch_function__(func, types, args, kwargs or {})

    @property
    def shape(self):
        raise RuntimeError

    @property
    def device(self):
        raise RuntimeError

    def __eq__(self, other):
        raise RuntimeError

    def __hash__(self):
        raise RuntimeError


def test_no_code_of_a_tensor_subclass_is_run(inventory):
    kept = torch.Tensor._make_subclass(Nosy, torch.ones(100))
    Nosy.asked = 0
    storage = only(inventory)
    assert (storage.shape, storage.kind) == ((100,), "Nosy")
    (found,) = tensors_of(storage)
    assert found is kept
    assert Nosy.asked == 0


class Wrapper(torch.Tensor):
    """Has no memory of its own and answers all questions by a method."""

    asked = 0

    @staticmethod
    def __new__(cls, inner):
        wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dispatch_sizes_strides_policy="sizes")
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.asked += 1
        raise RuntimeError


def test_a_wrapper_is_passed_over_and_what_it_wraps_is_found(inventory):
    kept = Wrapper(torch.ones(100))
    Wrapper.asked = 0
    assert str(only(inventory)) == "float32 tensor of shape (100,)"
    assert Wrapper.asked == 0
    assert kept.inner is tensors_of(only(inventory))[0]


@pytest.mark.filterwarnings("error")
def test_tensors_without_memory_are_passed_over(inventory):
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(100), torch.empty(100, device="cuda")
    kept = (fake, torch.empty(100, device="meta"), torch.nn.UninitializedParameter(), torch.empty(0))
    assert inventory.new() == []
    assert len(kept) == 4


def test_a_lazy_copy_stays_lazy(inventory):
    kept = torch._lazy_clone(torch.ones(100))
    assert len(inventory.new()) == 1
    assert torch._C._is_cow_tensor(kept)


def test_looking_keeps_nothing_alive(inventory):
    kept = torch.ones(BIG)
    reference, watch = weakref.ref(kept), StorageWatch(inventory.new())
    found = inventory.new()
    assert tensors_of(found[0])[0] is kept
    assert watch.remaining() == 4 * BIG
    again = Inventory.take(["host"])
    del kept
    assert reference() is None
    assert watch.remaining() == 0
    assert again.new() == []


def test_a_watch_counts_those_that_still_live(inventory):
    kept = [torch.ones(BIG), torch.ones(2 * BIG), torch.ones(10)]
    watch = StorageWatch(inventory.new())
    assert watch.remaining() == 12 * BIG
    view = kept[1][:2]
    kept.clear()
    assert watch.remaining() == 8 * BIG
    assert view.numel() == 2


def test_the_walk_ends_when_its_time_is_over(inventory, monkeypatch):
    monkeypatch.setattr(walk, "_EVERY", 1)
    kept = [torch.ones(10) for _ in range(50)]
    assert inventory.new(deadline=time.monotonic() - 1) == []
    assert len(inventory.new(deadline=time.monotonic() + 60)) == len(kept)


def test_a_device_that_is_not_up_has_no_tensors():
    inventory = Inventory.take(["cuda:0"])
    kept = torch.ones(100)
    assert inventory.new() == []
    assert not torch.cuda.is_initialized()
    assert kept.numel() == 100


WITHOUT_TORCH = """
import sys
from pytest_vllm_cleanup.diagnosis.tensors import Inventory, StorageWatch
inventory = Inventory.take(["host", "cuda:0"])
assert (inventory.new(), inventory.unreferenced("cuda:0"), inventory.new_pools("cuda:0")) == ([], {}, [])
assert StorageWatch([]).remaining() == 0
assert "torch" not in sys.modules
import torch
kept = torch.ones(100)
assert [storage.bytes for storage in inventory.new()] == [400]
"""


def test_where_torch_is_not_imported_there_is_nothing_and_later_all_is_new():
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH], check=True, timeout=120)


def test_very_many_small_tensors_cost_a_baseline_no_reference_each_and_little_time(inventory):
    kept = [torch.ones(256) for _ in range(100_000)]
    started = time.monotonic()
    again = Inventory.take(["host"])
    assert time.monotonic() - started < 2
    assert len(again._known.big) < 100
    assert again.new(deadline=time.monotonic() + 1) == []
    assert len(inventory.new(deadline=time.monotonic() + 1)) > 1000
    assert len(kept) == 100_000


def test_what_a_baseline_had_no_time_for_is_old(inventory, monkeypatch):
    monkeypatch.setattr(walk, "_EVERY", 1)
    monkeypatch.setattr(known, "TIME_TO_TAKE", -1)
    old = [torch.ones(BIG), torch.ones(10)]
    again = Inventory.take(["host"])
    new = torch.ones(2 * BIG)
    assert [storage.address for storage in again.new()] == [new.data_ptr()]
    assert len(old) == 2


def test_of_very_many_big_ones_the_size_is_known(inventory, monkeypatch):
    monkeypatch.setattr(known, "MOST_FOLLOWED", 0)
    old = torch.ones(BIG)
    again = Inventory.take(["host"])
    new = torch.ones(2 * BIG)
    assert [storage.address for storage in again.new()] == [new.data_ptr()]
    assert old.numel() == BIG


def test_an_old_tensor_that_grew_is_new_by_what_it_grew():
    big, small = torch.ones(BIG, dtype=torch.uint8), torch.ones(1, dtype=torch.uint8)
    inventory = Inventory.take(["host"])
    big.resize_(3 * BIG), small.resize_(4 * BIG)
    found = {storage.address: storage for storage in inventory.new()}
    assert (found[big.data_ptr()].bytes, found[big.data_ptr()].before) == (2 * BIG, BIG)
    assert "that has grown" in str(found[big.data_ptr()])
    assert found[small.data_ptr()].bytes == 4 * BIG
    watch = StorageWatch(found.values())
    assert watch.remaining() == 6 * BIG
    small.untyped_storage().resize_(0)
    big.untyped_storage().resize_(BIG)
    assert watch.remaining() == 0


def test_a_gradient_that_nobody_has_asked_for_is_found(inventory):
    layer = torch.nn.Linear(100, 100, bias=False)
    layer(torch.ones(2, 100)).sum().backward()
    assert [storage.bytes for storage in inventory.new()] == [40000, 40000]
    assert Inventory.take(["host"]).new() == []
    assert layer.weight.grad is not None


def test_what_was_made_meanwhile_is_put_in_and_taken_out():
    first = torch.ones(BIG), torch.ones(2)
    baseline = Inventory.take(["host"])
    made = torch.ones(2 * BIG), torch.ones(3)
    inventory = Inventory.take(["host"])
    difference = inventory.without(baseline)
    new = torch.ones(3 * BIG)
    sizes = [tensor.nbytes for tensor in (*first, *made, new)]
    assert [storage.bytes for storage in baseline.plus(difference).new()] == sizes[4:]
    assert [storage.bytes for storage in inventory.without(difference).new()] == [sizes[4], sizes[2], sizes[3]]


def test_blocks_and_pools_made_meanwhile_are_put_in_and_taken_out():
    def inventory(blocks, reserved, pinned):
        books = Books({"cuda:0": blocks}, [Pool("cuda:0", (0, 1), reserved, 0)] if reserved else [], pinned)
        return Inventory(["cuda:0"], books, Known())

    before, after = inventory({1: 10}, 5, 1), inventory({1: 20, 2: 10}, 7, 4)
    made = after.without(before)
    assert (made._books.blocks, made._books.pools[0].reserved, made.pinned) == ({"cuda:0": {1: 20, 2: 10}}, 2, 3)
    both = inventory({1: 10, 3: 1}, 0, 0).plus(made)
    assert (both._books.blocks, both._books.pools[0].reserved, both.pinned) == ({"cuda:0": {1: 20, 2: 10, 3: 1}}, 2, 3)
    rest = inventory({1: 20, 2: 11, 3: 1}, 7, 4).without(made)
    assert (rest._books.blocks, rest._books.pools[0].reserved, rest.pinned) == ({"cuda:0": {2: 11, 3: 1}}, 5, 1)
