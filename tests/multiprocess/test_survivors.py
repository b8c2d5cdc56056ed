"""A process is lost, and the others go on from copies of the state in their memory."""

import contextlib
import dataclasses
import json
import os
import re
import secrets
import shutil
import signal
import socket
import threading
import time
from unittest import mock

import jax
import jax.numpy as jnp
import limits
import numpy as np
import pytest
from command import LOOPBACK, back_to, finish, num_lines, saved, start, steps
from jax.sharding import NamedSharding, PartitionSpec

from train import errors
from train.config import Config
from train.errors import CannotContinueError
from train.processes import calls, watchdog
from train.recover import state_copies, survivors
from train.recover.survivors import Membership, Survivor
from train.runs.run_lock import LOCK_FILE

_COPY_EVERY = 5
_LAST = 60
_OPTIONS = (
    *("--mesh.stage=2", "--mesh.data=2", "--train.keep=99", f"--train.steps={_LAST}"),
    *(f"--train.checkpoint-every={_COPY_EVERY}", f"--distributed.copy-every={_COPY_EVERY}"),
)


def _wait_for_lines(run, number):
    until = time.monotonic() + limits.hang()
    while num_lines(run) < number:
        assert time.monotonic() < until
        time.sleep(0.02)


def _kill_one(trainer, run, *, count, victim, at=20):
    """Kills a process of a run; returns how the others end, and the lines of the first."""
    with trainer.processes(count, "--run-dir", run, *_OPTIONS) as processes:
        _wait_for_lines(run, at)
        processes[victim].send_signal(signal.SIGKILL)
        ended = [finish(one, None) for n, one in enumerate(processes) if n != victim]
    not_needed = [survivors.NOT_NEEDED] * (count // 2 - 1)
    assert sorted(one.status for one in ended) == [0] * (count // 2) + not_needed
    assert not any("has not reached" in one.err for one in ended)  # that a partner died is said
    (first,) = (one for one in ended if "from copies in memory" in one.out)
    assert f"going on without process {victim}\n" in first.out
    return ended, first


def _assert_goes_on_as_if_resumed(trainer, run, first, tmp_path):
    """The losses are those of a run that a checkpoint of the same step continues on that mesh."""
    assert len(steps(run)) == _LAST == saved(run)[-1]
    start = first.out.rpartition(f"continuing {run} at step ")[2]
    begun = int(start.partition(",")[0])
    resumed = shutil.copytree(run, tmp_path / "resumed")
    back_to(resumed, begun)
    trainer.run("--run-dir", resumed, *_OPTIONS, "--mesh.data=1", "--resume")
    losses, expected = ([record["loss"] for record in steps(one)] for one in (run, resumed))
    assert losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.end_to_end
def test_one_of_two_goes_on_without_the_first(toy_trainer, tmp_path):
    run = tmp_path / "run"
    _, first = _kill_one(toy_trainer, run, count=2, victim=0)
    _assert_goes_on_as_if_resumed(toy_trainer, run, first, tmp_path)


@pytest.mark.slow
@pytest.mark.end_to_end
@pytest.mark.parametrize("victim", range(4))
def test_whichever_of_four_is_lost_two_go_on(trainer, tmp_path, victim):
    """A stage each: the third one that is left is not needed, once its copies have been read."""
    run = tmp_path / "run"
    ended, first = _kill_one(trainer, run, count=4, victim=victim)
    assert sum("not needed by the smaller mesh" in one.out for one in ended) == 1
    _assert_goes_on_as_if_resumed(trainer, run, first, tmp_path)


_KILLED_AS_IT_GOES_ON = """
import os, sys
from train import loop, train
from train.recover import survivors
if survivors._HANDOVER in os.environ:
    loop.run = lambda *_, **__: os.kill(os.getpid(), 9)
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.end_to_end
def test_a_second_loss_before_they_go_on_ends_all_for_a_restart(toy_trainer, tmp_path):
    options = "--run-dir", tmp_path / "run", *_OPTIONS, "--distributed.num-processes=4"
    with contextlib.ExitStack() as started:
        (first,) = started.enter_context(toy_trainer.processes(1, *options))
        given = list(map(str, first.args[first.args.index("--config") :]))
        second, third, last = (
            start(*how, *given, f"--distributed.process-id={number}")
            for number, how in enumerate(
                [("python", "-c", _KILLED_AS_IT_GOES_ON), first.args[:2], first.args[:2]], start=1
            )
        )
        for process in (second, third, last):
            started.callback(process.kill)
        _wait_for_lines(tmp_path / "run", 20)
        last.send_signal(signal.SIGKILL)
        finish(last, -signal.SIGKILL)
        finish(second, -signal.SIGKILL)
        ended = finish(first, errors.RESTART)
        finish(third, survivors.NOT_NEEDED)
    assert "error: process 1 is missing" in ended.err, str(ended)
    assert "the processes that are left cannot go on from copies in memory" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.slow
@pytest.mark.end_to_end
@pytest.mark.parametrize("victim", [0, 1])
def test_one_goes_on_without_a_frozen_one_which_ends_when_it_wakes(toy_trainer, tmp_path, victim):
    """While nothing else than steps runs, so that only silence tells it from one that is late."""
    run, seldom = tmp_path / "run", f"{10 * _LAST}"
    options = "--run-dir", run, *_OPTIONS, "--train.checkpoint-every", seldom, "--train.eval-every"
    patience = f"--distributed.patience-seconds={limits.scaled(6)}"
    with toy_trainer.processes(2, *options, seldom, patience) as processes:
        _wait_for_lines(run, 20)
        processes[victim].send_signal(signal.SIGSTOP)
        other = finish(processes[1 - victim])
        processes[victim].send_signal(signal.SIGCONT)
        ended = finish(processes[victim], errors.RESTART)
    assert f"going on without process {victim}\n" in other.out
    assert re.search(f"error: process {victim} .*is missing: it was last heard of", other.err)
    assert f"error: process {victim} stood still, and the others have given it up." in ended.err
    assert len(steps(run)) == _LAST == saved(run)[-1]
    assert not (run / LOCK_FILE).exists()


def _state(mesh):
    arrays = {
        "scalar": (jnp.int32(7), PartitionSpec()),
        "rows": (jnp.arange(48.0).reshape(8, 6), PartitionSpec("stage", "data")),
        "narrow": (jnp.arange(16, dtype=jnp.bfloat16), PartitionSpec("data")),
        "whole": (jnp.arange(5) > 2, PartitionSpec()),
    }
    return {
        name: jax.device_put(array, NamedSharding(mesh, spec))
        for name, (array, spec) in arrays.items()
    }


def test_a_copy_restores_onto_another_mesh():
    state = _state(jax.make_mesh((2, 2), ("stage", "data")))
    copy = state_copies.new_pair()[0]
    state_copies.write(copy, 3, state, {"epoch": 1})
    assert (copy.step, copy.data) == (3, {"epoch": 1})
    assert state_copies.are_whole([copy, copy])
    assert not state_copies.are_whole([dataclasses.replace(copy, parts=copy.parts[1:])])

    other = _state(jax.make_mesh((4, 1), ("stage", "data")))
    shapes = jax.tree.map(
        lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=w.sharding), other
    )
    read = [(part, lambda part: copy.read(part.offset, part.size)) for part in copy.parts]
    restored = state_copies.restore(shapes, read)
    for name, leaf in restored.items():
        assert leaf.sharding == other[name].sharding
        np.testing.assert_array_equal(leaf, state[name], err_msg=name, strict=True)


_LEAVE = Survivor.leave
_CONFIG = Config.model_validate(
    {
        "mesh": {"stage": 2, "data": 2},
        "pipeline": {"microbatches": 2},
        "train": {"batch_size": 8},
        "distributed": {"copy_every": 1, "patience_seconds": 20},
    }
)


@pytest.mark.parametrize(
    ("left", "count", "mesh", "expected"),
    [
        (3, 4, {}, (2, 1, 1)),
        (1, 2, {}, (1, 1, 1)),
        (1, 4, {}, None),
        (7, 8, {"data": 4}, (4, 2, 1)),  # 3 divides no batch of 8
        (7, 8, {"data": 4, "replica": 2}, (4, 2, 2)),
        (1, 2, {"data": 2, "replica": 2}, (1, 1, 1)),
        (3, 4, {"stage": 4, "data": 1}, None),
    ],
)
def test_the_largest_mesh_that_is_left(left, count, mesh, expected):
    config = Config.model_validate(
        _CONFIG.model_dump() | {"mesh": _CONFIG.mesh.model_copy(update=mesh).model_dump()}
    )
    smaller = survivors.fitting(config, left, count, "localhost:1")
    if smaller is not None:
        sizes = smaller.mesh.data, smaller.mesh.replica
        assert smaller.mesh == config.mesh.model_copy(
            update={"data": sizes[0], "replica": sizes[1]}
        )
        assert (smaller.distributed.num_processes, *sizes) == expected
    else:
        assert expected is None


@contextlib.contextmanager
def _programs(steps_of, lost=(), unsent=()):
    """The new programs of four processes, with copies of these steps; some are dead, and some
    copies, by process and step, have not reached the partner."""
    sockets = [socket.socket() for _ in steps_of]
    for one in sockets:
        one.bind(("localhost", 0))
    addresses = [one.getsockname() for one in sockets]
    secret = secrets.token_hex()
    programs = {}
    for number, steps_ in enumerate(steps_of):
        if number in lost:  # nobody listens
            continue
        sockets[number].listen()
        own, kept = state_copies.new_pair(), state_copies.new_pair()
        for pair, owner in ((own, number), (kept, (number + 2) % 4)):
            for copy, step in zip(pair, steps_, strict=False):
                if pair is kept and (owner, step) in unsent:
                    continue
                content = np.full(4, 10 * step + owner, np.uint8).tobytes()
                os.write(copy.file, content)
                copy.step, copy.data, copy.sizes = step, {"step": step}, [16]
                copy.parts = [state_copies.Part(0, (4 * owner,), (4,), 0, 4)]
        membership = Membership(_CONFIG.model_dump(), number, 0, secret, "lock", addresses)
        programs[number] = Survivor(membership, own, kept, os.dup(sockets[number].fileno()))
    with mock.patch.object(Survivor, "leave", side_effect=AssertionError("it would be replaced")):
        yield programs
    for one in (*sockets, *(program.socket for program in programs.values())):
        one.close()


def _regrouped(programs, delays=None):
    """Results or errors of `Survivor.regroup`, by process."""
    results = {}

    def run(number):
        time.sleep((delays or {}).get(number, 0))
        try:
            results[number] = programs[number].regroup()
        except (CannotContinueError, SystemExit) as error:
            results[number] = error
        else:
            here = NamedSharding(jax.make_mesh((1,), ("x",)), PartitionSpec())
            shape = jax.ShapeDtypeStruct((16,), np.uint8, sharding=here)
            state = results[number].restore([shape])
            results[number] = dataclasses.replace(results[number], data=np.asarray(state[0]))
            read.wait()
            results[number].release()

    read = threading.Barrier(2, timeout=limits.scaled(60))  # so many go on
    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in programs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limits.hang())
        assert not thread.is_alive()
    return results


@pytest.mark.parametrize("lost", range(4))
@pytest.mark.parametrize("late", [1, 2])
def test_those_that_are_left_agree_whoever_comes_late(lost, late):
    """On the newest step of which all parts are left, and on who is lost."""
    newest = [[4, 5], [4, 5], [5, 4], [5, 4]]
    with _programs(newest, lost=[lost], unsent=[(lost, 5)]) as programs:
        results = _regrouped(programs, delays={late: 0.7})
    left = sorted(programs)
    for number, group in zip(left[:2], (results[n] for n in left[:2]), strict=True):
        assert (group.step, group.lost) == (4, [lost])
        assert group.config.mesh.data == 1
        assert group.config.distributed.process_id == left.index(number)
        assert group.survivor.membership.generation == 1
        np.testing.assert_array_equal(group.data, np.repeat(40 + np.arange(4), 4))
    assert results[left[2]].code == survivors.NOT_NEEDED


def test_what_cannot_be_continued_is_said_to_all():
    for steps_of, lost, reason in [
        ([[3, 4], [3, 4], [5, 6], [3, 4]], [3], "not all of them have a copy of the same step"),
        ([[3, 4]] * 4, [1, 3], "parts of the state are in no copy"),
    ]:
        with _programs(steps_of, lost=lost) as programs:
            for result in _regrouped(programs).values():
                assert reason in str(result)
                assert "Start all processes again with --resume" in str(result)


def test_whoever_comes_when_the_others_have_gone_on_is_told():
    with _programs([[3, 4]] * 4, lost=[0]) as programs:
        late = programs.pop(3)
        others = dataclasses.replace(programs[1].membership, generation=1)
        programs[1].membership = others
        programs[1]._hellos = None
        late.membership = dataclasses.replace(late.membership, number=3)
        with pytest.raises(CannotContinueError, match="the others have gone on"):
            late.regroup()


def test_copies_go_to_the_partner_and_nobody_is_answered_without_the_secret():
    with _programs([[], [], [], []]) as programs:
        mesh = jax.make_mesh((2, 2), ("stage", "data"))
        for step in (1, 2, 3):
            for program in programs.values():
                program.take(step, _state(mesh), lambda: {"batch": 5})
        for program in programs.values():
            program._pushing.join()
        for program in programs.values():
            whole = sorted(program.whole, key=lambda copy: copy.step)
            assert [copy.step for copy in whole] == [2, 2, 3, 3]
            for own, kept in (whole[:2], whole[2:]):
                assert (own.data, own.parts) == (kept.data, kept.parts)
                size = sum(part.size for part in own.parts)
                assert own.read(0, size) == kept.read(0, size)
        stranger = dataclasses.replace(programs[0].membership, token="guess")
        programs[1].membership, right = stranger, programs[1].membership
        read = survivors._Read(programs[2].own[0].file, offset=0, size=4)
        with (
            programs[1]._call(right.members[2], read) as call,
            pytest.raises((EOFError, ConnectionResetError)),
        ):
            call.recv_bytes()


_COPY = {"file": 9, "step": 7, "data": None, "sizes": [4], "parts": [[0, [0], [4], 0, 4]]}


@pytest.mark.parametrize(
    "message",
    [
        *("", "3", "null", "[]", "[" * 100_000, '{"kind": "keep"}', '{"kind": ["read"]}'),
        *(
            json.dumps({"kind": "keep", "copy": _COPY | wrong})
            for wrong in ({"step": "x"}, {"step": None}, {"sizes": 4}, {"parts": [[0, 0, 0, 0]]})
        ),
        '{"kind": "read", "file": 0, "offset": 0, "size": 4}',
        '{"kind": "hello", "number": "1", "generation": 0, "copies": []}',
    ],
    ids=lambda message: message[:60],
)
def test_a_message_of_another_form_changes_nothing(message):
    with _programs([[5, 6]] * 4, lost=[0, 1, 3]) as programs:
        survivor = programs[2]
        before = [dataclasses.replace(copy) for copy in survivor.whole]
        token, own = survivor.membership.token.encode(), survivor.membership.members[2]
        with calls.call(own, token, message.encode(), seconds=limits.hang()) as call:
            assert call.poll(limits.hang())
            with pytest.raises(EOFError):
                call.recv_bytes()
        assert survivor.whole == before


def test_one_warning_where_copies_do_not_arrive(capfd):
    """The first copy is as lost when a partner dies, which then takes part in no other one."""
    with _programs([[], [], [], []], lost=[2]) as programs:
        said, mesh = [], jax.make_mesh((2, 2), ("stage", "data"))
        for step in range(1, 4):
            programs[0].take(step, _state(mesh), dict)
            programs[0]._pushing.join()
            said.append(
                "copy of process 0 has not reached process 2 at 127.0.0.1:"
                in capfd.readouterr().err
            )
        assert said == [False, True, False]
        assert {copy.step for copy in programs[0].whole} == {2, 3}


@pytest.mark.parametrize("host", LOOPBACK)
def test_copies_are_sent_to_the_address_that_partners_use(host, monkeypatch):
    monkeypatch.setattr(watchdog, "_coordinator", lambda: (host, 1))
    survivor = Survivor(Membership(_CONFIG.model_dump(), 0, 0, "secret", "lock", []))
    with survivor.socket:
        address = survivor.socket.getsockname()[:2]
        assert address[0] == host
        with survivor._call(address, survivors._Come(generation=7)) as call:
            assert b"the others have gone on" in call.recv_bytes()


def test_who_stood_still_goes_on_only_after_a_copy_with_all_others():
    with _programs([[3, 4]] * 4) as programs:
        one = programs[1]
        assert not one.has_stood_still
        one._awake -= 30  # as if it had been stopped for longer than the patience
        assert one.has_stood_still

        def data():
            one._awake -= 30  # again, while others may have waited
            assert one.has_stood_still

        one.take(5, _state(jax.make_mesh((2, 2), ("stage", "data"))), data)
        assert one.has_stood_still
        one.take(6, _state(jax.make_mesh((2, 2), ("stage", "data"))), dict)
        assert not one.has_stood_still
        one._pushing.join()


def test_who_stood_still_ends_and_does_not_regroup(capfd, monkeypatch):
    class EndedError(Exception):
        pass

    with _programs([[3, 4]] * 4) as programs:
        monkeypatch.setattr(os, "_exit", mock.Mock(side_effect=EndedError))
        one = programs[1]
        one._awake -= 30
        with pytest.raises(EndedError):
            _LEAVE(one)
        os._exit.assert_called_once_with(errors.RESTART)
    assert "error: process 1 stood still, and the others have given it up." in (
        capfd.readouterr().err
    )
