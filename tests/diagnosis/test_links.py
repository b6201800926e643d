"""Links of a chain are named as a person would write them."""

from __future__ import annotations

import asyncio
import collections
import contextvars
import enum
import functools
import re
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import pytest
from holding import Held, chain

HERE = "tests/diagnosis/test_links.py"
KEPT: Any = None


class Engine:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def generate(self) -> None:
        pass

    @staticmethod
    def key() -> int:
        return 1


class Slotted:
    __slots__ = ("__weakref__", "cache")


class Slots(Slotted):
    __slots__ = ("other",)


@dataclass(slots=True)
class Output:
    text: str
    logits: Any


class Pair(NamedTuple):
    left: Any
    right: Any


class Size(enum.Enum):
    BIG = 1


class Table(dict):
    pass


class NoEquality:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    def __hash__(self) -> int:
        return 1


def take(prompt: str, llm: Any, *, other: Any = None) -> None:
    pass


def closure() -> Callable[[], Any]:
    outputs = [Held()]
    return lambda: outputs


def plain_closure() -> Callable[[], Any]:
    llm = Held()
    return lambda: llm


def default() -> Any:
    def load(name: str, cache: Any = [Held()]) -> None:  # noqa: B006, B008
        pass

    return load


def keyword_default() -> Any:
    def load(*, cache: Any = Held()) -> None:  # noqa: B008
        pass

    return load


def function_attribute() -> Any:
    def load() -> None:
        pass

    load.cache = {"a": Held()}  # type: ignore[attr-defined]
    return load


def generator() -> Any:
    def stream() -> Iterator[int]:
        batch = [Held()]
        yield 1
        yield len(batch)

    running = stream()
    next(running)
    return running


def coroutine() -> Any:
    async def serve() -> None:
        llm = Held()
        await asyncio.sleep(0)
        del llm

    running = serve()
    running.send(None)
    return running


def awaiting() -> Any:
    async def serve() -> None:
        llm = Held()
        await asyncio.sleep(0)
        del llm

    async def main() -> None:
        await serve()

    running = main()
    running.send(None)
    return running


def failure() -> BaseException:
    def load() -> None:
        llm = Held()
        raise KeyError(str(llm))

    try:
        load()
    except KeyError as error:
        return error
    raise AssertionError


def caused() -> BaseException:
    def load() -> None:
        try:
            raise failure()
        except KeyError as error:
            raise ValueError from error

    try:
        load()
    except ValueError as error:
        return error.with_traceback(None)
    raise AssertionError


def excinfo() -> Any:
    def load() -> None:
        llm = Held()
        raise KeyError(str(llm))

    with pytest.raises(KeyError) as info:
        load()
    return info


def lru_result() -> Any:
    @functools.lru_cache
    def load(name: str) -> Any:
        return [Held()]

    load("a")
    return load


def lru_argument() -> Any:
    @functools.cache
    def score(prompt: str, model: Any) -> int:
        return 1

    score("a", Held())
    return score


def lru_only_argument() -> Any:
    @functools.lru_cache(maxsize=3)
    def score(model: Any) -> int:
        return 1

    score(Held())
    return score


def called_mock() -> Any:
    llm = mock.Mock(name="llm")
    llm.generate(["prompt", Held()], use_tqdm=False)
    return llm


def unnamed_mock() -> Any:
    llm = mock.MagicMock()
    llm(Held())
    return llm


def returning_mock() -> Any:
    return mock.Mock(return_value=Held())


def weak_callback() -> Any:
    llm = Held()
    return [weakref.ref(Size, lambda _: llm and None)]


def copied_context() -> Any:
    context = contextvars.copy_context()
    context.run(contextvars.ContextVar("session").set, [Held()])
    return context


def slotted() -> Any:
    thing = Slots()
    thing.cache = (1, Held())
    return thing


def appending() -> Any:
    return [Held()].append


def deep() -> Any:
    return Engine(a=Engine(b=Engine(c=Engine(d=Engine(e=Engine(f=Engine(llm=Held())))))))


SITUATIONS: dict[str, tuple[Callable[[], Any], str]] = {
    "itself": (Held, "KEPT"),
    "list": (lambda: [1, Held()], "KEPT[1]"),
    "tuple": (lambda: (Held(),), "KEPT[0]"),
    "key": (lambda: {"a": Held()}, "KEPT['a']"),
    "nested": (lambda: {"a": [[], (1, Held())]}, "KEPT['a'][1][1]"),
    "set": (lambda: {Held()}, "KEPT{...}"),
    "deque": (lambda: collections.deque([0, Held()]), "KEPT[1]"),
    "defaultdict": (lambda: collections.defaultdict(list, {3: [Held()]}), "KEPT[3][0]"),
    "ordered": (lambda: collections.OrderedDict({b"x": Held()}), "KEPT[b'x']"),
    "enum key": (lambda: {Size.BIG: Held()}, "KEPT[Size.BIG]"),
    "tuple key": (lambda: {("a", 1): Held()}, "KEPT[('a', 1)]"),
    "odd key": (lambda: {NoEquality(): Held()}, "KEPT[...]"),
    "long key": (lambda: {"x" * 80: Held()}, f"KEPT['{'x' * 29}...xxxx']"),
    "as a key": (lambda: {Held(): 1}, "KEPT.keys()"),
    "class of its own": (lambda: Table(a=Held()), "KEPT -> Table['a']"),
    "attribute": (lambda: Engine(llm=Held()), "KEPT -> Engine.llm"),
    "in an attribute": (lambda: Engine(llms={"a": [Held()]}), "KEPT -> Engine.llms['a'][0]"),
    "objects": (lambda: Engine(core=Engine(runner=Held())), "KEPT -> Engine.core -> Engine.runner"),
    "slots": (slotted, "KEPT -> Slots.cache[1]"),
    "dataclass": (lambda: [Output("a", Held())], "KEPT[0] -> Output.logits"),
    "named tuple": (lambda: Pair(1, [Held()]), "KEPT -> Pair.right[0]"),
    "namespace": (lambda: types.SimpleNamespace(llm=Held()), "KEPT -> SimpleNamespace.llm"),
    "closure": (closure, "KEPT -> closure variable outputs[0] of closure.<locals>.<lambda>"),
    "plain closure": (plain_closure, "KEPT -> closure variable 'llm' of plain_closure.<locals>.<lambda>"),
    "default": (default, "KEPT -> default argument cache[0] of default.<locals>.load"),
    "keyword default": (keyword_default, "KEPT -> default argument 'cache' of keyword_default.<locals>.load"),
    "function attribute": (
        function_attribute,
        "KEPT -> function attribute function_attribute.<locals>.load.cache['a']",
    ),
    "method": (lambda: Engine(llm=Held()).generate, "KEPT -> method Engine.generate -> Engine.llm"),
    "method of a list": (appending, "KEPT -> method list.append -> list[0]"),
    "partial": (lambda: functools.partial(take, "a", [Held()]), "KEPT -> argument llm[0] of functools.partial of take"),
    "partial keyword": (
        lambda: functools.partial(take, other=Held()),
        "KEPT -> argument 'other' of functools.partial of take",
    ),
    "lru result": (lru_result, "KEPT -> functools.lru_cache of lru_result.<locals>.load (result[0])"),
    "lru argument": (lru_argument, "KEPT -> functools.lru_cache of lru_argument.<locals>.score (argument 'model')"),
    "lru only argument": (
        lru_only_argument,
        "KEPT -> functools.lru_cache of lru_only_argument.<locals>.score (argument 'model')",
    ),
    "generator": (generator, f"KEPT -> local batch[0] of suspended generator stream ({HERE}:LINE)"),
    "coroutine": (coroutine, f"KEPT -> local 'llm' of suspended coroutine serve ({HERE}:LINE)"),
    "awaiting": (
        awaiting,
        f"KEPT -> suspended coroutine main ({HERE}:LINE) -> local 'llm' of suspended coroutine serve ({HERE}:LINE)",
    ),
    "exception": (failure, f"KEPT -> KeyError.__traceback__ -> local 'llm' of frame load ({HERE}:LINE)"),
    "cause": (
        caused,
        f"KEPT -> ValueError.__cause__ -> KeyError.__traceback__ -> local 'llm' of frame load ({HERE}:LINE)",
    ),
    "pytest.raises": (excinfo, f"KEPT -> ExceptionInfo.tb -> local 'llm' of frame load ({HERE}:LINE)"),
    "exception argument": (lambda: ValueError("a", Held()), "KEPT -> ValueError.args[1]"),
    "mock": (called_mock, "KEPT -> call arguments of mock 'llm'"),
    "unnamed mock": (unnamed_mock, "KEPT -> call arguments of a mock"),
    "returning mock": (returning_mock, "KEPT -> return value of a mock"),
    "weak callback": (
        weak_callback,
        "KEPT[0] -> callback of a weakref -> closure variable 'llm' of weak_callback.<locals>.<lambda>",
    ),
    "context": (copied_context, "KEPT -> context variable session[0] of a copied context"),
}


def without_lines(text: str) -> str:
    """Return a chain with LINE for the numbers of lines."""
    return re.sub(r"(?<=\.py:)\d+", "LINE", text)


@pytest.mark.parametrize(("make", "expected"), SITUATIONS.values(), ids=SITUATIONS.keys())
def test_a_link_is_named_as_a_person_would_write_it(
    make: Callable[[], Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "KEPT", make())
    assert without_lines(chain()) == f"{HERE}: module global {expected} -> Held"


def test_a_long_chain_is_shortened_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "KEPT", deep())
    assert chain() == f"{HERE}: module global KEPT -> Engine.a -> Engine.b -> ... -> Engine.llm -> Held"
