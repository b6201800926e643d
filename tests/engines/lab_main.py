"""What runs in a lab: reads which scenario to play, line by line, and answers with what it returned."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import sys
import traceback
from types import ModuleType
from typing import Any, TextIO


@functools.cache
def _module(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"scenarios_{os.path.basename(path)[:-3]}", path)  # noqa: PTH119
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _play(task: dict[str, Any]) -> dict[str, Any]:
    # A function of its own: no frame of a scenario outlives its call.
    try:
        return {"result": getattr(_module(task["file"]), task["name"])(*task["arguments"])}
    except BaseException:
        return {"error": traceback.format_exc()}


def _serve(answers: TextIO) -> None:
    for line in sys.stdin:
        print(json.dumps(_play(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":  # vLLM's child processes import this file again
    for variable in [name for name in os.environ if name.startswith("COVERAGE_")]:
        del os.environ[variable]  # engine_lab.CHILDREN_UNMEASURED says why
    _serve(os.fdopen(int(sys.argv[1]), "w"))
