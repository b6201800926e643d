"""The parts of the tiny models of ``pytest_vllm_cleanup.testing``."""
