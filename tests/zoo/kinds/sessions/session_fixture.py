"""A fixture of the session fills a cache of the module, and forgets it when it is torn down."""

from __future__ import annotations

import pytest
from zoo_expect import Expect
from zoo_tensors import logits

EXPECT = Expect(
    holder="tests/zoo/kinds/sessions/session_fixture.py: module global _MODELS['tiny'] -> Tensor",
    owner="session-scoped fixture 'model' *",
)
pytestmark = pytest.mark.gpu_released
_MODELS = {}


@pytest.fixture(scope="session")
def model():
    _MODELS["tiny"] = logits()
    return _MODELS["tiny"]


def test_the_model_has_no_zeros(model):
    assert model.all()


def test_the_model_has_rows(model):
    assert model.shape[0]
