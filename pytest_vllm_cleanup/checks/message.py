"""What a user reads about a result: one sentence with the numbers, and a section with the evidence."""

from __future__ import annotations

from pytest_vllm_cleanup.checks.check import Result
from pytest_vllm_cleanup.memory import DeviceVerdict, Reading, Snapshot, format_size

_FIGURES = ("used", "own", "children", "others", "allocated", "reserved")
_ADVICE = {
    "allocator": "A tensor of this process is still referenced: look for globals, caches, closures and kept outputs.",
    "allocator cache": "The allocator keeps blocks that it cannot hand back: a memory pool or CUDA graph lives on.",
    "processes": "A child process still holds memory: close its engine with close_engine() or use vllm_runner.",
    "below allocator": "The memory is below torch's allocator: CUDA graphs, communicators or loaded kernels.",
    "device": "The device as a whole has not come back; per-process figures are not visible here.",
    "host": "Objects of this process or a child process are still alive: look for globals, caches and engines.",
}


def sentence(name: str, result: Result) -> str:
    """Return what happened in one sentence: how much stayed, where, by which meter, and how long it was waited."""
    waited = f"waited {result.waited:.1f} s ({result.trend})"
    leaks = [device for device in result.verdict.devices if device.outcome == "leaked"]
    if not leaks and result.abandoned:
        return f"{name} left {_engines(result)} alive. {_CLOSE}"
    parts = [_leak(device) for device in leaks]
    text = f"{name} left {' and '.join(parts)}; {waited}."
    if result.abandoned:
        text += f" It left {_engines(result)} alive. {_CLOSE}"
    elif leaks:
        text += f" {_ADVICE.get(leaks[0].reason, '')}"
    return text


_CLOSE = "Make it with vllm_runner, or close it with close_engine()."


def not_measured(name: str, result: Result) -> str:
    """Return why nothing can be said about a test, in one sentence."""
    why = result.reason or result.verdict.reason
    return f"{name}: whether GPU memory was released could not be measured: {why}."


def evidence(result: Result) -> str:
    """Return the readings before and after, device by device, and what else is known."""
    lines = []
    for name in sorted(result.baseline.keys() | result.after.keys()):
        lines += _table(name, result.baseline, result.after)
    if result.abandoned:
        lines += ["engines still alive:", *(f"  {engine}" for engine in result.abandoned)]
    if result.trend == "falling":
        lines.append(f"still falling at {format_size(round(result.rate))}/s when time was up: raise timeout")
    lines += result.notes
    if result.reason:
        lines.append(f"not measurable: {result.reason}")
    return "\n".join(lines)


def _leak(device: DeviceVerdict) -> str:
    return (
        f"{exact_size(device.stayed)} on {device.device} by {device.meter} "
        f"({format_size(device.baseline)} before, {format_size(device.after)} after, "
        f"tolerance {format_size(device.tolerance)})"
    )


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
    for process in now.processes or ():
        whose = "ours" if process.ours else "not ours"
        lines.append(f"  pid {process.pid} {process.name or '?'}: {_size(process.bytes)}, {whose}")
    return lines


def _size(value: int | None) -> str:
    return "unknown" if value is None else format_size(value)


def _change(old: int | None, new: int | None) -> str:
    if old is None or new is None or old == new:
        return ""
    return f"  ({'+' if new > old else ''}{format_size(new - old)})"
