"""One call of a function in a fresh process, from its start until nothing of it is left."""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Mapping
from typing import IO, Any

from pytest_vllm_cleanup.guard import guarded
from pytest_vllm_cleanup.isolation import cargo, neighbour_memory
from pytest_vllm_cleanup.isolation.endings import ended
from pytest_vllm_cleanup.isolation.errors import IsolatedProcessError, IsolatedTimeoutError
from pytest_vllm_cleanup.isolation.neighbour_memory import Piece, Place
from pytest_vllm_cleanup.isolation.process import FreshProcess
from pytest_vllm_cleanup.memory.units import format_size
from pytest_vllm_cleanup.processes import marks, proc, reap
from pytest_vllm_cleanup.processes.proc import ProcessId

_CLOSING = 180.0  # seconds to close an engine, which has limits of its own and may wait for its turn; or for that alone
_EXIT = 15.0  # seconds to exit after that
_WRITING = 600.0  # seconds to write what is big in an answer; a GiB takes one
_FAREWELL = 15.0  # seconds to close engines after Ctrl-C
_GRACE = 5.0  # seconds after SIGTERM, and again after SIGKILL
_HELPERS = 2.0  # seconds for Python's own helper processes, which end by themselves
_DRIVER = 10.0  # seconds for the driver to drop processes that are gone

_ADVICE: dict[int, str] = {
    signal.SIGKILL: "Nobody else having sent it, the system was out of memory: see its log, and the container's limit",
    signal.SIGTERM: "Somebody has asked it to end",
}
_CRASHED = "Native code has crashed; the stacks tell where it was called"


class Errand:
    """Has a function called in a process of its own, and leaves nothing of it behind, however that ends.

    Args:
        name: what is called, for messages.
        environ: the environment of the process.
        streams: descriptors for its standard output and error.

    Attributes:
        notes: what went wrong after the function had returned, one sentence each.
        pieces: what is big in the answer, and not in its file.
        unwritten: why it is not here; "" if it is.
    """

    def __init__(self, name: str, environ: Mapping[str, str], streams: tuple[int, int]) -> None:
        self.notes: list[str] = []
        self.pieces: list[Piece] = []
        self.unwritten = ""
        self._name = name
        self._mark = f"isolated-{secrets.token_hex(8)}"
        mark = marks.with_mark(self._mark, environ.get(marks.VARIABLE))
        self._process = FreshProcess(shared_output=True, environ={**environ, marks.VARIABLE: mark}, streams=streams)
        self._first = proc.identify(self._process.pid)
        self._seen: frozenset[ProcessId] = frozenset()
        self._started = False
        self._listed = False

    def carry_out(self, order: dict[str, Any], call: IO[bytes], answer: IO[bytes], limit: float | None) -> None:
        """Give the order, and wait until it is done and nothing runs any more.

        Args:
            order: for ``callee.run_function``.
            call: the file of the call.
            answer: the file of the answer.
            limit: seconds for the function.

        Raises:
            IsolatedProcessError: the process ended without an answer, or before all of it was here.
            IsolatedTimeoutError: there was none in time.
            MemoryError: there is no memory here for what is big in the answer.
            BaseException: this was interrupted; nothing runs any more in this case either.
        """
        try:
            deadline = None if limit is None else time.monotonic() + limit
            files = call.fileno(), answer.fileno()
            self._process.send("function", {**order, "environ": self._process.environ}, files)
            if places := self._wait_for_answer(deadline, limit):
                self._take(places, answer)
            self._wait_for_end()
        except IsolatedProcessError:
            raise
        except BaseException:
            if self._started:
                self._interrupt()
            raise
        finally:
            self._leave_nothing()

    def _wait_for_answer(self, deadline: float | None, limit: float | None) -> list[Place]:
        name = ""
        places: list[Place] = []
        while name != "answered":
            try:
                message = self._process.receive(deadline)
            except TimeoutError:
                raise self._late(
                    f"it had not returned after {limit:g} s", "Give it more time with timeout=, or look where it hangs"
                ) from None
            if message is None:
                raise self._died("before the function had returned")
            name, places = message
            self._started = True
        return places

    def _take(self, places: list[Place], answer: IO[bytes]) -> None:
        """Copy what is big in the answer, and let the process go on without it."""
        try:
            try:
                self.pieces = neighbour_memory.read(self._process.pid, places)
            except (OSError, RuntimeError):  # it must not, or no thread starts; or the process is gone
                self._have_it_written(places, answer)
            else:
                self._process.send("taken")
        except MemoryError:
            size = format_size(sum(place.size for place in places))
            raise MemoryError(f"{self._name}: there is no memory here for its result of {size}") from None

    def _have_it_written(self, places: list[Place], answer: IO[bytes]) -> None:
        self._process.send("write")
        try:
            message = self._process.receive(time.monotonic() + _WRITING)
        except TimeoutError:
            raise self._late(f"it has returned, but its result was not here after {_WRITING:g} s more") from None
        if message is None:
            raise self._died("after the function had returned, and before all of its result was here") from None
        name, data = message
        if name == "not written":
            self.unwritten = f"{data['type']}: {data['text']}"
            return
        self._process.send("taken")  # the process need not have it any longer
        self.pieces = cargo.read_pieces(answer, data, places)

    def _wait_for_end(self) -> None:
        self._look()
        limit, what, doing = _CLOSING, "close its engines", "closed its engines"
        try:
            while (message := self._process.receive(time.monotonic() + limit)) is not None:
                name, data = message
                if name == "closed":
                    self.notes += [f"closing an engine: {error}" for error in data]
                else:
                    limit, what, doing = _EXIT, "exit", "exited"
        except TimeoutError:
            stacks = self._process.abort()
            self.notes.append(f"its process did not {what} within {limit:g} s of its result and was ended\n{stacks}")
            return
        code = self._process.returncode or 0
        if code < 0 or (code > 0 and what != "exit"):
            self.notes.append(f"its process {ended(code)} while it {doing}\n{self._process.stacks()}")

    def _look(self) -> None:
        """See what the process has started, while it lives; and whether the driver lists them."""
        from pytest_vllm_cleanup.engines import measure  # takes a while, in which the process starts

        self._process.look()
        with guarded("asking the driver for processes"):
            self._listed = measure.lists(self._process.processes())

    def _late(self, what: str, advice: str = "Look where it hangs") -> IsolatedTimeoutError:
        """End the process, and return what to say about it."""
        self._look()
        stacks = self._process.abort()
        text = f"{self._name}: {what}; its process, and all that it had started, was ended. {advice}"
        return IsolatedTimeoutError(text, self._process.returncode, stacks)

    def _died(self, when: str) -> IsolatedProcessError:
        code, stacks = self._process.returncode, self._process.stacks()
        if code is not None and code < 0:
            advice = _ADVICE.get(-code, _CRASHED if stacks else "")
        else:
            advice = "The function, or something that it called, has ended it (os._exit); its output tells more"
        text = f"{self._name}: its process {ended(code)} {when}. {advice}"
        return IsolatedProcessError(text.rstrip(". "), code, stacks)

    def _leave_nothing(self) -> None:
        try:
            self._process.end()
            self._end_strays()
            self._wait_for_driver()
        except BaseException:  # a second Ctrl-C: no more waiting
            self._kill()
            raise
        finally:
            self._process.close()

    def _interrupt(self) -> None:
        try:
            self._process.interrupt(_FAREWELL)
        except BaseException:  # likewise
            self._kill()
            raise

    def _kill(self) -> None:
        reap.send_all(self._process.processes() | self._strays(), signal.SIGKILL)

    def _end_strays(self) -> None:
        """End what is nobody's child, since whoever started it has ended; it is known by the mark of this errand."""
        self._seen = self._process.processes() | self._strays()
        reap.Family(self._seen).end(_GRACE)
        if reap.wait(self._strays, _HELPERS):
            reap.send_all(self._strays(), signal.SIGKILL)
            reap.wait(self._strays, _GRACE)

    def _wait_for_driver(self) -> None:
        from pytest_vllm_cleanup.engines import measure

        try:
            measure.wait_until_dropped(self._seen, self._listed, _DRIVER)
        except TimeoutError as problem:
            self.notes.append(str(problem))

    def _strays(self) -> frozenset[ProcessId]:
        return frozenset() if self._first is None else marks.carrying(self._mark, self._first)
