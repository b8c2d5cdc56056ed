"""Calls between processes: strangers take neither memory nor files, nor a process's place."""

import contextlib
import json
import os
import resource
import socket
import threading
import time

import limits
import pytest
from command import LOOPBACK

from train.processes import calls

_TOKEN = b"a token of the run"


@contextlib.contextmanager
def _serving(host):
    """An address at which messages are answered with what JSON makes of them."""
    over = threading.Event()

    def answer(call):
        with call:
            call.send_bytes(str(json.loads(call.recv_bytes())).encode())

    with calls.listen(host) as server:
        given = {"is_over": over.is_set}
        thread = threading.Thread(target=calls.serve, args=(server, _TOKEN, answer), kwargs=given)
        thread.start()
        yield server.getsockname()[:2]
        over.set()
        thread.join()


def _asked(address, message):
    with calls.call(address, _TOKEN, message, seconds=limits.hang()) as call:
        assert call.poll(limits.hang())
        return call.recv_bytes()


@pytest.mark.parametrize("host", LOOPBACK)
def test_strangers_wait_for_little_and_the_others_are_answered(host, monkeypatch):
    monkeypatch.setattr(calls, "_TOKEN_SECONDS", 0.5)
    assert calls.parsed(calls.written((host, 8))) == (host, 8)
    with _serving(host) as address, contextlib.ExitStack() as open_:
        before = threading.active_count()
        # A message of 2 GB without a token, which nobody reads, and many that say nothing.
        loud = open_.enter_context(socket.create_connection(address))
        with contextlib.suppress(ConnectionError):
            loud.sendall(b"\x7f\xff\xff\xff" + bytes(1 << 24))
        for _ in range(100):
            open_.enter_context(socket.create_connection(address))
        time.sleep(0.2)
        assert threading.active_count() - before <= calls._MOST_STRANGERS
        assert _asked(address, b"[1]") == b"[1]"


def test_a_process_that_can_open_no_file_serves_again_when_it_can():
    with _serving("127.0.0.1") as address, socket.socket() as early:
        early.bind(("127.0.0.1", 0))
        lowest, limit = os.dup(0), resource.getrlimit(resource.RLIMIT_NOFILE)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limit[1]))
        try:
            early.connect(address)
            time.sleep(3 * calls._PAUSE_SECONDS)  # it is not accepted
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        assert _asked(address, b"[2]") == b"[2]"


def test_what_cannot_be_understood_ends_its_call_alone():
    with _serving("127.0.0.1") as address:
        with calls.call(address, _TOKEN, b"{", seconds=9) as call, pytest.raises(EOFError):
            call.recv_bytes()
        assert _asked(address, b"{}") == b"{}"
