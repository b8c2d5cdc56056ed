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
import os
import queue
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Annotated, Any, Literal, NoReturn

import jax
import pydantic

from models.types import PyTree
from train import checks
from train.config import Config
from train.errors import RESTART, CannotContinueError
from train.processes import calls, distributed, watchdog
from train.processes.calls import Address
from train.recover import state_copies
from train.recover.state_copies import Copy, Part

_HANDOVER = "JAXPIPE_HANDOVER"
"""The variable with the descriptor of what a program leaves to the one that replaces it."""
_CONNECT_SECONDS = 5.0
"""Time after which a host that does not answer counts as dead."""
_MARGIN_SECONDS = 2.0
_RETRY_SECONDS = 0.3
_CHUNK_BYTES = 1 << 26

NOT_NEEDED = 79
"""The exit status of a process that the smaller mesh does not need; sysexits.h ends at 78."""


@dataclasses.dataclass(frozen=True)
class _Keep:
    """Asks a partner to keep a copy, whose bytes follow."""

    copy: Copy
    kind: Literal["keep"] = "keep"


@dataclasses.dataclass(frozen=True)
class _Read:
    """Asks for bytes of a copy."""

    file: int
    offset: int
    size: int
    kind: Literal["read"] = "read"


@dataclasses.dataclass(frozen=True)
class _Come:
    """Asks a process to leave its program, because another one is missing."""

    generation: int
    kind: Literal["come"] = "come"


@dataclasses.dataclass(frozen=True)
class _Hello:
    """Says that a process is left, with the copies that it has; asks for the decision."""

    number: int
    generation: int
    copies: list[Copy]
    kind: Literal["hello"] = "hello"


@dataclasses.dataclass(frozen=True)
class _Decision:
    """How those that are left go on.

    Args:
      config: the configuration with the smaller mesh.
      step: the step of the copies that they go on from.
      order: their former numbers, in the order of their new ones.
      copies: the copies of this step, by the former number of the process that has them.
    """

    config: dict[str, Any]
    step: int
    order: list[int]
    copies: dict[int, list[Copy]]


_Message = _Keep | _Read | _Come | _Hello
_MESSAGE: pydantic.TypeAdapter[_Message] = pydantic.TypeAdapter(
    Annotated[_Message, pydantic.Field(discriminator="kind")]
)
_ANSWER: pydantic.TypeAdapter[_Decision | str] = pydantic.TypeAdapter(_Decision | str)
"""The decision, or why they cannot go on."""
_HEARD = b"heard"
"""The immediate answer to a hello: a frozen process answers nothing."""


@dataclasses.dataclass(frozen=True)
class Membership:
    """A process's place in its group, and the group's addresses.

    Args:
      config: the configuration, with what `train.plan` has chosen.
      number: number of this process.
      generation: how often processes have replaced their programs.
      token: the secret of the run, without which nobody is answered.
      lock: identifies the lock of the run folder that the group has.
      members: the address of every process, by number.
    """

    config: dict[str, Any]
    number: int
    generation: int
    token: str
    lock: str
    members: list[Address]

    @property
    def partner(self) -> int:
        """The process that keeps the copies of this one: one far off, as neighbors share hosts."""
        return (self.number + max(len(self.members) // 2, 1)) % len(self.members)


@dataclasses.dataclass(frozen=True)
class _Left:
    """State that a program leaves to the one that replaces it: the arguments of `Survivor`."""

    membership: Membership
    own: list[Copy]
    kept: list[Copy]
    listener: int


_LEFT = pydantic.TypeAdapter(_Left)


class Survivor:
    """This process as its group sees it: its copies, and the socket at which it answers.

    Args:
      membership: its group.
      own: the last two copies of this process's parts.
      kept: those of the process whose partner this one is.
      listener: descriptor of the socket; None makes one, at the address that others use.
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
        self._hellos: queue.Queue[tuple[_Hello, Connection]] | None = None
        if listener is None:
            self.socket = calls.listen(watchdog.own_host())
        else:
            self.socket, self._hellos = socket.socket(fileno=listener), queue.Queue()
        self._pushing: threading.Thread | None = None
        self._undelivered: Exception | None = None
        self._has_warned = False
        # Others give up a process that stands still, until it takes a copy together with them.
        self._awake, self._woken, self._together = time.monotonic(), -1.0, -1.0
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
          data: finds the position in the data, with all processes: until then the last copy but one
            is not touched.
        """
        if self._pushing is not None:
            self._pushing.join()
        began = time.monotonic()
        position = data()
        self._together = began
        # The partner has taken part, so that it is alive.
        if self._undelivered is not None and not self._has_warned:
            self._has_warned = True
            partner = self.membership.partner
            watchdog.tell(
                f"warning: a copy of process {self.membership.number} has not reached process "
                f"{partner} at {calls.written(self.membership.members[partner])} "
                f"({str(self._undelivered) or 'the call was ended'}). Without copies the run "
                "cannot go on when this process is lost: open all ports between processes."
            )
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
        try:
            with self._call(address, _Keep(copy)) as call:
                size = sum(part.size for part in copy.parts)
                for offset in range(0, size, _CHUNK_BYTES):
                    call.send_bytes(copy.read(offset, min(_CHUNK_BYTES, size - offset)))
                call.recv_bytes()
        except (OSError, EOFError) as error:
            self._undelivered = error

    def _keep(self, call: Connection, given: Copy) -> None:
        copy = state_copies.older(self.kept)
        self._forget(copy)
        left = sum(part.size for part in given.parts)
        with open(copy.file, "wb", closefd=False) as file:
            file.seek(0)
            while left > 0:
                left -= file.write(call.recv_bytes())
        copy.data, copy.sizes, copy.parts = given.data, given.sizes, given.parts
        copy.step = given.step
        call.send_bytes(b"kept")

    @property
    def whole(self) -> list[Copy]:
        """The copies that are whole."""
        return [copy for copy in self._copies if copy.step >= 0]

    # Calls.

    def _call(self, address: Address, message: _Message) -> Connection:
        token, content = self.membership.token.encode(), _MESSAGE.dump_json(message)
        return calls.call(address, token, content, seconds=_CONNECT_SECONDS)

    def _serve(self) -> None:
        token = self.membership.token.encode()
        calls.serve(self.socket, token, self._answer, is_over=self._look_at_clock)

    def _answer(self, call: Connection) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(call)
            message = _MESSAGE.validate_json(call.recv_bytes(), strict=True)
            if isinstance(message, _Keep):
                self._keep(call, message.copy)
            elif isinstance(message, _Read):
                call.send_bytes(self._read(message.file, message.offset, message.size))
            elif message.generation != self.membership.generation:
                call.send_bytes(_ANSWER.dump_json("the others have gone on"))
            elif self._hellos is None:
                self.leave()
            elif isinstance(message, _Hello):
                call.send_bytes(_HEARD)
                self._hellos.put((message, call))
                stack.pop_all()

    # Leaving.

    def _look_at_clock(self) -> bool:
        """Notes whether this program has stood still; returns whether its socket is closed."""
        now = time.monotonic()
        patience = self.membership.config["distributed"]["patience_seconds"]
        # The others count from an earlier time, that of the last sign of life.
        if now - self._awake > max(patience - _MARGIN_SECONDS, patience / 2):
            self._woken = now
        self._awake = now
        return self.socket.fileno() < 0

    @property
    def has_stood_still(self) -> bool:
        """Whether this process may have stood still for so long that the others gave it up."""
        self._look_at_clock()
        return self._woken > self._together

    def leave(self) -> NoReturn:
        """Replaces this program by a new one, which regroups with those that are left.

        Ends it instead if the others have given it up. Any thread may call it, and a handler of a
        signal.
        """
        if self.has_stood_still:
            watchdog.tell(
                f"error: process {self.membership.number} stood still, and the others have given it"
                f" up. It ends with status {RESTART}: if they have not gone on, start all "
                "processes again with --resume to continue."
            )
            os._exit(RESTART)
        if not self._changing.acquire(timeout=_CONNECT_SECONDS):
            threading.Event().wait()  # another thread is doing it
        left = _Left(self.membership, self.own, self.kept, self.socket.fileno())
        file = os.memfd_create("handover")
        os.write(file, _LEFT.dump_json(left))
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
        patience = config.distributed.patience_seconds
        decision, open_calls = None, list[Connection]()
        for number in range(self.membership.number):
            decision, open_calls = self._follow(number, patience)
            if decision is not None:
                break
        else:
            decision, open_calls = self._lead(config, patience)
        assert decision is not None
        if isinstance(decision, str):
            raise CannotContinueError(decision)
        group = self._joined(decision, open_calls)
        self._hellos = None
        return group

    def _hello(self) -> _Hello:
        own = self.membership
        return _Hello(own.number, own.generation, self.whole)

    def _follow(
        self, number: int, patience: float
    ) -> tuple[_Decision | str | None, list[Connection]]:
        """Asks a process with a lower number; there is no answer if it is dead or frozen."""
        until = time.monotonic() + patience
        while (left := until - time.monotonic()) > 0:
            try:
                call = self._call(self.membership.members[number], self._hello())
            except OSError:
                break
            with contextlib.suppress(OSError, EOFError, ValueError):  # it is replacing itself
                # Having heard, it waits for all before it, and for those behind it that are frozen.
                for seconds in (left, (number + 2) * patience):
                    if not call.poll(seconds):
                        return None, []
                    if (content := call.recv_bytes()) != _HEARD:
                        return _ANSWER.validate_json(content, strict=True), [call]
            call.close()
            time.sleep(_RETRY_SECONDS)
        return None, []

    def _lead(self, config: Config, patience: float) -> tuple[_Decision | str, list[Connection]]:
        """Waits for those that are left, decides, and tells them."""
        assert self._hellos is not None
        own, until = self.membership, time.monotonic() + patience
        waiting = set(range(own.number + 1, len(own.members)))
        hellos, open_calls = {own.number: self._hello()}, list[Connection]()
        while waiting and time.monotonic() < until:
            for number in sorted(waiting):
                try:
                    self._call(own.members[number], _Come(own.generation)).close()
                except OSError:
                    waiting.remove(number)
            with contextlib.suppress(queue.Empty):
                while waiting:
                    hello, call = self._hellos.get(timeout=_RETRY_SECONDS)
                    hellos[hello.number] = hello
                    waiting.discard(hello.number)
                    open_calls.append(call)
        decision: _Decision | str
        try:
            decision = self._decided(config, hellos)
        except CannotContinueError as error:
            decision = error.reason
        for call in open_calls:
            with contextlib.suppress(OSError):
                call.send_bytes(_ANSWER.dump_json(decision))
        return decision, open_calls

    def _decided(self, config: Config, hellos: Mapping[int, _Hello]) -> _Decision:
        members = self.membership.members
        if self.has_stood_still:
            raise CannotContinueError("the one that decides stood still meanwhile")
        steps = set.intersection(*({copy.step for copy in h.copies} for h in hellos.values()))
        if not steps:
            raise CannotContinueError("not all of them have a copy of the same step")
        # Of the newest step, what was lost may not have been sent yet.
        for step in sorted(steps, reverse=True):
            copies = {n: [c for c in h.copies if c.step == step] for n, h in hellos.items()}
            if state_copies.are_whole([copy for of_one in copies.values() for copy in of_one]):
                break
        else:
            raise CannotContinueError("parts of the state are in no copy")
        host = members[self.membership.number][0]
        with calls.listen(host) as probe:
            port = probe.getsockname()[1]
        smaller = fitting(config, len(hellos), len(members), calls.written((host, port)))
        if smaller is None:
            raise CannotContinueError("no mesh with fewer data shards fits their devices")
        order = sorted(hellos)[: smaller.distributed.num_processes]
        return _Decision(smaller.model_dump(), step, order, copies)

    def _joined(self, decision: _Decision, open_calls: list[Connection]) -> Group:
        own, order, step = self.membership, decision.order, decision.step
        if own.number not in order:
            print(
                f"this process is not needed by the smaller mesh: it ends with status {NOT_NEEDED} "
                "once the others have its copies",
                flush=True,
            )
            with contextlib.suppress(OSError, EOFError):
                open_calls[0].recv_bytes()
            raise SystemExit(NOT_NEEDED)
        for copy in self._copies:
            if copy.step != step:
                copy.step = -1
        sources = sorted(decision.copies.items(), key=lambda item: item[0] != own.number)
        parts = [
            (part, self._reader(number, copy.file))
            for number, copies in sources
            for copy in copies
            for part in copy.parts
        ]
        config = decision.config
        config["distributed"]["process_id"] = order.index(own.number)
        self.membership = dataclasses.replace(
            own,
            config=config,
            number=order.index(own.number),
            generation=own.generation + 1,
            members=[own.members[n] for n in order],
        )
        data = self.whole[0].data
        lost = sorted({*range(len(own.members))} - decision.copies.keys())
        return Group(self, Config.model_validate(config), step, data, lost, parts, open_calls)

    def _reader(self, number: int, file: int) -> state_copies.Read:
        own, address = self.membership.number, self.membership.members[number]

        def read(part: Part) -> bytes:
            if number == own:
                return self._read(file, part.offset, part.size)
            with self._call(address, _Read(file, part.offset, part.size)) as call:
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
        """Makes the state of the copies, given its shapes with shardings.

        Raises:
          CannotContinueError: a process that has a part does not answer.
        """
        try:
            return state_copies.restore(shapes, self.parts)
        except (OSError, EOFError) as error:
            raise CannotContinueError(f"a copy cannot be read ({error})") from error

    def release(self) -> None:
        """Lets processes end that are not needed any more."""
        for call in self.calls:
            call.close()


def fitting(config: Config, left: int, count: int, coordinator: str) -> Config | None:
    """Finds the largest mesh of fewer data shards for the processes that are left.

    Args:
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


def joined(config: Config, group: Group | None, lock: str) -> Survivor | None:
    """Joins the processes of a run in a group that outlives some; every process must call it.

    Args:
      group: what is left of an earlier group, if this program has replaced another.
      lock: identifies the lock of the run folder that the processes have.

    Returns:
      This process in the group; None if the run keeps no copies, or no other process is there.
    """
    if not config.distributed.copy_every or jax.process_count() == 1:
        return None
    if group is not None:
        survivor = group.survivor
        survivor.membership = dataclasses.replace(survivor.membership, lock=lock)
        return survivor
    number, token = jax.process_index(), distributed.from_first(lambda: secrets.token_hex(16))
    survivor = Survivor(Membership(config.model_dump(), number, 0, token, lock, []))
    own = calls.written(survivor.socket.getsockname()[:2])
    members = list(map(calls.parsed, distributed.gathered(own)))
    survivor.membership = dataclasses.replace(survivor.membership, members=members)
    return survivor


def inherited() -> Survivor | None:
    """Returns what the program that this one replaces has left; None if it replaces none."""
    file = os.environ.pop(_HANDOVER, None)
    if file is None:
        return None
    with open(int(file), "rb") as content:
        content.seek(0)
        left = _LEFT.validate_json(content.read())
    return Survivor(left.membership, left.own, left.kept, left.listener)
