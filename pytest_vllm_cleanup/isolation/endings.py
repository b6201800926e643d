"""What to say of a process that ended too early."""

from __future__ import annotations

import signal
from collections.abc import Sequence

_IN = {"setup": "start or setup", "call": "call", "teardown": "teardown"}


def ended(returncode: int | None) -> str:
    """Return how a process ended, as the end of a sentence.

    Args:
        returncode: as in ``subprocess.Popen``: its exit code, or minus the number of the signal.
    """
    if returncode is None:
        return "broke off the connection"
    if returncode >= 0:
        return f"exited with code {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"


def not_reported(when: str, fate: str, told: Sequence[str], stacks: str) -> str:
    """Return why there is no report of a phase.

    Args:
        when: the phase: "setup", "call" or "teardown".
        fate: what happened to the process, as the end of a sentence.
        told: what pytest said in there.
        stacks: what faulthandler printed, "" if nothing.
    """
    lines = [f"the process of this isolated test {fate} before its {_IN[when]} was over", *told]
    if stacks:
        lines += ["stacks of its threads:", stacks]
    return "\n".join(lines)
