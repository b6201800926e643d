"""A fixture of the module makes its table anew for each parameter."""

from __future__ import annotations

import pytest
from zoo_expect import CLEAN, SIZE
from zoo_tensors import logits

EXPECT = CLEAN
pytestmark = pytest.mark.gpu_released


@pytest.fixture(scope="module", params=[1, 2])
def table(request):
    return logits(request.param * SIZE)


def test_the_first_row_has_no_zeros(table):
    assert table[0].all()


def test_the_last_row_has_no_zeros(table):
    assert table[-1].all()
