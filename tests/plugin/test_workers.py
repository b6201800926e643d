"""Workers of pytest-xdist that have devices of their own, on a machine with fake GPUs and real processes."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from pytest_vllm_cleanup.workers import restarts

pytest.importorskip("xdist")

HERE = Path(__file__).parent
HEADER = """
import os, signal, sys, time
import pytest
from fake_driver import MIB, Engine, devices, meet, note, runs, start
"""
CONFTEST = """
import os, pytest
from fake_driver import note

@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item):
    note(event="begins", test=item.name, visible=os.environ.get("CUDA_VISIBLE_DEVICES"))
    try:
        return (yield)
    finally:
        note(event="ends", test=item.name, visible=os.environ.get("CUDA_VISIBLE_DEVICES"))
"""
NAMES = ("VLLM_PORT", "MASTER_PORT", "VLLM_DP_MASTER_PORT", "TRITON_CACHE_DIR", "PYTEST_VLLM_CLEANUP_SHARERS")
EIGHT = f"""
@pytest.mark.parametrize("number", range(8))
def test_it(number):
    time.sleep(0.05)
    note(event="sees", **{{name: os.environ.get(name) for name in {NAMES!r}}})
"""


class Machine:
    """A machine with GPUs, and the diary of what ran there."""

    def __init__(self, pytester, monkeypatch):
        self._pytester = pytester
        self.uuids = []
        self.folder = pytester.mkdir("gpus")
        self.locks = pytester.mkdir("tmp")
        fakes = pytester.mkdir("fakes")
        for file in (*(HERE / "fake_driver").glob("*.py"), HERE.parent / "fake_nvml.py"):
            shutil.copy(file, fakes / file.name)
        monkeypatch.setenv("FAKE_GPUS", str(self.folder))
        monkeypatch.setenv("PYTHONPATH", str(fakes))
        monkeypatch.setenv("TMPDIR", str(self.locks))
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES", *NAMES):
            monkeypatch.delenv(name, raising=False)
        for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):
            monkeypatch.delenv(name, raising=False)
        self.environ = monkeypatch

    def with_gpus(self, count):
        self.uuids = [f"GPU-{letter * 8}" for letter in "abcd"[:count]]
        for number, uuid in enumerate(self.uuids):
            (self.folder / f"{number}_{uuid}").mkdir(exist_ok=True)
        return self

    def run(self, source, *arguments, conftest=""):
        modules = {"test_inner": source} if isinstance(source, str) else source
        self._pytester.makeconftest(CONFTEST + conftest)
        self._pytester.makepyfile(**{name: HEADER + text for name, text in modules.items()})
        (self._pytester.path / "diary").unlink(missing_ok=True)
        plugins = ("-p", "xdist", "-p", "vllm_cleanup", "-p", "fake_driver", "-p", "no:cacheprovider")
        return self._pytester.runpytest_subprocess(*plugins, *arguments)

    def diary(self, event=None):
        file = self._pytester.path / "diary"
        entries = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [entry for entry in entries if event in (None, entry["event"])]

    def devices_of_workers(self):
        found = {}
        for entry in self.diary("begins"):
            found.setdefault(entry["worker"], set()).add(entry["visible"])
        return {worker: min(visible) for worker, visible in sorted(found.items()) if len(visible) == 1}


@pytest.fixture
def machine(pytester, monkeypatch):
    """Makes a machine with some GPUs."""
    return Machine(pytester, monkeypatch).with_gpus


def overlapping(entries, first="begins", last="ends", of="worker"):
    """The pairs of periods of different workers that overlap in time."""
    periods, open_ = [], {}
    for entry in sorted(entries, key=lambda entry: entry["at"]):
        if entry["event"] == first:
            open_[entry[of]] = entry
        elif entry["event"] == last:
            periods.append((open_.pop(entry[of]), entry))
    pairs = itertools.combinations(periods, 2)
    return [(a[0], b[0]) for a, b in pairs if a[0]["at"] < b[1]["at"] and b[0]["at"] < a[1]["at"]]


@pytest.mark.parametrize(
    ("visible", "given"),
    [
        (None, {"gw0": "0", "gw1": "1"}),
        ("1", {"gw0": "1"}),
        ("1,0", {"gw0": "1", "gw1": "0"}),
        ("GPU-bbbbbbbb,GPU-aa", {"gw0": "GPU-bbbbbbbb", "gw1": "GPU-aaaaaaaa"}),
    ],
)
def test_each_worker_has_a_device_of_the_callers_list_in_the_callers_words_but_in_full(machine, visible, given):
    machine = machine(2)
    if visible is not None:
        machine.environ.setenv("CUDA_VISIBLE_DEVICES", visible)
    result = machine.run(EIGHT, "-n", "gpu", "-v")
    assert result.parseoutcomes() == {"passed": 8}
    assert machine.devices_of_workers() == given
    assert {entry["PYTEST_VLLM_CLEANUP_SHARERS"] for entry in machine.diary("sees")} == {"1"}
    for worker, device in given.items():
        assert f"[{worker}] CUDA_VISIBLE_DEVICES={device}" in result.stdout.str()


def test_workers_that_share_a_device_have_ports_and_caches_of_their_own(machine):
    machine = machine(1)
    options = ("--vllm-cleanup-gpus=auto", "--vllm-cleanup-workers-per-gpu=2", "--vllm-cleanup-caches=worker")
    result = machine.run(EIGHT, "-n", "auto", *options)
    assert result.parseoutcomes() == {"passed": 8}
    assert machine.devices_of_workers() == {"gw0": "0", "gw1": "0"}
    seen = {entry["worker"]: entry for entry in machine.diary("sees")}
    assert {entry["PYTEST_VLLM_CLEANUP_SHARERS"] for entry in seen.values()} == {"2"}
    first, second = (int(entry["VLLM_PORT"]) for entry in seen.values())
    assert abs(first - second) >= 100
    for entry in seen.values():
        base = int(entry["VLLM_PORT"])
        assert base < int(entry["MASTER_PORT"]) < int(entry["VLLM_DP_MASTER_PORT"]) < base + 90
    assert len({entry["TRITON_CACHE_DIR"] for entry in seen.values()}) == 2


def test_ports_that_the_user_has_set_stay(machine):
    machine = machine(1)
    machine.environ.setenv("MASTER_PORT", "12345")
    assert machine.run(EIGHT, "-n", "gpu").parseoutcomes() == {"passed": 8}
    assert {entry["MASTER_PORT"] for entry in machine.diary("sees")} == {"12345"}
    assert None not in {entry["VLLM_DP_MASTER_PORT"] for entry in machine.diary("sees")}


def test_without_the_options_no_environment_changes_and_nothing_is_loaded(machine):
    machine = machine(2)
    loaded = "def test_loaded():\n    assert 'pytest_vllm_cleanup.workers.worker' not in sys.modules\n"
    assert machine.run(EIGHT + loaded, "-n", "2").parseoutcomes() == {"passed": 9}
    assert {entry["visible"] for entry in machine.diary("begins")} == {None}
    assert {entry[name] for entry in machine.diary("sees") for name in NAMES} == {None}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("-n", "gpu"), "ERROR: -n gpu: no GPU to give to a worker: CUDA_VISIBLE_DEVICES='' names no device"),
        (
            ("-n", "gpu", "--vllm-cleanup-gpus=off"),
            "ERROR: -n gpu gives each worker a GPU, and",
        ),
        (
            ("--vllm-cleanup-on-leak=restart",),
            "ERROR: --vllm-cleanup-on-leak=restart replaces a worker",
        ),
        (("-n", "cpu"), "error: argument -n/--numprocesses"),
    ],
)
def test_what_cannot_be_is_said_before_the_run(machine, options, error):
    machine = machine(1)
    machine.environ.setenv("CUDA_VISIBLE_DEVICES", "")
    result = machine.run(EIGHT, *options)
    assert result.ret == 4
    assert error in result.stderr.str()


TORCH = """
import sys
from types import ModuleType, SimpleNamespace
torch = sys.modules["torch"] = ModuleType("torch")
torch.cuda = SimpleNamespace(is_initialized=lambda: True)
"""


def test_cuda_that_is_up_before_pytest_is_an_error_that_names_who_started_it(machine, pytester):
    machine = machine(2)
    (pytester.path / "fakes" / "starter.py").write_text(TORCH)
    # As an interpreter does that runs site customisations; the controller has none.
    (pytester.path / "fakes" / "sitecustomize.py").write_text(
        "import sys\nif '-c' in sys.orig_argv[:3]:\n    import starter\n"
    )
    result = machine.run(EIGHT, "-n", "gpu")
    assert result.ret == 4
    assert "worker gw0 cannot be given a GPU: CUDA has been started in its process before pytest" in result.stderr.str()
    assert "by torch, which starter imported" in result.stderr.str()


def test_a_conftest_that_hands_out_devices_by_itself_ends_the_run_with_a_sentence(machine):
    conftest = "if 'PYTEST_XDIST_WORKER' in os.environ: os.environ['CUDA_VISIBLE_DEVICES'] = '0'\n"
    result = machine(2).run(EIGHT, "-n", "gpu", conftest=conftest)
    assert result.ret != 0
    assert "this worker was given CUDA_VISIBLE_DEVICES=1, and something has made it '0' since" in result.stdout.str()
    assert "replacing crashed worker" not in result.stdout.str()


BUGS = """
from pytest_vllm_cleanup.devices import board, ports
from pytest_vllm_cleanup.workers import controller
def bug(*_, **__):
    raise RuntimeError("a bug of the plugin")
{places} = bug
"""


@pytest.mark.parametrize("places", ["controller._offer", "board.Board.wait = ports.reserve"])
def test_a_bug_of_ours_is_a_warning_and_the_run_goes_on(machine, places):
    source = "@pytest.mark.gpus(2)\ndef test_two():\n    pass\n" + EIGHT
    result = machine(2).run(source, "-n", "gpu", conftest=BUGS.format(places=places))
    assert result.parseoutcomes()["passed"] == 9
    assert result.ret == 0
    assert "a bug of the plugin" in result.stdout.str() + result.stderr.str()


def test_each_host_shares_out_its_own_devices(machine):
    machine = machine(4)
    tx = [f"--tx={count}*popen//env:CUDA_VISIBLE_DEVICES={devices}" for count, devices in ((2, "0,1"), (1, "GPU-cc"))]
    result = machine.run(EIGHT, "--dist=load", *tx, "--vllm-cleanup-gpus=auto")
    assert result.parseoutcomes() == {"passed": 8}
    assert machine.devices_of_workers() == {"gw0": "0", "gw1": "1", "gw2": "GPU-cccccccc"}
    assert {entry["PYTEST_VLLM_CLEANUP_SHARERS"] for entry in machine.diary("sees")} == {"1"}


MIXED = """
@pytest.mark.parametrize("number", range(12))
def test_one(number):
    meet()
@pytest.mark.gpus(2)
@pytest.mark.parametrize("number", range(4))
def test_two(number, gpu_devices):
    assert [device.name for device in gpu_devices] == ["cuda:0", "cuda:1"]
    assert sorted(device.uuid for device in gpu_devices) == ["GPU-aaaaaaaa", "GPU-bbbbbbbb"]
    assert [device.uuid for device in gpu_devices] == [card.name.partition("_")[2] for card in devices()]
    time.sleep(0.05)
@pytest.mark.gpus(3)
def test_three():
    pass
@pytest.mark.gpus(1)
def test_single(gpu_devices):
    assert len(gpu_devices) == 1
@pytest.mark.gpus(0)
def test_wrong():
    pass
"""


def test_a_test_with_several_devices_has_them_alone(machine):
    machine = machine(2)
    result = machine.run(MIXED, "-n", "gpu", "-rs", "--maxschedchunk=1")
    assert result.parseoutcomes() == {"passed": 17, "skipped": 1, "errors": 1}
    assert "needs 3 GPUs, and 2 are visible (CUDA_VISIBLE_DEVICES=0,1)" in result.stdout.str()
    assert "@pytest.mark.gpus: n=0: expected a number from 1 on" in result.stdout.str()
    met = overlapping(machine.diary())
    assert met, "the workers never ran at the same time"
    assert not [pair for pair in met if any("test_two" in one["test"] for one in pair)]
    assert {e["visible"] for e in machine.diary("begins") if "test_two" in e["test"]} <= {"0,1", "1,0"}
    assert {e["visible"] for e in machine.diary("begins") if "test_one" in e["test"]} == {"0", "1"}


WIDE = """
@pytest.fixture(scope="module")
def engine():
    engine = Engine()
    yield engine
    engine.close()
@pytest.mark.gpu_released
@pytest.mark.parametrize("number", range(2))
def test_with_the_engine(engine, number):
    time.sleep(0.05)
@pytest.mark.gpus(2)
def test_with_all(engine):
    pass
"""


def test_workers_that_each_hold_an_engine_and_want_all_devices_do_not_wait_for_ever(machine):
    result = machine(2).run({f"test_{name}": WIDE for name in "abc"}, "-n", "gpu", "--dist=loadfile")
    assert result.parseoutcomes() == {"passed": 9}


def test_outside_a_distributed_run_a_test_has_what_is_visible(machine):
    machine = machine(2)
    machine.environ.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    result = machine.run(MIXED, "-rs")
    assert result.parseoutcomes() == {"passed": 17, "skipped": 1, "errors": 1}
    assert {entry["visible"] for entry in machine.diary("begins")} == {"1,0"}
    machine.environ.setenv("CUDA_VISIBLE_DEVICES", "")
    result = machine.run(MIXED, "-rs", "-k", "single")
    assert "needs a GPU, and none is visible: CUDA_VISIBLE_DEVICES='' names no device" in result.stdout.str()


KILLED = """
@pytest.mark.parametrize("number", range(8))
def test_engine(number):
    found = [file.name for card in devices() for file in card.iterdir() if runs(file.name)]
    note(event="finds", others=found)
    engine = Engine()
    if number in (2, 5):
        os.kill(os.getpid(), signal.SIGKILL)
    engine.close()
"""


def test_a_worker_that_is_killed_is_replaced_on_its_device_after_its_engine_is_gone(machine):
    machine = machine(2)
    result = machine.run(KILLED, "-n", "gpu")
    assert result.parseoutcomes() == {"passed": 6, "failed": 2}
    text = result.stdout.str()
    assert text.count("replacing crashed worker") == 2
    for number in (2, 5):
        assert f"crashed while running 'test_inner.py::test_engine[{number}]'" in text
    assert text.count("the worker had CUDA_VISIBLE_DEVICES=") == 2
    given = machine.devices_of_workers()
    killed = re.findall(r"replacing crashed worker (gw\d)", text)
    for number, worker in enumerate(killed, start=2):
        assert given.get(f"gw{number}", given[worker]) == given[worker]  # the last one may have had no test left
    assert not [entry for entry in machine.diary("finds") if entry["others"]]


LEAKY = """
@pytest.mark.gpu_released(timeout=0)
@pytest.mark.parametrize("number", range(6))
def test_it(number):
    others = [file.name for card in devices() for file in card.iterdir() if int(file.name) != os.getpid()]
    note(event="finds", others=[pid for pid in others if runs(pid)])
    if number == {leaks}:
        files = [card / str(os.getpid()) for card in devices()]
        for file in files:
            file.write_text(str(3000 * MIB))  # in this process: nobody can give it back
@pytest.fixture(scope="session", autouse=True)
def wide():
    yield
    note(event="torn down")
"""


@pytest.mark.parametrize("dist", ["load", "loadscope", "worksteal"])
def test_a_worker_that_leaks_is_replaced_and_the_rest_runs_clean(machine, dist):
    machine = machine(1)
    modules = {f"test_{name}": LEAKY.format(leaks=leaks) for name, leaks in (("a", 1), ("b", 9))}
    result = machine.run(modules, "-n", "1", f"--dist={dist}", "--vllm-cleanup-on-leak=restart")
    assert result.parseoutcomes() == {"passed": 12, "leaked": 1}
    assert result.ret == 1
    text = result.stdout.str()
    assert text.count("replacing worker gw") == 1
    assert "crashed" not in text
    assert "node down" not in text
    assert len(machine.diary("finds")) == 12
    assert {entry["worker"] for entry in machine.diary("torn down")} == {"gw0", "gw1"}
    assert not [entry for entry in machine.diary("finds") if entry["others"]]


def test_where_all_workers_run_all_tests_each_is_replaced_as_often_as_it_leaks(machine):
    machine = machine(1)
    modules = {f"test_{name}": LEAKY.format(leaks=leaks) for name, leaks in (("a", 1), ("b", 4))}
    options = ("-n", "2", "--dist=each", "--vllm-cleanup-gpus=auto", "--vllm-cleanup-on-leak=restart")
    result = machine.run(modules, *options)
    assert result.parseoutcomes() == {"passed": 24, "leaked": 4}
    assert result.stdout.str().count("replacing worker gw") == 4


LEAVING = """
import atexit
from fake_driver import FOLDER
@pytest.mark.{marker}
def test_it():
    while "starts" not in (FOLDER.parent / "diary").read_text():
        time.sleep(0.01)
    for card in devices():
        (card / str(os.getpid())).write_text(str(3000 * MIB))
    atexit.register(note, event="leaves")
def test_after_it():
    pass
"""
STARTING = """
@pytest.mark.gpu_released
def test_engine():
    Engine(loading={loading}).close()
def test_after_it():
    pass
"""


@pytest.mark.parametrize(
    ("marker", "loading", "outcomes"),
    [
        ("gpu_released(timeout=0)", 8.0, {"passed": 4, "leaked": 1}),  # pytest-xdist gives it 5 s once it has finished
        ("vllm_isolated", 3.0, {"passed": 4}),
    ],
    ids=["replaced", "isolated"],
)
def test_a_process_does_not_end_while_a_sibling_starts_an_engine_on_its_device(machine, marker, loading, outcomes):
    machine = machine(1)
    options = ("-n", "2", "--dist=loadfile", "--vllm-cleanup-gpus=auto", "--vllm-cleanup-on-leak=restart")
    result = machine.run(
        {"test_a": LEAVING.format(marker=marker), "test_b": STARTING.format(loading=loading)}, *options
    )
    assert result.parseoutcomes() == outcomes
    assert ("replacing worker gw" in result.stdout.str()) == ("leaked" in outcomes)
    [leaves], [is_up] = machine.diary("leaves"), machine.diary("is up")
    assert 0 < leaves["at"] - is_up["at"] < 15
    assert leaves["worker"] != is_up["worker"]


def test_a_worker_cannot_be_replaced_by_an_xdist_that_is_too_old(monkeypatch):
    monkeypatch.setattr(restarts.metadata, "version", lambda _name: "3.5.0")
    with pytest.raises(pytest.UsageError, match=r"needs pytest-xdist 3\.6 or later, and 3\.5\.0 is"):
        restarts.require_xdist()


STARTS = """
@pytest.mark.gpu_released
@pytest.mark.parametrize("number", range(6))
def test_engine(number):
    engine = Engine(loading=0.05)
    meet()
    engine.close()
@pytest.mark.gpu_released(timeout=1)
def test_leak():
    note(event="leaks", process=start(700 * MIB).pid)
"""


@pytest.mark.parametrize("hidden", ["", "1"])
def test_workers_that_share_a_device_start_one_by_one_and_are_told_apart(machine, hidden):
    machine = machine(1)
    machine.environ.setenv("FAKE_GPUS_HIDDEN", hidden)
    options = ("-n", "2", "--vllm-cleanup-gpus=auto", "--maxschedchunk=1")
    result = machine.run(STARTS, *options)
    [leak] = machine.diary("leaks")
    os.kill(leak["process"], signal.SIGKILL)
    if hidden:  # nobody can tell whose memory it is, and nobody is blamed
        assert result.parseoutcomes() == {"passed": 7}
        assert "other workers of this run use the device too" in result.stdout.str()
    else:
        assert result.parseoutcomes() == {"passed": 7, "leaked": 1}
        assert "test_inner.py::test_leak left 700 MiB" in result.stdout.str()
    starts = [entry for entry in machine.diary() if entry["event"] in ("starts", "is up")]
    assert len(starts) == 12
    assert not overlapping(starts, "starts", "is up")
    assert overlapping(machine.diary()), "the workers never ran at the same time"
