"""Facts about a release of vLLM that the drain and the stop depend on, read from its sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .symbols import find_class, find_function, mentions, parse

_RUNNER_V1 = "vllm.v1.worker.gpu_model_runner"
_RUNNER_V2 = "vllm.v1.worker.gpu.model_runner"


def read_facts(root: Path) -> dict[str, Any]:
    """Facts of the release whose sources are under a folder that contains `vllm/`."""
    wrapper = parse(root, "vllm.compilation.wrapper")
    engine = parse(root, "vllm.v1.engine.llm_engine")
    core = parse(root, "vllm.v1.engine.core")
    client = parse(root, "vllm.v1.engine.core_client")
    core_shutdown = find_function(core, "EngineCore.shutdown")
    client_shutdown = find_function(client, "InprocClient.shutdown")
    worker_shutdown = find_function(parse(root, "vllm.v1.worker.gpu_worker"), "Worker.shutdown")
    return {
        "TorchCompileWithNoGuardsWrapper stores _bytecode_hook_handle": mentions(
            find_class(wrapper, "TorchCompileWithNoGuardsWrapper"), "_bytecode_hook_handle"
        ),
        "LLMEngine sets _finalizer": mentions(find_class(engine, "LLMEngine"), "_finalizer"),
        "InprocClient sets _finalizer": mentions(find_class(client, "InprocClient"), "_finalizer"),
        "GPUModelRunner has shutdown": find_function(parse(root, _RUNNER_V1), "GPUModelRunner.shutdown") is not None,
        "GPUModelRunner (V2) has shutdown": find_function(parse(root, _RUNNER_V2), "GPUModelRunner.shutdown")
        is not None,
        "EngineCore.shutdown calls gc.unfreeze": mentions(core_shutdown, "unfreeze"),
        "EngineCore.shutdown calls cleanup_dist_env_and_memory": mentions(core_shutdown, "cleanup_dist_env_and_memory"),
        "Worker.shutdown calls release_pools": mentions(worker_shutdown, "release_pools"),
        "InprocClient.shutdown parameters": ast.unparse(client_shutdown.args) if client_shutdown else "",
        "MPClient.shutdown takes a timeout": mentions(find_function(client, "MPClient.shutdown"), "timeout"),
        "launch_core_engines waits inside zmq_socket_ctx": mentions(
            find_function(parse(root, "vllm.v1.engine.utils"), "launch_core_engines"), "zmq_socket_ctx"
        ),
        "CoreEngineProcManager keeps its processes": mentions(
            find_class(parse(root, "vllm.v1.engine.utils"), "CoreEngineProcManager"), "processes"
        ),
        "CUDAGraphWrapper has clear_all_graphs": find_function(
            parse(root, "vllm.compilation.cuda_graph"), "CUDAGraphWrapper.clear_all_graphs"
        )
        is not None,
        "callers of clear_all_graphs": sorted(_callers(root, "clear_all_graphs")),
    }


def _callers(root: Path, method: str) -> set[str]:
    """Places that call a method: "path: function", with " (ROCm only)" where the platform is asked first."""
    found: set[str] = set()
    for path in (root / "vllm").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if f".{method}(" not in text:
            continue
        for function in ast.walk(ast.parse(text)):
            if isinstance(function, ast.FunctionDef):
                where = f"{path.relative_to(root)}: {function.name}"
                for rocm in _calls(function.body, method, rocm=False):
                    found.add(where + (" (ROCm only)" if rocm else ""))
    return found


def _calls(body: list[ast.stmt], method: str, *, rocm: bool) -> Iterator[bool]:
    """For each call of a method, whether it is under a condition that names ROCm."""
    for node in body:
        if isinstance(node, ast.If):
            yield from _calls(node.body, method, rocm=rocm or mentions(node.test, "is_rocm"))
            yield from _calls(node.orelse, method, rocm=rocm)
        elif isinstance(node, ast.Try):
            for part in (node.body, node.orelse, node.finalbody):
                yield from _calls(part, method, rocm=rocm)
        elif isinstance(node, ast.With):
            yield from _calls(node.body, method, rocm=rocm)
        else:
            calls = (item.func for item in ast.walk(node) if isinstance(item, ast.Call))
            if any(isinstance(func, ast.Attribute) and func.attr == method for func in calls):
                yield rocm
