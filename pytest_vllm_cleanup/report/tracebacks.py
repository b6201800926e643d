"""Failures are printed as if this plugin were not there: with its wrappers' frames taken out of their tracebacks.

pytest hides most frames that are not the user's, but neither with ``--tb=native`` and ``--full-trace``, nor for an
exception group, nor where no frame is of the test's own file.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from types import TracebackType

from pytest_vllm_cleanup.checks.references import chain, traceback_of

_PACKAGE = Path(__file__).parents[1]
# Hooks that wrap pytest's, and constructors that wrap vLLM's.
_WRAPPERS = frozenset(str(_PACKAGE / name) for name in ("monitor.py", "engines/instrument.py"))


def forget_wrappers(error: BaseException) -> None:
    """Take this plugin's wrappers out of the traceback of an exception, its causes, contexts and members.

    Before it is printed: whoever has looked at the traceback earlier may have kept the old one.
    """
    for linked in chain(error):
        trace = traceback_of(linked)
        while trace is not None and _is_ours(trace):
            _empty(trace)
            trace = trace.tb_next
        if trace is not traceback_of(linked) and trace is not None:
            BaseException.with_traceback(linked, trace)
        while trace is not None:
            _skip_ours(trace)
            trace = trace.tb_next


def _skip_ours(trace: TracebackType) -> None:
    """Tie an entry of a traceback to the next one that is none of ours."""
    following = trace.tb_next
    while following is not None and _is_ours(following) and following.tb_next is not None:
        _empty(following)
        following = following.tb_next
        # pluggy's loop over hooks has an entry on either side of each wrapper: where it called, and where it threw.
        if following.tb_frame.f_code is trace.tb_frame.f_code and following.tb_next is not None:
            following = following.tb_next
    if following is not trace.tb_next:
        trace.tb_next = following


def _empty(trace: TracebackType) -> None:
    # The frames that it called still refer to it, and nobody will find it any more to empty it.
    with suppress(RuntimeError):  # still running
        trace.tb_frame.clear()
        _ = trace.tb_frame.f_locals  # empties the copy that a look at them has left there (before Python 3.13)


def _is_ours(trace: TracebackType) -> bool:
    return trace.tb_frame.f_code.co_filename in _WRAPPERS
