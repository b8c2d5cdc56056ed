"""Going on without a lost process: its part of the state is in the memory of another one.

jax cannot leave a process out. So a process that misses another one replaces its own program by a
new one, and keeps the copies of the state and the socket at which others reach it (`leave`). The
new programs find out who is left (`regroup`): calls to a dead process are refused, while those to
one that is replacing itself wait in its socket. Of those that are left, the one with the lowest
number decides on mesh and step. ``docs/design/010-checkpoints.md`` gives the reasons.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import queue
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import jax

from train import checks, distributed, state_copies, watchdog
from train.config import Config
from train.errors import CannotContinueError
from train.state_copies import Copy, Part, PyTree

_HANDOVER = "JAXPIPE_HANDOVER"
"""The variable with the descriptor of what a program leaves to the one that replaces it."""
_CONNECT_SECONDS = 5.0
"""Time after which a host that does not answer counts as dead."""
_RETRY_SECONDS = 0.3
_CHUNK_BYTES = 1 << 26
_KEY = "jaxpipe/survivors/"

Address = tuple[str, int]


@dataclasses.dataclass(frozen=True)
class Membership:
    """A process's place in its group, and the group's addresses.

    Args:
      config: the configuration, with what `train.plan` has chosen.
      number: number of this process.
      generation: how often processes have replaced their programs.
      token: the secret of the run, without which nobody is answered.
      members: the address of every process, by number.
    """

    config: dict[str, Any]
    number: int
    generation: int
    token: str
    members: list[Address]

    @property
    def partner(self) -> int:
        """The process that keeps the copies of this one: one far off, as neighbours share hosts."""
        return (self.number + max(len(self.members) // 2, 1)) % len(self.members)


class Survivor:
    """This process as its group sees it: its copies, and the socket at which it answers.

    Args:
      membership: its group.
      own: the last two copies of this process's parts.
      kept: those of the process whose partner this one is.
      listener: descriptor of the socket; None makes one.
    """

    def __init__(
        self,
        membership: Membership,
        own: list[Copy] | None = None,
        kept: list[Copy] | None = None,
        listener: int | None = None,
    ) -> None:
        self.membership = membership
        self.own = own or state_copies.new_pair()
        self.kept = kept or state_copies.new_pair()
        self._hellos: queue.Queue[tuple[dict[str, Any], Connection]] | None = None
        if listener is None:
            self.socket = socket.create_server(("", 0), backlog=1024)
        else:
            self.socket, self._hellos = socket.socket(fileno=listener), queue.Queue()
        self._pushing: threading.Thread | None = None
        # Whoever holds it may change what the copies say of themselves, or end this program.
        self._changing = threading.Lock()
        threading.Thread(target=self._serve, name="survivor", daemon=True).start()

    # Copies.

    @property
    def _copies(self) -> list[Copy]:
        return [*self.own, *self.kept]

    def _read(self, file: int, offset: int, size: int) -> bytes:
        (copy,) = (copy for copy in self._copies if copy.file == file)
        return copy.read(offset, size)

    def take(self, step: int, state: PyTree, data: Callable[[], Any]) -> None:
        """Copies the state, and begins to send the copy to the partner.

        Args:
          step: optimizer steps done.
          state: a tree of global arrays.
          data: finds the position in the data, with all processes: until then the last copy but one
            is not touched.
        """
        if self._pushing is not None:
            self._pushing.join()
        position = data()
        copy = state_copies.older(self.own)
        self._forget(copy)
        state_copies.write(copy, step, state, position)
        self._pushing = threading.Thread(target=self._push, args=(copy,), daemon=True)
        self._pushing.start()

    def _forget(self, copy: Copy) -> None:
        with self._changing:
            copy.step = -1

    def _push(self, copy: Copy) -> None:
        address = self.membership.members[self.membership.partner]
        fields = dataclasses.asdict(copy)
        # If the partner is gone, `train.watchdog` finds out.
        with contextlib.suppress(OSError, EOFError), self._call(address, "keep", **fields) as call:
            size = sum(part.size for part in copy.parts)
            for offset in range(0, size, _CHUNK_BYTES):
                call.send_bytes(copy.read(offset, min(_CHUNK_BYTES, size - offset)))
            call.recv_bytes()

    def _keep(self, call: Connection, fields: Mapping[str, Any]) -> None:
        copy = state_copies.older(self.kept)
        self._forget(copy)
        given = state_copies.from_json(dict(fields))
        left = sum(part.size for part in given.parts)
        with open(copy.file, "wb", closefd=False) as file:
            file.seek(0)
            while left:
                left -= file.write(call.recv_bytes())
        copy.data, copy.sizes, copy.parts = given.data, given.sizes, given.parts
        copy.step = given.step
        call.send_bytes(b"kept")

    def whole(self) -> dict[int, list[Copy]]:
        """Returns the copies that are whole, by step."""
        copies: dict[int, list[Copy]] = {}
        for copy in self._copies:
            if copy.step >= 0:
                copies.setdefault(copy.step, []).append(copy)
        return copies

    # Calls.

    def _call(self, address: Address, kind: str, **fields: Any) -> Connection:
        connected = socket.create_connection(address, _CONNECT_SECONDS)
        connected.settimeout(None)
        call = Connection(connected.detach())
        message = {"token": self.membership.token, "kind": kind, **fields}
        call.send_bytes(json.dumps(message).encode())
        return call

    def _serve(self) -> None:
        while True:
            call = Connection(self.socket.accept()[0].detach())
            threading.Thread(target=self._answer, args=(call,), daemon=True).start()

    def _answer(self, call: Connection) -> None:
        waits = False
        with contextlib.suppress(OSError, EOFError, ValueError, KeyError, TypeError):
            asked = json.loads(call.recv_bytes())
            kind = asked.pop("kind")
            if not secrets.compare_digest(asked.pop("token"), self.membership.token):
                pass
            elif kind == "keep":
                self._keep(call, asked)
            elif kind == "read":
                call.send_bytes(self._read(asked["file"], asked["offset"], asked["size"]))
            elif asked["generation"] != self.membership.generation:
                call.send_bytes(json.dumps({"refused": "the others have gone on"}).encode())
            elif self._hellos is None:
                self.leave()
            elif waits := kind == "hello":
                self._hellos.put((asked, call))
        if not waits:
            call.close()

    # Leaving.

    def leave(self) -> NoReturn:
        """Replaces this program by a new one, which regroups with those that are left.

        Any thread may call it, and a handler of a signal.
        """
        if not self._changing.acquire(timeout=_CONNECT_SECONDS):
            threading.Event().wait()  # another thread is doing it
        handover = {
            "membership": dataclasses.asdict(self.membership),
            "own": [dataclasses.asdict(copy) for copy in self.own],
            "kept": [dataclasses.asdict(copy) for copy in self.kept],
            "listener": self.socket.fileno(),
        }
        file = os.memfd_create("handover")
        with open(file, "w", encoding="utf-8", closefd=False) as text:
            json.dump(handover, text)
        os.environ[_HANDOVER] = str(file)
        stays = {0, 1, 2, file, self.socket.fileno()}
        stays |= {copy.file for copy in self._copies}
        # Sockets of XLA's would otherwise go on listening.
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                os.set_inheritable(int(name), int(name) in stays)
        signal.alarm(0)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])

    # Regrouping.

    def regroup(self) -> Group:
        """Finds out, in the new program, who is left and how they go on.

        Raises:
          CannotContinueError: they cannot, or do not answer.
          SystemExit: they do without this process, which they need no longer.
        """
        config = Config.model_validate(self.membership.config)
        until = time.monotonic() + config.distributed.patience_seconds
        answer, calls = None, list[Connection]()
        for address in self.membership.members[: self.membership.number]:
            # A leader that waits for a frozen process answers when its own time is over.
            answer, calls = self._follow(address, until + config.distributed.patience_seconds)
            if answer is not None:
                break
        else:
            answer, calls = self._lead(config, until)
        assert answer is not None
        if "refused" in answer:
            raise CannotContinueError(answer["refused"])
        group = self._joined(answer, calls)
        self._hellos = None
        return group

    def _hello(self) -> dict[str, Any]:
        copies = {step: list(map(dataclasses.asdict, c)) for step, c in self.whole().items()}
        own = self.membership
        return {"number": own.number, "generation": own.generation, "copies": copies}

    def _follow(
        self, address: Address, until: float
    ) -> tuple[dict[str, Any] | None, list[Connection]]:
        """Asks a process with a lower number; the answer is None if it is dead."""
        while time.monotonic() < until:
            try:
                call = self._call(address, "hello", **self._hello())
            except OSError:
                return None, []
            with contextlib.suppress(OSError, EOFError):  # it is replacing itself
                if call.poll(max(until - time.monotonic(), 0)):
                    return json.loads(call.recv_bytes()), [call]
            call.close()
            time.sleep(_RETRY_SECONDS)
        raise CannotContinueError("one of them does not answer")

    def _lead(self, config: Config, until: float) -> tuple[dict[str, Any], list[Connection]]:
        """Waits for those that are left, decides, and tells them."""
        assert self._hellos is not None
        own = self.membership
        waiting = set(range(own.number + 1, len(own.members)))
        hellos, calls = {own.number: json.loads(json.dumps(self._hello()))}, list[Connection]()
        while waiting and time.monotonic() < until:
            for number in sorted(waiting):
                try:
                    self._call(own.members[number], "come", generation=own.generation).close()
                except OSError:
                    waiting.remove(number)
            with contextlib.suppress(queue.Empty):
                while waiting:
                    hello, call = self._hellos.get(timeout=_RETRY_SECONDS)
                    hellos[hello["number"]] = hello
                    waiting.discard(hello["number"])
                    calls.append(call)
        try:
            answer = self._decided(config, hellos)
        except CannotContinueError as error:
            answer = {"refused": error.reason}
        for call in calls:
            with contextlib.suppress(OSError):
                call.send_bytes(json.dumps(answer).encode())
        return answer, calls

    def _decided(self, config: Config, hellos: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
        members = self.membership.members
        steps = set.intersection(*(set(hello["copies"]) for hello in hellos.values()))
        if not steps:
            raise CannotContinueError("not all of them have a copy of the same step")
        # Of the newest step, what was lost may not have been sent yet.
        for step in sorted(map(int, steps), reverse=True):
            copies = {n: hello["copies"][str(step)] for n, hello in hellos.items()}
            if _are_whole([copy for of_one in copies.values() for copy in of_one]):
                break
        else:
            raise CannotContinueError("parts of the state are in no copy")
        with socket.create_server(("", 0)) as probe:
            port = probe.getsockname()[1]
        coordinator = f"{members[self.membership.number][0]}:{port}"
        smaller = fitting(config, len(hellos), len(members), coordinator)
        if smaller is None:
            raise CannotContinueError("no mesh with fewer data shards fits their devices")
        order = sorted(hellos)[: smaller.distributed.num_processes]
        return {"config": smaller.model_dump(), "step": step, "order": order, "copies": copies}

    def _joined(self, answer: dict[str, Any], calls: list[Connection]) -> Group:
        own, order, step = self.membership, answer["order"], answer["step"]
        if own.number not in order:
            print("this process is not needed by the smaller mesh", flush=True)
            with contextlib.suppress(OSError, EOFError):
                calls[0].recv_bytes()  # until the others have read its copies
            raise SystemExit(0)
        for copy in self._copies:
            if copy.step != step:
                copy.step = -1
        sources = sorted(answer["copies"].items(), key=lambda item: int(item[0]) != own.number)
        parts = [
            (part, self._reader(int(number), copy["file"]))
            for number, copies in sources
            for copy in copies
            for part in state_copies.parts_from_json(copy["parts"])
        ]
        config = answer["config"]
        config["distributed"]["process_id"] = order.index(own.number)
        lost = sorted({*range(len(own.members))} - {int(n) for n in answer["copies"]})
        self.membership = dataclasses.replace(
            own,
            config=config,
            number=order.index(own.number),
            generation=own.generation + 1,
            members=[own.members[n] for n in order],
        )
        data = self.whole()[step][0].data
        return Group(self, Config.model_validate(config), step, data, lost, parts, calls)

    def _reader(self, number: int, file: int) -> state_copies.Read:
        own, address = self.membership.number, self.membership.members[number]

        def read(part: Part) -> bytes:
            if number == own:
                return self._read(file, part.offset, part.size)
            where = {"file": file, "offset": part.offset, "size": part.size}
            with self._call(address, "read", **where) as call:
                return call.recv_bytes()

        return read


@dataclasses.dataclass(frozen=True)
class Group:
    """The processes that are left, and the state with which they go on.

    Args:
      survivor: this process among them.
      config: the configuration, with the smaller mesh.
      step: optimizer steps that the copies have done.
      data: the position in the data.
      lost: the processes that are missing, by their former numbers.
      parts: the parts of the state, and how each is read.
      calls: connections to the other processes that were left, which some of them wait for.
    """

    survivor: Survivor
    config: Config
    step: int
    data: Any
    lost: list[int]
    parts: list[tuple[Part, state_copies.Read]]
    calls: list[Connection]

    @property
    def without(self) -> str:
        """The processes that are missing, in words."""
        several = "es" * (len(self.lost) > 1)
        numbers = ", ".join(map(str, self.lost))
        return f"without process{several} {numbers}" if self.lost else "with all processes"

    def restore(self, shapes: PyTree) -> PyTree:
        """Makes the state of the copies, given its shapes with shardings."""
        return state_copies.restore(shapes, self.parts)

    def release(self) -> None:
        """Lets processes end that are not needed any more."""
        for call in self.calls:
            call.close()


def fitting(config: Config, left: int, count: int, coordinator: str) -> Config | None:
    """Finds the largest mesh of fewer data shards for the processes that are left.

    Args:
      config: the configuration of the run.
      left: number of processes that are left.
      count: number of processes that there were.
      coordinator: HOST:PORT of the process that becomes number 0.

    Returns:
      The configuration with this mesh and its processes; None if none fits.
    """
    mesh = config.mesh
    own, of_shard = mesh.num_devices // count, mesh.num_devices // mesh.data
    sizes = itertools.product(range(mesh.data, 0, -1), range(mesh.replica, 0, -1))
    for data, replica in sizes:
        processes, rest = divmod(of_shard * data, own)
        if rest or not processes or processes > left:
            continue
        values = config.model_dump()
        values["mesh"] |= {"data": data, "replica": replica}
        values["distributed"] |= {
            "coordinator": coordinator,
            "num_processes": processes,
            "process_id": 0,
        }
        smaller = Config.model_validate(values)
        if not checks.check(smaller, resume=True, writes=False, reads=False):
            return smaller
    return None


def _are_whole(copies: Sequence[Mapping[str, Any]]) -> bool:
    """Says whether copies, as JSON has them, hold all of the state."""
    parts = [part for copy in copies for part in state_copies.parts_from_json(copy["parts"])]
    return state_copies.are_whole(parts, copies[0]["sizes"])


def joined(config: Config, group: Group | None) -> Survivor | None:
    """Joins the processes of a run in a group that outlives some; every process must call it.

    Args:
      config: configuration of the run.
      group: what is left of an earlier group, if this program has replaced another.

    Returns:
      This process in the group; None if the run keeps no copies, or no other process is there.
    """
    if not config.distributed.copy_every or jax.process_count() == 1:
        return None
    if group is not None:
        return group.survivor
    number, client = jax.process_index(), watchdog.client()
    token = distributed.from_first(lambda: secrets.token_hex(16))
    survivor = Survivor(Membership(config.model_dump(), number, 0, token, []))
    address = watchdog.own_host(), survivor.socket.getsockname()[1]
    client.key_value_set(f"{_KEY}{number}", json.dumps(address))
    wait = int(1000 * config.distributed.patience_seconds)
    keys = [f"{_KEY}{other}" for other in range(jax.process_count())]
    addresses = [json.loads(client.blocking_key_value_get(key, wait)) for key in keys]
    members = [(host, port) for host, port in addresses]
    survivor.membership = dataclasses.replace(survivor.membership, members=members)
    return survivor


def inherited() -> Survivor | None:
    """Returns what the program that this one replaces has left; None if it replaces none."""
    file = os.environ.pop(_HANDOVER, None)
    if file is None:
        return None
    with open(int(file), encoding="utf-8") as text:
        text.seek(0)
        left = json.load(text)
    pairs = [list(map(state_copies.from_json, left[name])) for name in ("own", "kept")]
    members = [(host, port) for host, port in left["membership"].pop("members")]
    own, kept = pairs
    membership = Membership(**left["membership"], members=members)
    return Survivor(membership, own, kept, left["listener"])
