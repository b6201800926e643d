"""Where a chain of references begins: what stays by itself, and where a person can do something about it."""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pytest_vllm_cleanup.diagnosis import places, safely, unseen
from pytest_vllm_cleanup.diagnosis.callables import argument, function_text, is_function
from pytest_vllm_cleanup.diagnosis.links import name_links
from pytest_vllm_cleanup.diagnosis.ranks import KNOWN, LIBRARY, UNKNOWN, USERS
from pytest_vllm_cleanup.diagnosis.segments import Path, Segment, words
from pytest_vllm_cleanup.diagnosis.unseen import Variable
from pytest_vllm_cleanup.engines.holders import HOLDERS

_MODULE_DICT: Any = vars(types.ModuleType)["__dict__"]
_KNOWN = {(holder.module, holder.attribute): holder.name for holder in HOLDERS}
_HOOKS = ("torch._dynamo.convert_frame", "_bytecode_hooks")
_THREAD_ARGUMENTS = ("_args", "_kwargs", "args", "kwargs")
_THREAD_FUNCTIONS = ("_target", "function")
_FINALIZER: Any = vars(weakref.finalize)["_Info"]  # what it keeps, slot by slot
_FIRST_NAMES = 32  # of a module: those that the interpreter gives it are among them


@dataclass(frozen=True, slots=True)
class Root:
    """A chain in words.

    Attributes:
        rank: see ``Chain``.
        key: the same for two chains that begin at the same thing.
        segments: the chain, from the root to what is held.
    """

    rank: int
    key: tuple[Any, ...]
    segments: tuple[str, ...]


class Roots:
    """Tells roots from other objects, and names chains that begin there.

    Args:
        base: the folder to which paths are relative.
    """

    def __init__(self, base: str) -> None:
        self._base = base
        self._modules = {
            id(_MODULE_DICT.__get__(module))
            for module in list(sys.modules.values())
            if issubclass(type(module), types.ModuleType)
        }
        self._kinds: dict[int, str] = {}  # by the id of a class
        self._namers: dict[str, Callable[[Path], Root]] = {
            "module": self._module,
            "class": self._class,
            "thread": self._thread,
            "fixture": self._fixture,
            "item": self._item,
            "node": self._node,
        }

    def kind(self, thing: Any) -> str:
        """Return what kind of root an object is, "" if it is none."""
        kind = type(thing)
        if kind is dict:
            return "module" if id(thing) in self._modules or _is_namespace(thing) else ""
        known = self._kinds.get(id(kind))
        if known is None:
            known = self._kinds[id(kind)] = _kind_of(kind)
        if known == "class":
            return "class" if _is_found(thing) else ""
        if known == "thread":
            return "thread" if _is_alive(thing) else ""
        return known

    def rank(self, kind: str, thing: Any) -> int:
        """Return the rank of most chains that begin there; that of a known holder is known when it is named."""
        if kind == "module":
            return USERS if places.module_label(thing, self._base)[1] else LIBRARY
        if kind == "class":
            namespace = places.module_namespace(safely.module_of(thing))
            return USERS if places.module_label(namespace, self._base)[1] else LIBRARY
        return LIBRARY if kind == "node" else USERS

    def name(self, kind: str, path: Path) -> Root:
        """Name a chain whose first object is a root of this kind."""
        return self._namers[kind](path)

    def name_variable(self, variable: Variable, path: Path) -> Root:
        """Name a chain whose first object is held by a variable."""
        return self._root(variable.rank, variable.key, path, 0, variable.segment.copy())

    def name_end(self, path: Path) -> Root:
        """Name a chain whose first object is held by nobody who can be seen."""
        variable = unseen.end(path)
        return self._root(variable.rank, variable.key, path, 0, variable.segment)

    def name_cut(self, path: Path) -> Root:
        """Name a chain that there was no time to follow further."""
        return self._root(
            UNKNOWN, ("cut", id(path[0])), path, 0, words("not followed further (the search was cut short)")
        )

    def _root(self, rank: int, key: tuple[Any, ...], path: Path, start: int, first: Segment | None) -> Root:
        return Root(rank, key, tuple(map(str, name_links(path, start, first, self._base))))

    def _module(self, path: Path) -> Root:
        namespace, held = path[0], path[1]
        label, users = places.module_label(namespace, self._base)
        variable = safely.key_holding(namespace, held)
        if type(variable) is not str:  # gone meanwhile
            variable = "?"
        name, rank = safely.lookup(namespace, "__name__"), USERS if users else LIBRARY
        name = name if type(name) is str else ""
        key = ("module", id(namespace), "last" if name == "sys" and variable.startswith("last_") else variable)
        if (name, variable) == _HOOKS and len(path) > 3:
            return self._bytecode_hook(path, key)
        known = _KNOWN.get((name, variable))
        after = f" (known holder: {known})" if known else ""
        rank = KNOWN if known else rank
        if is_function(held) and function_text(held) == variable and len(path) > 2:
            return self._of_function(f"{label}: ", after, rank, key, path, 1)
        in_file = users or safely.lookup(namespace, "__file__") is not None
        before = f"{label}: module global " if in_file else f"{label}."
        return self._root(rank, key, path, 1, Segment(before, variable, after, open=True, quoted=False))

    def _of_function(self, before: str, after: str, rank: int, key: tuple[Any, ...], path: Path, at: int) -> Root:
        """Name a function that is where its name says: what it holds is named by it, and it need not be named twice."""
        first, *rest = name_links(path, at, None, self._base)
        return Root(rank, key, (f"{before}{first}{after}", *map(str, rest)))

    def _bytecode_hook(self, path: Path, key: tuple[Any, ...]) -> Root:
        hook = path[2]
        of_method = type(hook) is types.MethodType and path[3] is hook.__self__
        text = f"of {safely.type_name(path[3])}" if of_method else function_text(hook)
        first = Segment(f"{_HOOKS[0]}: bytecode hook {text}")
        return self._root(KNOWN, (*key, id(hook)), path, 3 if of_method else 2, first)

    def _class(self, path: Path) -> Root:
        kind, name = path[0], safely.module_of(path[0])
        if kind is weakref.finalize:
            finalizer = self._finalizer(path)
            if finalizer is not None:
                return finalizer
        label, users = places.module_label(places.module_namespace(name), self._base)
        first, *rest = name_links(path, 0, None, self._base)
        attribute = first.expression.partition("[")[0]
        known = _KNOWN.get((name, attribute))
        after = f" (known holder: {known})" if known else ""
        rank = KNOWN if known else USERS if users else LIBRARY
        key = ("class", id(kind), attribute)
        at = next((at for at in (2, 3) if len(path) > at + 1 and is_function(path[at])), None)
        if at is not None and function_text(path[at]).endswith(attribute):
            return self._of_function(f"{label}: ", after, rank, key, path, at)
        return Root(rank, key, (f"{label}: class attribute {first}{after}", *map(str, rest)))

    def _finalizer(self, path: Path) -> Root | None:
        """Name what ``weakref.finalize`` keeps until an object dies: a function and its arguments."""
        at = next((at for at, thing in enumerate(path) if type(thing) is _FINALIZER), None)
        if at is None or at + 1 >= len(path):
            return None
        info = path[at]
        function, held = info.func, path[at + 1]
        key = ("finalize", id(info))
        rank = USERS if places.is_users_function(function) else LIBRARY
        whose = f"weakref.finalize of {safely.type_name(info.weakref())}"
        if at + 2 < len(path) and (held is info.args or held is info.kwargs):
            name = argument(function, held, path[at + 2])
            first = Segment(f"{whose}: argument ", name, f" of {function_text(function)}", open=True)
            return self._root(rank, key, path, at + 2, first)
        return self._root(rank, key, path, at + 1, words(whose))

    def _thread(self, path: Path) -> Root:
        thread = path[0]
        ident = safely.attribute(thread, "_ident")
        key, text = ("thread", ident), unseen.thread_text(ident)
        at = 2 if path[1] is safely.namespace_of(thread) else 1
        if at + 1 < len(path) and any(path[at] is safely.attribute(thread, name) for name in _THREAD_ARGUMENTS):
            functions = (safely.attribute(thread, name) for name in _THREAD_FUNCTIONS)
            function = next((function for function in functions if function is not None), None)
            name = argument(function, path[at], path[at + 1])
            first = Segment(f"{text}: argument ", name, f" of {function_text(function)}", open=True)
            return self._root(USERS, key, path, at + 1, first)
        if at < len(path) and any(path[at] is safely.attribute(thread, name) for name in _THREAD_FUNCTIONS):
            return self._root(USERS, key, path, at, words(text))
        first, *rest = name_links(path, 0, None, self._base)
        return Root(USERS, key, (f"{text}: {first}", *map(str, rest)))

    def _fixture(self, path: Path) -> Root:
        """Name a fixture's value, what its generator holds, or how it failed. Pytest's own bookkeeping is left out."""
        definition = path[0]
        scope = safely.attribute(safely.attribute(definition, "_scope"), "_value_")
        function = safely.attribute(definition, "func")
        function = function.__func__ if type(function) is types.MethodType else function
        plain = type(function) is types.FunctionType
        where = f" ({places.line(function.__code__, None, self._base)})" if plain else ""
        first = Segment(f"{scope}-scoped fixture ", str(safely.attribute(definition, "argname")), where, open=True)
        result = safely.attribute(definition, "cached_result")
        at = 2 if path[1] is safely.namespace_of(definition) else 1
        if path[at] is result and at + 1 < len(path):
            at += 1
            if path[at] is result[2]:
                first = Segment(f"failure of {first}")
                at = min(at + 1, len(path) - 1)
        else:
            while at < len(path) - 1 and _is_bookkeeping(path[at]):
                at += 1
        return self._root(USERS, ("fixture", id(definition)), path, at, first)

    def _item(self, path: Path) -> Root:
        """Name what a test has: the instance of its class, its parameters, the values of its fixtures."""
        item, base = path[0], self._base
        test = safely.attribute(item, "name")
        at = 2 if path[1] is safely.namespace_of(item) else 1
        name = safely.attribute_holding(item, path[at]) if at < len(path) else None
        first, *rest = name_links(path, 0, None, base)
        if name in ("_instance", "_obj"):
            at += type(path[at]) is types.MethodType
            if at + 1 < len(path) and type(path[at]) is types.FunctionType:
                namespace, function = path[at].__globals__, function_text(path[at])
                label = places.module_label(namespace, base)[0]
                return self._of_function(f"{label}: ", "", USERS, ("module", id(namespace), function), path, at)
            if at + 1 < len(path):
                segments = name_links(path, at, None, base)
                owner, _, attribute = segments[0].expression.partition(".")
                segments[0] = Segment("attribute ", attribute, f" of the instance of test class {owner}", open=True)
                return Root(USERS, ("instance", id(path[at])), tuple(map(str, segments)))
        if name == "funcargs" and at + 1 < len(path):
            what = str(safely.key_holding(path[at], path[at + 1]))
            first = Segment("value of fixture ", what, f" in test {test!r}", open=True)
            return self._root(USERS, ("item", id(item), what), path, at + 1, first)
        if name == "callspec":
            params = safely.attribute(path[at], "params")
            inner = next((place for place in range(at, min(at + 3, len(path) - 1)) if path[place] is params), None)
            if inner is not None:
                what = str(safely.key_holding(params, path[inner + 1]))
                first = Segment("parameter ", what, f" of test {test!r}", open=True)
                return self._root(USERS, ("item", id(item), what), path, inner + 1, first)
        return Root(USERS, ("item", id(item), str(first)), (f"test {test!r}: {first}", *map(str, rest)))

    def _node(self, path: Path) -> Root:
        first, *rest = name_links(path, 0, None, self._base)
        return Root(LIBRARY, ("node", id(path[0]), str(first)), (f"pytest's {first}", *map(str, rest)))


def _is_namespace(thing: Any) -> bool:
    """Whether a dictionary is that of a module which is in ``sys.modules`` no more."""
    names = []
    for name, _ in itertools.islice(safely.items(thing), _FIRST_NAMES):
        if type(name) is not str:  # no name, and to look for one would compare it
            return False
        names.append(name)
    return "__builtins__" in names and "__name__" in names


def _kind_of(kind: type[Any]) -> str:
    if issubclass(kind, type):
        return "class"
    if issubclass(kind, threading.Thread):
        return "thread"
    names = {
        safely.class_name(base) for base in safely.bases(kind) if safely.module_of(base).partition(".")[0] == "_pytest"
    }
    if "FixtureDef" in names:
        return "fixture"
    if "Item" in names:
        return "item"
    return "node" if names & {"Node", "Config"} else ""


def _is_found(kind: Any) -> bool:
    """Whether a class is where its name says, so that it stays."""
    namespace: Any = places.module_namespace(safely.module_of(kind))
    found: Any = None
    for part in type.__dict__["__qualname__"].__get__(kind).split("."):
        found = safely.lookup(namespace, part)
        if not issubclass(type(found), type):
            return False
        namespace = safely.members(found)
    return found is kind


def _is_alive(thread: Any) -> bool:
    return threading._active.get(safely.attribute(thread, "_ident")) is thread  # type: ignore[attr-defined]


def _is_bookkeeping(thing: Any) -> bool:
    """Whether it is how pytest remembers what to call at teardown."""
    if type(thing) is functools.partial:
        return function_text(thing.func) == "_teardown_yield_fixture"
    return safely.is_container(type(thing))
