"""Checks without an engine, on a real device."""

from __future__ import annotations

KEEPS_ONE = """
    import pytest
    import torch

    KEPT = []

    @pytest.mark.gpu_released
    def test_comes_first():
        (torch.ones(1024, 1024, device="cuda") @ torch.ones(1024, 1024, device="cuda")).sum().item()

    @pytest.mark.gpu_released
    def test_keeps_one():
        KEPT.append(torch.ones(2 * 2**20, dtype=torch.uint8, device="cuda"))

    @pytest.mark.gpu_released
    def test_comes_after():
        torch.ones(2 * 2**20, dtype=torch.uint8, device="cuda")

    @pytest.mark.gpu_released(tolerance="2 MiB")
    def test_is_allowed_to_keep_one():
        KEPT.append(torch.ones(2 * 2**20, dtype=torch.uint8, device="cuda"))

    @pytest.mark.gpu_released
    def test_keeps_a_reference_cycle_only():
        cycle = [torch.ones(64 * 2**20, dtype=torch.uint8, device="cuda")]
        cycle.append(cycle)

    @pytest.mark.gpu_released
    def test_fails_with_a_tensor_in_a_local():
        local = torch.ones(64 * 2**20, dtype=torch.uint8, device="cuda")
        assert not local.numel()
"""


def test_a_kept_tensor_of_2_mib_is_leaked_with_exactly_those_bytes(run_suite):
    result = run_suite(KEEPS_ONE)
    result.assert_outcomes(passed=5, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*::test_keeps_one PASSED*",
            "*::test_keeps_one LEAKED*",
            "*::test_keeps_one left 2 MiB (2097152 bytes) on cuda:0 by torch allocator (* before, * after,"
            " tolerance 1 MiB); waited *",
            "*1 failed, 5 passed, 1 leaked*",
        ]
    )
    assert result.ret == 1


def test_a_clean_test_is_not_flagged_50_times_in_a_row(run_suite):
    result = run_suite(
        """
        import pytest
        import torch

        @pytest.mark.parametrize("number", range(50))
        @pytest.mark.gpu_released
        def test_keeps_nothing(number):
            size = 256 * (1 + number % 8)
            left = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
            assert torch.isfinite(left @ left).all()
        """
    )
    result.assert_outcomes(passed=50)
    assert "leaked" not in result.stdout.str()


def test_measuring_creates_no_cuda_context_and_imports_no_torch(run_suite):
    result = run_suite(
        """
        import ctypes
        import os
        import sys

        import pytest

        NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED

        @pytest.mark.gpu_released
        def test_first():
            pass

        @pytest.mark.gpu_released
        def test_second():
            import pynvml

            assert "torch" not in sys.modules
            assert "vllm" not in sys.modules
            context = ctypes.c_void_p()
            assert ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context)) == NOT_INITIALIZED
            device = pynvml.nvmlDeviceGetHandleByIndex(0)
            pids = [process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(device)]
            assert os.getpid() not in pids
        """
    )
    result.assert_outcomes(passed=2)


def test_a_process_that_a_test_leaves_behind_is_a_leak_and_charged_once(run_suite):
    result = run_suite(
        """
        import subprocess
        import sys

        import pytest

        HOLD = (
            "import torch; t = torch.ones(256 * 2**20, dtype=torch.uint8, device='cuda'); print('up', flush=True); "
            "input()"
        )
        STARTED = []

        @pytest.fixture(scope="module", autouse=True)
        def end_them():
            yield
            for process in STARTED:
                process.stdin.close()
                process.wait()

        @pytest.mark.gpu_released
        def test_leaves_a_process():
            process = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert process.stdout.readline()
            STARTED.append(process)

        @pytest.mark.gpu_released
        def test_comes_after():
            pass
        """
    )
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*::test_leaves_a_process LEAKED*", "*by processes on the device*", "*1 leaked*"])
