"""What an isolated test must not take over from its parent's command line, folder and plugins, all in one run."""

from __future__ import annotations

import pytest

CONFTEST = """
import os, pytest

vars(pytest).pop("TerminalReporter", None)  # which releases before 8.4 do not have

class ForWorkers:
    def pytest_configure_node(self, node):
        node.workerinput["seed"] = node.config.seed

class OnlyWhereDistributed:
    def pytest_configure_node(self, node):
        node.nodemanager

def pytest_addoption(parser):
    parser.addoption("--randomly-seed", dest="randomly_seed", default="default")

def pytest_configure(config):
    if hasattr(config, "workerinput"):
        config.seed = config.workerinput["seed"]
        config.option.randomly_seed = config.workerinput["randomly_seed"]
    else:
        config.seed = os.getpid()
        config.option.randomly_seed = -config.seed
    config.pluginmanager.register(OnlyWhereDistributed())
    config.pluginmanager.register(ForWorkers())
"""
MODULE = """
import os
with open("imports.txt", "a") as file:
    file.write(f"{os.getpid()} ")

class Strange(UserWarning): pass
"""
SUITE = """
import os, pytest, signal, sys, warnings

pytestmark = pytest.mark.vllm_isolated

def test_plugins(pytestconfig):
    assert pytestconfig.seed == -pytestconfig.option.randomly_seed == os.getppid()

def test_options(pytestconfig):
    assert pytestconfig.option.pastebin is None
    assert pytestconfig.option.debug is None
    assert pytestconfig.option.no_cov

def test_only_its_own_file_is_loaded():
    assert "test_beside" not in sys.modules

def test_ctrl_c():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

def test_warning():
    import only_there
    warnings.warn("strange", only_there.Strange)
"""
IN_THE_BACKGROUND = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
OPTIONS = (
    *("-m", "pytest", "-p", "vllm_cleanup", "-p", "recorder", "-p", "xdist", "-p", "pytest_cov"),
    *("--debug=debug.txt", "--pastebin=failed", "--cov=only_there", "--cov-report=", "--", "."),
)


@pytest.fixture(scope="module")
def run(folder_factory):
    files = {
        "conftest.py": CONFTEST,
        "only_there.py": MODULE,
        "a[1]/test_beside.py": "def test_beside(): pass",
        "a[1]/test_here.py": SUITE,
    }
    folder = folder_factory(files, copies=["recorder.py", "helpers.py"])
    return folder.run(*OPTIONS, start=("-c", IN_THE_BACKGROUND), PYTHONPATH=".")


@pytest.mark.parametrize(
    "name", ["plugins", "options", "only_its_own_file_is_loaded", "ctrl_c", "warning"], ids=lambda name: name
)
def test_an_isolated_test_has_its_own(run, name):
    reports = [report for report in run.record["reports"] if report["nodeid"] == f"a[1]/test_here.py::test_{name}"]
    assert [report["outcome"] for report in reports] == ["passed"] * 3, run.output + run.errors


def test_the_file_of_debug_is_the_parents(run):
    text = (run.folder / "debug.txt").read_text()
    assert text.startswith("versions pytest")
    assert "\0" not in text
    assert "pytest_unconfigure" in text


def test_a_warning_has_nothing_imported_in_the_parent(run):
    assert len((run.folder / "imports.txt").read_text().split()) == 1
    assert "Strange: strange" in run.output


def test_a_folder_with_a_bracket_is_no_hindrance_inside_of_it(folder):
    run = folder({"a[1]/test_it.py": "import pytest\n@pytest.mark.vllm_isolated\ndef test_it(): pass"}).run(
        "test_it.py", cwd="a[1]"
    )
    assert run.counts == {"passed": 1}, run.output + run.errors
