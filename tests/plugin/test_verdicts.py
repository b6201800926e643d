from __future__ import annotations

import re

import pytest

pytestmark = pytest.mark.usefixtures("hasty")


def line_of(result, text):
    lines = [line for line in result.outlines if text in line]
    assert lines, f"no line with {text!r}:\n{result.stdout.str()}"
    return lines[0]


def test_a_test_that_gives_its_memory_back_passes_and_says_nothing(run):
    result = run("""
@pytest.mark.gpu_released
def test_clean():
    tensor = Tensor(100 * MIB)
    gpu.cached += MIB
    gpu.cached -= MIB
""")
    assert result.ret == 0
    assert result.parseoutcomes() == {"passed": 1}
    assert "GPU memory" not in result.stdout.str()
    assert not any(
        "vllm" in line for line in result.outlines if not line.startswith(("plugins:", "rootdir:", "vllm-cl"))
    )


def test_a_clean_test_costs_one_reading_before_and_one_after(run):
    result = run("""
from fake_gpu import FakeMeter
@pytest.mark.gpu_released
def test_clean():
    FakeMeter.reads = 0
def test_after():
    assert FakeMeter.reads == 1
@pytest.mark.gpu_released
def test_baseline():
    assert FakeMeter.reads == 2
""")
    assert result.parseoutcomes() == {"passed": 3}


def test_a_leak_is_named_with_all_its_numbers(run):
    result = run(
        """
def test_earlier():
    gpu.allocated += 5 * MIB
@pytest.mark.gpu_released(tolerance="1 KiB")
def test_leak():
    gpu.allocated += 2 * MIB + 1
""",
        "--vllm-cleanup-timeout=1 min",
    )
    assert result.ret == 1
    assert result.parseoutcomes() == {"passed": 2, "leaked": 1}
    sentence = line_of(result, "test_inner.py::test_leak left")
    assert "left 2.0 MiB (2097153 bytes) on cuda:0 by torch allocator" in sentence
    assert "(5 MiB before, 7.0 MiB after, tolerance 1 KiB)" in sentence
    waited = re.search(r"waited (\d+\.\d) s \(stuck: flat for", sentence)
    assert waited
    assert 0.3 <= float(waited[1]) < 3


def test_a_leak_has_its_letter_and_its_word(run):
    source = """
@pytest.mark.gpu_released
def test_leak():
    gpu.allocated += 2 * MIB
"""
    assert line_of(run(source), "100%").startswith("test_inner.py .L ")
    verbose = run(source, "-v")
    assert re.match(r"test_inner.py::test_leak LEAKED +\[100%\]", line_of(verbose, "LEAKED"))
    assert re.match(r"test_inner.py::test_leak PASSED", line_of(verbose, "PASSED"))


@pytest.mark.parametrize(("size", "leaks"), [("2 * MIB", False), ("2 * MIB + 1", True)])
def test_exactly_the_tolerance_may_stay(run, size, leaks):
    result = run(f"""
@pytest.mark.gpu_released(tolerance="2 MiB")
def test_it():
    gpu.allocated += {size}
""")
    assert result.parseoutcomes() == ({"passed": 1, "leaked": 1} if leaks else {"passed": 1})


def test_the_default_tolerance_of_the_allocator_is_one_mib(run):
    result = run("""
@pytest.mark.gpu_released
def test_within():
    gpu.allocated += MIB
@pytest.mark.gpu_released
def test_beyond():
    gpu.allocated += MIB + 1
""")
    assert result.parseoutcomes() == {"passed": 2, "leaked": 1}
    assert "test_beyond left" in line_of(result, " left ")


def test_memory_that_comes_back_late_is_waited_for(run):
    result = run(
        """
import time
@pytest.mark.gpu_released
def test_late():
    gpu.children += 4096 * MIB
    for tenth in range(1, 9):
        gpu.later(tenth / 10, "children", -512 * MIB)
    global end
    end = time.monotonic()
def test_after():
    assert gpu.children == 0
    assert time.monotonic() - end < 2.5, "waited on though all was back"
""",
        "--vllm-cleanup-timeout=1 min",
    )
    assert result.parseoutcomes() == {"passed": 2}


def test_memory_that_is_stuck_ends_the_wait_early_and_is_called_stuck(run):
    result = run("""
@pytest.mark.gpu_released(timeout=50)
def test_stuck():
    gpu.allocated += 512 * MIB
""")
    assert result.duration < 10
    stood = re.search(r"\(stuck: flat for (\d\.\d) s\)", line_of(result, " left "))
    assert stood
    assert 0.4 <= float(stood[1]) < 2


def test_a_child_process_gets_longer_to_end_than_a_tensor(run):
    result = run(
        """
@pytest.mark.gpu_released
def test_ends():
    gpu.children += 512 * MIB
    gpu.later(1.5, "children", -512 * MIB)
""",
        "--vllm-cleanup-timeout=1 min",
    )
    assert result.parseoutcomes() == {"passed": 1}


def test_memory_that_has_not_had_the_time_to_be_called_stuck_says_how_long_it_stood(run):
    result = run("""
@pytest.mark.gpu_released(timeout="500 ms")
def test_child():
    gpu.children += 512 * MIB
""")
    assert re.search(r"\(time was up; flat for 0\.[3-9] s\)", line_of(result, " left "))


LATE_THREAD = """
import threading, time
def work(tensor):
    time.sleep(1.5)
@pytest.mark.gpu_released(timeout="50 s")
def test_thread():
    threading.Thread(target=work, args=(Tensor(512 * MIB),)).start()
"""


def test_a_thread_that_the_test_started_gets_longer_to_finish_its_work_than_a_tensor(run):
    assert run(LATE_THREAD).parseoutcomes() == {"passed": 1}


def test_a_thread_of_before_the_test_gets_no_longer(run):
    result = run(
        LATE_THREAD.replace("def work", "threading.Thread(target=time.sleep, args=(4,)).start()\ndef work").replace(
            "threading.Thread(target=work, args=(Tensor(512 * MIB),)).start()", "gpu.allocated += 512 * MIB"
        )
    )
    stood = re.search(r"\(stuck: flat for (\d\.\d) s\)", line_of(result, " left "))
    assert stood
    assert float(stood[1]) < 2


def test_memory_still_coming_back_when_time_is_up_is_called_slow_with_its_rate(run):
    result = run("""
@pytest.mark.gpu_released(timeout="700 ms")
def test_slow():
    gpu.children += 100_000 * MIB
    for step in range(200):
        gpu.later(step / 100, "children", -50 * MIB)
""")
    assert result.parseoutcomes() == {"passed": 1, "leaked": 1}
    assert "on cuda:0 by processes on the device" in line_of(result, " left ")
    rate = re.search(r"\(slow: falling at (\d+\.\d) GiB/s, so a longer timeout may help\)", line_of(result, " left "))
    assert rate
    assert 2 < float(rate[1]) < 10


def test_memory_of_another_tenant_is_not_a_leak(run):
    result = run(
        """
@pytest.mark.gpu_released
def test_neighbour():
    gpu.others += 4096 * MIB
""",
        "--vllm-cleanup-strict",
        "--junitxml=junit.xml",
    )
    assert result.ret == 0
    assert result.parseoutcomes() == {"passed": 1}


def test_what_cannot_be_measured_passes_and_is_shown(run):
    source = """
@pytest.mark.gpu_released
def test_blind():
    gpu.readable = second_gpu.readable = False
"""
    result = run(source)
    assert result.ret == 0
    assert result.parseoutcomes() == {"passed": 1}
    result.stdout.fnmatch_lines(
        [
            "*= GPU memory not measured =*",
            "test_inner.py::test_blind: whether GPU memory was released could not be measured: "
            "the fake GPUs are switched off.",
        ]
    )
    strict = run(source, "--vllm-cleanup-strict")
    assert strict.ret == 1
    assert strict.parseoutcomes() == {"passed": 1, "errors": 1}
    strict.stdout.fnmatch_lines(
        ["*ERROR at teardown of test_blind*", "test_inner.py::test_blind: whether GPU memory was released could not *"]
    )


def test_all_tests_are_checked_with_check_all_and_none_with_check_off(run):
    source = """
def test_unmarked():
    gpu.allocated += 2 * MIB
@pytest.mark.gpu_released
def test_marked():
    gpu.allocated += 2 * MIB
"""
    assert run(source).parseoutcomes() == {"passed": 2, "leaked": 1}
    assert run(source, "--vllm-cleanup-check=all").parseoutcomes() == {"passed": 2, "leaked": 2}
    off = run(source, "--vllm-cleanup-check=off")
    assert off.ret == 0
    assert off.parseoutcomes() == {"passed": 2}


def test_a_test_can_be_left_out_with_a_reason(run):
    result = run(
        """
@pytest.mark.gpu_released(check=False, reason="keeps its cache on purpose")
def test_left_out():
    gpu.allocated += 2 * MIB
""",
        "--vllm-cleanup-check=all",
    )
    assert result.ret == 0
    assert result.parseoutcomes() == {"passed": 1}


def test_only_the_named_devices_count(run):
    result = run("""
@pytest.mark.gpu_released(devices=1)
def test_other_device():
    gpu.allocated += 2 * MIB
@pytest.mark.gpu_released(devices=[0, "cuda:1"])
def test_both():
    second_gpu.allocated += 3 * MIB
    gpu.allocated += 4 * MIB
""")
    assert result.parseoutcomes() == {"passed": 2, "leaked": 1}
    sentence = line_of(result, " left ")
    assert "4 MiB (4194304 bytes) on cuda:0" in sentence
    assert "3 MiB (3145728 bytes) on cuda:1" in sentence


def test_a_finalizer_that_frees_memory_counts_as_before_the_verdict(run):
    result = run("""
@pytest.fixture
def freed_by_finalizer(request):
    gpu.allocated += 2 * MIB
    request.addfinalizer(lambda: setattr(gpu, "allocated", gpu.allocated - 2 * MIB))
@pytest.fixture
def freed_after_yield(freed_by_finalizer):
    gpu.allocated += 2 * MIB
    yield
    gpu.allocated -= 2 * MIB
class TestIt:
    def setup_method(self):
        gpu.allocated += 2 * MIB
    def teardown_method(self):
        gpu.allocated -= 2 * MIB
    @pytest.mark.gpu_released
    def test_it(self, freed_after_yield):
        pass
""")
    assert result.parseoutcomes() == {"passed": 1}


def test_memory_of_the_first_fixture_is_not_in_the_baseline(run):
    result = run("""
@pytest.fixture(autouse=True)
def first():
    gpu.allocated += 2 * MIB
@pytest.mark.gpu_released
def test_it():
    pass
""")
    assert result.parseoutcomes() == {"passed": 1, "leaked": 1}
    assert "(0 B before, 2 MiB after" in line_of(result, " left ")


def test_memory_from_before_the_first_fixture_is_in_the_baseline(run):
    result = run("""
gpu.allocated += 2 * MIB
@pytest.mark.gpu_released
def test_it():
    gpu.allocated -= 2 * MIB
@pytest.mark.gpu_released
def test_less_is_no_credit():
    gpu.allocated += 2 * MIB
""")
    assert result.parseoutcomes() == {"passed": 2, "leaked": 1}
    assert "test_less_is_no_credit left" in line_of(result, " left ")


def test_memory_in_a_cycle_is_collected_before_the_verdict(run):
    result = run("""
import gc
@pytest.mark.gpu_released
def test_cycle():
    gc.disable()
    tensor = Tensor()
    tensor.me = tensor
""")
    assert result.parseoutcomes() == {"passed": 1}


def test_free_blocks_that_the_allocator_cannot_hand_back_are_a_leak(run):
    result = run("""
@pytest.mark.gpu_released
def test_pool():
    gpu.cached += 600 * MIB
""")
    assert result.parseoutcomes() == {"passed": 1, "leaked": 1}
    assert "600 MiB (629145600 bytes) on cuda:0 by free blocks of the torch allocator" in line_of(result, " left ")
