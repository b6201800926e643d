"""Plugin of the inner runs: writes down what was said of each test, and has each kind clean up after itself."""

from __future__ import annotations

import gc
import json
import os
import time
from pathlib import Path

import pytest


def note(event, **facts):
    with Path(os.environ["ZOO_DIARY"]).open("a", encoding="utf-8") as diary:
        diary.write(json.dumps({"event": event, **facts}) + "\n")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    began = time.monotonic()
    result = yield
    note("end", module=item.path.stem, test=item.name, seconds=time.monotonic() - began)
    module = item.module
    if nextitem is None or nextitem.module is not module:
        let_go = getattr(module, "let_go", None)
        if let_go is not None:
            let_go()
            gc.collect()
        note("let go", module=item.path.stem, **_taken())
    return result


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report):
    note(
        "report",
        module=Path(report.location[0]).stem,
        test=report.location[2],
        when=report.when,
        outcome="xfailed" if report.skipped and hasattr(report, "wasxfail") else report.outcome,
        memory=getattr(report, "vllm_cleanup", None),
        text=str(report.longrepr)[-2000:] if report.failed else "",
    )


def pytest_collection_finish(session):
    note("begin", **_taken())


def _taken():
    from pytest_vllm_cleanup.engines.measure import current_gauge

    readings = current_gauge().read()
    return {"taken": sum((r.own if r.device == "host" else r.allocated) or 0 for r in readings.values())}
