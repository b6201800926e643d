"""What ``run_isolated`` raises of its own."""

from __future__ import annotations


class IsolatedProcessError(RuntimeError):
    """The process of an isolated function ended too early, or what the function raised cannot be brought here.

    Attributes:
        returncode: what the process ended with: its exit code, or minus the number of the signal; None if it ended in
            order, and it is the exception that could not be brought.
        stacks: the last stacks of its threads, "" if it had no time to print them.
    """

    def __init__(self, message: str, returncode: int | None = None, stacks: str = "") -> None:
        super().__init__(message, returncode, stacks)
        self.message = message
        self.returncode = returncode
        self.stacks = stacks

    def __str__(self) -> str:
        return f"{self.message}\nlast stacks of its threads:\n{self.stacks}" if self.stacks else self.message


class IsolatedTimeoutError(IsolatedProcessError, TimeoutError):
    """An isolated function had not returned when its ``timeout`` was over; its process was ended."""

    # RuntimeError's and OSError's constructors differ; the latter would take the arguments for an error number.
    __str__ = IsolatedProcessError.__str__


class RemoteTraceback(Exception):
    """The traceback of another process, as text; the cause of an exception that was brought from there."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text.rstrip()}\n"""'
