"""Who made which engine, where it lives, and what became of it.

A handle is our weak record of one engine: it never keeps the engine or any part of it alive.
"""

from __future__ import annotations

import itertools
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from pytest_vllm_cleanup.engines import hooks
from pytest_vllm_cleanup.engines.errors import DeviceQuarantinedError
from pytest_vllm_cleanup.engines.traces import Traces
from pytest_vllm_cleanup.guard import guarded
from pytest_vllm_cleanup.processes.proc import ProcessId


class State(Enum):
    """The stages of an engine's life."""

    BUILDING = "building"
    LIVE = "live"
    DROPPED = "dropped"  # collected without having been closed: what it left behind is still to be released
    FAILED = "failed"  # its constructor raised: likewise
    CLOSING = "closing"
    CLOSED = "closed"


UNRELEASED = frozenset({State.DROPPED, State.FAILED})
_ALIVE = frozenset({State.BUILDING, State.LIVE})


# pytest makes fixtures of the methods that xunit and unittest know.
_SETUP_METHOD = re.compile(r"_(?:xunit|unittest)_(\w+)_fixture_(.+)")


@dataclass(frozen=True)
class Owner:
    """What must outlive an engine.

    Attributes:
        node: node id of the test, or "" outside a test run.
        phase: "setup", "call" or "teardown" of the test, or "" outside one.
        fixture: name of the fixture that was being set up, None for the test itself.
        scope: pytest scope of the owner; "process" outside a test run.
    """

    node: str = ""
    phase: str = ""
    fixture: str | None = None
    scope: str = "process"

    @property
    def is_test(self) -> bool:
        """Whether the engine must be gone when the test is over."""
        return self.scope == "function"

    def __str__(self) -> str:
        if not self.node:
            return "this process"
        if self.fixture is None:
            return f"test {self.node}"
        if method := _SETUP_METHOD.fullmatch(self.fixture):
            return f"{method[1]} of {method[2]} (set up for {self.node})"
        return f"{self.scope}-scoped fixture '{self.fixture}' (set up for {self.node})"


@dataclass
class CloseReport:
    """What closing an engine did.

    Attributes:
        steps: (name, seconds, error) of each step in order; error is None where the step worked.
        alive: parts of the engine that were still referenced afterwards, by name.
        collections: how many full garbage collections were needed.
    """

    steps: list[tuple[str, float, str | None]] = field(default_factory=list)
    alive: list[str] = field(default_factory=list)
    collections: int = 0

    def run(self, name: str, step: Callable[..., object], *arguments: Any) -> None:
        """Do one step, guarded and timed: one that fails is noted, and the next one can run."""
        started = time.monotonic()
        error = None
        try:
            step(*arguments)
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"  # text only: its traceback holds frames
        self.steps.append((name, time.monotonic() - started, error))

    @property
    def seconds(self) -> float:
        """How long it took in all, in seconds."""
        return sum(seconds for _, seconds, _ in self.steps)

    @property
    def errors(self) -> list[str]:
        """The steps that failed, one sentence each."""
        return [f"{name}: {error}" for name, _, error in self.steps if error is not None]


@dataclass(eq=False)
class EngineHandle:
    """Our record of one engine.

    Attributes:
        number: counts the engines of this process, from 1.
        kind: name of its class, "LLMEngine" or "AsyncLLM".
        owner: the fixture or test that must outlive it.
        state: where it is in its life.
        in_process: whether the model lives in this process (None while it is being built).
        pid: the process that built it; a forked child inherits the record but not the engine.
        thread: the thread that built it.
        traces: what building it added to the process.
        processes: the child processes that were started for it.
        parts: weak references to engine, core, executor, worker, runner and models, by name.
        graph_wrappers: weak set of its CUDA graph wrappers, None where the release has no register of them.
        sleeps: whether it was built with ``enable_sleep_mode``.
        waited: how long its start had to wait and for whom, as a phrase; "" if it had not to.
        failure: type and text of the exception that its constructor raised.
        report: what closing it did, once it is closed or, where its constructor raised, taken apart.
    """

    number: int
    kind: str
    owner: Owner
    state: State = State.BUILDING
    in_process: bool | None = None
    pid: int = field(default_factory=os.getpid)
    thread: int = field(default_factory=threading.get_ident)
    created: float = field(default_factory=time.monotonic)
    traces: Traces = field(default_factory=Traces)
    processes: frozenset[ProcessId] = frozenset()
    parts: dict[str, weakref.ref[Any]] = field(default_factory=dict)
    graph_wrappers: list[weakref.WeakSet[Any]] = field(default_factory=list)
    sleeps: bool = False
    waited: str = ""
    failure: str | None = None
    report: CloseReport | None = None

    def part(self, name: str) -> Any | None:
        """Return a strong reference to one part, None where there is none or it is gone."""
        reference = self.parts.get(name)
        return None if reference is None else reference()

    def __str__(self) -> str:
        return f"{self.kind} number {self.number} of {self.owner}"


class Listener(Protocol):
    """Wants to know when engines come and go, to account for their memory."""

    def before_build(self, handle: EngineHandle) -> None:
        """Look before the engine's constructor runs."""

    def after_build(self, handle: EngineHandle) -> None:
        """Look when the constructor has returned or raised."""

    def after_close(self, handle: EngineHandle) -> None:
        """Look when the engine has been closed."""


class Turns(Protocol):
    """Has engines of several processes start, and give memory back, one after the other."""

    def starting(self, handle: EngineHandle) -> AbstractContextManager[object]:
        """Return what waits until an engine may start, and lets the next one when it is left."""

    def closing(self, handle: EngineHandle) -> AbstractContextManager[object]:
        """Return what waits until an engine may be closed, and lets the next one when it is left."""


class Registry:
    """The engines of this process."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._handles: list[EngineHandle] = []
        self._engines: weakref.WeakKeyDictionary[Any, EngineHandle] = weakref.WeakKeyDictionary()
        self._cores: weakref.WeakKeyDictionary[Any, EngineHandle] = weakref.WeakKeyDictionary()
        self.listeners: list[Listener] = []
        self.gates: list[Callable[[EngineHandle, Any], None]] = []
        self.owner: Callable[[], Owner] = Owner
        self.turns: Turns | None = None

    def begin(self, kind: str) -> EngineHandle:
        """Record that an engine of class ``kind`` is about to be built."""
        handle = EngineHandle(next(self._numbers), kind, self.owner())
        self._handles.append(handle)
        return handle

    def attach(self, handle: EngineHandle, engine: Any) -> None:
        """Tie a record to the engine object. Its collection is noticed from now on."""
        self._engines[engine] = handle
        handle.parts["engine"] = weakref.ref(engine)
        # atexit=False: at the interpreter's end the operating system gives everything back.
        weakref.finalize(engine, self._collected, weakref.ref(handle)).atexit = False

    def attach_core(self, handle: EngineHandle, core: Any) -> None:
        """Tie a record to an engine core of this process."""
        self._cores[core] = handle
        handle.parts["core"] = weakref.ref(core)

    def of_engine(self, engine: Any) -> EngineHandle | None:
        """Return the record of an engine object, None if it was built unseen."""
        return self._engines.get(engine)

    def of_core(self, core: Any) -> EngineHandle | None:
        """Return the record of an engine core of this process."""
        return self._cores.get(core)

    def handles(self) -> Iterator[EngineHandle]:
        """Iterate over the engines that this very process built and that are not closed, oldest first."""
        me = os.getpid()
        return (h for h in list(self._handles) if h.pid == me and h.state is not State.CLOSED)

    def siblings(self, handle: EngineHandle | None) -> list[EngineHandle]:
        """Return the other live engines whose model is in this process."""
        return [h for h in self.others(handle) if h.in_process is not False]

    def others(self, handle: EngineHandle | None) -> list[EngineHandle]:
        """Return the other engines that are live or being built, oldest first, wherever their model is."""
        return [h for h in self.handles() if h is not handle and h.state in _ALIVE]

    def unreleased(self) -> list[EngineHandle]:
        """Return the engines that are gone but have not been drained: dropped, or failed while starting."""
        return [h for h in self.handles() if h.state in UNRELEASED]

    def due(self, node: str, ended: Collection[Owner]) -> list[EngineHandle]:
        """Return the open engines that must not outlive the test ``node``, oldest first.

        Args:
            node: node id of the test.
            ended: the fixtures of wider scope that ended with it.
        """
        return [h for h in self.handles() if (h.owner.node == node and h.owner.is_test) or h.owner in ended]

    def wait_to_start(self, handle: EngineHandle, stack: ExitStack) -> None:
        """Wait until an engine may start, if it has to take turns with those of other processes.

        Args:
            handle: its record.
            stack: whose end is that of its turn.
        """
        if self.turns is not None:
            with guarded(f"waiting for the turn of {handle}"):
                _enter(stack, self.turns.starting(handle), handle)

    @contextmanager
    def closing(self, handle: EngineHandle, report: CloseReport) -> Iterator[None]:
        """Close an engine inside of this: when it is its turn, if it has to take turns with those of other processes.

        Args:
            handle: its record.
            report: where the waiting is noted.
        """
        with ExitStack() as stack:
            if self.turns is not None:
                report.run("wait for its turn", _enter, stack, self.turns.closing(handle), handle)
            handle.state = State.CLOSING  # not before: one that is not waited for any more is still to be released
            yield

    def closed(self, handle: EngineHandle, report: CloseReport) -> None:
        """Record that an engine is closed, and forget all about it but the report."""
        handle.state = State.CLOSED
        handle.report = report
        handle.parts.clear()
        handle.graph_wrappers.clear()
        if handle in self._handles:  # two threads may close it
            self._handles.remove(handle)
        self.tell("after_close", handle)

    def tell(self, event: str, handle: EngineHandle) -> None:
        """Call a method of every listener. A bug there must not break the engine that is being built or closed."""
        for listener in self.listeners:
            with guarded(f"accounting for {handle}"):
                getattr(listener, event)(handle)

    def ask_gates(self, handle: EngineHandle, config: Any) -> None:
        """Ask whether an engine may start. A bug in a gate lets it through.

        Args:
            handle: its record.
            config: its ``VllmConfig``.

        Raises:
            DeviceQuarantinedError: a gate refuses it.
        """
        __tracebackhide__ = True  # by pytest: who asked for the engine is of interest
        for gate in self.gates:
            refusal = None
            with guarded(f"looking whether there is room for {handle}"):
                try:
                    gate(handle, config)
                except DeviceQuarantinedError as problem:
                    refusal = str(problem)
            if refusal is not None:
                raise DeviceQuarantinedError(refusal)

    @staticmethod
    def _collected(reference: weakref.ref[EngineHandle]) -> None:
        # The net under explicit closing. It may run inside any allocation, so it only takes the hooks away, which no
        # collection can; the rest of the drain waits for the next safe moment (see drain.release_unreleased).
        handle = reference()
        if handle is not None and handle.state is State.LIVE and handle.pid == os.getpid():
            handle.state = State.DROPPED
            hooks.remove_hooks(handle.traces.hooks)


def _enter(stack: ExitStack, turn: AbstractContextManager[object], handle: EngineHandle) -> None:
    held = ExitStack()
    held.enter_context(turn)
    stack.callback(_give_up, held, handle)


def _give_up(held: ExitStack, handle: EngineHandle) -> None:
    with guarded(f"giving up the turn of {handle}"):
        held.close()


registry = Registry()
