"""The parts of a chain in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

_LONGEST, _KEPT_AT_END = 90, 20  # characters of one expression
Path = Sequence[Any]  # each object holds the next one; the last one is the one that is looked for


@dataclass(slots=True)
class Segment:
    """What stands between two arrows.

    Attributes:
        before: the words before the expression.
        expression: code. Between words, a bare name is quoted.
        after: the words behind it.
        open: whether accesses to built-in containers are appended to the expression.
        quoted: whether a bare name is put in quotes.
    """

    before: str
    expression: str = ""
    after: str = ""
    open: bool = False
    quoted: bool = True

    def copy(self) -> Segment:
        """Return one that may be written on."""
        return replace(self)

    def __str__(self) -> str:
        quote = "'" if self.open and self.quoted and self.expression.isidentifier() else ""
        return f"{self.before}{quote}{_shortened(self.expression)}{quote}{self.after}"


def _shortened(expression: str) -> str:
    """Leave out the middle of a long expression, whole accesses where it has any."""
    if len(expression) <= _LONGEST:
        return expression
    start, end = expression[: _LONGEST - _KEPT_AT_END], expression[-_KEPT_AT_END:]
    return f"{start[: start.rfind('[')] if '[' in start else start}...{end[max(0, end.find('[')) :]}"


def words(text: str) -> Segment:
    """Return a segment to which nothing can be appended."""
    return Segment(text)


def code(expression: str, before: str = "") -> Segment:
    """Return a segment of code without quotes, to which accesses are appended."""
    return Segment(before, expression, open=True, quoted=False)


@dataclass(slots=True)
class Step:
    """How one object holds the next one or, through helpers, a later one.

    Attributes:
        used: how many objects it went on.
        segment: what is said about it; None if it goes without saying.
        access: what is appended to the holder's expression instead, such as ``.name`` or ``[0]``.
    """

    used: int = 1
    segment: Segment | None = None
    access: str = ""


@dataclass(frozen=True, slots=True)
class Spot:
    """A place in a path, not its end.

    Attributes:
        path: the objects.
        at: the number of the holder.
        base: the folder to which paths of files are relative.
    """

    path: Path
    at: int
    base: str

    @property
    def holder(self) -> Any:
        """The object that holds the next one."""
        return self.path[self.at]

    @property
    def held(self) -> Any:
        """The next object."""
        return self.path[self.at + 1]

    def has(self, ahead: int) -> bool:
        """Whether there is an object so many places behind the holder."""
        return self.at + ahead < len(self.path)

    def ahead(self, count: int) -> Any:
        """Return the object so many places behind the holder, None behind the end."""
        return self.path[self.at + count] if self.has(count) else None


Namer = Callable[[Spot], "Step | None"]
