"""What one known pin looks like, and where its attribute is found in a loaded module."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol


@dataclass(frozen=True)
class Place:
    """Where an attribute lives.

    Attributes:
        module: the loaded module.
        owner: the module itself, or the class inside it that has the attribute.
        name: the attribute's name in `owner`.
    """

    module: ModuleType
    owner: ModuleType | type[Any]
    name: str

    @property
    def value(self) -> Any:
        """The attribute as stored: no descriptor and no module-level `__getattr__` runs."""
        return vars(self.owner)[self.name]

    def rebind(self, value: object) -> None:
        """Store another value in the attribute."""
        setattr(self.owner, self.name, value)


class Action(Protocol):
    """How one kind of pin is seen and released."""

    def holds(self, place: Place) -> bool:
        """Whether the attribute holds anything now."""

    def run(self, place: Place) -> None:
        """Let go of what the attribute holds."""


@dataclass(frozen=True)
class Holder:
    """One known pin of vLLM: state of the process that outlives an engine and keeps memory.

    Attributes:
        name: what a person would call it.
        module: dotted name of the module.
        attribute: dotted path inside the module.
        first: oldest known release that has it, among those in `tests/releases/symbols.json`.
        last: newest release that has it, None if it is still there.
        pins: what it keeps.
        release: how it is seen and released.
        shared: whether another live engine of the process needs it, so that it waits for the last engine.
        after_collection: whether it can be released only when the engine's tensors are gone, that is, after
            the garbage collection.
    """

    name: str
    module: str
    attribute: str
    first: str
    last: str | None
    pins: str
    release: Action
    shared: bool = True
    after_collection: bool = False


@dataclass(frozen=True)
class Released:
    """What came of releasing one pin.

    Attributes:
        name: the holder's name, or the name of the cache.
        seconds: how long it took.
        error: the exception as text, None if there was none.
    """

    name: str
    seconds: float
    error: str | None = None


def find(holder: Holder) -> Place | None:
    """Look up the attribute of a holder, without importing anything.

    Returns:
        None if the module was never imported or has no such attribute in the installed release.
    """
    module = sys.modules.get(holder.module)
    # type(), not isinstance: a stand-in module may answer `__class__` by importing the real one.
    if module is None or not issubclass(type(module), ModuleType):
        return None
    owner: Any = module
    *classes, name = holder.attribute.split(".")
    for part in classes:
        owner = vars(owner).get(part)
        if owner is None or not issubclass(type(owner), type):
            return None
    return Place(module, owner, name) if name in vars(owner) else None
