"""Looking into objects of others without running any code of theirs: no property, no ``__getattr__``, no ``__eq__``."""

from __future__ import annotations

import collections
import enum
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_NAME = type.__dict__["__name__"]
_NAMESPACE = type.__dict__["__dict__"]
_MRO = type.__dict__["__mro__"]
_LONGEST_KEY = 40
_LONGEST_NUMBER = 1 << 128
_SHOWN_KEYS = (str, int, bool, float, bytes, type(None))
_CONTAINERS = (
    dict, list, tuple, set, frozenset, collections.OrderedDict, collections.defaultdict, collections.deque,
    collections.Counter, types.MappingProxyType,
)  # fmt: skip


def is_among(kind: type[Any], kinds: Iterable[type[Any]]) -> bool:
    """Whether a class is one of some others. ``in`` would run the ``__hash__`` or ``__eq__`` of its metaclass."""
    return any(kind is known for known in kinds)


def is_container(kind: type[Any]) -> bool:
    """Whether a class is a built-in container.

    Such an object has no name of its own, so a person writes it as a part of what holds it.
    """
    return is_among(kind, _CONTAINERS)


def type_name(thing: object) -> str:
    """Return the name of an object's class, without its module."""
    return class_name(type(thing))


def class_name(kind: type[Any]) -> str:
    """Return the name of a class, whatever its metaclass says."""
    return str(_NAME.__get__(kind))


def members(kind: type[Any]) -> Mapping[str, Any]:
    """Return the namespace of a class."""
    namespace: Mapping[str, Any] = _NAMESPACE.__get__(kind)
    return namespace


def lookup(namespace: Any, name: str) -> Any:
    """Return what a dictionary or a class's namespace has under a name, None if nothing.

    Its keys are compared only where they are plain names: looking one up runs the ``__eq__`` of another kind of key
    that has the same hash.
    """
    pairs = items(namespace) if issubclass(type(namespace), dict) else list(namespace.items())
    return next((value for key, value in pairs if type(key) is str and key == name), None)


def bases(kind: type[Any]) -> tuple[type[Any], ...]:
    """Return a class and all that it inherits from, in the order in which attributes are looked up."""
    order: tuple[type[Any], ...] = _MRO.__get__(kind) or (kind,)
    return order


def module_of(kind: type[Any]) -> str:
    """Return the dotted name of the module in which a class is defined, "" if it does not say."""
    name = lookup(members(kind), "__module__")
    return name if type(name) is str else ""


def namespace_of(thing: object) -> dict[str, Any] | None:
    """Return an instance's own ``__dict__``, None if it has none or hides it."""
    for kind in bases(type(thing)):
        descriptor = lookup(members(kind), "__dict__")
        if descriptor is not None:
            if not is_among(type(descriptor), (types.GetSetDescriptorType, types.MemberDescriptorType)):
                return None
            namespace = descriptor.__get__(thing)
            return namespace if issubclass(type(namespace), dict) else None
    return None


def attribute(thing: object, name: str) -> Any:
    """Return what an instance stores under a name, None if nothing."""
    namespace = namespace_of(thing)
    value = None if namespace is None else lookup(namespace, name)
    if value is not None:
        return value
    for found, value in slots(thing):
        if found == name:
            return value
    return None


def slots(thing: object) -> Iterator[tuple[str, Any]]:
    """Iterate over what an instance stores in slots, and in the fields of classes written in C."""
    for kind in bases(type(thing)):
        for name, descriptor in list(members(kind).items()):
            if type(descriptor) is types.MemberDescriptorType:
                try:
                    value = descriptor.__get__(thing)
                except Exception:  # empty
                    continue
                yield name, value


def attribute_holding(thing: object, held: object) -> str | None:
    """Return the name of the attribute in which an instance stores an object, None if it is in none."""
    namespace = namespace_of(thing)
    if namespace is not None:
        for name, value in items(namespace):
            if value is held and type(name) is str:
                return name
    for name, value in slots(thing):
        if value is held:
            return name
    return None


def items(mapping: Any) -> Iterator[tuple[Any, Any]]:
    """Iterate over a dictionary, or a subclass of it, that others may change meanwhile; it ends early if they do."""
    try:
        yield from dict.items(mapping)
    except RuntimeError:
        return


def key_holding(namespace: Any, held: object) -> Any:
    """Return the key under which a dictionary holds an object; names before other keys, ``held`` itself if none."""
    return next((key for key, value in items(namespace) if value is held), held)


def element(container: Any, held: object) -> str | None:
    """Return how a person writes an element of a built-in container, such as ``['key']``, ``[3]`` or ``{...}``.

    Returns:
        None if the object is not in it, or the container is of another kind.
    """
    kind = type(container)
    if issubclass(kind, dict):
        return _entry(container, held)
    if issubclass(kind, (list, tuple)):
        base: Any = list if issubclass(kind, list) else tuple
        return _place(base.__iter__(container), held)
    if issubclass(kind, collections.deque):
        return _place(collections.deque.__iter__(container), held)
    if issubclass(kind, (set, frozenset)):
        return "{...}"
    return None


def index(elements: Iterable[Any], held: object) -> int:
    """Return at which place an object is."""
    return next(number for number, value in enumerate(elements) if value is held)


def _place(elements: Iterator[Any], held: object) -> str | None:
    try:
        return next((f"[{number}]" for number, value in enumerate(elements) if value is held), None)
    except RuntimeError:
        return None


def _entry(mapping: Any, held: object) -> str | None:
    is_key = False
    for key, value in items(mapping):
        if value is held:
            return f"[{key_text(key)}]"
        is_key = is_key or key is held
    return ".keys()" if is_key else None


def key_text(key: object) -> str:
    """Return a key of a dictionary as a person writes it; ``...`` for what cannot be shown safely."""
    kind = type(key)
    if kind is int and abs(key) > _LONGEST_NUMBER:  # type: ignore[arg-type]
        return "..."  # Python refuses to write the longest ones
    if is_among(kind, _SHOWN_KEYS):
        if is_among(kind, (str, bytes)) and len(key) > 2 * _LONGEST_KEY:  # type: ignore[arg-type]
            key = key[:_LONGEST_KEY] + key[-_LONGEST_KEY:]  # type: ignore[index]
        text = repr(key)
        return text if len(text) <= _LONGEST_KEY else f"{text[: _LONGEST_KEY - 10]}...{text[-5:]}"
    if issubclass(kind, enum.Enum):
        name = attribute(key, "_name_")
        return f"{class_name(kind)}.{name}" if type(name) is str else "..."
    if kind is tuple and 0 < len(key) <= 4:  # type: ignore[arg-type]
        parts = [key_text(part) for part in key]  # type: ignore[attr-defined]
        return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})" if set(parts) != {"..."} else "..."
    return "..."
