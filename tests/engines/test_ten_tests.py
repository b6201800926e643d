"""A failing test with an engine in this process harms no other test, and its report is pytest's own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from engine_lab import InnerRun, run_pytest

pytestmark = pytest.mark.engine

SUITE = Path(__file__).parents[2] / "benchmarks" / "inner" / "ten_tests.py"
ENGINE = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "kv_cache_memory_bytes": 128 << 20}
# vLLM writes how long loading took, and a progress bar: no two runs write the same there.
COMMON = "--show-capture=no --junitxml=junit.xml -p no:randomly"


def run(folder: Path, model: Path, *arguments: str, source: str | None = None) -> InnerRun:
    folder.mkdir()
    environ = {
        "BENCHMARK_MODEL": str(model),
        "BENCHMARK_ENGINE": json.dumps(ENGINE),
        "PYTEST_ADDOPTS": " ".join([COMMON, *arguments]),
    }
    return run_pytest(folder, source or SUITE.read_text(encoding="utf-8"), environ)


def _without_addresses(text: str) -> str:
    return re.sub(r"0x[0-9a-f]{6,}", "0x", text)


def failures(run: InnerRun) -> str:
    """Return the section FAILURES, to the headline of the next one."""
    found = re.search(r"^=+ FAILURES =+$.*?(?=^=)", run.output, re.M | re.S)
    assert found is not None, run.output
    return _without_addresses(found[0])


def in_junit(folder: Path) -> list[tuple[str, str | None, str | None]]:
    """Return tag, message and text of what JUnit's file says of the failing test."""
    cases = ElementTree.parse(folder / "junit.xml").getroot().iter("testcase")
    (failed,) = (case for case in cases if case.get("name") == "test_fails")
    problems = [child for child in failed if child.tag != "properties"]
    return [(child.tag, child.get("message"), _without_addresses(child.text or "")) for child in problems]


def test_one_of_ten_fails_nine_pass(model: Path, tmp_path: Path) -> None:
    seen = run(tmp_path / "with", model)
    assert seen.outcomes == {"test_fails": ["FAILED"], "test_passes": ["PASSED"] * 9}, seen.output
    assert seen.status == 1
    alone = run(tmp_path / "without", model, "-p no:vllm_cleanup", "-k test_fails")
    assert alone.outcomes == {"test_fails": ["FAILED"]}, alone.output
    assert failures(seen) == failures(alone)
    assert "engine = LlamaForCausalLM(" in failures(seen)
    assert in_junit(tmp_path / "with") == in_junit(tmp_path / "without") != []


def test_the_failure_is_printed_with_its_locals_as_without_the_plugin(model: Path, tmp_path: Path) -> None:
    ours = run(tmp_path / "with", model, "--showlocals", "-k test_fails")
    plain = run(tmp_path / "without", model, "--showlocals", "-k test_fails", "-p no:vllm_cleanup")
    assert ours.outcomes == plain.outcomes == {"test_fails": ["FAILED"]}, ours.output
    assert failures(ours) == failures(plain)
    assert in_junit(tmp_path / "with") == in_junit(tmp_path / "without") != []
    assert "llm        = LlamaForCausalLM(" in failures(ours)


FAILED_STARTS = """
import json, os
import pytest
from vllm import LLM

pytestmark = pytest.mark.gpu_released
ENGINE = json.loads(os.environ["BENCHMARK_ENGINE"])

@pytest.mark.parametrize("wrong", [{"max_model_len": 10**6}, {"kv_cache_memory_bytes": 1024}], ids=["config", "cache"])
def test_fails(wrong):
    LLM(os.environ["BENCHMARK_MODEL"], **{**ENGINE, **wrong})
"""


def test_an_engine_that_fails_to_start_is_reported_as_without_the_plugin(model: Path, tmp_path: Path) -> None:
    ours = run(tmp_path / "with", model, source=FAILED_STARTS)
    plain = run(tmp_path / "without", model, "-p no:vllm_cleanup", source=FAILED_STARTS)
    assert ours.outcomes == plain.outcomes == {"test_fails": ["FAILED", "FAILED"]}, ours.output
    assert failures(ours) == failures(plain)
