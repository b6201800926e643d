"""A factory that owns the runners it makes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pytest_vllm_cleanup.engines.drain import release_unreleased
from pytest_vllm_cleanup.engines.errors import EngineCleanupWarning
from pytest_vllm_cleanup.runners.vllm_runner import VllmRunner


class RunnerFactory:
    """Makes ``VllmRunner`` objects and closes them in reverse order.

    Args:
        add_finalizer: registers a callable with whoever makes the engine, so that it is called when that ends. None:
            all engines live as long as the factory.
        start_timeout: how long an engine may take to start, in seconds, unless the call says otherwise. None: as
            long as ``VllmRunner`` gives it.
        defaults: returns further arguments for an engine, from those of the call. None: there are none.
    """

    def __init__(
        self,
        add_finalizer: Callable[[Callable[[], None]], bool] | None = None,
        *,
        start_timeout: float | None = None,
        defaults: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ) -> None:
        self._add_finalizer = add_finalizer
        self._more_defaults = defaults
        self._defaults = {} if start_timeout is None else {"start_timeout": start_timeout}
        self._runners: list[VllmRunner] = []

    def __call__(self, model_name: str | Path, **arguments: Any) -> VllmRunner:
        """Build an engine. Takes what ``VllmRunner`` takes."""
        more = {} if self._more_defaults is None else self._more_defaults(arguments)
        runner = VllmRunner(model_name, **{**self._defaults, **more, **arguments})
        self._runners.append(runner)
        if self._add_finalizer is not None:
            self._add_finalizer(lambda: self._close(runner))
        return runner

    def close(self) -> None:
        """Close all engines that are still open, newest first, and what failed constructors left behind.

        A step that fails is shown as a warning; the other engines are closed all the same.
        """
        errors: list[str] = []
        while self._runners:
            errors += _close(self._runners.pop())
        for handle in release_unreleased():
            errors += [] if handle.report is None else handle.report.errors
        _warn(errors)  # last: where warnings are errors, the first one ends this

    def _close(self, runner: VllmRunner) -> None:
        if runner in self._runners:
            self._runners.remove(runner)
        _warn(_close(runner))


def _close(runner: VllmRunner) -> list[str]:
    try:
        report = runner.close()
    except Exception as problem:  # what a test has put in the place of LLM is no engine
        return [f"{type(problem).__name__}: {problem}"]
    return [] if report is None else report.errors


def _warn(errors: list[str]) -> None:
    for error in errors:
        warnings.warn(f"closing an engine: {error}", EngineCleanupWarning, stacklevel=3)
