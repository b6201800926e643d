"""Tensors that other tensors keep through C code: their gradient, and what their autograd graph has saved."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from pytest_vllm_cleanup.diagnosis import heap, safely

_MOST_NODES = 5000  # of all graphs together
_SAVED = "_raw_saved_"
_clock = time.monotonic  # a test may have stopped it


def is_tensor(kind: type[Any]) -> bool:
    """Whether objects of a class are plain tensors: a subclass might have code of its own for everything."""
    return safely.is_among(kind, _plain())


def _plain() -> tuple[Any, ...]:
    torch = sys.modules.get("torch")
    return () if torch is None else (getattr(torch, "Tensor", None), torch.nn.Parameter)


def gradient(tensor: Any) -> Any:
    """Return the gradient of a plain tensor; None if it has none."""
    if not is_tensor(type(tensor)) or not tensor.is_leaf:  # others warn
        return None
    return tensor.grad


def owners(things: Iterable[Any], deadline: float) -> Iterator[tuple[Any, Any]]:
    """Look for tensors that keep others through C code.

    Args:
        things: objects to which no Python object refers.
        deadline: when to stop, on the clock of ``time.monotonic``.

    Returns:
        pairs of owner and what is owned.
    """
    wanted = {id(thing): thing for thing in things if is_tensor(type(thing))}
    if not wanted:
        return
    nodes: dict[int, Any] = {}
    for thing in heap.instances(map(id, _plain())):
        if _clock() >= deadline:
            return
        owned = wanted.get(id(gradient(thing)))
        if owned is not None:
            yield thing, owned
        elif not thing.is_leaf:
            for saved in _saved(thing.grad_fn, nodes):
                owned = wanted.get(id(saved))
                if owned is not None:
                    yield thing, owned


def _saved(root: Any, seen: dict[int, Any]) -> Iterator[Any]:
    """Iterate over the tensors in a graph.

    Args:
        root: its first node.
        seen: nodes that were there before, by id. They are held here, because each look would make a new one.
    """
    waiting = [root]
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        if node is None or id(node) in seen:
            continue
        seen[id(node)] = node
        with contextlib.suppress(Exception):  # what was saved may have been freed, or belongs to the user's own node
            waiting += [following for following, _ in node.next_functions]
            yield getattr(node, "variable", None)
            for name in [name for name in vars(type(node)) if name.startswith(_SAVED)]:
                raw = getattr(node, name)
                # Whoever has packed it runs code of his own to unpack it. (Older releases of torch do not tell.)
                if getattr(raw, "unpack_hook", raw) is None:
                    yield getattr(node, f"_saved_{name[len(_SAVED) :]}")
