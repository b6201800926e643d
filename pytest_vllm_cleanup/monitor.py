"""The hooks that are active while tests run, in runs where some test needs them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

import pytest

from pytest_vllm_cleanup import leaving, markers
from pytest_vllm_cleanup.checks import references
from pytest_vllm_cleanup.checks.check import ReleaseCheck, Result, UnknownDeviceError, current_ledger
from pytest_vllm_cleanup.config import Settings
from pytest_vllm_cleanup.engines import instrument
from pytest_vllm_cleanup.engines.close import close_handle
from pytest_vllm_cleanup.engines.drain import release_unreleased, still_alive
from pytest_vllm_cleanup.engines.registry import EngineHandle, Owner, registry
from pytest_vllm_cleanup.guard import guarded, warn
from pytest_vllm_cleanup.leaving import Leaving
from pytest_vllm_cleanup.report import payload
from pytest_vllm_cleanup.stash import SETTINGS

NAME = "vllm_cleanup_monitor"
_RESULT = pytest.StashKey[Result]()
_CHECK = pytest.StashKey[ReleaseCheck]()
_ERRORS = pytest.StashKey[list[BaseException]]()


def activate(config: pytest.Config) -> Monitor:
    """Return the monitor of a run, started if it was not yet."""
    monitor = config.pluginmanager.get_plugin(NAME)
    if not isinstance(monitor, Monitor):
        monitor = Monitor(config)
        config.pluginmanager.register(monitor, NAME)
        config.pluginmanager.register(Leaving(config), leaving.NAME)
    return monitor


class Monitor:
    """Knows which test and fixture is running, takes the baseline before a test and the verdict after it."""

    def __init__(self, config: pytest.Config) -> None:
        self.settings: Settings = config.stash[SETTINGS]
        self._debugging = bool(config.getoption("usepdb", False) or config.getoption("trace", False))
        self._item: pytest.Item | None = None
        self._phase = ""
        self._fixtures: list[tuple[str, str, pytest.FixtureRequest]] = []
        self._wider: dict[object, Owner] = {}  # by definition of the fixture
        self._accounts: dict[object, int] = {}  # likewise: numbers in the ledger
        self._late: list[Callable[[], None]] = []
        self._ended: set[Owner] = set()  # in the running test's teardown
        instrument.install()
        self._owner_outside = registry.owner
        registry.owner = self.owner

    def pytest_unconfigure(self) -> None:
        registry.owner = self._owner_outside  # this run may be one inside another, of a test of a plugin

    # Who is running

    def owner(self) -> Owner:
        """Return the fixture that is being set up, else the test that is running."""
        node = self._item.nodeid if self._item is not None else ""
        if self._fixtures:
            name, scope, _ = self._fixtures[-1]
            return Owner(node, self._phase, name, scope)
        return Owner(node, self._phase, None, "function" if node else "process")

    def add_finalizer(self, finalizer: Callable[[], None]) -> bool:
        """Have something called when the fixture that is being set up ends, else when the running test does.

        Returns:
            whether there is such a fixture or test.
        """
        if self._fixtures:
            self._fixtures[-1][2].addfinalizer(finalizer)
        elif self._item is not None:
            try:
                self._item.addfinalizer(finalizer)
            except AssertionError:  # pytest has not begun to set the test up, or has torn it down
                self._late.append(finalizer)
        else:
            return False
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        self._fixtures.append((fixturedef.argname, fixturedef.scope, request))
        try:
            with self._accounted(fixturedef):
                return (yield)
        finally:
            self._fixtures.pop()

    @contextmanager
    def _accounted(self, fixturedef: pytest.FixtureDef[object]) -> Iterator[None]:
        """Know the fixtures of wider scope: what they hold is no leak of the test for which they are set up."""
        set_up = None
        if fixturedef.scope != "function":
            self._wider[fixturedef] = self.owner()
            if self._item is not None and _CHECK in self._item.stash:
                with guarded(f"measuring before fixture {fixturedef.argname}"):
                    set_up = current_ledger().account_fixture()
        yield
        if set_up is not None:
            with guarded(f"measuring after fixture {fixturedef.argname}"):
                self._accounts[fixturedef] = set_up()

    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[object]) -> None:
        owner, number = self._wider.pop(fixturedef, None), self._accounts.pop(fixturedef, None)
        if owner is not None:
            self._ended.add(owner)
        if number is not None:
            with guarded(f"accounting for fixture {fixturedef.argname}"):
                current_ledger().end_fixture(number)

    # The life of one test

    # No wrapper: one that raises before its yield leaves pytest's own wrappers unentered, and their teardown fails.
    # Not the first either: a test that is skipped may name devices that this machine does not have.
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._item, self._phase = item, "setup"  # until the next phase
        self._ended.clear()
        problem = self._begin(item)
        if problem is not None:
            pytest.fail(problem, pytrace=False)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        with self._running(item, "call"):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, None, None]:
        with self._running(item, "teardown"):
            try:
                yield  # If it raises, the verdict waits for the report: until then its traceback keeps memory.
            finally:
                while self._late:
                    with guarded(f"closing an engine of {item.nodeid}"):
                        self._late.pop()()
            result = self._finish(item)
        if result is not None:
            self._fail_if_leaked(item, result)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        error = call.excinfo.value if call.excinfo is not None else None
        if error is not None and _CHECK in item.stash:
            item.stash[_ERRORS].append(error)
        if call.when == "teardown":
            with self._running(item, "teardown"):
                self._finish(item)
            result = item.stash.get(_RESULT, None)
            if result is not None:
                del item.stash[_RESULT]
                with guarded(f"reporting {item.nodeid}"):
                    report.user_properties = list(item.user_properties)
                    payload.attach(report, result, error)
        return report

    def _begin(self, item: pytest.Item) -> str | None:
        """Take the baseline. Return what is wrong with the test's marker, None if nothing is."""
        try:
            if self.settings.check != "off":
                current_ledger()  # from the first test on: an unchecked one may set up an engine for others
            requirement = self._requirement(item)
            if requirement is None:
                return None
            release_unreleased()
            item.stash[_ERRORS] = []
            item.stash[_CHECK] = ReleaseCheck(
                tolerance=self.settings.tolerance if requirement.tolerance is None else requirement.tolerance,
                timeout=self.settings.timeout if requirement.timeout is None else requirement.timeout,
                devices=requirement.devices,
            )
        except (markers.MarkerError, UnknownDeviceError) as problem:  # the user's, and of this test alone
            return str(problem)
        except Exception as problem:
            warn(f"taking the baseline of {item.nodeid}", problem)
        return None

    def _requirement(self, item: pytest.Item) -> markers.Requirement | None:
        if self.settings.check == "off":
            return None
        requirement = markers.requirement_of(item)
        if requirement is None and self.settings.check == "all":
            requirement = markers.Requirement()
        return requirement if requirement is not None and requirement.check else None

    def _finish(self, item: pytest.Item) -> Result | None:
        """Come to the verdict, unless that has been done or the test is not checked."""
        check = item.stash.get(_CHECK, None)
        if check is None:
            return None
        del item.stash[_CHECK]
        errors = item.stash[_ERRORS]
        del item.stash[_ERRORS]
        result = None

        def let_go() -> None:
            if not self._debugging:
                references.release(item, errors)
                errors.clear()

        with guarded(f"checking {item.nodeid}"):
            # Only where it matters: hooks of others may still look at the fixtures' values.
            if registry.due(item.nodeid, self._ended) or registry.unreleased():
                let_go()
            release_unreleased()
            abandoned = still_alive(registry.due(item.nodeid, self._ended))
            try:
                result = check.finish(abandoned, let_go)
                item.stash[_RESULT] = result
                payload.record_properties(item, result)
            finally:  # also where a timeout ends the waiting
                notes = [_closed(handle) for handle in abandoned]
            result.notes.extend(notes)
        return result

    def _fail_if_leaked(self, item: pytest.Item, result: Result) -> None:
        text = None
        with guarded(f"describing the leak of {item.nodeid}"):
            text = payload.failure(item.nodeid, result, strict=self.settings.strict)
        if text is not None:
            raise payload.Leaked(text, pytrace=False)

    @contextmanager
    def _running(self, item: pytest.Item, phase: str) -> Iterator[None]:
        self._item, self._phase = item, phase
        try:
            yield
        finally:
            self._item, self._phase = None, ""


def _closed(handle: EngineHandle) -> str:
    return f"closed {handle} in {close_handle(handle).seconds:.1f} s, after the verdict"
