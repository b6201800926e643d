"""``-n gpu``, and ``-n auto`` with ``--vllm-cleanup-gpus=auto``. Light: every run with pytest-xdist loads it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from pytest_vllm_cleanup import config as settings

_OWN_NUMBER = "PYTEST_XDIST_AUTO_NUM_WORKERS"  # what the user says that auto is, by a variable of pytest-xdist


class _Gpu(str):
    """The value of ``-n gpu``: to pytest-xdist it is "auto", so that it asks how many workers that makes."""


def accept_gpu(parser: pytest.Parser) -> None:
    """Have pytest-xdist's ``-n`` take "gpu" beside its own values."""
    for option in parser.getgroup("xdist").options:
        if "-n" in option.names():
            attributes: Any = option.attrs()  # those that the command line is parsed with
            attributes["type"] = _with_gpu(attributes["type"])


def _with_gpu(parse: Callable[[str], object]) -> Callable[[str], object]:
    def parse_numprocesses(text: str) -> object:
        return _Gpu("auto") if text == "gpu" else parse(text)

    return parse_numprocesses


class Number:
    """Says how many workers there are; a plugin of the controller."""

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_xdist_auto_num_workers(self, config: pytest.Config) -> int | None:
        """Return one worker a device, or as many as wanted; None to leave it to pytest-xdist."""
        asked = isinstance(config.option.numprocesses, _Gpu)
        gpus, per_gpu = settings.gpus_of(config)
        if asked and gpus == "off":
            raise pytest.UsageError("-n gpu gives each worker a GPU, and --vllm-cleanup-gpus=off forbids it: drop one")
        if not asked and (gpus != "auto" or config.option.numprocesses != "auto" or os.environ.get(_OWN_NUMBER)):
            return None
        from pytest_vllm_cleanup.devices import assign, inventory
        from pytest_vllm_cleanup.devices.offered import offer

        found = inventory.take()
        offered = offer(os.environ, found.cards, found.reason)
        if not offered.devices:
            if asked:
                raise pytest.UsageError(f"-n gpu: no GPU to give to a worker: {offered.reason}")
            return None
        config.option.vllm_cleanup_gpus = "auto"
        return assign.worker_count(len(offered.devices), per_gpu)
