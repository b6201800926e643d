"""Other programs on the device, and drivers that do not tell them from our own."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.usefixtures("hasty")

HIDDEN = """
gpu.hidden = True
gpu.context = second_gpu.context = 0
"""


def lines_of(result):
    return [" ".join(line.split()) for line in result.outlines]


def test_a_neighbour_that_grew_is_named_in_the_report_of_a_test_that_passes(run):
    result = run(
        """
@pytest.mark.gpu_released
def test_neighbour():
    gpu.others += 3072 * MIB
""",
        "-v",
    )
    assert result.parseoutcomes() == {"passed": 1}
    result.stdout.fnmatch_lines(["*= GPU memory that others took =*"])
    assert (
        "test_inner.py::test_neighbour left nothing of its own, but other processes grew on cuda:0 (0 B -> 3 GiB by "
        "other processes on the device: pid 777 (stranger): 0 B -> 3 GiB)."
    ) in lines_of(result)


def test_a_child_process_that_stays_beside_a_growing_neighbour_is_the_leak_and_is_named(run):
    result = run("""
@pytest.mark.gpu_released
def test_both():
    gpu.others += 9000 * MIB
    gpu.children += 512 * MIB
""")
    assert result.parseoutcomes() == {"passed": 1, "leaked": 1}
    (sentence,) = (line for line in result.outlines if "test_both left" in line)
    assert "left 512 MiB (536870912 bytes) on cuda:0 by processes on the device" in sentence
    assert "Held by pid 4242 (VLLM::EngineCore): 0 B -> 512 MiB. " in sentence


def test_where_processes_are_hidden_a_neighbour_is_no_leak_of_a_test_without_any_process_there(run):
    result = run(
        HIDDEN
        + """
@pytest.mark.gpu_released
def test_start():
    gpu.others += 3072 * MIB
@pytest.mark.gpu_released
def test_growth():
    gpu.others += 1024 * MIB
@pytest.mark.gpu_released
def test_shrinks():
    gpu.others -= 2048 * MIB
""",
        "--vllm-cleanup-strict",
        "-v",
    )
    assert result.parseoutcomes() == {"passed": 3}
    named = [line for line in lines_of(result) if "left nothing of its own" in line]
    assert len(named) == 2
    assert "pid 777 (name not known here): 3 GiB -> 4 GiB" in named[1]


def test_where_processes_are_hidden_an_engine_that_is_alive_is_a_leak_and_is_named(run):
    result = run(
        HIDDEN
        + """
@pytest.mark.gpu_released
def test_orphan():
    gpu.others += 1024 * MIB
    gpu.children += 4096 * MIB
"""
    )
    assert result.parseoutcomes() == {"passed": 1, "leaked": 1}
    (sentence,) = (line for line in result.outlines if "test_orphan left" in line)
    assert "on cuda:0 by device" in sentence
    (level,) = (line for line in lines_of(result) if line.startswith("cuda:0: per-process figures of ours are not"))
    assert "the driver lists no process of this one's process table" in level
    assert level.endswith("so the device as a whole was judged")
    assert "Held by pid 4242 (VLLM::EngineCore): 0 B -> unknown. " in sentence
    lines = lines_of(result)
    assert "pid 4242 VLLM::EngineCore of ours is alive" in lines
    assert "pid 3004242 ?: 4 GiB, whose is not known" in lines


def test_where_it_cannot_be_told_whose_growth_it_is_the_summary_says_what_to_do(run):
    source = """
gpu.hidden = True
gpu.others = 1024 * MIB
@pytest.mark.gpu_released
def test_shared():
    gpu.others += 4096 * MIB
"""
    result = run(source)
    assert result.parseoutcomes() == {"passed": 1}
    result.stdout.fnmatch_lines(
        ["*test_shared: * could not be measured: the device grew by 4 GiB, and more * --pid=host*"]
    )
    assert run(source, "--vllm-cleanup-strict").parseoutcomes() == {"passed": 1, "errors": 1}


def test_memory_of_a_hidden_process_that_has_just_ended_is_waited_for(run):
    result = run(
        HIDDEN
        + """
import time
@pytest.mark.gpu_released
def test_late():
    gpu.unlisted += 4096 * MIB
    gpu.later(1.5, "unlisted", -4096 * MIB)
    global end
    end = time.monotonic()
def test_after():
    assert 1 < time.monotonic() - end < 4
    assert gpu.unlisted == 0
""",
        "--vllm-cleanup-timeout=1 min",
        "-v",
    )
    assert result.parseoutcomes() == {"passed": 2}
    assert "that others took" not in result.stdout.str()


def test_a_neighbour_that_never_stands_still_is_not_waited_for_without_end(run):
    result = run(
        HIDDEN
        + """
@pytest.mark.gpu_released
def test_busy():
    gpu.unlisted += 4096 * MIB
    for step in range(400):
        gpu.later(step / 20, "unlisted", MIB * (1 if step % 2 else -1) * 200)
""",
        "--vllm-cleanup-timeout=1 min",
    )
    assert result.parseoutcomes() == {"passed": 1}
    assert result.duration < 18
