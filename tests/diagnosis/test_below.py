from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from pytest_vllm_cleanup.diagnosis.allocations import Pool
from pytest_vllm_cleanup.diagnosis.below import below, pool_users
from pytest_vllm_cleanup.memory.reading import Reading

MIB, GIB = 2**20, 2**30


def reading(**figures):
    return Reading(device="cuda:0", **figures)


def test_what_the_driver_counts_beyond_torchs_allocator_is_told():
    before, after = reading(own=600 * MIB, reserved=2 * MIB), reading(own=800 * MIB, reserved=66 * MIB)
    assert below("cuda:0", before, after) == [
        "136 MiB more on cuda:0 are below torch's allocator: kernels and the context of CUDA, or memory that a library"
        " took by itself"
    ]


def test_the_whole_device_is_asked_where_processes_are_hidden():
    before, after = reading(used=600 * MIB), reading(used=900 * MIB)
    assert below("cuda:0", before, after)[0].startswith("300 MiB more on cuda:0 are below torch's allocator: ")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {}),
        ({"own": 600 * MIB, "reserved": 0}, {"own": 664 * MIB, "reserved": 64 * MIB}),
        ({"own": 600 * MIB}, {"own": 600 * MIB + 1}),
    ],
)
def test_nothing_is_said_where_nothing_is_known_or_all_is_torchs(before, after):
    assert below("cuda:0", reading(**before), reading(**after)) == []


def test_what_sleep_mode_gave_out_is_told_by_tag(monkeypatch):
    def data(device, size, tag, **more):
        return SimpleNamespace(handle=(device, size, 0, 0), tag=tag, cpu_backup_tensor=None, **more)

    instance = SimpleNamespace(
        pointer_to_data={
            1: data(0, GIB, "weights"),
            2: data(0, 2 * GIB, "kv_cache", is_asleep=False),
            3: data(0, GIB, "weights", is_asleep=True),
            4: data(1, GIB, "weights"),
        }
    )
    module = ModuleType("vllm.device_allocator.cumem")
    module.CuMemAllocator = type("CuMemAllocator", (), {"instance": instance})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert below("cuda:0", reading(), reading()) == [
        "the allocator of vLLM's sleep mode (CuMemAllocator) has given out 3 GiB on cuda:0: 2 GiB of 'kv_cache', 1 GiB"
        " of 'weights'"
    ]
    module.CuMemAllocator.instance = None
    assert below("cuda:0", reading(), reading()) == []


def test_without_cuda_nobody_uses_a_pool():
    assert pool_users(Pool("cuda:0", (0, 1), 1, 1)) == []
