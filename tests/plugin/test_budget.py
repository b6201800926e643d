from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest

from pytest_vllm_cleanup.engines.errors import ModelDoesNotFitError
from pytest_vllm_cleanup.memory import ProcessUse, Reading
from pytest_vllm_cleanup.runners import factory
from pytest_vllm_cleanup.runners.budget import defaults, engine_arguments, weight_bytes
from pytest_vllm_cleanup.workers import starting

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def device(name="cuda:0", used=0, total=80 * GIB, processes=None):
    return Reading(device=name, used=used, total=total, processes=processes)


@pytest.fixture
def host(monkeypatch):
    """Host memory of which 8 GiB are free."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8 * GIB))
    return Reading(device="host", used=GIB, total=16 * GIB)


@pytest.fixture
def model(tmp_path):
    """A model with 3 MiB of weights in two files."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_bytes(b"x" * 100)
    (folder / "model-1.safetensors").write_bytes(b"\0" * (2 * MIB))
    (folder / "model-2.safetensors").write_bytes(b"\0" * MIB)
    # The same weights in another format are not loaded.
    (folder / "pytorch_model.bin").write_bytes(b"\0" * (5 * MIB))
    return folder


def test_the_weights_are_the_files_of_the_format_that_is_loaded(model):
    assert weight_bytes(model, {}) == 3 * MIB
    assert weight_bytes(str(model), {"load_format": "auto"}) == 3 * MIB


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.gguf"])
def test_older_formats_count_where_there_is_no_newer_one(tmp_path, name):
    (tmp_path / name).write_bytes(b"\0" * KIB)
    assert weight_bytes(tmp_path, {}) == KIB


def test_weights_that_are_not_on_this_machine_or_not_loaded_have_no_size(model, tmp_path):
    assert weight_bytes("facebook/opt-125m", {}) is None
    assert weight_bytes(tmp_path, {}) is None
    assert weight_bytes(model, {"load_format": "dummy"}) is None


def test_on_an_accelerator_the_budget_becomes_a_share_of_the_device(model):
    assert engine_arguments(4 * GIB, model, {}, [device()]) == {"gpu_memory_utilization": pytest.approx(0.05)}


def test_the_smallest_device_decides_the_share():
    readings = [device(), device("cuda:1", total=16 * GIB)]
    assert engine_arguments(4 * GIB, "name", {}, readings) == {"gpu_memory_utilization": pytest.approx(0.25)}


def test_the_share_stays_below_one():
    assert engine_arguments(80 * GIB, "name", {}, [device()]) == {"gpu_memory_utilization": 0.99}


def test_on_the_host_the_weights_are_taken_off_the_kv_cache(model, host):
    assert engine_arguments(64 * MIB, model, {}, [host]) == {"kv_cache_memory_bytes": 61 * MIB}
    assert engine_arguments(64 * MIB, "name", {}, [host]) == {"kv_cache_memory_bytes": 64 * MIB}
    parallel = {"tensor_parallel_size": 3}
    assert engine_arguments(64 * MIB, model, parallel, [host]) == {"kv_cache_memory_bytes": 63 * MIB}


@pytest.mark.parametrize("name", ["gpu_memory_utilization", "kv_cache_memory_bytes"])
def test_two_limits_contradict_each_other(name):
    with pytest.raises(ValueError, match=f"max_memory and {name} both limit .*: give only one of them"):
        engine_arguments(GIB, "name", {name: 0.5}, [device()])


def test_without_a_device_there_is_no_budget():
    with pytest.raises(ValueError, match="max_memory needs a device whose memory can be measured"):
        engine_arguments(GIB, "name", {}, [])


@pytest.mark.parametrize("budget", [3 * MIB, 3 * MIB - 1])
def test_weights_that_fill_the_budget_do_not_fit(model, budget):
    with pytest.raises(
        ModelDoesNotFitError, match=r"model: the weights alone take 3 MiB on each device, max_memory is"
    ):
        engine_arguments(budget, model, {}, [device()])
    engine_arguments(3 * MIB + 1, model, {}, [device()])


def test_weights_are_split_over_tensor_and_pipeline_ranks(model):
    arguments = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    with pytest.raises(ModelDoesNotFitError, match=r"take 768 KiB on each device, max_memory is 768 KiB"):
        engine_arguments(768 * KIB, model, arguments, [device()])
    engine_arguments(769 * KIB, model, arguments, [device()])


def test_a_device_with_less_than_the_budget_free_is_named_with_who_uses_it():
    processes = (
        ProcessUse(10, GIB, "small", ours=True),
        ProcessUse(11, None, "unknown size", ours=False),
        *(ProcessUse(20 + number, (number + 2) * GIB, None, ours=False) for number in range(5)),
    )
    full = device("cuda:1", used=78 * GIB, processes=processes)
    with pytest.raises(ModelDoesNotFitError) as caught:
        engine_arguments(4 * GIB, "some/model", {}, [device(), full])
    assert str(caught.value) == (
        "some/model: max_memory is 4 GiB, but cuda:1 has only 2 GiB of 80 GiB free. In use by: "
        "pid 24 (unknown) 6 GiB, pid 23 (unknown) 5 GiB, pid 22 (unknown) 4 GiB, pid 21 (unknown) 3 GiB, "
        "pid 20 (unknown) 2 GiB. Free some memory or lower max_memory."
    )


def test_nobody_is_blamed_where_processes_cannot_be_seen():
    with pytest.raises(ModelDoesNotFitError, match=r"80 GiB free\. Free some memory"):
        engine_arguments(4 * GIB, "name", {}, [device(used=78 * GIB)])


def test_exactly_the_budget_free_is_enough(host):
    engine_arguments(4 * GIB, "name", {}, [device(used=76 * GIB)])
    engine_arguments(8 * GIB, "name", {}, [host])


def test_the_host_is_full_when_the_machine_says_so(host):
    with pytest.raises(ModelDoesNotFitError, match="host has only 8 GiB of 16 GiB free"):
        engine_arguments(8 * GIB + 1, "name", {}, [host])


@pytest.mark.parametrize("unknown", ["used", "total"])
def test_a_device_of_unknown_size_has_no_budget(unknown):
    reading = Reading(device="cuda:0", **{**{"used": 0, "total": GIB}, unknown: None})
    with pytest.raises(ValueError, match="size of cuda:0 cannot be measured; use gpu_memory_utilization"):
        engine_arguments(MIB, "name", {}, [reading])


def test_a_model_that_does_not_fit_is_a_value_error():
    assert issubclass(ModelDoesNotFitError, ValueError)


def test_workers_that_share_a_device_get_a_share_each():
    assert defaults({}, [device(), device("cuda:1", total=40 * GIB)], 2) == {"max_memory": int(40 * GIB * 0.9 / 2)}
    shares = [engine_arguments(defaults({}, [device()], 4)["max_memory"], "model", {}, [device()]) for _ in range(4)]
    assert sum(share["gpu_memory_utilization"] for share in shares) == pytest.approx(0.9)


def test_an_engine_with_a_cache_of_its_own_size_asks_for_its_share_of_free_memory_only():
    assert defaults({"kv_cache_memory_bytes": GIB}, [device()], 3) == {"gpu_memory_utilization": pytest.approx(0.3)}


@pytest.mark.parametrize(
    ("arguments", "readings", "sharers"),
    [
        ({}, [device()], 1),
        ({"max_memory": "1 GiB"}, [device()], 2),
        ({"gpu_memory_utilization": 0.2}, [device()], 2),
        ({}, [device(total=None)], 2),
        ({}, [], 2),
        ({"kv_cache_memory_bytes": GIB}, [device(), device("host")], 2),
    ],
    ids=["alone", "budget", "utilization", "no size", "no device", "on CPUs"],
)
def test_nothing_is_added_where_it_is_not_needed_or_not_known(arguments, readings, sharers):
    assert defaults(arguments, readings, sharers) == {}


def test_engines_of_the_fixtures_keep_within_the_share_of_their_worker(monkeypatch):
    monkeypatch.setattr(starting, "current_gauge", lambda: SimpleNamespace(read=lambda: {"cuda:0": device()}))
    monkeypatch.setattr(factory, "VllmRunner", lambda _name, **arguments: arguments)
    make = factory.RunnerFactory(defaults=starting.share)
    monkeypatch.delenv("PYTEST_VLLM_CLEANUP_SHARERS", raising=False)
    assert make("model") == {}
    monkeypatch.setenv("PYTEST_VLLM_CLEANUP_SHARERS", "2")
    assert make("model", seed=1) == {"max_memory": int(80 * GIB * 0.45), "seed": 1}
    assert make("model", max_memory=GIB) == {"max_memory": GIB}
