"""Roots of a chain are what a person can act on, and are named so."""

from __future__ import annotations

import atexit
import contextvars
import functools
import gc
import re
import signal
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from holding import ROOT, Held, chain, chains

from pytest_vllm_cleanup.diagnosis.chains import Chain

HERE = "tests/diagnosis/test_roots.py"
KEPT: dict[str, Any] = {}
ALSO: list[Any] = []


def without_lines(text: object) -> str:
    """Return a chain with LINE for the numbers of lines."""
    return re.sub(r"(?<=\.py:)\d+", "LINE", str(text))


class Loader:
    shared: Any = None

    def load(self, cache: Any = None) -> None:
        pass

    class Inner:
        outputs: Any = None


@functools.lru_cache
def cached(name: str) -> Any:
    return Held()


def with_default(prompt: str, cache: list[Any] = []) -> None:  # noqa: B006
    cache.append(Held())


def test_a_class_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loader, "shared", [Held()])
    assert chains()[0] == Chain(f"{HERE}: class attribute Loader.shared[0]", ("Held",), 0)


def test_an_attribute_of_a_nested_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loader.Inner, "outputs", {"a": Held()})
    assert chain() == f"{HERE}: class attribute Inner.outputs['a'] -> Held"


def test_a_class_that_a_function_has_made_is_a_link() -> None:
    class Local:
        outputs = [Held()]  # noqa: RUF012

    KEPT["kind"] = Local
    try:
        del Local
        assert chain() == f"{HERE}: module global KEPT['kind'] -> Local.outputs[0] -> Held"
    finally:
        KEPT.clear()


def test_a_cache_that_is_where_its_name_says() -> None:
    cached("a")
    try:
        assert chain() == f"{HERE}: functools.lru_cache of cached (result) -> Held"
    finally:
        cached.cache_clear()


def test_a_cache_on_a_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loader, "load", functools.lru_cache(Loader.load))
    made = Loader()
    made.held = Held()  # type: ignore[attr-defined]
    made.load()
    del made
    assert chain() == f"{HERE}: functools.lru_cache of Loader.load (argument 'self') -> Loader.held -> Held"


def test_a_default_argument() -> None:
    with_default("a")
    try:
        assert chain() == f"{HERE}: default argument cache[0] of with_default -> Held"
    finally:
        with_default.__defaults__[0].clear()  # type: ignore[index]


def test_the_closure_of_a_patched_method(monkeypatch: pytest.MonkeyPatch) -> None:
    def patched() -> Callable[..., None]:
        llm = Held()
        return lambda self: llm and None

    monkeypatch.setattr(Loader, "load", patched())
    assert chain() == (
        f"{HERE}: class attribute Loader.load -> "
        "closure variable 'llm' of test_the_closure_of_a_patched_method.<locals>.patched.<locals>.<lambda> -> Held"
    )


def test_a_module_of_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest, "kept", [Held()], raising=False)
    assert chains()[0] == Chain("pytest: module global kept[0]", ("Held",), 2)


def test_a_variable_of_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "kept", Held(), raising=False)
    assert chain() == "sys.kept -> Held"


def test_a_callback_of_the_garbage_collector() -> None:
    def callback() -> Callable[[str, dict[str, int]], None]:
        llm = Held()
        return lambda phase, info: llm and None

    gc.callbacks.append(callback())
    try:
        assert re.match(r"gc\.callbacks\[\d+\] -> closure variable 'llm' of ", chain())
    finally:
        gc.callbacks.pop()


def test_a_module_that_was_taken_out_of_the_table_of_modules(tmp_path: Any) -> None:
    module = types.ModuleType("gone")
    module.__file__ = str(ROOT / "tests" / "gone.py")
    exec("def function(): pass", vars(module))
    module.kept = [Held()]  # type: ignore[attr-defined]
    KEPT["function"] = module.function  # type: ignore[attr-defined]
    del module
    try:
        assert chain() == "tests/gone.py: module global kept[0] -> Held"
    finally:
        KEPT.clear()


def test_a_known_holder_of_vllm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "vllm.model_executor.layers.rotary_embedding"
    module = types.ModuleType(name)
    module.__file__ = "/usr/lib/python3/dist-packages/vllm/model_executor/layers/rotary_embedding/__init__.py"
    module._ROPE_DICT = {(1, 2): Held()}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    del module
    assert chains()[0] == Chain(
        f"{name}: module global _ROPE_DICT[(1, 2)] (known holder: rotary-embedding cache)", ("Held",), 1
    )


def test_the_users_code_comes_before_a_library() -> None:
    pytest.kept = Held()  # type: ignore[attr-defined]
    KEPT["a"] = [[[Held.last()]]]
    try:
        assert list(map(str, chains())) == [
            f"{HERE}: module global KEPT['a'][0][0][0] -> Held",
            "pytest: module global kept -> Held",
        ]
    finally:
        del pytest.kept  # type: ignore[attr-defined]
        KEPT.clear()


def test_two_variables_of_one_module_are_two_roots() -> None:
    KEPT["a"] = Held()
    ALSO.append([Held.last()])
    try:
        assert list(map(str, chains())) == [
            f"{HERE}: module global KEPT['a'] -> Held",
            f"{HERE}: module global ALSO[0][0] -> Held",
        ]
    finally:
        KEPT.clear()
        ALSO.clear()


def test_a_local_variable_of_a_running_frame() -> None:
    llms = {"a": Held()}
    assert without_lines(chain()) == (
        f"local llms['a'] of frame test_a_local_variable_of_a_running_frame ({HERE}:LINE) -> Held"
    )
    del llms


def test_a_local_variable_that_a_closure_uses_too() -> None:
    llm = Held()
    assert without_lines(chain()) == (
        f"local 'llm' of frame test_a_local_variable_that_a_closure_uses_too ({HERE}:LINE) -> Held"
    )
    assert callable(lambda: llm)


@contextmanager
def waiting(thread: threading.Thread, started: threading.Event, end: threading.Event) -> Iterator[None]:
    thread.start()
    started.wait(5)
    try:
        yield
    finally:
        end.set()
        thread.join()


def test_a_local_variable_in_another_thread() -> None:
    started, end = threading.Event(), threading.Event()

    def load() -> None:
        llm = Held()
        started.set()
        end.wait(5)
        del llm

    with waiting(threading.Thread(target=load, name="loader"), started, end):
        found = chains()
    assert without_lines(found[0]).endswith(f"load ({HERE}:LINE) -> Held")
    assert str(found[0]).startswith("thread 'loader': local 'llm' of frame ")
    assert len(found) == 1
    assert found[0].rank == 0


def take(started: threading.Event, end: threading.Event, /, *rest: Any, llm: Any = None) -> None:
    del rest, llm
    started.set()
    end.wait(5)


def swallow(started: threading.Event, end: threading.Event, outputs: Any) -> None:
    del outputs
    take(started, end)


def test_an_argument_of_a_thread() -> None:
    started, end = threading.Event(), threading.Event()
    thread = threading.Thread(target=swallow, args=(started, end, [Held()]), name="loader")
    with waiting(thread, started, end):
        assert chain() == "thread 'loader': argument outputs[0] of swallow -> Held"


def test_a_keyword_argument_of_a_thread() -> None:
    started, end = threading.Event(), threading.Event()
    thread = threading.Thread(target=take, args=(started, end), kwargs={"llm": Held()}, name="loader")
    with waiting(thread, started, end):
        assert chain() == "thread 'loader': argument 'llm' of take -> Held"


def test_an_attribute_of_a_thread() -> None:
    started, end = threading.Event(), threading.Event()
    thread = threading.Thread(target=take, args=(started, end), name="loader")
    thread.llm = Held()  # type: ignore[attr-defined]
    with waiting(thread, started, end):
        del thread
        assert chain() == "thread 'loader': Thread.llm -> Held"


def test_a_timer() -> None:
    timer = threading.Timer(60, with_default, args=["a", Held()])
    timer.name = "later"
    timer.start()
    try:
        del timer
        assert chain() == "thread 'later': argument 'cache' of with_default -> Held"
    finally:
        next(thread for thread in threading.enumerate() if thread.name == "later").cancel()  # type: ignore[attr-defined]


def test_a_thread_that_was_never_started_is_no_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KEPT, "thread", threading.Thread(target=take, args=(Held(),)))
    assert chain() == f"{HERE}: module global KEPT['thread'] -> Thread._args[0] -> Held"


def test_a_thread_local() -> None:
    KEPT["local"] = threading.local()
    KEPT["local"].llm = [Held()]
    try:
        assert chain() == f"{HERE}: module global KEPT['local'] -> thread-local attribute llm[0] -> Held"
    finally:
        KEPT.clear()


def test_a_context_variable() -> None:
    token = contextvars.ContextVar("session", default=None).set({"llm": Held()})  # type: ignore[arg-type]
    try:
        assert chain() == "context variable session['llm'] -> Held"
    finally:
        token.var.reset(token)


def test_a_signal_handler() -> None:
    def handler() -> Callable[..., None]:
        llm = Held()
        return lambda number, frame: llm and None

    old = signal.signal(signal.SIGUSR2, handler())
    try:
        assert chain() == (
            "signal handler of SIGUSR2 -> "
            "closure variable 'llm' of test_a_signal_handler.<locals>.handler.<locals>.<lambda> -> Held"
        )
    finally:
        signal.signal(signal.SIGUSR2, old)


AT_EXIT = "C code or the interpreter (no Python object refers to it), perhaps an atexit callback"


def shut_down(llm: Any) -> None:
    pass


def test_what_is_called_at_exit() -> None:
    made = Loader()
    made.held = Held()  # type: ignore[attr-defined]
    load = made.load
    atexit.register(load)
    del made, load
    try:
        assert chain() == f"{AT_EXIT} -> method Loader.load -> Loader.held -> Held"
    finally:
        atexit.unregister(next(thing for thing in gc.get_objects() if type(thing) is Loader).load)


def test_an_argument_of_a_function_that_is_called_at_exit() -> None:
    atexit.register(shut_down, Held())
    try:
        assert chain() == f"{AT_EXIT} -> tuple[0] -> Held"
    finally:
        atexit.unregister(shut_down)


class EqualToAll:
    """As a symbolic expression, whose ``==`` makes another one."""

    __hash__ = None  # type: ignore[assignment]
    compared: list[object] = []  # noqa: RUF012

    def __call__(self) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        self.compared.append(other)
        return True


def test_no_function_that_is_called_at_exit_is_compared() -> None:
    atexit.register(EqualToAll())
    atexit.register(shut_down, Held())
    try:
        chain()
        assert EqualToAll.compared == []
    finally:
        atexit.unregister(shut_down)  # and whatever says that it is the same


def test_what_only_c_code_holds_says_so() -> None:
    # An iterator in C code that the garbage collector does not see: a running call.
    found: list[Chain] = []

    def key(value: Any) -> int:
        del value
        found.extend(chains())
        return 1

    sorted([[Held()]], key=key)
    assert found[0].rank == 3
    assert str(found[0]) == "C code or the interpreter (no Python object refers to it) -> list[0][0] -> Held"


def test_an_argument_of_a_finalizer() -> None:
    owner = Loader()
    weakref.finalize(owner, shut_down, [Held()])
    assert chains()[0] == Chain("weakref.finalize of Loader: argument llm[0] of shut_down", ("Held",), 0)
    del owner


def test_the_method_of_a_finalizer() -> None:
    owner, other = Loader(), Loader()
    other.held = Held()  # type: ignore[attr-defined]
    weakref.finalize(owner, other.load)
    del other
    assert chain() == "weakref.finalize of Loader -> method Loader.load -> Loader.held -> Held"
    del owner
