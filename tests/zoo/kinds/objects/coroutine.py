"""A request is not awaited to its end, and its coroutine is kept with the loop."""

from __future__ import annotations

import asyncio

import pytest
from zoo_expect import Expect
from zoo_tensors import logits

EXPECT = Expect(
    holder="tests/zoo/kinds/objects/coroutine.py: module global REQUESTS{...} -> Task -> "
    "local 'scores' of suspended coroutine generate (tests/zoo/kinds/objects/coroutine.py:*) -> "
    "Tensor"
)
pytestmark = pytest.mark.gpu_released
LOOP = asyncio.new_event_loop()
REQUESTS = set()


async def generate():
    scores = logits()
    await asyncio.sleep(3600)
    return scores.argmax()


async def submit():
    REQUESTS.add(asyncio.ensure_future(generate()))
    await asyncio.sleep(0)


def test_requests_are_submitted():
    LOOP.run_until_complete(submit())
    assert REQUESTS


def let_go():
    for request in REQUESTS:
        request.cancel()
    LOOP.run_until_complete(asyncio.gather(*REQUESTS, return_exceptions=True))
    REQUESTS.clear()
    LOOP.close()
