"""Actions and guards of the holders table, and the sweep over LRU caches, on throw-away modules."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pytest_vllm_cleanup.engines import holders
from pytest_vllm_cleanup.engines.holders import Holder, allocator, lru, present, release, release_holders
from pytest_vllm_cleanup.engines.holders.actions import (
    Blank,
    CacheClear,
    Call,
    Clear,
    ClosureClear,
    ForgetGraphPool,
    Fresh,
    SetToNone,
    ShutDown,
    UncacheGetattr,
)
from pytest_vllm_cleanup.engines.holders.entry import Action, Place

_NAME = "vllm.throw_away"


class Model:
    """Stands for whatever a holder keeps alive."""

    def forward(self, **_: Any) -> None:
        """Stands for a method that vLLM asks about."""


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A loaded module of vLLM."""
    made = ModuleType(_NAME)
    monkeypatch.setitem(sys.modules, _NAME, made)
    return made


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces the holders table."""
    return lambda *entries: monkeypatch.setattr(holders, "HOLDERS", entries)


def _holder(attribute: str, action: Action, **options: Any) -> Holder:
    return Holder(
        **{"name": attribute, "module": _NAME, "shared": False, **options},
        attribute=attribute,
        first="0.11.0",
        last=None,
        pins="something",
        release=action,
    )


def test_a_dictionary_is_emptied_in_place(module: ModuleType) -> None:
    kept = module._cache = {"key": Model()}  # type: ignore[attr-defined]
    holder = _holder("_cache", Clear())
    assert present(holder)
    release(holder)
    assert kept == {}
    assert module._cache is kept
    assert not present(holder)


def test_items_of_a_list_become_none_and_its_length_stays(module: ModuleType) -> None:
    contexts = module._contexts = [None, Model()]  # type: ignore[attr-defined]
    holder = _holder("_contexts", Blank())
    assert present(holder)
    release(holder)
    assert contexts == [None, None]
    assert not present(holder)


def test_a_function_cache_is_cleared(module: ModuleType) -> None:
    module.supports = functools.lru_cache(lambda callable_: True)  # type: ignore[attr-defined]
    model = Model()
    module.supports(model.forward)
    holder, dead = _holder("supports", CacheClear()), weakref.ref(model)
    assert present(holder)
    del model
    release(holder)
    assert dead() is None
    assert not present(holder)


@pytest.mark.parametrize("wrap", [lambda function: function, staticmethod, classmethod])
def test_a_cache_on_a_class_is_cleared(module: ModuleType, wrap: Callable[..., Any]) -> None:
    cache = functools.lru_cache(lambda *arguments: len(arguments))
    module.Tower = type("Tower", (), {"rope": wrap(cache)})  # type: ignore[attr-defined]
    module.Tower().rope(1)
    holder = _holder("Tower.rope", CacheClear())
    assert present(holder)
    release(holder)
    assert cache.cache_info().currsize == 0


def test_a_function_that_this_release_does_not_cache_holds_nothing(module: ModuleType) -> None:
    module.supports = lambda: True  # type: ignore[attr-defined]
    assert not present(_holder("supports", CacheClear()))


def test_entries_in_a_decorator_closure_are_dropped(module: ModuleType) -> None:
    def caching() -> Callable[[object], object]:
        entries: list[object] = []
        return lambda item: entries.append(item)

    module.indices = caching()  # type: ignore[attr-defined]
    model = Model()
    module.indices(model)
    holder, dead = _holder("indices", ClosureClear()), weakref.ref(model)
    del model
    assert present(holder)
    release(holder)
    assert dead() is None
    assert not present(holder)


def test_a_lazy_object_is_set_to_none(module: ModuleType) -> None:
    module._workspace = Model()  # type: ignore[attr-defined]
    holder, dead = _holder("_workspace", SetToNone()), weakref.ref(module._workspace)
    assert present(holder)
    release(holder)
    assert dead() is None
    assert not present(holder)


def test_a_do_nothing_object_takes_the_place_of_a_working_one(module: ModuleType) -> None:
    module.NoopOffloader = type("NoopOffloader", (), {})  # type: ignore[attr-defined]
    module._instance = Model()  # type: ignore[attr-defined]
    holder = _holder("_instance", Fresh("NoopOffloader"))
    assert present(holder)
    release(holder)
    assert type(module._instance) is module.NoopOffloader
    assert not present(holder)


@pytest.mark.parametrize(("nothing", "something"), [(None, Model()), ({}, {1: 2}), (set(), {1})])
def test_the_modules_own_function_is_called_only_if_there_is_something(
    module: ModuleType, nothing: object, something: object
) -> None:
    calls: list[str] = []
    module.reset = lambda: calls.append("reset")  # type: ignore[attr-defined]
    holder = _holder("_state", Call("reset"))
    module._state = nothing  # type: ignore[attr-defined]
    release(holder)
    assert calls == []
    module._state = something  # type: ignore[attr-defined]
    release(holder)
    assert calls == ["reset"]


def test_a_connector_is_let_go_also_if_its_shutdown_fails(module: ModuleType, table: Callable[..., None]) -> None:
    class Connector:
        def shutdown(self) -> None:
            raise RuntimeError("peer is gone")

    module._AGENT = Connector()  # type: ignore[attr-defined]
    dead = weakref.ref(module._AGENT)
    table(_holder("_AGENT", ShutDown()))
    [outcome] = release_holders(last_engine=True)
    assert outcome.error == "RuntimeError: peer is gone"
    assert module._AGENT is None
    assert dead() is None


def test_a_connector_without_shutdown_is_let_go(module: ModuleType) -> None:
    module._AGENT = Model()  # type: ignore[attr-defined]
    release(_holder("_AGENT", ShutDown()))
    assert module._AGENT is None


def test_a_cached_module_getattr_is_unwrapped_however_often_it_was_wrapped(module: ModuleType) -> None:
    def plain(name: str) -> str:
        return name

    module.__getattr__ = functools.cache(functools.cache(plain))  # type: ignore[method-assign]
    holder = _holder("__getattr__", UncacheGetattr())
    assert present(holder)
    release(holder)
    assert vars(module)["__getattr__"] is plain
    assert not present(holder)


def test_the_graph_pool_is_forgotten_on_the_class_of_the_current_platform(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = module.Platform = type("Platform", (), {"_pool": None})  # type: ignore[attr-defined]
    cuda: Any = type("Cuda", (base,), {})
    platforms = ModuleType("vllm.platforms")
    platforms._current_platform = cuda()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    holder = _holder("Platform._pool", ForgetGraphPool())
    assert not present(holder)
    cuda._pool = (0, 7)
    assert present(holder)
    release(holder)
    assert cuda._pool is None
    assert not present(holder)


def test_the_platform_is_not_resolved_to_look_for_a_graph_pool(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    module.Platform = type("Platform", (), {"_pool": None})  # type: ignore[attr-defined]
    platforms = ModuleType("vllm.platforms")
    asked: list[str] = []
    platforms.__getattr__ = asked.append  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    assert not present(_holder("Platform._pool", ForgetGraphPool()))
    assert asked == []


def test_a_module_that_was_never_imported_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "this", raising=False)
    holder = _holder("s", SetToNone(), module="this")
    assert not present(holder)
    release(holder)
    assert "this" not in sys.modules


@pytest.mark.parametrize("attribute", ["_absent", "Absent.member", "_plain.member"])
def test_an_attribute_that_the_release_does_not_have_is_passed_over(module: ModuleType, attribute: str) -> None:
    module._plain = 1  # type: ignore[attr-defined]
    holder = _holder(attribute, SetToNone())
    assert not present(holder)
    release(holder)
    assert not hasattr(module, "_absent")


@pytest.mark.parametrize("attribute", ["_workspace", "Tower.rope"])
def test_a_lazy_module_attribute_is_not_evaluated(module: ModuleType, attribute: str) -> None:
    asked: list[str] = []
    module.__getattr__ = asked.append  # type: ignore[method-assign]
    assert not present(_holder(attribute, SetToNone()))
    assert asked == []


def test_a_failing_release_is_recorded_and_the_next_one_runs(module: ModuleType, table: Callable[..., None]) -> None:
    def fail() -> None:
        raise ValueError("no such device")

    module.fail, module._a, module._b = fail, Model(), Model()  # type: ignore[attr-defined]
    table(_holder("_a", Call("fail")), _holder("_gone", SetToNone()), _holder("_b", SetToNone()))
    outcomes = release_holders(last_engine=True)
    assert [(item.name, item.error) for item in outcomes] == [
        ("_a", "ValueError: no such device"),
        ("_b", None),
    ]
    assert all(item.seconds >= 0 for item in outcomes)
    assert module._b is None


def test_a_failing_look_is_recorded_too(module: ModuleType, table: Callable[..., None]) -> None:
    module._contexts = 5  # type: ignore[attr-defined]
    table(_holder("_contexts", Blank()))
    [outcome] = release_holders(last_engine=True)
    assert outcome.error is not None
    assert outcome.error.startswith("TypeError")


def test_nothing_is_done_twice(module: ModuleType, table: Callable[..., None]) -> None:
    module._a = Model()  # type: ignore[attr-defined]
    table(_holder("_a", SetToNone()))
    assert len(release_holders(last_engine=True)) == 1
    assert release_holders(last_engine=True) == []


def test_shared_holders_wait_for_the_last_engine(module: ModuleType, table: Callable[..., None]) -> None:
    module._own, module._shared = Model(), Model()  # type: ignore[attr-defined]
    table(_holder("_shared", SetToNone(), shared=True), _holder("_own", SetToNone()))
    assert [item.name for item in release_holders(last_engine=False)] == ["_own"]
    assert module._shared is not None
    assert [item.name for item in release_holders(last_engine=True)] == ["_shared"]


def test_pools_wait_for_the_collection(module: ModuleType, table: Callable[..., None]) -> None:
    module._pool, module._cache = Model(), Model()  # type: ignore[attr-defined]
    table(_holder("_pool", SetToNone(), after_collection=True), _holder("_cache", SetToNone()))
    assert [item.name for item in release_holders(last_engine=True)] == ["_cache"]
    assert [item.name for item in release_holders(last_engine=True, collected=True)] == ["_pool"]


def test_nothing_is_referenced_while_holders_are_released(module: ModuleType, table: Callable[..., None]) -> None:
    """Each holder is let go by reference counting alone, also if releasing it raises."""

    def fail() -> None:
        module._b = None  # type: ignore[attr-defined]
        raise ValueError("late")

    module.fail = fail  # type: ignore[attr-defined]
    module._a, module._b = {1: Model()}, Model()  # type: ignore[attr-defined]
    dead = [weakref.ref(module._a[1]), weakref.ref(module._b)]
    alive: list[bool] = []

    class Probe:
        def holds(self, place: Place) -> bool:
            alive.extend(item() is not None for item in dead)
            return place.value is not None

        def run(self, place: Place) -> None:
            raise AssertionError("there was nothing to release")

    module._probe = None  # type: ignore[attr-defined]
    table(_holder("_a", Clear()), _holder("_b", Call("fail")), _holder("_probe", Probe()))
    gc.disable()
    try:
        release_holders(last_engine=True)
    finally:
        gc.enable()
    assert alive == [False, False]


class _Pool:
    """A memory pool that notes whether its allocator object was still there when it died."""

    def __init__(self, allocator_object: Model, log: list[bool]) -> None:
        self._allocator = weakref.ref(allocator_object)
        self._log = log

    def __del__(self) -> None:
        self._log.append(self._allocator() is not None)


def _sleeping(module: ModuleType, pairs: dict[str, Any], mapped: dict[int, int]) -> SimpleNamespace:
    data = {pointer: SimpleNamespace(handle=(0, size, pointer, 0)) for pointer, size in mapped.items()}
    instance = SimpleNamespace(allocator_and_pools=pairs, pointer_to_data=data)
    module.CuMemAllocator = type("CuMemAllocator", (), {"instance": instance})  # type: ignore[attr-defined]
    return instance


def _torch_whose_empty_cache(action: Callable[[], None]) -> ModuleType:
    torch = ModuleType("torch")
    torch.cuda = SimpleNamespace(empty_cache=action)  # type: ignore[attr-defined]
    return torch


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The allocator objects that are kept, empty before the test."""
    objects: list[object] = []
    monkeypatch.setattr(allocator, "_kept", objects)
    return objects


@pytest.mark.parametrize("as_list", [False, True], ids=["pair", "list of pairs"])
def test_a_sleep_mode_pool_goes_before_its_allocator(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, kept: list[object], as_list: bool
) -> None:
    log: list[bool] = []
    allocator_object = Model()
    pair = (_Pool(allocator_object, log), allocator_object)
    instance = _sleeping(module, {"weights": [pair] if as_list else pair}, {4096: 100})
    dead = weakref.ref(allocator_object)
    del pair, allocator_object

    def empty_cache() -> None:
        assert log == [True], "the pool is gone, its allocator is not"
        log.append(dead() is not None)
        instance.pointer_to_data.clear()

    monkeypatch.setitem(sys.modules, "torch", _torch_whose_empty_cache(empty_cache))
    holder = _holder("CuMemAllocator.instance", allocator.ReleasePools())
    assert present(holder)
    release(holder)
    assert log == [True, True], "memory went back while the allocator was alive"
    assert dead() is None
    assert kept == []
    assert not present(holder)


def test_memory_that_is_still_mapped_is_reported_and_keeps_its_allocator(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, kept: list[object]
) -> None:
    allocator_object = Model()
    instance = _sleeping(module, {"weights": (Model(), allocator_object)}, {4096: 100, 8192: 28})
    monkeypatch.setitem(sys.modules, "torch", _torch_whose_empty_cache(lambda: None))
    holder = _holder("CuMemAllocator.instance", allocator.ReleasePools())
    with pytest.raises(allocator.PoolsInUseError, match="128 bytes in 2 allocations"):
        release(holder)
    assert kept == [allocator_object]
    assert present(holder), "to be tried again when the tensors are gone"
    instance.pointer_to_data.clear()
    release(holder)
    assert kept == []
    assert not present(holder)


def test_allocators_outlive_a_shutdown_that_drops_them(monkeypatch: pytest.MonkeyPatch, kept: list[object]) -> None:
    made = ModuleType("vllm.device_allocator.cumem")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    instance = _sleeping(made, {"weights": (Model(), Model()), "kv_cache": (Model(), Model())}, {})
    pools = [weakref.ref(pool) for pool, _ in instance.allocator_and_pools.values()]
    holders.keep_pool_allocators()
    holders.keep_pool_allocators()
    assert len(kept) == 2
    instance.allocator_and_pools.clear()
    assert [pool() for pool in pools] == [None, None]


def test_keeping_allocators_imports_nothing(monkeypatch: pytest.MonkeyPatch, kept: list[object]) -> None:
    monkeypatch.delitem(sys.modules, "vllm.device_allocator.cumem", raising=False)
    holders.keep_pool_allocators()
    assert kept == []
    assert "vllm.device_allocator.cumem" not in sys.modules


class _Module:
    def forward(self) -> None:
        """Stands for a layer's forward."""


class _Tensor:
    pass


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A torch with just the two classes that the sweep asks for."""
    made = ModuleType("torch")
    made.nn, made.Tensor = SimpleNamespace(Module=_Module), _Tensor  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", made)
    return made


def _cache(module: ModuleType, name: str, *, maxsize: int | None = 8) -> Any:
    def remember(*arguments: object, **_: object) -> object:
        return arguments[-1] if arguments else None

    remember.__module__, remember.__qualname__ = module.__name__, name
    cache = functools.lru_cache(maxsize=maxsize)(remember)
    setattr(module, name, cache)
    return cache


class _Workspace:
    """An object of a class of vLLM's own."""

    def __init__(self, held: object) -> None:
        self.held = held


_Workspace.__module__ = _NAME


@pytest.mark.parametrize("maxsize", [8, None])
@pytest.mark.parametrize(
    "held",
    [
        lambda: _Module(),
        lambda: _Module().forward,
        lambda: _Tensor(),
        lambda: (1, (_Tensor(),)),
        lambda: _Workspace({"buffers": [_Tensor()]}),
        lambda: functools.partial(_Module().forward),
    ],
    ids=["module", "bound method", "tensor", "nested tensor", "object of vLLM", "partial"],
)
@pytest.mark.usefixtures("torch")
def test_a_cache_that_reaches_a_module_or_tensor_is_cleared(
    module: ModuleType, held: Callable[[], object], maxsize: int | None
) -> None:
    cache = _cache(module, "remember", maxsize=maxsize)
    cache(held()) if maxsize else cache(1, key=held())
    assert cache.cache_info().currsize == 1
    outcomes = holders.clear_lru_caches_holding()
    assert [item.name for item in outcomes] == [f"{_NAME}.remember"]
    assert cache.cache_info().currsize == 0


@pytest.mark.usefixtures("torch")
def test_a_cache_of_other_things_is_left_alone(module: ModuleType) -> None:
    cache = _cache(module, "remember")
    for thing in (1, "text", _Module, _Tensor, len, (1, 2), frozenset({"a"}), weakref.ref(_Module)):
        cache(thing)
    before = cache.cache_info().currsize
    assert holders.clear_lru_caches_holding() == []
    assert cache.cache_info().currsize == before > 0


@pytest.mark.usefixtures("torch")
def test_what_a_class_holds_is_not_what_its_cache_holds(module: ModuleType) -> None:
    meta = type("Meta", (type,), {"__module__": _NAME})
    cache = _cache(module, "remember")
    cache(meta("Backend", (), {"shared": _Tensor()}))
    assert holders.clear_lru_caches_holding() == []


def test_a_cache_that_many_modules_import_is_looked_at_once(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    importer = ModuleType("vllm.importer")
    monkeypatch.setitem(sys.modules, importer.__name__, importer)
    importer.remember = _cache(module, "remember")  # type: ignore[attr-defined]
    importer.remember(1)
    assert list(lru._caches("vllm")).count(importer.remember) == 1


@pytest.mark.parametrize("wrap", [lambda function: function, staticmethod, classmethod])
@pytest.mark.usefixtures("torch")
def test_a_cache_on_a_class_is_found(module: ModuleType, wrap: Callable[..., Any]) -> None:
    cache = _cache(module, "remember")
    del module.remember
    module.Tower = type("Tower", (), {"rope": wrap(cache), "__module__": _NAME})  # type: ignore[attr-defined]
    cache(_Tensor())
    assert len(holders.clear_lru_caches_holding()) == 1


@pytest.mark.usefixtures("torch")
def test_a_cache_that_vllm_only_imports_is_left_alone(module: ModuleType) -> None:
    cache = _cache(ModuleType("someone_elses"), "remember")
    module.remember = cache  # type: ignore[attr-defined]
    cache(_Tensor())
    assert holders.clear_lru_caches_holding() == []


@pytest.mark.usefixtures("torch")
def test_another_package_can_be_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ModuleType("my_models.llama")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    _cache(made, "remember")(_Tensor())
    assert holders.clear_lru_caches_holding() == []
    assert [item.name for item in holders.clear_lru_caches_holding("my_models")] == ["my_models.llama.remember"]


@pytest.mark.usefixtures("torch")
def test_the_sweep_keeps_nothing(module: ModuleType) -> None:
    model = _Module()
    _cache(module, "remember")(model.forward)
    dead = weakref.ref(model)
    del model
    gc.disable()
    try:
        holders.clear_lru_caches_holding()
        assert dead() is None
    finally:
        gc.enable()


@pytest.mark.usefixtures("torch")
def test_the_sweep_evaluates_nothing(module: ModuleType) -> None:
    asked: list[str] = []

    class Loud:
        __module__ = _NAME

        @property
        def value(self) -> object:
            asked.append("value")
            return None

        def __getattr__(self, name: str) -> object:
            asked.append(name)
            return None

    module.__getattr__ = asked.append  # type: ignore[method-assign]
    module.loud, module.Loud = Loud(), Loud  # type: ignore[attr-defined]
    _cache(module, "remember")(module.loud)
    holders.clear_lru_caches_holding()
    assert asked == []


def test_without_torch_there_is_nothing_to_sweep(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    _cache(module, "remember")(_Tensor())
    assert holders.clear_lru_caches_holding() == []


def test_the_table_holds_nothing_in_a_process_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
        monkeypatch.delitem(sys.modules, name)
    before = set(sys.modules)
    assert release_holders(last_engine=True) == []
    assert release_holders(last_engine=True, collected=True) == []
    assert set(sys.modules) == before
