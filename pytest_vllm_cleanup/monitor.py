"""The hooks that are active while tests run, in runs where some test needs them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest

from pytest_vllm_cleanup import leaving, markers
from pytest_vllm_cleanup.checks import investigate, references
from pytest_vllm_cleanup.checks.announce import announce
from pytest_vllm_cleanup.checks.check import ReleaseCheck, UnknownDeviceError, current_ledger
from pytest_vllm_cleanup.checks.gate import Gate
from pytest_vllm_cleanup.checks.result import Result
from pytest_vllm_cleanup.config import Settings
from pytest_vllm_cleanup.diagnosis import allocations
from pytest_vllm_cleanup.engines import instrument
from pytest_vllm_cleanup.engines.drain import release_unreleased, still_alive
from pytest_vllm_cleanup.engines.registry import EngineHandle, Owner, registry
from pytest_vllm_cleanup.guard import guarded, warn
from pytest_vllm_cleanup.kept import Kept
from pytest_vllm_cleanup.processes import marks
from pytest_vllm_cleanup.report import payload, recording, tracebacks
from pytest_vllm_cleanup.report.carried import SECTION
from pytest_vllm_cleanup.scopes import WiderFixtures
from pytest_vllm_cleanup.stash import MONITOR, SETTINGS
from pytest_vllm_cleanup.workers import starting, worker

_RESULT = pytest.StashKey[Result]()
_CHECK = pytest.StashKey[ReleaseCheck]()
_FIXTURES_ONLY = pytest.StashKey[bool]()  # the test itself is not checked


def activate(config: pytest.Config) -> Monitor:
    """Return the monitor of a run, started if it was not yet."""
    monitor = config.pluginmanager.get_plugin(MONITOR)
    if not isinstance(monitor, Monitor):
        monitor = Monitor(config)
        config.pluginmanager.register(monitor, MONITOR)
        leaving.activate(config)
    return monitor


class Monitor:
    """Knows which test and fixture is running, takes the baseline before a test and the verdict after it."""

    def __init__(self, config: pytest.Config) -> None:
        self.settings: Settings = config.stash[SETTINGS]
        self._kept = Kept(debugging=bool(config.getoption("usepdb", False) or config.getoption("trace", False)))
        self._item: pytest.Item | None = None
        self._phase = ""
        self._fixtures: list[tuple[str, str, pytest.FixtureRequest]] = []
        self._wider = WiderFixtures(measured=self.settings.check != "off")
        self._late: list[Callable[[], None]] = []
        instrument.install()
        self._gate = Gate(refuse=self.settings.on_leak == "quarantine")
        self._gate.install()
        self._starts = starting.install()
        if self.settings.record:
            allocations.start_recording()
        self._owner_outside = registry.owner
        registry.owner = self.owner
        self._mark = ExitStack()
        with guarded("marking what the tests start"):
            self._mark.enter_context(marks.marked())

    def pytest_unconfigure(self) -> None:
        with guarded("taking the mark of this run away"):
            self._mark.close()
        registry.owner = self._owner_outside  # this run may be one inside another, of a test of a plugin
        self._gate.uninstall()
        self._starts()
        if self.settings.record:
            allocations.stop_recording()

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
        self._note_ended_fixtures()
        checked = self._item is not None and _CHECK in self._item.stash
        try:
            with self._wider.being_set_up(fixturedef, self.owner(), checked=checked):
                return (yield)
        finally:
            if self._wider.get(fixturedef) is not None:
                request.addfinalizer(partial(self._before_fixture_ends, fixturedef))  # the last one runs first
            self._fixtures.pop()

    def _before_fixture_ends(self, fixturedef: pytest.FixtureDef[object]) -> None:
        """Know what is missing before a fixture of wider scope ends, so that its leak is not its last test's."""
        item, fixture = self._item, self._wider.get(fixturedef)
        if item is None or fixture is None:
            return
        with guarded(f"measuring before the end of fixture {fixturedef.argname}"):
            if fixture.checked and _CHECK not in item.stash:
                item.stash[_FIXTURES_ONLY] = True
                self._kept.begin(item)
                item.stash[_CHECK] = self._check(markers.Requirement(), own=False)
            if _CHECK in item.stash:
                owner, let_go = str(fixture.owner), partial(self._kept.let_go, item)
                try:
                    item.stash[_CHECK].before_fixture_ends(owner, fixture.number, let_go)
                finally:
                    self._kept.restore(item)

    def _note_ended_fixtures(self) -> None:
        """Know what fixtures left that ended while the running test was set up, such as that of another parameter."""
        item = self._item
        if item is not None and self._phase != "teardown" and _CHECK in item.stash:
            with guarded("measuring after the end of fixtures"):
                item.stash[_CHECK].after_fixtures_ended()

    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[object]) -> None:
        self._wider.end(fixturedef)

    # The life of one test

    # No wrapper: one that raises before its yield leaves pytest's own wrappers unentered, and their teardown fails.
    # Not the first either: a test that is skipped may name devices that this machine does not have.
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._item, self._phase = item, "setup"  # until the next phase
        self._wider.ended.clear()
        self._kept.runs(item)
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
            result = None if references.unreported(item) else self._finish(item)
        if result is not None:
            payload.fail_if_leaked(item.nodeid, result, strict=self.settings.strict)

    # First in and last out: the wrappers of others look at a failed test before its references are let go.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        if call.excinfo is not None:
            with guarded(f"preparing the report of {item.nodeid}"):
                tracebacks.forget_wrappers(call.excinfo.value)
        report = yield
        error = call.excinfo.value if call.excinfo is not None else None
        with guarded(f"naming earlier leaks in the report of {item.nodeid}"):
            if text := self._gate.explain(item.nodeid, error):
                report.sections.append((SECTION, text))
        if error is not None and _CHECK in item.stash:
            self._kept.failed(item, error)
        if call.when == "teardown":
            if _CHECK in item.stash:
                self._kept.torn_down(item)
            with self._running(item, "teardown"):
                self._finish(item)
            self._kept.over(item)
            result = item.stash.get(_RESULT, None)
            if result is not None:
                del item.stash[_RESULT]
                with guarded(f"reporting {item.nodeid}"):
                    payload.attach(report, result, error, item.user_properties)
        return report

    def _begin(self, item: pytest.Item) -> str | None:
        """Take the baseline. Return what is wrong with the test's marker, None if nothing is."""
        try:
            if self.settings.check != "off":
                current_ledger()  # from the first test on: an unchecked one may set up an engine for others
            requirement = markers.required_of(item, self.settings.check)
            if requirement is None:
                self._gate.begin()
                return None
            release_unreleased()
            item.stash[_FIXTURES_ONLY] = False
            self._kept.begin(item)
            item.stash[_CHECK] = self._check(requirement)
            self._gate.begin(item.stash[_CHECK].baseline)
        except (markers.MarkerError, UnknownDeviceError) as problem:  # the user's, and of this test alone
            return str(problem)
        except Exception as problem:
            warn(f"taking the baseline of {item.nodeid}", problem)
        return None

    def _check(self, requirement: markers.Requirement, *, own: bool = True) -> ReleaseCheck:
        return ReleaseCheck(
            tolerance=self.settings.tolerance if requirement.tolerance is None else requirement.tolerance,
            timeout=self.settings.timeout if requirement.timeout is None else requirement.timeout,
            devices=requirement.devices,
            fixture_tolerance=self.settings.tolerance,
            own=own,
        )

    def _finish(self, item: pytest.Item) -> Result | None:
        """Come to the verdict, unless that has been done or the test is not checked."""
        check = item.stash.get(_CHECK, None)
        if check is None:
            return None
        del item.stash[_CHECK]
        let_go, result, leaks = partial(self._kept.let_go, item, torn_down=True), None, []
        if self._kept.is_left_to_debugger(item):
            check.excuse("what pytest keeps of the failed test was left to the debugger (--pdb, --trace)")
        try:
            with guarded(f"checking {item.nodeid}"):
                release_unreleased()
                abandoned = still_alive(self._due(item))
                if abandoned:  # or frames of what a test raised keep it; only then, as hooks of others may look at them
                    let_go()
                    release_unreleased()
                    abandoned = still_alive(self._due(item))
                blamed, note = partial(self._blamed, item, abandoned), partial(self._note, item)
                result = investigate.conclude(check, abandoned, let_go, blamed, str(item.config.rootpath), note)
                if result.leaked and self.settings.record and allocations.is_recording():
                    with guarded(f"writing down the allocations of {item.nodeid}"):
                        result.notes.append(recording.write(item))
                self._note(item, result)
        finally:  # also where a time limit of the user's ended the search
            self._kept.restore(item)
            self._kept.forget(item)
            noted = item.stash.get(_RESULT, None)
            if noted is not None:
                with guarded(f"remembering the result of {item.nodeid}"):
                    payload.record_properties(item, noted)
                    leaks = self._gate.leaked(item.nodeid, noted) if noted.leaked else []
        restart = partial(worker.ask_for_restart, item.session) if self.settings.on_leak == "restart" else None
        # A user's hook may end the run.
        announce(item, leaks, end_the_run=self.settings.on_leak == "exit", restart=restart)
        return result

    def _note(self, item: pytest.Item, result: Result) -> None:
        """Take down a result for the report, unless it is of a test that is not checked and nothing leaked."""
        if result.leaked or not item.stash.get(_FIXTURES_ONLY, False):
            item.stash[_RESULT] = result

    def _due(self, item: pytest.Item) -> list[EngineHandle]:
        """Return the open engines that must not outlive a test: its own if it is checked, those of ended fixtures."""
        due = registry.due(item.nodeid, self._wider.ended)
        return [h for h in due if h.owner in self._wider.ended] if item.stash.get(_FIXTURES_ONLY, False) else due

    def _blamed(self, item: pytest.Item, abandoned: tuple[EngineHandle, ...], result: Result) -> str:
        """Return the fixtures of wider scope that are to blame for a leak, "" if the test itself is."""
        owners = [str(h.owner) if h.owner in self._wider.ended else "" for h in abandoned]
        owners = owners or [charge.owner for charge in result.charges]
        if item.stash.get(_FIXTURES_ONLY, False):
            owners = [owner for owner in owners if owner]
        return " and ".join(dict.fromkeys(owners)) if all(owners) else ""

    @contextmanager
    def _running(self, item: pytest.Item, phase: str) -> Iterator[None]:
        self._item, self._phase = item, phase
        try:
            yield
        finally:
            self._item, self._phase = None, ""
