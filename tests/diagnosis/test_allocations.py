from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from pytest_vllm_cleanup.diagnosis import allocations
from pytest_vllm_cleanup.diagnosis.allocations import Pool, blocks_in, pools_in, shortened, stack_in

MIB = 2**20
LIBRARY = f"{sysconfig.get_path('purelib')}/torch/nn/modules/linear.py"
# What is below the current folder is shown relative to it, as libraries of an environment inside a checkout are.
SHOWN = os.path.relpath(LIBRARY) if Path.cwd() in Path(LIBRARY).parents else LIBRARY
RUNNER = f"{sysconfig.get_path('purelib')}/_pytest/python.py"


def frame(path, line, name):
    return {"filename": str(path), "line": line, "name": name}


HERE = Path.cwd() / "tests" / "test_it.py"
FRAMES = [frame(LIBRARY, 7, "forward"), frame(HERE, 12, "test_keeps"), frame(RUNNER, 157, "pytest_pyfunc_call")]


def block(address, size, state="active_allocated", **more):
    return {"address": address, "size": size, "requested_size": size - 12, "state": state, **more}


def segment(address, blocks, device=0, pool=(0, 0)):
    return {
        "device": device,
        "address": address,
        "total_size": sum(block["size"] for block in blocks),
        "allocated_size": 0,
        "active_size": 0,
        "requested_size": 0,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": pool,
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }


# As ``torch.cuda.memory_snapshot()`` gives them.
SEGMENTS = [
    segment(0x1000, [block(0x1000, 512, frames=FRAMES), block(0x1200, 1536, "inactive", frames=[])]),
    segment(0x20000000, [block(0x20000000, 2 * MIB, frames=[])], pool=(0, 3)),
    segment(0x30000000, [block(0x30000000, 4 * MIB, "inactive", frames=[])], pool=(0, 3)),
    segment(0x40000000, [block(0x40000000, 20 * MIB, "active_awaiting_free", frames=[])], pool=(7, 0)),
    segment(0x1000, [block(0x1000, 1024, frames=[])], device=1),
]


def test_blocks_that_are_given_out_are_told_by_device():
    assert blocks_in(SEGMENTS, ["cuda:0", "cuda:1", "cuda:2"]) == {
        "cuda:0": {0x1000: 512, 0x20000000: 2 * MIB, 0x40000000: 20 * MIB},
        "cuda:1": {0x1000: 1024},
        "cuda:2": {},
    }


def test_private_pools_are_added_up_and_the_common_one_is_none():
    assert pools_in(SEGMENTS, "cuda:0") == [
        Pool("cuda:0", (7, 0), 20 * MIB, 20 * MIB),
        Pool("cuda:0", (0, 3), 6 * MIB, 2 * MIB),
    ]
    assert pools_in(SEGMENTS, "cuda:1") == []


def test_the_stack_of_a_block_begins_at_the_users_code():
    assert stack_in(SEGMENTS, 0x1000, "cuda:0") == ("tests/test_it.py:12 test_keeps", f"{SHOWN}:7 forward")


@pytest.mark.parametrize(("address", "device"), [(0x1200, "cuda:0"), (0x1000, "cuda:1"), (0x99, "cuda:0")])
def test_a_block_that_is_free_unknown_or_unrecorded_has_no_stack(address, device):
    assert stack_in(SEGMENTS, address, device) == ()


def test_a_long_stack_keeps_the_users_lines_and_the_innermost_ones():
    # Innermost first, as torch gives them.
    frames = [frame(LIBRARY, number, "inner") for number in range(30)]
    frames += [frame(HERE, 5, "helper"), *[frame(LIBRARY, 99, "between")] * 9, frame(HERE, 12, "test_keeps")]
    assert shortened(frames) == (
        "tests/test_it.py:12 test_keeps",
        "tests/test_it.py:5 helper",
        *(f"{SHOWN}:{number} inner" for number in (5, 4, 3, 2, 1, 0)),
    )


def test_of_a_recursion_the_innermost_lines_stay():
    frames = [frame(LIBRARY, 1, "empty"), *(frame(HERE, number, "again") for number in range(50))]
    stack = shortened(frames)
    assert len(stack) == 8
    assert stack[-2:] == ("tests/test_it.py:0 again", f"{SHOWN}:1 empty")


def test_a_stack_of_libraries_only_is_told_too():
    assert shortened([frame(LIBRARY, 1, "empty")]) == (f"{SHOWN}:1 empty",)


RECORDS = """
import sys
from pytest_vllm_cleanup.diagnosis import allocations
{imported}
allocations.start_recording()
assert ("torch" in sys.modules) is {already}, "recording imported torch"
import torch
assert not torch.cuda.is_initialized(), "recording started CUDA"
assert allocations._recording.begin in [call for call, _ in torch.cuda._queued_calls]
assert not allocations.is_recording()
assert allocations.stack_of(1, "cuda:0") == ()
allocations.stop_recording()
assert not torch.cuda.is_initialized()
"""


@pytest.mark.parametrize("already", [True, False])
def test_recording_waits_for_cuda_without_starting_it(already):
    pytest.importorskip("torch")
    source = RECORDS.format(imported="import torch" if already else "", already=already)
    subprocess.run([sys.executable, "-c", source], check=True, timeout=120)


def test_without_cuda_there_is_nothing_to_write_down(tmp_path):
    with pytest.raises(RuntimeError, match="CUDA is not up in this process"):
        allocations.write_snapshot(tmp_path, "tests/test_it.py::test_it")
    assert not list(tmp_path.iterdir())


def test_without_cuda_there_are_no_books():
    books = allocations.read(["cuda:0", "cpu"])
    assert (books.blocks, books.pools, books.pinned) == ({}, [], 0)
