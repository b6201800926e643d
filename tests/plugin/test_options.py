from __future__ import annotations

import pytest

from pytest_vllm_cleanup import config

MAJOR = int(pytest.__version__.partition(".")[0])


def outcome(result):
    return "leaked" if result.parseoutcomes().get("leaked") else "passed"


@pytest.mark.parametrize(
    ("marker", "option", "variable", "ini", "expected"),
    [
        (None, None, None, None, "leaked"),
        (None, None, None, "8 MiB", "passed"),
        (None, None, "8 MiB", "0", "passed"),
        (None, None, "0", "8 MiB", "leaked"),
        (None, "8 MiB", "0", "0", "passed"),
        (None, "0", "8 MiB", "8 MiB", "leaked"),
        ("8 MiB", "0", "0", "0", "passed"),
        ("0", "8 MiB", "8 MiB", "8 MiB", "leaked"),
    ],
)
def test_marker_over_option_over_environment_over_ini(
    run, pytester, monkeypatch, marker, option, variable, ini, expected
):
    if ini is not None:
        pytester.makeini(f"[pytest]\nvllm_cleanup_tolerance = {ini}\n")
    if variable is not None:
        monkeypatch.setenv("PYTEST_VLLM_CLEANUP_TOLERANCE", variable)
    arguments = [] if option is None else ["--vllm-cleanup-tolerance", option]
    mark = "@pytest.mark.gpu_released" + ("" if marker is None else f"(tolerance={marker!r})")
    result = run(f"{mark}\ndef test_it():\n    gpu.allocated += 4 * MIB\n", *arguments)
    assert outcome(result) == expected


@pytest.mark.parametrize("source", ["option", "environment", "ini"])
def test_every_setting_can_come_from_every_source(run, pytester, monkeypatch, source):
    values = {"check": "all", "strict": "yes", "tolerance": "3 MiB", "timeout": "2 min", "record": "on"}
    arguments = []
    if source == "option":
        flags = ("strict", "record")
        arguments = [f"--vllm-cleanup-{name}={value}" for name, value in values.items() if name not in flags]
        arguments += [f"--vllm-cleanup-{name}" for name in flags]
    elif source == "environment":
        for name, value in values.items():
            monkeypatch.setenv(f"PYTEST_VLLM_CLEANUP_{name.upper()}", value)
    else:
        pytester.makeini("[pytest]\n" + "\n".join(f"vllm_cleanup_{name} = {value}" for name, value in values.items()))
    result = run("def test_it():\n    pass\n", *arguments)
    assert result.ret == 0
    assert "vllm-cleanup: check=all, strict, tolerance=3 MiB, timeout=120s, record" in result.outlines


@pytest.mark.parametrize(
    ("table", "number"),
    [
        ("tool.pytest.ini_options", "{}"),
        # The native table came with pytest 9, which wants text there for what is text in an ini file.
        pytest.param("tool.pytest", '"{}"', marks=pytest.mark.skipif(MAJOR < 9, reason="pytest 9")),
    ],
)
def test_settings_may_stand_in_pyproject(run, pytester, table, number):
    pytester.makepyprojecttoml(f"""
        [{table}]
        vllm_cleanup_check = "all"
        vllm_cleanup_strict = {number.format("true")}
        vllm_cleanup_tolerance = {number.format(2048)}
        vllm_cleanup_timeout = {number.format(5)}
    """)
    result = run("def test_it():\n    pass\n")
    assert "vllm-cleanup: check=all, strict, tolerance=2 KiB, timeout=5s" in result.outlines


def test_the_header_says_nothing_where_nothing_differs(run, monkeypatch):
    monkeypatch.setenv("PYTEST_VLLM_CLEANUP_STRICT", "0")
    monkeypatch.setenv("PYTEST_VLLM_CLEANUP_TIMEOUT", "60s")
    monkeypatch.setenv("PYTEST_VLLM_CLEANUP_TOLERANCE", "")
    result = run("def test_it():\n    pass\n", "--vllm-cleanup-check=marked")
    assert result.ret == 0
    assert "vllm-cleanup:" not in result.stdout.str()


@pytest.mark.parametrize("flag", ["1", "true", "YES", "on", True])
def test_yes_is_understood_in_several_ways(flag):
    assert config.parse_flag(flag) is True


@pytest.mark.parametrize("flag", ["0", "false", "No", "off", " ", False])
def test_no_is_understood_in_several_ways(flag):
    assert config.parse_flag(flag) is False


def test_no_in_the_environment_wins_over_yes_in_the_ini_file(run, pytester, monkeypatch):
    pytester.makeini("[pytest]\nvllm_cleanup_strict = yes\n")
    assert "vllm-cleanup: strict" in run("def test_it():\n    pass\n").outlines
    monkeypatch.setenv("PYTEST_VLLM_CLEANUP_STRICT", "no")
    assert "vllm-cleanup:" not in run("def test_it():\n    pass\n").stdout.str()


BAD = [
    ("check", "some", "expected one of marked, all, off, got 'some'"),
    ("strict", "maybe", "expected one of 1, true, yes, on, 0, false, no, off, got 'maybe'"),
    ("tolerance", "4G", "not a size: '4G'. Write for example '4 GiB'"),
    ("tolerance", "-1", "not a size: '-1'"),
    ("timeout", "soon", "not a duration: 'soon'. Write for example '30s'"),
    ("timeout", "-5", "not a duration: '-5'"),
]


CASES = [
    (source, *bad)
    for source in ("option", "environment", "ini")
    for bad in BAD
    if (source, bad[0]) != ("option", "strict")  # which takes no value
]


@pytest.mark.parametrize(("source", "name", "value", "text"), CASES)
def test_a_bad_value_is_a_usage_error_that_names_its_source(pytester, monkeypatch, source, name, value, text):
    arguments = []
    if source == "option":
        named = f"--vllm-cleanup-{name}"
        arguments = [f"{named}={value}"]
    elif source == "environment":
        named = f"environment variable PYTEST_VLLM_CLEANUP_{name.upper()}"
        monkeypatch.setenv(f"PYTEST_VLLM_CLEANUP_{name.upper()}", value)
    else:
        named = f"ini key vllm_cleanup_{name}"
        pytester.makeini(f"[pytest]\nvllm_cleanup_{name} = {value}\n")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile("def test_it(): pass")
    result = pytester.runpytest_subprocess("-p", "vllm_cleanup", *arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert f"ERROR: {named}: {text}" in result.stderr.str()
    assert "Traceback" not in result.stderr.str()


def test_help_markers_and_fixtures_show_our_texts(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def words(option):
        result = pytester.runpytest_subprocess("-p", "vllm_cleanup", option)
        assert result.ret == 0
        return " ".join(result.stdout.str().split())

    text = words("--help")
    assert "GPU memory of vLLM engines" in text
    for name in ("check", "strict", "tolerance", "timeout"):
        assert f"--vllm-cleanup-{name}" in text
        assert f"vllm_cleanup_{name}" in text
    assert "which tests must release their GPU memory (default: marked)" in text
    assert "how long to wait for memory to come back (default: 60 s)" in text

    text = words("--markers")
    assert (
        "@pytest.mark.gpu_released(tolerance=None, timeout=None, devices=None, check=True, reason=None): "
        "Fail the test as LEAKED if GPU memory has not come back when its last fixture is torn down." in text
    )
    assert "@pytest.mark.assert_gpu_released(" in text
    assert "alias of gpu_released." in text

    text = words("--fixtures")
    for name in ("vllm_runner", "vllm_runner_factory [session scope]", "gpu_memory", "assert_gpu_released"):
        assert f"{name} -- " in text
    assert "Make engines that are closed when the test is over." in text


def test_markers_are_registered_for_strict_runs(run):
    result = run(
        """
@pytest.mark.gpu_released
@pytest.mark.assert_gpu_released
def test_it():
    pass
""",
        "--strict-markers",
    )
    assert result.parseoutcomes() == {"passed": 1}


PLUGINS = """
def test_plugins(pytestconfig):
    manager = pytestconfig.pluginmanager
    ours = {name for name, plugin in manager.list_name_plugin() if plugin is not None and "vllm" in name}
    found = [plugin for plugin in manager.get_plugins() if getattr(plugin, "__name__", "").startswith("pytest_vllm")]
    assert (ours, len(found)) == (EXPECTED)
"""


@pytest.mark.parametrize(
    ("autoload", "arguments", "expected"),
    [
        (True, [], ({"vllm_cleanup"}, 1)),
        (True, ["-p", "vllm_cleanup"], ({"vllm_cleanup"}, 1)),
        (True, ["-p", "no:vllm_cleanup"], (set(), 0)),
        (False, [], (set(), 0)),
        (False, ["-p", "vllm_cleanup"], ({"vllm_cleanup"}, 1)),
    ],
)
def test_the_plugin_loads_once_by_entry_point_or_by_name_or_not_at_all(
    pytester, monkeypatch, autoload, arguments, expected
):
    monkeypatch.delenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", raising=False)
    if not autoload:
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(PLUGINS.replace("EXPECTED", repr(expected)))
    result = pytester.runpytest_subprocess(*arguments)
    assert result.parseoutcomes() == {"passed": 1}


def test_switching_the_plugin_off_switches_markers_fixtures_and_options_off(pytester, fake_gpu):
    pytester.makeconftest(fake_gpu)
    pytester.makepyfile("""
        import pytest
        from fake_gpu import MIB, gpu
        @pytest.mark.gpu_released
        def test_leak():
            gpu.allocated += 100 * MIB
        def test_fixture(vllm_runner):
            pass
    """)
    result = pytester.runpytest_subprocess("-p", "no:vllm_cleanup")
    assert result.parseoutcomes()["passed"] == 1
    result.stdout.fnmatch_lines(["*PytestUnknownMarkWarning*gpu_released*", "*1 passed*1 error*"])
    assert "fixture 'vllm_runner' not found" in result.stdout.str()
    usage = pytester.runpytest_subprocess("-p", "no:vllm_cleanup", "--vllm-cleanup-strict")
    assert usage.ret == pytest.ExitCode.USAGE_ERROR
