"""Processes meet before they start, and those that do not come are named to all others."""

import concurrent.futures
import socket

import pytest

from train import distributed
from train.errors import MissingProcessError


@pytest.fixture
def coordinator():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return f"localhost:{probe.getsockname()[1]}"


def _meet(coordinator, numbers, *, count, seconds):
    """What each of these processes finds."""

    def one(number):
        distributed.meet(coordinator, count=count, number=number, seconds=seconds)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        return [future.exception() for future in [pool.submit(one, n) for n in numbers]]


def test_all_have_come(coordinator):
    """Also if what happens to connect first is no process of the run."""
    assert _meet(coordinator, [2, 1, 3, 0], count=4, seconds=20) == [None] * 4
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(distributed.meet, coordinator, count=2, number=0, seconds=20)
        host, port = coordinator.split(":")
        while not first.done():
            try:
                with socket.create_connection((host, int(port))) as foreign:
                    foreign.sendall(b"GET / HTTP/1.1")
                break
            except ConnectionRefusedError:
                continue
        distributed.meet(coordinator, count=2, number=1, seconds=20)
        assert first.result() is None


def test_those_that_have_not_come_are_named_to_all(coordinator):
    found = _meet(coordinator, [0, 2], count=4, seconds=1)
    assert all(isinstance(error, MissingProcessError) for error in found), found
    assert [error.missing for error in found] == [(1, 3), (1, 3)]
    assert "processes 1, 3 of this run have not come within 1 s" in str(found[0])


def test_process_0_is_named(coordinator):
    (error,) = _meet(coordinator, [1], count=2, seconds=0.5)
    assert error.missing == (0,)
