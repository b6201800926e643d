"""Looking at what objects refer to, without doing harm to what C code keeps."""

from __future__ import annotations

import gc
import subprocess
import sys
import types

from pytest_vllm_cleanup.diagnosis import heap


class Lazy(types.ModuleType):
    """A module as many packages replace theirs by."""


def keeping_more_than_its_names() -> types.ModuleType:
    """A module written in C that shows the collector more than its namespace."""
    import _functools

    assert len(gc.get_referents(_functools)) > 1
    return _functools


def test_of_a_module_only_the_namespace_is_looked_at():
    lazy = Lazy("lazy")
    for module in (keeping_more_than_its_names(), lazy):
        [namespace] = heap.referents(module)
        assert namespace is vars(module)
    lazy.partial = object()
    thing = [lazy.partial, heap]
    assert {id(part) for part in heap.referents(thing)} == {id(lazy.partial), id(heap)}
    assert heap.referents_of_many([keeping_more_than_its_names(), lazy, lazy]) == []
    assert {id(part) for part in heap.referents_of_many([lazy, thing, lazy])} == {id(lazy.partial), id(heap)}


def test_a_module_that_holds_one_of_several_things_by_c_code_alone_is_passed_over():
    module = keeping_more_than_its_names()
    hidden = next(thing for thing in gc.get_referents(module) if thing is not vars(module))
    assert heap.held_by(module, {id(hidden): 1, id(vars(module)): 2}) == [2]
    assert heap.held_by(module, {id(hidden): 1, 0: 2}) == []


AFTER_AWAITING = """
import asyncio, faulthandler, time
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
"""


def test_a_search_after_a_search_ends_where_futures_were_awaited():
    # With Python 3.12, _asyncio shows the collector what it keeps of futures that were awaited.
    run = subprocess.run([sys.executable, "-c", AFTER_AWAITING], capture_output=True, text=True, timeout=120)
    assert run.stdout.splitlines() == ["__main__: module global array -> ndarray -> Output"] * 2, run.stderr
