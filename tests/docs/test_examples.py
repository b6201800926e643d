"""The examples, from which the documentation's blocks are cut, run."""

from __future__ import annotations

import subprocess
import sys

import pages
import pytest
import unmeasured

from pytest_vllm_cleanup.testing import tiny_model

pytestmark = pytest.mark.engine
EXAMPLES = pages.ROOT / "examples"
QUIET = ("-q", "--disable-warnings", "-p", "no:cacheprovider")


def run(*arguments):
    environ = {**unmeasured.environment(), "VLLM_LOGGING_LEVEL": "ERROR"}
    return subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, cwd=pages.ROOT, env=environ, timeout=540
    )


def test_the_how_tos_pass():
    done = run("-m", "pytest", EXAMPLES / "howto", *QUIET)
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout
    assert "not measured" not in done.stdout


def test_the_demo_goes_as_planned():
    done = run(EXAMPLES / "demo" / "run.py")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert done.stdout.endswith("as expected: 1 leaked, the test after it passed\n")
    assert "3 passed" in done.stdout
    assert "1 leaked" in done.stdout


def test_the_demo_says_when_it_goes_otherwise(tmp_path):
    for name in ("run.py", "conftest.py"):
        (tmp_path / name).write_bytes((EXAMPLES / "demo" / name).read_bytes())
    (tmp_path / "test_demo.py").write_text("def test_engine_in_a_global(): assert 0\n")
    done = run(tmp_path / "run.py")
    assert done.returncode == 1
    assert "NOT as expected: the tests are test_engine_in_a_global instead of" in done.stderr


def test_without_pytest_an_engine_is_freed(tmp_path):
    done = run(EXAMPLES / "howto" / "without_pytest.py", tiny_model(tmp_path / "llama"))
    assert done.returncode == 0, done.stderr[-5000:]
    assert done.stdout.rstrip().endswith("0 errors")
