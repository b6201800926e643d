"""Looking at what objects refer to, without doing harm to what C code keeps."""

from __future__ import annotations

import gc
import subprocess
import sys
import types

import unmeasured

from pytest_vllm_cleanup.diagnosis import heap


class Lazy(types.ModuleType):
    """A module as many packages replace theirs by."""

    __slots__ = ("cache",)


def keeping_more_than_its_names() -> types.ModuleType:
    """A module written in C that shows the collector more than its namespace."""
    import _functools

    assert len(gc.get_referents(_functools)) > 1
    return _functools


def test_of_a_module_written_in_c_only_the_namespace_is_looked_at():
    module = keeping_more_than_its_names()
    [namespace] = heap.referents(module)
    assert namespace is vars(module)
    thing = [heap]
    found = heap.referents_of_many([module, thing, module])
    assert list(map(id, found)) == [id(heap), id(namespace), id(namespace)]
    hidden = next(held for held in gc.get_referents(module) if held is not namespace)
    assert heap.held_by(module, {id(hidden): 1, id(namespace): 2}) == [2]
    assert heap.held_by(module, {id(hidden): 1, 0: 2}) == []


def test_of_any_other_module_all_is():
    lazy, plain = Lazy("lazy"), types.ModuleType("plain")
    lazy.cache = object()
    for found in (heap.referents(lazy), heap.referents_of_many([plain, lazy, plain])):
        assert {id(lazy.cache), id(vars(lazy))} <= set(map(id, found))
    assert heap.held_by(lazy, {id(lazy.cache): 1, id(plain): 2}) == [1]
    assert any(held is vars(plain) for held in heap.referents_of_many([plain]))


AFTER_AWAITING = """
import asyncio, faulthandler, sys, time, types
import numpy
from pytest_vllm_cleanup.diagnosis.chains import find_chains

faulthandler.dump_traceback_later(40, exit=True)

async def wait():
    future = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(future.set_result, None)
    await future

class Output: pass

asyncio.run(wait())
array = numpy.empty(1, dtype=object)  # the collector does not see what it holds, so all objects are looked at
for _ in range(2):
    array[0] = Output()
    print(*find_chains([array[0]], deadline=time.monotonic() + 10))
del array
module = sys.modules["made"] = types.ModuleType("made")  # nor what is in this namespace, which holds nothing else
module.__dict__.clear()
module.array = numpy.empty(1, dtype=object)
module.array[0] = Output()
del module
print(find_chains([sys.modules["made"].array[0]], deadline=time.monotonic() + 10)[0])  # others have sys.modules too
"""


def test_a_search_after_a_search_ends_where_futures_were_awaited():
    # With Python 3.12, _asyncio shows the collector what it keeps of futures that were awaited.
    run = subprocess.run(
        [sys.executable, "-c", AFTER_AWAITING],
        capture_output=True,
        text=True,
        timeout=120,
        env=unmeasured.environment(),
    )
    wanted = ["__main__: module global array -> ndarray -> Output"] * 2
    wanted.append("sys.modules['made'] -> module.array -> ndarray -> Output")
    assert run.stdout.splitlines() == wanted, run.stderr
