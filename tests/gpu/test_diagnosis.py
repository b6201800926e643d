"""What is known of memory on a real device after a leak."""

from __future__ import annotations

TENSORS = """
    import gc
    import time

    import pytest
    import torch

    from pytest_vllm_cleanup.diagnosis.below import below, pool_users
    from pytest_vllm_cleanup.diagnosis.tensors import Inventory, StorageWatch, tensors_on
    from pytest_vllm_cleanup.memory.reading import Reading

    GPU, MIB = "cuda:0", 2**20

    def said(inventory):
        nothing = Reading(device=GPU)
        return below(GPU, nothing, nothing, inventory)

    def test_looking_starts_nothing():
        assert Inventory.take([GPU, "host"]).new() == []
        assert not torch.cuda.is_initialized()

    def test_what_is_new_is_found_where_cuda_was_not_up_before():
        inventory = Inventory.take([GPU])
        kept = torch.ones(4096, 4096, dtype=torch.float16, device=GPU)
        (storage,) = inventory.new()
        assert (storage.device, storage.bytes, storage.address) == (GPU, 32 * MIB, kept.data_ptr())
        assert str(storage) == "float16 tensor of shape (4096, 4096)"
        assert tensors_on([storage])[0][0] is kept

    def test_what_was_there_before_is_not_new_and_looking_keeps_nothing():
        old = torch.ones(3 * MIB, device=GPU)
        inventory = Inventory.take([GPU])
        before = torch.cuda.memory_allocated()
        kept = [torch.ones(2 * MIB, device=GPU)]
        (storage,) = inventory.new()
        watch = StorageWatch([storage])
        assert watch.remaining() == storage.bytes == 8 * MIB
        kept.clear()
        assert (watch.remaining(), torch.cuda.memory_allocated(), inventory.new()) == (0, before, [])
        assert old.numel()

    def test_looking_takes_no_memory_of_the_device_and_little_time():
        kept = [torch.ones(1000, device=GPU) for _ in range(2000)]
        before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        began = time.perf_counter()
        inventory = Inventory.take([GPU])
        seconds = time.perf_counter() - began
        print(f"inventory of {len(kept)} blocks: {seconds * 1000:.1f} ms")
        assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before
        assert seconds < 0.25
        assert inventory.new() == []

    def test_what_only_cpp_holds_is_told():
        inventory = Inventory.take([GPU])
        leaf = torch.ones(8 * MIB, device=GPU, requires_grad=True)
        out = leaf.exp().sum()  # the graph saves the result of exp, for which no Python object is left
        (sentence,) = said(inventory)
        assert sentence.startswith("1 block of torch's allocator on cuda:0 (32 MiB) without a tensor in Python: ")
        assert "autograd graph" in sentence
        del out, leaf
        assert said(inventory) == []

    def test_a_private_pool_of_a_cuda_graph_is_told_with_its_graph():
        static = torch.ones(4 * MIB, device=GPU)
        static * 2  # loads the kernel
        torch.cuda.empty_cache()
        inventory = Inventory.take([GPU])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = static * 2
        (pool,) = inventory.new_pools(GPU)
        assert pool.reserved >= 16 * MIB
        (sentence,) = said(inventory)
        assert sentence.startswith(f"private pool {pool.id} of torch's allocator on cuda:0 keeps ")
        assert sentence.endswith(", for 1 CUDAGraph in Python")
        assert pool_users(pool)[0] is graph
        del graph, result
        gc.collect()
        torch.cuda.empty_cache()
        assert inventory.new_pools(GPU) == []

    def test_a_memory_pool_is_told_with_its_object():
        inventory = Inventory.take([GPU])
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            kept = torch.ones(4 * MIB, device=GPU)
        assert any(text.endswith("for 1 MemPool in Python") for text in said(inventory))
        assert [storage.address for storage in inventory.new()] == [kept.data_ptr()]
        del kept  # before its pool

    def test_pinned_memory_is_told_as_the_hosts():
        inventory = Inventory.take([GPU])
        kept = torch.ones(8 * MIB, dtype=torch.uint8, pin_memory=True)
        assert any(text.startswith("pinned host memory: ") for text in said(inventory))
        assert inventory.new() == []
        assert kept.numel()
"""


def test_new_tensors_pools_and_graphs_are_told(run_suite):
    result = run_suite(TENSORS, "-s")
    result.assert_outcomes(passed=8)


RECORDED = """
    import pickle
    import sys
    from pathlib import Path

    from pytest_vllm_cleanup.diagnosis import allocations

    assert "torch" not in sys.modules
    allocations.start_recording()
    import torch

    assert not torch.cuda.is_initialized()
    KEPT = []

    def keep(size):
        KEPT.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        return KEPT[-1]

    def test_the_first_tensor_has_its_stack():
        tensor = keep(2**21)
        stack = allocations.stack_of(tensor.data_ptr(), "cuda:0")
        assert [line.rpartition(" ")[2] for line in stack][:2] == ["test_the_first_tensor_has_its_stack", "keep"]
        assert stack[0].startswith("test_recorded_memory_can_be_looked_at.py:")

    def test_a_snapshot_is_written_that_torch_can_read(tmp_path):
        file = allocations.write_snapshot(tmp_path / "new", "tests/test_it.py::test_it[a b]")
        assert file.name == "tests_test_it.py_test_it_a_b_.pickle"
        data = pickle.loads(file.read_bytes())
        blocks = [block for segment in data["segments"] for block in segment["blocks"]]
        assert KEPT[0].data_ptr() in [block["address"] for block in blocks]
        assert any(entry["action"] == "alloc" for trace in data["device_traces"] for entry in trace)
        from torch.cuda import _memory_viz

        assert "<html" in _memory_viz.trace_plot(data) or "<!DOCTYPE" in _memory_viz.trace_plot(data)

    def test_recording_ends():
        allocations.stop_recording()
        assert not allocations.is_recording()
        assert allocations.stack_of(KEPT[0].data_ptr(), "cuda:0") == ()

    def test_a_recording_of_the_users_own_is_left_alone():
        torch.cuda.memory._record_memory_history(max_entries=10)
        allocations.start_recording()
        allocations.stop_recording()
        assert allocations.is_recording()
        torch.cuda.memory._record_memory_history(enabled=None)
"""


def test_recorded_memory_can_be_looked_at(run_suite):
    run_suite(RECORDED).assert_outcomes(passed=4)


FORKED = """
    import multiprocessing

    import torch

    from pytest_vllm_cleanup.diagnosis import allocations

    def child(results):
        torch.ones(5, device="cuda")
        results.put(allocations.is_recording())

    def test_a_forked_child_does_not_record():
        allocations.start_recording()
        context = multiprocessing.get_context("fork")
        results = context.Queue()
        process = context.Process(target=child, args=(results,))
        process.start()
        assert results.get(timeout=120) is False
        process.join()
        torch.ones(5, device="cuda")
        assert allocations.is_recording()
"""


def test_only_the_process_of_the_tests_records(run_suite):
    run_suite(FORKED).assert_outcomes(passed=1)
