"""The holders table against every supported release of vLLM."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pytest_vllm_cleanup.engines.holders import HOLDERS, Holder

from .index import build, helper, load, version

INDEX = load()


def _label(holder: Holder) -> str:
    return f"{holder.module}:{holder.attribute}"


@pytest.fixture(scope="module")
def index_of_sources() -> dict[str, Any]:
    """The index made anew from the sources."""
    folder = os.environ.get("VLLM_SOURCES")
    if not folder or not Path(folder).is_dir():
        pytest.skip("needs the sources of vLLM: python tests/releases/fetch_sources.py FOLDER, VLLM_SOURCES=FOLDER")
    return build(Path(folder))


@pytest.mark.parametrize("holder", HOLDERS, ids=_label)
def test_a_holder_exists_in_just_the_releases_it_names(holder: Holder) -> None:
    found = INDEX["symbols"].get(holder.module, {}).get(holder.attribute)
    assert found == [[holder.first, holder.last]], "python -m tests.releases.index FOLDER writes the index anew"


@pytest.mark.parametrize("holder", [holder for holder in HOLDERS if helper(holder)], ids=_label)
def test_what_a_release_action_uses_exists_as_long_as_the_holder(holder: Holder) -> None:
    newest = INDEX["releases"][-1]
    runs = INDEX["symbols"][holder.module][helper(holder)]
    assert any(
        version(first) <= version(holder.first) and version(holder.last or newest) <= version(last or newest)
        for first, last in runs
    ), f"{helper(holder)} exists in {runs}"


def test_the_index_names_nothing_that_the_table_does_not() -> None:
    names = {(holder.module, name) for holder in HOLDERS for name in (holder.attribute, helper(holder))}
    indexed = {(module, name) for module, found in INDEX["symbols"].items() for name in found}
    assert indexed <= names


def test_every_holder_has_a_name_of_its_own() -> None:
    counts = Counter(holder.name for holder in HOLDERS)
    assert [name for name, count in counts.items() if count > 1] == []


@pytest.mark.parametrize(
    ("fact", "before", "since"),
    [
        ("TorchCompileWithNoGuardsWrapper stores _bytecode_hook_handle", False, "0.24.0"),
        ("LLMEngine sets _finalizer", False, "0.24.0"),
        ("InprocClient sets _finalizer", False, "0.31.0"),
        ("GPUModelRunner has shutdown", False, "0.20.2"),
        ("GPUModelRunner (V2) has shutdown", False, "0.21.0"),
        ("EngineCore.shutdown calls gc.unfreeze", False, "0.20.2"),
        ("EngineCore.shutdown calls cleanup_dist_env_and_memory", False, "0.22.1"),
        ("Worker.shutdown calls release_pools", False, "0.25.1"),
        ("CUDAGraphWrapper has clear_all_graphs", False, "0.18.1"),
        ("MPClient.shutdown takes a timeout", False, "0.18.1"),
        ("launch_core_engines waits inside zmq_socket_ctx", False, "0.11.0"),
        ("CoreEngineProcManager keeps its processes", False, "0.11.0"),
    ],
)
def test_what_the_drain_relies_on_begins_with_one_release_and_stays(fact: str, before: bool, since: str) -> None:
    values = {release: INDEX["facts"][release][fact] for release in INDEX["releases"]}
    assert values == {release: before ^ (version(release) >= version(since)) for release in values}


def test_shutdown_of_the_client_can_be_called_without_arguments() -> None:
    parameters = {facts["InprocClient.shutdown parameters"] for facts in INDEX["facts"].values()}
    assert parameters == {"self", "self, timeout: float | None=None"}


def test_on_cuda_all_graphs_of_the_process_are_cleared_only_while_memory_is_profiled() -> None:
    callers = {caller for facts in INDEX["facts"].values() for caller in facts["callers of clear_all_graphs"]}
    elsewhere = {caller for caller in callers if "(ROCm only)" not in caller}
    assert {caller.split(": ")[1] for caller in elsewhere} == {"profile_cudagraph_memory", "release_graphs"}


def test_the_index_agrees_with_the_sources(index_of_sources: dict[str, Any]) -> None:
    assert index_of_sources == INDEX
