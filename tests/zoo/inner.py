"""Inner runs of pytest with many kinds in one process, and what was said of each kind."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import pytest

from .catalogue import Kind

IN_PROCESS = (("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),)
IN_CHILDREN = (("VLLM_ENABLE_V1_MULTIPROCESSING", "1"),)
# Where pytest itself and the machinery of imports hold what all of them hold.
_NOBODY_WRITES = ("*__loader__*", "*__spec__*", "*frame _multicall*", "*_pytest/runner.py*", "*.__dict__[*")
_LEFT = 64 * 2**20  # bytes that one kind may leave to the next: fragments and caches


@dataclass(frozen=True)
class Run:
    """What is to be run.

    Attributes:
        name: in a few words.
        kinds: the modules, in their order.
        device: "cpu" or "cuda".
        environ: further environment variables.
        seconds: about how long it takes; the longest begin first.
    """

    name: str
    kinds: tuple[Kind, ...]
    device: str = "cpu"
    environ: tuple[tuple[str, str], ...] = ()
    seconds: float = 5

    def cases(self) -> list[Any]:
        """Return the parameters of a test: this run with each of its kinds."""
        return [pytest.param(self, kind, id=kind.name) for kind in self.kinds]


@dataclass
class InnerRun:
    """What an inner run noted.

    Attributes:
        run: what was to be run.
        status: its exit status; None if it did not end in time.
        seconds: how long it took.
        notes: its diary, in order.
        output: what it printed.
    """

    run: Run
    status: int | None = None
    seconds: float = 0.0
    notes: list[dict[str, Any]] = field(default_factory=list)
    output: str = ""

    def check(self, kind: Kind) -> None:
        """Fail unless all that was said of a kind is right."""
        if problems := self.problems(kind):
            pytest.fail("\n".join([f"{kind.name}: {kind.about}", *problems]), pytrace=False)

    def problems(self, kind: Kind) -> list[str]:
        """Return what is wrong with what was said of a kind, one sentence each."""
        tests = list(dict.fromkeys(note["test"] for note in self.notes_of(kind, "report")))
        if not tests or not self.notes_of(kind, "let go"):
            return [f"it did not run to its end (exit status {self.status})", self.output[-3000:]]
        wrong = [problem for test in tests[:-1] for problem in self._spoilt(kind, test)]
        wrong += self._wrong(kind, tests[-1])
        return wrong + self._left(kind)

    def said(self, kind: Kind) -> dict[str, Any]:
        """Return what was said of the memory of a kind's last test."""
        reports = self.notes_of(kind, "report")
        return (reports[-1]["memory"] if reports else None) or {"outcome": "nothing"}

    def notes_of(self, kind: Kind, event: str) -> list[dict[str, Any]]:
        """Return what was noted of a kind."""
        return [note for note in self.notes if note["event"] == event and note["module"] == kind.file.stem]

    def _spoilt(self, kind: Kind, test: str) -> list[str]:
        said = [note["memory"] for note in self.notes_of(kind, "report") if note["test"] == test and note["memory"]]
        return [f"{test} comes before: {each['text']}" for each in said if each["outcome"] != "released"]

    def _wrong(self, kind: Kind, test: str) -> list[str]:
        expect, said, wrong = kind.expect, self.said(kind), []
        if said["outcome"] != expect.outcome:
            return [f"{said['outcome']}, expected {expect.outcome}: {said.get('text') or self._failure(kind)}"]
        outcomes = {
            note["outcome"]
            for note in self.notes_of(kind, "report")
            if note["test"] == test and not (note["memory"] or {}).get("only_leaked")
        }
        own = next((name for name in ("failed", "xfailed", "skipped") if name in outcomes), "passed")
        if own != expect.test:
            wrong.append(f"the test {own}, expected {expect.test}: {self._failure(kind)}")
        devices = [device for device in said["devices"] if device["outcome"] == expect.outcome]
        reason = "host" if self.run.device == "cpu" and expect.outcome == "leaked" else expect.reason
        reasons = [device.get("reason", reason) for device in devices]
        if reasons and reason and reason not in reasons:
            wrong.append(f"the reason is {', '.join(reasons)}, expected {reason}")
        if expect.stayed is not None and not 0.9 * self.size(expect.stayed) < said["stayed"] < 1.6 * self.size(
            expect.stayed
        ):
            wrong.append(f"{said['stayed']} bytes stayed, expected about {self.size(expect.stayed)}")
        if expect.outcome == "leaked" and not like(expect.owner, said.get("owner") or ""):
            wrong.append(
                f"it is charged to {said.get('owner') or 'the test'!r}, expected {expect.owner or 'the test'!r}"
            )
        holder, diagnosis = said.get("holder") or "", said.get("diagnosis") or []
        if expect.holder and not like(expect.holder, holder):
            wrong.append(f"the holder is {holder!r}, expected {expect.holder!r}; all that was said:")
            wrong += [f"    {line}" for line in diagnosis]
        wrong += [
            f"nothing like {pattern!r} was said"
            for pattern in expect.says
            if not any(like(pattern, d) for d in diagnosis)
        ]
        wrong += [f"nobody would write: {line}" for line in diagnosis for odd in _NOBODY_WRITES if like(odd, line)]
        return wrong

    def size(self, stayed: int) -> int:
        """Return the size that a kind has on this run's device; the outer process speaks of host memory."""
        return stayed // 3 if self.run.device == "cuda" else stayed

    def _left(self, kind: Kind) -> list[str]:
        notes = [note for note in self.notes if "taken" in note]
        number = next(number for number, note in enumerate(notes) if note.get("module") == kind.file.stem)
        left = notes[number]["taken"] - notes[number - 1]["taken"]
        last = number == len(notes) - 1  # nobody comes after it
        return [f"it leaves {left} bytes to the next kind"] if left > _LEFT and not last else []

    def _failure(self, kind: Kind) -> str:
        return next((note["text"] for note in self.notes_of(kind, "report") if note["text"]), "")


def like(pattern: str, text: str) -> bool:
    """Whether a text is like a pattern, in which a star stands for anything and all else for itself."""
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), text, re.DOTALL) is not None
