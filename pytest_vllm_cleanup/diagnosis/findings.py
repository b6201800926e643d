"""What came of a diagnosis, as text and numbers: it can cross processes, and keeps nothing alive."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pytest_vllm_cleanup.memory.units import format_size


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that holds memory.

    Attributes:
        what: the thing in words, such as "uint8 tensor of shape (1024, 1024)" or "LLMEngine number 2".
        bytes: how much it takes, None where that is not known.
        device: where, "" where that is not known.
        holders: who holds it: reference chains, or who has started a process; best first, empty if nobody was found.
        stack: where it was allocated, outermost line first; empty where that was not recorded.
        count: how many things of this kind the same holder has; they are counted in ``bytes``.
        itself: whether the thing holds memory by itself, as a process does.
        minor: whether it explains so little of what stayed that it is no holder to look at first.
    """

    what: str
    bytes: int | None
    device: str
    holders: tuple[str, ...] = ()
    stack: tuple[str, ...] = ()
    count: int = 1
    itself: bool = False
    minor: bool = False

    @property
    def holder(self) -> str:
        """The holder to look at first, in one phrase; "" if none was found."""
        return self.what if self.itself else next(iter(self.holders), "")

    def lines(self) -> list[str]:
        """Return what a person reads: the thing, then its holders and its allocation, indented."""
        if self.itself:
            return [self.what]
        size = "" if self.bytes is None else f", {format_size(self.bytes)}"
        more = "" if self.count == 1 else f" and {self.count - 1} more"
        where = f" on {self.device}" if self.device else ""
        lines = [f"{self.what}{more}{size}{where}"]
        lines += [f"  {'held by' if number == 0 else 'and by'} {text}" for number, text in enumerate(self.holders)]
        if self.stack:
            lines += ["  allocated at", *(f"    {line}" for line in self.stack)]
        return lines


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Who holds the memory that stayed.

    Attributes:
        findings: what was found, most to the point first.
        remarks: what lies below tensors and processes, one sentence each.
        seconds: how long the search took.
        finished: whether it came to an end before its limit.
    """

    findings: tuple[Finding, ...] = ()
    remarks: tuple[str, ...] = ()
    seconds: float = 0.0
    finished: bool = True

    @property
    def holder(self) -> str:
        """The holder to look at first, in one phrase; "" if none was found that explains much of what stayed."""
        return next((finding.holder for finding in self.findings if finding.holder and not finding.minor), "")

    def plus(self, other: Diagnosis) -> Diagnosis:
        """Both together, this one's findings first; what both found is said once."""
        return Diagnosis(
            findings=tuple(dict.fromkeys((*self.findings, *other.findings))),
            remarks=tuple(dict.fromkeys((*self.remarks, *other.remarks))),
            seconds=self.seconds + other.seconds,
            finished=self.finished and other.finished,
        )

    def lines(self) -> list[str]:
        """Return what a person reads, line by line; nothing if nothing was found."""
        lines = [line for finding in self.findings for line in finding.lines()]
        lines += self.remarks
        if not self.finished:
            lines.append(f"the search for holders was ended after {self.seconds:.1f} s; there may be more")
        return lines


def grouped(findings: Iterable[Finding]) -> list[Finding]:
    """Put things that hang on the same place, but for its numbers, into one finding; biggest first.

    A list of a thousand tensors, or all the weights of one model, are one mistake of one person.
    """
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        place = " -> ".join(finding.holder.split(" -> ")[:2])
        key = "".join(letter for letter in place if not letter.isdigit())
        groups.setdefault((finding.device, key), []).append(finding)
    together = [_together(group) for group in groups.values()]
    return sorted(together, key=lambda finding: -(finding.bytes or 0))


def _together(group: list[Finding]) -> Finding:
    first = max(group, key=lambda finding: finding.bytes or 0)
    return Finding(
        what=first.what,
        bytes=sum(finding.bytes or 0 for finding in group),
        device=first.device,
        holders=first.holders,
        stack=first.stack,
        count=sum(finding.count for finding in group),
    )
