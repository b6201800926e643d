"""What a test's report carries about its memory; plain data, so that it also crosses pytest-xdist's wire."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.outcomes import Failed

from pytest_vllm_cleanup.checks import message
from pytest_vllm_cleanup.checks.result import Result
from pytest_vllm_cleanup.guard import guarded
from pytest_vllm_cleanup.report.carried import ATTRIBUTE, SECTION, data_of

_OUTCOME, _STAYED, _OWNER, _HOLDER = _PROPERTIES = (
    "gpu_memory_outcome",
    "gpu_memory_stayed_bytes",
    "gpu_memory_owner",
    "gpu_memory_holder",
)


class Leaked(Failed):
    """Fails the teardown of a test whose memory has not come back."""


def attach(
    report: pytest.TestReport,
    result: Result,
    error: BaseException | None,
    properties: Iterable[tuple[str, object]],
) -> None:
    """Put a result into the report of a test's teardown.

    Args:
        report: the report of the teardown. That of an isolated test carries the verdict of its process, which stands
            unless something has outlived that process.
        result: what the check found.
        error: what failed the teardown, None if nothing did.
        properties: the test's, with those of the verdict.
    """
    carried = data_of(report)
    if carried is not None and not result.leaked:
        return
    if carried is not None and carried["outcome"] == "leaked":
        report.sections.append((SECTION, message.evidence(result)))
        return
    kept = [entry for entry in report.user_properties if entry[0] not in _PROPERTIES]
    report.user_properties = kept + [entry for entry in properties if entry not in kept]
    data = as_data(report.nodeid, result)
    data["only_leaked"] = isinstance(error, Leaked) and result.leaked
    setattr(report, ATTRIBUTE, data)
    if isinstance(error, Leaked):
        report.longrepr = str(error)
        # pytest takes any failure of a test marked xfail for the expected one, also in its teardown.
        report.outcome = "failed"
        vars(report).pop("wasxfail", None)
    if result.outcome != "released":
        report.sections.append((SECTION, message.evidence(result)))


def as_data(name: str, result: Result) -> dict[str, Any]:
    """Return a result as dictionaries, lists, text and numbers. Sizes are in bytes, times in seconds."""
    return {
        "outcome": result.outcome,
        "text": _text(name, result),
        "stayed": result.verdict.stayed,
        "waited": result.waited,
        "trend": result.trend,
        "series": [list(sample) for sample in result.series],
        "abandoned": list(result.abandoned),
        "owner": result.owner,
        "holder": result.diagnosis.holder if result.diagnosis is not None else "",
        "diagnosis": result.diagnosis.lines() if result.diagnosis is not None else [],
        "devices": [
            {
                "device": device.device,
                "outcome": device.outcome,
                "reason": device.reason,
                "meter": device.meter,
                "stayed": device.stayed,
                "baseline": device.baseline,
                "after": device.after,
                "tolerance": device.tolerance,
            }
            for device in result.verdict.devices
        ],
    }


def failure(name: str, result: Result, *, strict: bool) -> str | None:
    """Return why the test fails, None if it does not."""
    if result.leaked:
        return message.sentence(name, result)
    if strict and result.outcome == "unknown":
        return message.not_measured(name, result)
    return None


def fail_if_leaked(name: str, result: Result, *, strict: bool) -> None:
    """Raise ``Leaked`` where a test fails because of a result."""
    text = None
    with guarded(f"describing the leak of {name}"):
        text = failure(name, result, strict=strict)
    if text is not None:
        raise Leaked(text, pytrace=False)


def record_properties(item: pytest.Item, result: Result) -> None:
    """Add the verdict to the test's properties, which JUnit XML shows."""
    item.user_properties.append((_OUTCOME, result.outcome))
    if result.leaked:
        item.user_properties.append((_STAYED, result.verdict.stayed))
        if result.owner:
            item.user_properties.append((_OWNER, result.owner))
        if result.diagnosis is not None and result.diagnosis.holder:
            item.user_properties.append((_HOLDER, result.diagnosis.holder))


def _text(name: str, result: Result) -> str:
    if result.leaked:
        return message.sentence(name, result)
    if result.outcome == "foreign":
        return message.foreign(name, result)
    return message.not_measured(name, result) if result.outcome == "unknown" else ""
