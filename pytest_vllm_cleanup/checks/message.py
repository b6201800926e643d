"""What a user reads about a result: one sentence with the numbers, and a section with the evidence."""

from __future__ import annotations

from pytest_vllm_cleanup.checks.result import Result
from pytest_vllm_cleanup.memory import DeviceVerdict, Reading, Snapshot, format_size
from pytest_vllm_cleanup.memory.tenants import strangers, tells

_FIGURES = ("used", "own", "children", "others", "allocated", "reserved")
_ADVICE = {
    "allocator": "A tensor of this process is still referenced: look for globals, caches, closures and kept outputs.",
    "allocator cache": "The allocator keeps blocks that it cannot hand back: a memory pool or CUDA graph lives on.",
    "processes": "A child process still holds memory: close its engine with close_engine() or use vllm_runner.",
    "below allocator": "The memory is below torch's allocator: CUDA graphs, communicators or loaded kernels.",
    "device": "The device as a whole has not come back; processes that are not ours cannot be told from ours here.",
    "host": "Objects of this process or a child process are still alive: look for globals, caches and engines.",
}


def sentence(name: str, result: Result) -> str:
    """Return what happened: how much stayed, where, by which meter, how long it was waited, and who holds it."""
    if result.owner:
        name = f"{result.owner}, which ended with {name},"
    holder = result.diagnosis.holder if result.diagnosis is not None else ""
    held = f" Held by {holder}." if holder else ""
    waited = f"waited {result.waited:.1f} s ({_trend(result)})"
    leaks = result.verdict.leaks
    if not leaks and result.abandoned:
        return f"{name} left {_engines(result)} alive.{held} {_CLOSE}"
    parts = [_leak(device) for device in leaks]
    text = f"{name} left {' and '.join(parts)}; {waited}."
    if result.abandoned:
        text += f" It left {_engines(result)} alive.{held} {_CLOSE}"
    else:
        # Who knows the variable needs no advice where to look.
        known = held and leaks[0].reason in ("allocator", "host")
        text += held if known else f"{held} {_ADVICE.get(leaks[0].reason, '')}"
    if len(result.charges) > 1:
        shares = (f"{format_size(c.bytes)} on {c.device} by {c.owner or 'the test itself'}" for c in result.charges)
        text += f" Of this: {', '.join(shares)}."
    unnamed = [change for device in leaks for change in device.processes if f" {change.pid} " not in holder]
    if unnamed:
        text += f" Processes of ours: {'; '.join(map(str, unnamed))}."
    return text


_CLOSE = "Make it with vllm_runner, or close it with close_engine()."


def not_measured(name: str, result: Result) -> str:
    """Return why nothing can be said about a test, in one sentence."""
    why = result.reason or result.verdict.reason
    return f"{name}: whether GPU memory was released could not be measured: {why}."


def foreign(name: str, result: Result) -> str:
    """Return whose memory grew beside a test that gave all of its own back, in one sentence."""
    parts = [_foreign(device) for device in result.verdict.devices if device.outcome == "foreign"]
    return f"{name} left nothing of its own, but {' and '.join(parts)}."


def evidence(result: Result) -> str:
    """Return the readings before and after, device by device, and what else is known."""
    lines = []
    for name in sorted(result.baseline.keys() | result.after.keys()):
        lines += _table(name, result.baseline, result.after)
    for device in result.verdict.devices:
        if device.why:
            whole = "" if device.outcome == "foreign" and device.processes else ", so the device as a whole was judged"
            lines.append(f"{device.device}: per-process figures of ours are not visible: {device.why}{whole}")
        if device.outcome == "foreign":
            lines.append(f"not of this test: {_foreign(device)}")
    findings = () if result.diagnosis is None else result.diagnosis.findings
    explained = {finding.what for finding in findings}
    alive = (f"still alive: {engine}" for engine in result.abandoned)
    lines += [line for line in alive if line not in explained]
    lines += [] if result.diagnosis is None else result.diagnosis.lines()
    lines += result.notes
    if result.reason:
        lines.append(f"not measurable: {result.reason}")
    return "\n".join(lines)


def _leak(device: DeviceVerdict) -> str:
    before, due = format_size(device.baseline), format_size(device.after - device.stayed)
    # What has a wider scope and came or went meanwhile is expected to change the figure.
    expected = "" if due == before else f", where {due} were due"
    return (
        f"{exact_size(device.stayed)} on {device.device} by {device.meter} "
        f"({before} before, {format_size(device.after)} after{expected}, "
        f"tolerance {format_size(device.tolerance)})"
    )


def _trend(result: Result) -> str:
    if result.trend == "flat":
        return f"stuck: flat for {result.stood:.1f} s"
    if result.trend == "falling":
        return f"slow: falling at {format_size(round(result.rate))}/s, so a longer timeout may help"
    return f"time was up; flat for {result.stood:.1f} s" if result.stood else result.trend


def _foreign(device: DeviceVerdict) -> str:
    grew = f"{format_size(device.baseline)} -> {format_size(device.after)}"
    named = "; ".join(str(change) for change in device.processes)
    return f"{device.reason} on {device.device} ({grew} by {device.meter}{': ' if named else ''}{named})"


def exact_size(size: int) -> str:
    """Return a size for people, with the exact bytes behind it where rounding hides them."""
    text = format_size(size)
    return text if size < 1024 else f"{text} ({size} bytes)"


def _engines(result: Result) -> str:
    count = len(result.abandoned)
    return "an engine" if count == 1 else f"{count} engines"


def _table(name: str, baseline: Snapshot, after: Snapshot) -> list[str]:
    before, now = baseline.get(name, Reading(device=name)), after.get(name, Reading(device=name))
    lines = [f"{name} (read by {', '.join(now.meters or before.meters) or 'no meter'})"]
    for figure in _FIGURES:
        old, new = getattr(before, figure), getattr(now, figure)
        if old is None and new is None:
            continue
        lines.append(f"  {figure:<10}{_size(old):>12} -> {_size(new):>12}{_change(old, new)}")
    theirs = strangers(before, now)
    for process in now.processes or ():
        whose = "ours" if process.ours else "not ours" if process.pid in theirs else "whose is not known"
        lines.append(f"  pid {process.pid} {process.name or '?'}: {_size(process.bytes)}, {whose}")
    if not tells(now):
        lines += [f"  pid {process.pid} {process.name or '?'} of ours is alive" for process in now.living or ()]
    return lines


def _size(value: int | None) -> str:
    return "unknown" if value is None else format_size(value)


def _change(old: int | None, new: int | None) -> str:
    if old is None or new is None or old == new:
        return ""
    return f"  ({'+' if new > old else ''}{format_size(new - old)})"
