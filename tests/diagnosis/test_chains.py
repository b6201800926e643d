"""The search: bounded, without side effects on what it looks at, and shared between several targets."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from holding import ROOT, Held, chain, chains

from pytest_vllm_cleanup.diagnosis.chains import Chain, find_chains, find_chains_to_each
from pytest_vllm_cleanup.diagnosis.roots import Roots

HERE = "tests/diagnosis/test_chains.py"
KEPT: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def _empty() -> Any:
    yield
    KEPT.clear()


class Node:
    held: Any


class Hostile:
    """Does harm whatever is asked of it, but for its class."""

    def __getattribute__(self, name: str) -> Any:
        raise SystemExit(name)

    def __eq__(self, other: object) -> bool:
        raise SystemExit

    def __hash__(self) -> int:
        return 1

    def __repr__(self) -> str:
        raise SystemExit

    def __len__(self) -> int:
        raise SystemExit

    __iter__ = None
    __bool__ = None

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise SystemExit

    @property
    def __class__(self) -> Any:
        raise SystemExit


def test_nothing_runs_in_the_objects_that_are_looked_at() -> None:
    hostile = Hostile()
    object.__setattr__(hostile, "held", [Held()])
    KEPT["hostile"] = {hostile: {"a": hostile}}
    del hostile
    assert chain().startswith(f"{HERE}: module global KEPT['hostile']")
    assert chain().endswith("-> Held")


def test_a_dead_proxy_is_passed_over() -> None:
    node = Node()
    KEPT["proxy"] = [weakref.proxy(node), Held()]
    del node
    assert chain() == f"{HERE}: module global KEPT['proxy'][1] -> Held"


def test_nothing_is_held_afterwards() -> None:
    KEPT["a"] = [Held()]
    targets = [Held.last()]
    found = find_chains(targets, deadline=time.monotonic() + 60)
    assert targets == []
    KEPT.clear()
    assert Held.last() is None  # at once, without a collection
    assert found[0].rank == 0


@pytest.mark.skipif(sys.gettrace() is not None, reason="under a tracer, such as coverage, the copy is left alone")
def test_a_running_frame_keeps_no_copy_of_its_locals() -> None:
    def inner() -> None:
        held: Any = Held()
        assert "local 'held' of frame" in chain()
        held = None
        assert Held.last() is held

    inner()


def test_the_copy_of_its_locals_that_a_function_has_asked_for_is_left_alone() -> None:
    held = [Held()]
    mine = locals()
    assert chain().startswith("local")
    assert mine["held"] is held


def test_a_frame_of_another_thread_keeps_a_copy_of_its_locals_until_it_is_asked_again_at_most() -> None:
    started, forget, forgot, end = (threading.Event() for _ in range(4))

    def load() -> None:
        held: Any = Held()
        started.set()
        forget.wait(5)
        held = None
        forgot.set()
        end.wait(5)
        assert held is None

    thread = threading.Thread(target=load, name="loader")
    thread.start()
    started.wait(5)
    try:
        assert chain().startswith("thread 'loader': local 'held' of frame ")
        forget.set()
        forgot.wait(5)
        chains_to_another()
        assert Held.last() is None
    finally:
        forget.set()
        end.set()
        thread.join()


def chains_to_another() -> None:
    KEPT["b"] = Node()
    find_chains([KEPT["b"]], deadline=time.monotonic() + 60)


@pytest.mark.parametrize("watch", [sys.setprofile, sys.settrace])
def test_a_profiler_or_tracer_in_another_thread_loses_no_variables(watch: Callable[[Any], None]) -> None:
    failures: list[BaseException] = []
    end = threading.Event()

    def watcher(frame: Any, event: str, argument: Any) -> None:
        del frame, event, argument
        for _ in range(100):
            pass

    def add(first: int, second: int) -> int:
        total = first + second
        len("x")
        return total + first + second

    def work() -> None:
        watch(watcher)
        while not end.is_set():
            try:
                add(1, 2)
            except BaseException as error:
                failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(40):
            chains_to_another()
    finally:
        end.set()
        thread.join()
    assert failures == []


def test_the_time_limit_holds_where_very_many_roots_refer_to_one_object() -> None:
    groups: list[list[Any]] = []
    shared = [Node() for _ in range(12)]
    groups += [[node] for node in shared]
    KEPT["items"] = [item(shared) for _ in range(20_000)]
    del shared
    started = time.monotonic()
    found = find_chains_to_each(groups, deadline=started + 2, base=str(ROOT))
    assert time.monotonic() - started < 3  # 20 s when all of them were named
    assert str(found[0][0]) == "test 'test_x': Item.shared[0] -> Node"


def knot(size: int) -> list[Any]:
    """Return lists that all hold all, each with a node of its own at its end."""
    lists: list[Any] = [[] for _ in range(size)]
    for each in lists:
        each.extend(lists)
        each.append(Node())
    return lists


@pytest.mark.parametrize("size", [300, 2000])  # one that can be untied in time, and one that cannot
def test_the_time_limit_holds_where_all_hold_all(size: int) -> None:
    KEPT["knot"] = [[[[[[knot(size)]]]]]]
    groups = [[each[-1]] for each in KEPT["knot"][0][0][0][0][0][0][:30]]
    started = time.monotonic()
    found = find_chains_to_each(groups, deadline=started + 2, base=str(ROOT))
    taken = time.monotonic() - started
    for each in KEPT["knot"][0][0][0][0][0][0]:
        each.clear()
    assert taken < 3  # 7 s when all ways through it were compared
    if size == 300:
        assert str(found[0][0]).startswith(f"{HERE}: module global KEPT['knot'][0][0]")


class Item(pytest.Item):
    def runtest(self) -> None:
        pass


def item(shared: Any) -> Item:
    """Return a test that belongs to no session."""
    made = object.__new__(Item)
    made.name, made.shared = "test_x", shared  # type: ignore[attr-defined]
    return made


class HostileMeta(type):
    """Fails if a class is hashed, compared, or asked anything."""

    def __hash__(cls) -> int:
        raise SystemExit

    def __eq__(cls, other: object) -> bool:
        raise SystemExit

    def __getattribute__(cls, name: str) -> Any:
        raise SystemExit(name)

    def __instancecheck__(cls, other: object) -> bool:
        raise SystemExit

    def __subclasscheck__(cls, other: type) -> bool:
        raise SystemExit


class HostileKey:
    """As ``Hostile``, with the hash of a name that every module has."""

    def __init__(self, name: str) -> None:
        self._hash = hash(name)

    def __eq__(self, other: object) -> bool:
        raise SystemExit

    def __hash__(self) -> int:
        return self._hash


def test_a_hostile_metaclass_is_not_asked() -> None:
    class OfHostileClass(metaclass=HostileMeta):  # pytest would ask it things, were it in the module
        pass

    thing = KEPT["a"] = object.__new__(OfHostileClass)
    object.__getattribute__(thing, "__dict__")["held"] = Held()
    del thing
    assert chain() == f"{HERE}: module global KEPT['a'] -> OfHostileClass.held -> Held"


@pytest.mark.parametrize("name", ["__builtins__", "__name__", "__dict__"])
def test_keys_that_are_no_names_are_not_compared(name: str) -> None:
    node = KEPT["a"] = Node()
    node.__dict__[HostileKey(name)] = 1  # type: ignore[index]
    node.held = [Held()]
    KEPT["b"] = {HostileKey(name): 1, 2: node.held[0]}
    del node
    assert {str(found) for found in chains()} == {f"{HERE}: module global KEPT['b'][2] -> Held"}


def test_one_odd_object_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Roots.rank

    def failing(self: Roots, kind: str, thing: Any) -> int:
        if kind == "item":
            raise RuntimeError
        return rank(self, kind, thing)

    KEPT["a"] = [Held()]
    odd = item(KEPT["a"][0])
    monkeypatch.setattr(Roots, "rank", failing)
    assert chain() == f"{HERE}: module global KEPT['a'][0] -> Held"
    del odd


def test_a_long_expression_is_shortened_in_the_middle() -> None:
    nested: Any = [Held()]
    for _ in range(60):
        nested = [nested]
    KEPT["a"] = nested
    del nested
    assert chain() == f"{HERE}: module global KEPT['a']{'[0]' * 20}...{'[0]' * 6} -> Held"


def test_a_number_that_python_refuses_to_write_is_not_written_out() -> None:
    KEPT["a"] = {10**6000: Held()}
    assert chain() == f"{HERE}: module global KEPT['a'][...] -> Held"


def test_a_frozen_object_is_seen() -> None:
    KEPT["a"] = Node()
    KEPT["a"].held = [Held()]
    gc.freeze()
    assert chain() == f"{HERE}: module global KEPT['a'] -> Node.held[0] -> Held"


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_left_as_it_was(enabled: bool) -> None:
    KEPT["a"] = Held()
    was = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        chain()
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was else gc.disable)()


def test_several_things_are_searched_for_at_once() -> None:
    KEPT["a"], KEPT["b"], KEPT["c"] = Held(), [Held()], Held()
    groups = [[KEPT["a"]], [KEPT["b"][0]], [], [3], [KEPT["c"]]]
    found = find_chains_to_each(groups, deadline=time.monotonic() + 60, base=str(ROOT))
    assert [[str(chain) for chain in chains] for chains in found] == [
        [f"{HERE}: module global KEPT['a'] -> Held"],
        [f"{HERE}: module global KEPT['b'][0] -> Held"],
        [],
        [],
        [f"{HERE}: module global KEPT['c'] -> Held"],
    ]
    assert groups == [[], [], [], [], []]


def test_each_of_two_things_that_share_a_holder_has_its_own_chain() -> None:
    node = KEPT["node"] = Node()
    node.held = {"a": Held(), "b": Held()}
    groups = [[node.held["a"]], [node.held["b"]]]
    del node
    found = find_chains_to_each(groups, deadline=time.monotonic() + 60, base=str(ROOT))
    assert [str(chains[0]) for chains in found] == [
        f"{HERE}: module global KEPT['node'] -> Node.held['a'] -> Held",
        f"{HERE}: module global KEPT['node'] -> Node.held['b'] -> Held",
    ]


def test_what_is_to_be_ignored_is_not_named() -> None:
    KEPT["a"] = [Held()]
    ignored = [KEPT["a"]]
    KEPT["b"] = Node()
    KEPT["b"].held = Held.last()
    found = find_chains([Held.last()], deadline=time.monotonic() + 60, ignore=ignored, base=str(ROOT))
    assert list(map(str, found)) == [f"{HERE}: module global KEPT['b'] -> Node.held -> Held"]


def test_the_way_past_what_everybody_shares_is_not_preferred() -> None:
    shared, owner = Node(), Node()
    shared.held = held = Held()
    owner.held = [[[[held]]]]
    KEPT["owner"] = owner
    KEPT["users"] = [[shared] for _ in range(100_000)]
    del shared, owner, held
    assert chain() == f"{HERE}: module global KEPT['owner'] -> Node.held[0][0][0][0] -> Held"


def test_a_deadline_that_has_passed_gives_what_is_known() -> None:
    KEPT["a"] = [Held()]
    found = find_chains([Held.last()], deadline=time.monotonic() - 1, base=str(ROOT))
    assert found == [Chain("not followed further (the search was cut short)", ("Held",), 3)]


def test_a_circle_that_only_c_code_holds_has_a_chain_too() -> None:
    node = Node()
    node.held = Held()
    node.held.back = node
    del node
    assert chains() == [
        Chain("C code or the interpreter (no Python object refers to it)", ("Held",), 3),
    ]
    gc.collect()
