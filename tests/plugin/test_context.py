"""The check of a part of a test, and readings on demand."""

from __future__ import annotations


def test_a_block_that_leaks_fails_with_the_numbers(run):
    result = run("""
def test_fixture(assert_gpu_released):
    with assert_gpu_released():
        tensor = Tensor()
        del tensor
    with pytest.raises(AssertionError) as caught:
        with assert_gpu_released(tolerance="1 MiB", timeout="0 s"):
            gpu.allocated += 2 * MIB
    text = str(caught.value)
    assert type(caught.value).__name__ == "GpuMemoryLeakError"
    assert text.startswith("the block left 2 MiB (2097152 bytes) on cuda:0 by torch allocator (0 B before, 2 MiB")
    assert "  allocated          0 B ->        2 MiB  (+2 MiB)" in text
def test_import():
    from pytest_vllm_cleanup import GpuMemoryLeakError, assert_gpu_released
    with pytest.raises(GpuMemoryLeakError):
        with assert_gpu_released(timeout=0):
            gpu.allocated += 2 * MIB
    with assert_gpu_released(tolerance=2 * MIB):
        gpu.allocated += 2 * MIB
    with assert_gpu_released(devices=("cuda:1",)):
        gpu.allocated += 2 * MIB
""")
    assert result.parseoutcomes() == {"passed": 2}


def test_an_exception_inside_the_block_goes_first(run):
    result = run("""
def test_it(assert_gpu_released):
    with pytest.raises(KeyError):
        with assert_gpu_released():
            gpu.allocated += 2 * MIB
            raise KeyError("own")
""")
    assert result.parseoutcomes() == {"passed": 1}


def test_what_cannot_be_measured_is_an_error_only_if_strict(run):
    result = run("""
def test_it(assert_gpu_released):
    with assert_gpu_released():
        gpu.readable = second_gpu.readable = False
    with pytest.raises(AssertionError, match="could not be measured: the fake GPUs are switched off"):
        with assert_gpu_released(strict=True):
            pass
""")
    assert result.parseoutcomes() == {"passed": 1}


def test_bad_arguments_are_refused_before_the_block_runs(run):
    result = run("""
@pytest.mark.parametrize(("arguments", "text"), [
    ({"tolerance": "much"}, "not a size: 'much'"),
    ({"timeout": -1}, "not a duration: -1"),
    ({"devices": ("cuda:9",)}, "device cuda:9 cannot be measured here; these can: cuda:0, cuda:1"),
])
def test_it(assert_gpu_released, arguments, text):
    with pytest.raises(ValueError, match=text):
        with assert_gpu_released(**arguments):
            pytest.fail("the block ran")
""")
    assert result.parseoutcomes() == {"passed": 3}


def test_devices_are_named_in_a_block_as_in_the_marker(run):
    result = run("""
@pytest.mark.parametrize("devices", [1, "1", "cuda:1", [1], ("cuda:1",)])
def test_it(assert_gpu_released, devices):
    with assert_gpu_released(devices=devices):
        gpu.allocated += 2 * MIB
    with pytest.raises(AssertionError):
        with assert_gpu_released(devices=devices, timeout=0):
            second_gpu.allocated += 2 * MIB
""")
    assert result.parseoutcomes() == {"passed": 5}


def test_the_fixture_reads_memory_and_its_peak(run):
    result = run("""
import time
def test_it(gpu_memory):
    gpu.allocated = 5 * MIB
    assert gpu_memory.device().allocated == 5 * MIB
    assert gpu_memory.device("cuda:1").allocated == 0
    assert set(gpu_memory.read()) == {"cuda:0", "cuda:1"}
    gpu.allocated = 50 * MIB
    time.sleep(0.3)
    gpu.allocated = 0
    assert gpu_memory.peak("allocated") == 50 * MIB
    assert gpu_memory.peak() == 650 * MIB
    assert gpu_memory.peak("allocated", "cuda:1") == 0
    with pytest.raises(LookupError, match="device 'cuda:9' cannot be measured; these can: cuda:0, cuda:1"):
        gpu_memory.device("cuda:9")
    with pytest.raises(ValueError, match="figure 'free': expected one of used, own, children, allocated, reserved"):
        gpu_memory.peak("free")
    gpu.readable = second_gpu.readable = False
    with pytest.raises(LookupError, match="the fake GPUs are switched off"):
        gpu_memory.device()
def test_the_thread_is_gone():
    import threading
    assert [thread.name for thread in threading.enumerate() if "vllm" in thread.name] == []
""")
    assert result.parseoutcomes() == {"passed": 2}
