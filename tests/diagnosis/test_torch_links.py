"""Links that only torch has."""

from __future__ import annotations

import functools
import re
import time
from typing import Any

import pytest
from holding import ROOT

from pytest_vllm_cleanup.diagnosis.chains import find_chains

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")

HERE = "tests/diagnosis/test_torch_links.py"
KEPT: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def _empty() -> Any:
    yield
    KEPT.clear()


def chain(targets: list[Any]) -> str:
    """Return the best chain to what is in a list."""
    return re.sub(
        r"(?<=\.py:)\d+", "LINE", str(find_chains(targets, deadline=time.monotonic() + 60, base=str(ROOT))[0])
    )


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
        self.register_buffer("table", torch.zeros(2))

    @functools.lru_cache  # noqa: B019
    def score(self) -> Any:
        return torch.ones(2)


def test_a_tensor_in_a_list() -> None:
    KEPT["outputs"] = [torch.zeros(2)]
    assert chain([KEPT["outputs"][0]]) == f"{HERE}: module global KEPT['outputs'][0] -> Tensor"


def test_a_parameter_of_a_model() -> None:
    KEPT["model"] = Model()
    assert chain([KEPT["model"].layers[0].weight]) == (
        f"{HERE}: module global KEPT['model'] -> Model.layers[0] -> Linear.weight -> Parameter"
    )


def test_a_buffer_of_a_model() -> None:
    KEPT["model"] = Model()
    assert chain([KEPT["model"].table]) == f"{HERE}: module global KEPT['model'] -> Model.table -> Tensor"


def test_a_cache_on_a_method_of_a_model() -> None:
    model = Model()
    model.score()
    targets = [model.table]
    del model
    assert chain(targets) == f"{HERE}: functools.lru_cache of Model.score (argument 'self') -> Model.table -> Tensor"
    targets = [Model.score(next(module for module in _models()))]
    assert chain(targets) == f"{HERE}: functools.lru_cache of Model.score (result) -> Tensor"
    Model.score.cache_clear()


def _models() -> list[Any]:
    import gc

    return [thing for thing in gc.get_objects() if type(thing) is Model]


def test_a_gradient() -> None:
    KEPT["layer"] = torch.nn.Linear(2, 2)
    KEPT["layer"](torch.ones(1, 2)).sum().backward()
    assert chain([KEPT["layer"].weight.grad]) == (
        f"{HERE}: module global KEPT['layer'] -> Linear.weight -> Parameter.grad -> Tensor"
    )


def test_a_hook_on_a_module() -> None:
    def hook() -> Any:
        output = torch.zeros(2)
        return lambda *_: output and None

    KEPT["layer"] = torch.nn.Linear(2, 2)
    KEPT["layer"].register_forward_hook(hook())
    found = chain([KEPT["layer"]._forward_hooks[next(iter(KEPT["layer"]._forward_hooks))].__closure__[0].cell_contents])
    assert re.sub(r"\[\d+\]", "[N]", found) == (
        f"{HERE}: module global KEPT['layer'] -> Linear._forward_hooks[N] -> "
        "closure variable 'output' of test_a_hook_on_a_module.<locals>.hook.<locals>.<lambda> -> Tensor"
    )


def test_a_bytecode_hook() -> None:
    from torch._dynamo import convert_frame

    class Wrapper(Model):
        def hook(self, old: Any, new: Any) -> None:
            pass

    model = Wrapper()
    handle = convert_frame.register_bytecode_hook(model.hook)
    targets = [model.table]
    del model
    try:
        found = find_chains(targets, deadline=time.monotonic() + 60, base=str(ROOT))
        assert str(found[0]) == "torch._dynamo.convert_frame: bytecode hook of Wrapper -> Wrapper.table -> Tensor"
        assert found[0].rank == 1
    finally:
        handle.remove()


def test_a_compiled_module_of_the_user() -> None:
    KEPT["model"] = torch.compile(Model(), backend="eager")
    KEPT["model"].layers[0](torch.ones(1, 2))
    found = chain([KEPT["model"]._orig_mod.table])
    # It has its module in more than one attribute.
    assert found.startswith(f"{HERE}: module global KEPT['model'] -> OptimizedModule._")
    assert found.endswith(" -> Model.table -> Tensor")


def test_the_base_of_a_view_and_the_view_are_one_thing() -> None:
    KEPT["view"] = torch.zeros(4)[:2]
    assert chain([KEPT["view"]._base, KEPT["view"]]) == f"{HERE}: module global KEPT['view'] -> Tensor"


def test_a_leaf_of_an_autograd_graph() -> None:
    leaf = torch.zeros(2, requires_grad=True)
    KEPT["loss"] = (leaf * 2).sum()
    targets = [leaf]
    del leaf
    assert chain(targets) == f"{HERE}: module global KEPT['loss'] -> autograd graph of Tensor -> Tensor"


def test_what_an_autograd_graph_has_saved() -> None:
    weight, data = torch.zeros(2, requires_grad=True), torch.ones(2)
    KEPT["loss"] = (weight * data).sum()
    targets = [data]
    del weight, data
    assert chain(targets) == f"{HERE}: module global KEPT['loss'] -> autograd graph of Tensor -> Tensor"


def test_what_was_packed_by_the_user_is_not_unpacked() -> None:
    unpacked: list[Any] = []
    weight, data = torch.zeros(2, requires_grad=True), torch.ones(2)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpacked.append):
        KEPT["loss"] = (weight * data).sum()
    targets = [data]
    del weight, data
    chain(targets)
    assert unpacked == []


def as_array() -> tuple[Any, list[Any]]:
    """Return an array of numpy, and the tensor whose memory it shares."""
    array = torch.zeros(2).numpy()
    return array, [array.base]


def as_view() -> tuple[Any, list[Any]]:
    """Return part of such an array."""
    array, tensors = as_array()
    return array[:1], tensors


def as_element() -> tuple[Any, list[Any]]:
    """Return an array of objects."""
    array = numpy.empty(3, dtype=object)
    array[1] = torch.zeros(2)
    return array, [array[1]]


class Outputs:
    array: Any


@pytest.mark.parametrize(
    ("made", "way"), [(as_array, "ndarray"), (as_view, "ndarray -> ndarray"), (as_element, "ndarray")]
)
@pytest.mark.parametrize(
    ("kept", "place"),
    [
        (lambda array: [array], "['outputs'][0]"),
        # What holds nothing but arrays is seen by the garbage collector no more than they are.
        (lambda array: {"a": array}, "['outputs']['a']"),
        (lambda array: {"a": {"b": array}}, "['outputs']['a']['b']"),
        (lambda array: array, "['outputs']"),
    ],
    ids=["list", "dictionary", "two dictionaries", "global"],
)
def test_an_array_of_numpy(made: Any, way: str, kept: Any, place: str) -> None:
    array, targets = made()
    KEPT["outputs"] = kept(array)
    del array
    assert chain(targets) == f"{HERE}: module global KEPT{place} -> {way} -> Tensor"


def test_an_array_of_numpy_in_an_attribute() -> None:
    KEPT["outputs"] = Outputs()
    KEPT["outputs"].array, targets = as_array()
    assert chain(targets) == f"{HERE}: module global KEPT['outputs'] -> Outputs.array -> ndarray -> Tensor"
