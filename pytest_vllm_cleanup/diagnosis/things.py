"""How instances, classes, containers, exceptions and mocks hold something."""

from __future__ import annotations

import sys
from typing import Any

from pytest_vllm_cleanup.diagnosis import safely
from pytest_vllm_cleanup.diagnosis.segments import Segment, Spot, Step, code, words

_TORCH_TABLES = ("_parameters", "_buffers", "_modules")
_TORCH_SEQUENCES = frozenset({"ModuleList", "ModuleDict", "Sequential", "ParameterList", "ParameterDict"})
_MOCK_CALLS = (
    "_mock_call_args",
    "_mock_call_args_list",
    "_mock_mock_calls",
    "_mock_await_args",
    "_mock_await_args_list",
    "method_calls",
)
_MOCK_VALUES = {
    "_mock_return_value": "return value",
    "_mock_side_effect": "side effect",
    "_mock_wraps": "wrapped object",
}
_EXCINFO_PARTS = (".type", ".value", ".tb")


def is_plain(thing: object) -> bool:
    """Whether a person writes an access to it behind the expression for what holds it: ``CACHE['key'][0]``."""
    kind = type(thing)
    return safely.is_container(kind) or (safely.class_name(kind) in _TORCH_SEQUENCES and _is_torch_module(kind))


def name_container(spot: Spot) -> Step | None:
    """Name an element of a built-in container, or of a subclass of one."""
    access = safely.element(spot.holder, spot.held)
    if access is None:
        return None
    fields = safely.lookup(safely.members(type(spot.holder)), "_fields")  # of a named tuple
    if type(fields) is tuple and issubclass(type(spot.holder), tuple):
        access = f".{fields[safely.index(tuple.__iter__(spot.holder), spot.held)]}"
    return Step(access=access)


def name_instance(spot: Spot) -> Step | None:
    """Name an attribute, whether it is in a ``__dict__``, in a slot or in a field of C code."""
    holder, held, used = spot.holder, spot.held, 1
    if spot.has(2) and held is safely.namespace_of(holder):
        name, held, used = safely.key_holding(held, spot.ahead(2)), spot.ahead(2), 2
    else:
        name = safely.attribute_holding(holder, held)
    if type(name) is not str:
        return None
    if name.startswith("_") or name == "method_calls":
        step = _private(spot, name, held, used)
        if step is not None:
            return step
    return Step(used, access=f".{name}")


def _private(spot: Spot, name: str, held: Any, used: int) -> Step | None:
    """Name what a person knows by another name than that of the attribute."""
    holder, deeper = spot.holder, spot.ahead(used + 1)
    if name in _TORCH_TABLES and deeper is not None and _is_torch_module(type(holder)):
        key = str(safely.key_holding(held, deeper))
        return Step(used + 1, access=f"[{key}]" if key.isdigit() else f".{key}")
    if name == "_excinfo" and deeper is not None and safely.type_name(holder) == "ExceptionInfo":
        return Step(used + 1, access=_EXCINFO_PARTS[safely.index(held, deeper)])
    if name == "_traceback" and safely.type_name(holder) == "ExceptionInfo":
        return Step(used, access=".traceback")
    if not _is_mock(type(holder)):
        return None
    if name == "_mock_children" and deeper is not None:
        return Step(used + 1, access=f".{safely.key_holding(held, deeper)}")
    if name in _MOCK_VALUES:
        return Step(used, words(f"{_MOCK_VALUES[name]} of {_mock_text(holder)}"))
    if name in _MOCK_CALLS:
        while spot.has(used + 1) and issubclass(type(spot.ahead(used)), (tuple, list, dict)):
            used += 1
        return Step(used, words(f"call arguments of {_mock_text(holder)}"))
    return None


def _mock_text(mock: object) -> str:
    for attribute in ("_mock_name", "_mock_new_name"):
        name = safely.attribute(mock, attribute)
        if type(name) is str and name:
            return f"mock {name!r}" if name.isidentifier() else "a mock"
    return "a mock"


def name_class(spot: Spot) -> Step | None:
    """Name an attribute of a class."""
    if type(spot.held) is dict and spot.has(2):
        name = safely.key_holding(spot.held, spot.ahead(2))
        if type(name) is str:
            return Step(2, code(f"{safely.class_name(spot.holder)}.{name}"))
    return None


def name_exception(spot: Spot) -> Step | None:
    """Name what an exception refers to."""
    for name in ("__traceback__", "__cause__", "__context__"):
        if BaseException.__dict__[name].__get__(spot.holder) is spot.held:
            return Step(access=f".{name}")
    if spot.held is BaseException.__dict__["args"].__get__(spot.holder) and spot.has(2):
        return Step(2, access=f".args{safely.element(spot.held, spot.ahead(2))}")
    return None


def name_context(spot: Spot) -> Step:
    """Name a variable of a context that is not the current one: a copy, or a task's."""
    used = 1
    while spot.has(used + 1) and safely.type_name(spot.ahead(used)).startswith("hamt"):
        used += 1
    held = spot.ahead(used)
    name = next((variable.name for variable, value in spot.holder.items() if value is held), "?")
    return Step(used, Segment("context variable ", name, " of a copied context", open=True))


def name_thread_local(spot: Spot) -> Step | None:
    """Name an attribute that each thread has for itself; it is in a dictionary in a dictionary."""
    if not spot.has(3) or type(spot.ahead(2)) is not dict:
        return None
    name = safely.key_holding(spot.ahead(2), spot.ahead(3))
    return Step(3, Segment("thread-local attribute ", str(name), open=True))


def _is_mock(kind: type[Any]) -> bool:
    mock = sys.modules.get("unittest.mock")
    return mock is not None and issubclass(kind, mock.NonCallableMock)


def _is_torch_module(kind: type[Any]) -> bool:
    modules = sys.modules.get("torch.nn")
    return modules is not None and issubclass(kind, modules.Module)
