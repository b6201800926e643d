from __future__ import annotations

import random

import pytest

from pytest_vllm_cleanup.devices import turns
from pytest_vllm_cleanup.devices.turns import Claim


class Places:
    """The waiting list and some processes, which act one step at a time."""

    def __init__(self):
        self.claims = []

    def ask(self, pid, devices, exclusive=False):
        """Ask for devices; whether it is the process's turn."""
        mine = Claim(pid, 0, 0, "waiting", frozenset(devices), exclusive)
        self.claims = turns.enter(self.claims, mine)
        return self.again(pid)

    def again(self, pid):
        self.claims, waits_for = turns.advance(self.claims, (pid, 0))
        return not waits_for

    def done(self, pid, rests_on=""):
        self.claims = turns.leave(self.claims, (pid, 0), frozenset(rests_on))


def test_tests_on_one_device_run_together_and_one_with_several_runs_alone():
    places = Places()
    assert places.ask(1, "a")
    assert places.ask(2, "a")
    assert not places.ask(3, "ab", exclusive=True)
    places.done(1)
    assert not places.again(3)
    places.done(2)
    assert places.again(3)
    assert not places.ask(1, "a")
    assert places.ask(2, "c")  # which nobody has
    places.done(3)
    assert places.again(1)


def test_two_with_several_devices_run_together_if_they_have_none_in_common():
    places = Places()
    assert places.ask(1, "ab", exclusive=True)
    assert places.ask(2, "cd", exclusive=True)
    assert not places.ask(3, "bc", exclusive=True)


def test_nobody_overtakes_one_that_waits():
    places = Places()
    assert places.ask(1, "a")
    assert not places.ask(2, "ab", exclusive=True)
    assert not places.ask(3, "a")  # it would run, if 2 were not before it
    places.done(1)
    assert not places.again(3)
    assert places.again(2)
    places.done(2)
    assert places.again(3)


def test_an_engine_of_wider_scope_keeps_others_from_having_the_device_alone_until_it_is_closed():
    places = Places()
    assert places.ask(1, "a")
    places.done(1, rests_on="a")
    assert places.ask(2, "a")  # beside it
    places.done(2)
    assert not places.ask(3, "ab", exclusive=True)
    assert places.ask(1, "a")  # the next test with that engine passes, or the engine would never be closed
    places.done(1)
    assert places.again(3)


def test_two_that_hold_what_the_other_wants_do_not_wait_for_each_other_for_ever():
    places = Places()
    for pid, device in ((1, "a"), (2, "b")):
        assert places.ask(pid, device)
        places.done(pid, rests_on=device)
    assert not places.ask(1, "ab", exclusive=True)
    assert not places.ask(2, "ab", exclusive=True)
    assert places.again(1)
    assert not places.again(2)
    places.done(1, rests_on="ab")
    assert not places.again(2)  # 1 may still close its engine
    assert places.ask(1, "a")
    places.done(1)
    assert places.again(2)


@pytest.mark.parametrize("seed", range(60))
def test_whatever_the_order_everybody_has_his_turn_and_nobody_meets_one_that_is_alone(seed):
    chance = random.Random(seed)
    devices = "abc"[: chance.randint(1, 3)]
    workers = range(chance.randint(2, 5))
    homes = {worker: devices[worker % len(devices)] for worker in workers}
    # Each test: how many devices, and whether an engine of wider scope stays after it. The last test closes all.
    plans = {
        worker: [(chance.choice((1, 1, len(devices))), chance.random() < 0.4) for _ in range(8)] + [(1, False)]
        for worker in workers
    }
    places, state, rests, waited = Places(), dict.fromkeys(workers, "idle"), dict.fromkeys(workers, ""), {}
    for _ in range(5000):
        if not any(plans.values()):
            break
        worker = chance.choice([worker for worker in workers if plans[worker]])
        count, stays = plans[worker][0]
        wanted = homes[worker] if count == 1 else devices
        if state[worker] == "idle":
            state[worker] = "runs" if places.ask(worker, wanted, exclusive=count > 1) else "waits"
            waited[worker] = 0
        elif state[worker] == "waits":
            state[worker] = "runs" if places.again(worker) else "waits"
            waited[worker] += 1
        else:
            rests[worker] = "".join(sorted({*rests[worker], *wanted})) if stays else ""
            places.done(worker, rests[worker])
            plans[worker].pop(0)
            state[worker] = "idle"
        running = [claim for claim in places.claims if claim.state == "running"]
        for one in running:
            assert not [
                other for other in running if one.exclusive and other is not one and one.devices & other.devices
            ]
    assert not any(plans.values()), f"some wait for ever: {places.claims}"
