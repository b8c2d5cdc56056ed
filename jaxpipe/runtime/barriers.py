"""Barriers that keep XLA from hoisting, recomputing or copying, each with its reason and test.

Nothing here changes a value.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.runtime.types import Flag, Index, Tree

Carry = TypeVar("Carry")


def tie(read: Tree, carried: Tree) -> tuple[Tree, Tree]:
    """Both, each made to depend on the other, so that XLA keeps the uses of ``read`` in the loop.

    What a gated loop's body reads but does not carry is the same in every iteration; XLA would
    compute with it before the loop, and so in idle ticks as well. Use both results: XLA drops an
    unused one from the barrier, and with it the dependence.

    Test: ``test_compiled.py::test_idle_ticks_run_no_matmul_and_no_collective_but_the_messages``.
    """
    return lax.optimization_barrier((read, carried))


def tie_to_smallest(read: Tree, carried: Tree) -> tuple[Tree, Tree]:
    """`tie` to the smallest array of ``carried`` alone.

    A sum behind a barrier is not added to by the matmul that makes the addend: XLA for GPUs writes
    the product, then reads it again. One array is enough to keep the uses of ``read`` in the loop.

    Test: as of `tie`; what it spares, ``make gpu-roofline`` keeps.
    """
    arrays, tree = jax.tree.flatten(carried)
    if arrays:
        smallest = min(range(len(arrays)), key=lambda n: arrays[n].size)
        read, arrays[smallest] = tie(read, arrays[smallest])
    return read, jax.tree.unflatten(tree, arrays)


def run_if(condition: Flag, body: Callable[[Carry], Carry], carry: Carry) -> Carry:
    """``body(carry)`` if the condition holds, ``carry`` if not, as a loop of one trip or none.

    XLA copies every buffer that passes through a ``cond``; a loop aliases its carry in place. The
    loop also keeps XLA from computing a result a second time where it is written, from a copy of
    what it overwrites.

    Test: ``test_compiled.py::test_the_tick_loop_copies_no_whole_buffer``.
    """

    def once(through: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
        return jnp.zeros((), bool), body(through[1])

    through = jnp.asarray(condition, bool), carry
    return lax.while_loop(lambda through: through[0], once, through)[1]


def always(index: Index) -> Flag:
    """True, which XLA does not know: no device, stage, slot or row has a negative number.

    Of a condition that XLA knows it leaves out the loop: it would inline the body, mix its work
    with that of other ticks, and give results buffers of their own.
    """
    return index >= 0


def copied(array: jax.Array, index: Index) -> jax.Array:
    """A copy of the array.

    A message that travels while layers write the next one in its place has to be copied. XLA would
    copy it twice: before it leaves, and from there to where layers write.

    Test: what it spares, ``make gpu-roofline`` keeps.
    """
    return jnp.where(always(index), array, jnp.zeros_like(array))


def overwrite(old: jax.Array, new: jax.Array, slot: Index) -> jax.Array:
    """``new``, as something that reads the array it overwrites.

    An array that is overwritten whole depends on nothing that the tick loop carries: XLA would
    gather every chunk of unrolled weights before the first tick, and keep them all.

    Test: ``test_compiled.py::test_temporaries_are_no_more_than_those_of_stacked_weights``.
    """
    return jnp.where(always(slot), new, old)


def after(first: Tree, then: Tree, device: Index) -> Tree:
    """``then``, as something that reads an element of every array of ``first``.

    XLA's CPU client runs at the same time what does not depend on each other, also loops and
    collectives, and has forgotten barriers by then. Two gathers of the same devices at once end the
    process, or wait for ever. XLA for GPUs copies a buffer that is read and written in no order.

    Tests: ``test_optimizers.py::test_layers_and_the_rest_communicate_one_after_the_other``; of the
    copy, ``make plan-memory``.
    """
    firsts = [
        lax.slice(w, (0,) * w.ndim, (1,) * w.ndim).reshape(()).astype(jnp.float32)
        for w in jax.tree.leaves(first)
        if w.size
    ]
    # XLA repeats a sum in every kernel that reads it, but computes a root once.
    read = jnp.sqrt(jnp.abs(sum(firsts)))
    return jax.tree.map(lambda w: jnp.where(always(device), w, read.astype(w.dtype)), then)
