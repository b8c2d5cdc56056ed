"""Embedding and head of a tick, and what becomes of what the head returns.

All stages compute them together, or the ends of the pipeline do. Together, they need sums over all
stages, in which every stage waits for the slowest. Otherwise the stage of the first virtual stage
embeds, and that of the last one computes the head, from what lies on them.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.runtime.barriers import run_if, tie, tie_to_smallest
from jaxpipe.runtime.layers import losses
from jaxpipe.runtime.layout.buffers import at_slot, put_slot
from jaxpipe.runtime.mesh import Axes
from jaxpipe.runtime.tick.fixed import Fixed
from jaxpipe.runtime.tick.microbatches import (
    Microbatches,
    add_input_gradients,
    inputs_of,
    join_rows,
    with_inputs,
)
from jaxpipe.runtime.tick.values import Carried
from jaxpipe.runtime.trees import combine, describe
from jaxpipe.runtime.types import Activation, Batch, Flag, Index, Message, OuterParams, Shapes, Tree
from jaxpipe.schedule.lowering.table import NONE, Outer


@jax.named_scope("enter")
def enter(fixed: Fixed, batch: Microbatches, carried: Carried, row: Outer) -> Carried:
    """Embeds the microbatch that enters, into the first stage's inbox."""
    runs, is_first = _runs(fixed, row.embed, 0)

    def body(inbox: Message) -> Message:
        i, inbox = tie(row.embed, inbox)
        outer, i = fixed.weights.outer(fixed, carried.weights, "enter", i)
        model = fixed.setup.model
        x = model.spread(model.embed(outer, *fixed.embed_context(batch, i)))
        message = fixed.message(fixed.empty_message(), fixed.layers.first, x)
        return run_if(is_first, lambda inbox: put_slot(inbox, row.embed_slot, message), inbox)

    x = run_if(runs, body, carried.inboxes["x"])
    return carried.but(inboxes=carried.inboxes | {"x": x})


@jax.named_scope("leave")
def evaluate(
    fixed: Fixed, batch: Microbatches, carried: Carried, row: Outer, y: Message
) -> Carried:
    """Only the loss, or the output, of the microbatch that leaves."""

    def body(collected: Tree) -> Tree:
        mine, collected = tie(y, collected)
        x = fixed.setup.model.merge(fixed.activation(mine, fixed.layers.last))
        x = _from_stage(fixed, x, -1)
        outer, x = fixed.weights.outer(fixed, carried.weights, "leave", x)
        result = fixed.head(outer, x, *fixed.head_context(batch, row.head))
        return fixed.collector.add(collected, result, row.head)

    runs, _ = _runs(fixed, row.head, -1)
    return carried.but(collected=run_if(runs, body, carried.collected))


@jax.named_scope("leave")
def leave(fixed: Fixed, batch: Microbatches, carried: Carried, row: Outer, y: Message) -> Carried:
    """The loss of the microbatch that leaves, its cotangent, and the gradient of the head."""
    assert fixed.gradients is not None
    sink, inputs = fixed.gradients, fixed.setup.inputs
    runs, is_last = _runs(fixed, row.head, -1)

    def body(through: Tree) -> Tree:
        mine, (collected, inbox, gradients, of_inputs) = tie_to_smallest(y, through)
        x, unmerge = jax.vjp(fixed.setup.model.merge, fixed.activation(mine, fixed.layers.last))
        x = _from_stage(fixed, x, -1)
        outer, x = fixed.weights.outer(fixed, carried.weights, "leave", x)
        # A sum over devices of a constant cotangent would run before the loop, beside those in it.
        scale, x = tie(fixed.loss_scale(batch, row.head), x)
        outer, constant = fixed.divided(outer)
        rows, rng = fixed.head_context(batch, row.head)

        def loss(
            outer: OuterParams, x: Activation, values: list[jax.Array]
        ) -> tuple[jax.Array, Tree]:
            own = with_inputs(rows, inputs, values)
            result = fixed.head(combine(outer, constant), x, own, rng)
            return losses.differentiated(result), result

        value, vjp, result = jax.vjp(loss, outer, x, inputs_of(rows, inputs), has_aux=True)
        douter, dx, new = vjp(jnp.asarray(scale, value.dtype))
        gradients = sink.add_outer(gradients, douter, "leave")
        of_inputs = add_input_gradients(of_inputs, new, row.head)
        message = fixed.message(fixed.empty_message(), fixed.layers.last, *unmerge(dx))
        collected = fixed.collector.add(collected, result, row.head)
        inbox = run_if(is_last, lambda inbox: put_slot(inbox, row.head_slot, message), inbox)
        return collected, inbox, gradients, of_inputs

    sums = carried.outer_gradients, carried.input_gradients
    through = carried.collected, carried.inboxes["dy"], *sums
    collected, dy, gradients, of_inputs = run_if(runs, body, through)
    return carried.but(
        collected=collected,
        inboxes=carried.inboxes | {"dy": dy},
        outer_gradients=gradients,
        input_gradients=of_inputs,
    )


@jax.named_scope("embed_gradient")
def embed_gradient(
    fixed: Fixed, batch: Microbatches, carried: Carried, row: Outer, dx: Message
) -> Carried:
    """The gradient of the embedding for microbatches whose cotangents have come back, in this tick
    or, waiting in the first stage's inbox, in one before."""
    assert fixed.gradients is not None
    sink, inputs, inbox = fixed.gradients, fixed.setup.inputs, carried.inboxes["dy"]
    # Numbers one by one, or a GPU would start a kernel for them in every tick.
    numbers = list(row.embed_gradient), list(row.embed_gradient_slot)

    def one(k: Index, through: Tree) -> Tree:
        known, through = tie(numbers, through)
        i, slot = (jnp.stack(column)[k] for column in known)
        mine, (gradients, of_inputs) = tie(dx, through)
        if fixed.table.cotangents_wait:
            kept = at_slot(inbox, jnp.maximum(slot, 0))
            mine = [jnp.where(slot == NONE, *pair) for pair in zip(mine, kept, strict=True)]
        unspread = jax.linear_transpose(fixed.setup.model.spread, fixed.layers.embedded)
        (cotangent,) = unspread(fixed.activation(mine, fixed.layers.first))
        cotangent = _from_stage(fixed, cotangent, 0)
        outer, cotangent = fixed.weights.outer(fixed, carried.weights, "embed_gradient", cotangent)
        outer, constant = fixed.divided(outer)
        rows, rng = fixed.embed_context(batch, i)

        def embed(outer: OuterParams, values: list[jax.Array]) -> Activation:
            own = with_inputs(rows, inputs, values)
            return fixed.setup.model.embed(combine(outer, constant), own, rng)

        _, vjp = jax.vjp(embed, outer, inputs_of(rows, inputs))
        douter, new = vjp(cotangent)
        gradients = sink.add_outer(gradients, douter, "embed_gradient")
        return gradients, add_input_gradients(of_inputs, new, i)

    through = carried.outer_gradients, carried.input_gradients
    count = jnp.int32(sum(_runs(fixed, i, 0)[0] for i in numbers[0]))
    gradients, of_inputs = lax.fori_loop(0, count, one, through)
    return carried.but(outer_gradients=gradients, input_gradients=of_inputs)


def _is_at(fixed: Fixed, virtual_stage: int) -> Flag:
    """Whether this device's stage holds a virtual stage."""
    return fixed.stage == fixed.table.schedule.placement.stages[virtual_stage]


def _runs(fixed: Fixed, microbatch: Index, virtual_stage: int) -> tuple[Flag, Flag]:
    """Whether this stage computes a phase, which is due if there is a microbatch, and whether it is
    then the stage of the virtual stage."""
    due, is_mine = microbatch != NONE, _is_at(fixed, virtual_stage)
    return (due, due & is_mine) if fixed.table.together else (due & is_mine, is_mine)


def _from_stage(fixed: Fixed, x: Activation, virtual_stage: int) -> Activation:
    """A value of one stage, sent to every stage if all compute with it."""
    if not fixed.table.together:
        return x
    has = _is_at(fixed, virtual_stage)
    return jax.tree.map(lambda w: lax.psum(jnp.where(has, w, 0), fixed.axes.stage), x)


# Collectors of what the head returns.


@dataclasses.dataclass(frozen=True)
class Losses:
    """Loss and metrics, which are added up.

    Args:
      shapes: of what the head returns for a microbatch, made `losses.addable`.
      layers: how many have losses.
      totals: whether `losses.totals` are made of the result, not `losses.values`.
    """

    shapes: Shapes
    microbatches: int
    layers: int
    axes: Axes
    totals: bool

    def empty(self) -> Tree:
        return jax.tree.map(jnp.zeros_like, self.shapes)

    def add(self, collected: Tree, new: Tree, i: Index) -> Tree:
        return jax.tree.map(jnp.add, collected, losses.addable(new))

    def result(self, collected: Tree, layer_losses: Tree) -> Tree:
        """The same on every device."""
        mean, total = (partial(f, axis_name=self.axes.peers) for f in (lax.pmean, lax.psum))
        copies = lax.axis_size(self.axes.model)
        reduced = partial(losses.reduced, mean=mean, total=total, copies=copies)
        result = reduced(collected, self.microbatches)
        if layer_losses is not None:
            loss, metrics = losses.parts(lax.psum(layer_losses, self.axes.stage))
            metrics = reduced(metrics, self.microbatches * self.layers)
            result = losses.with_metrics(result, mean(loss / self.microbatches), metrics)
        return result if self.totals else losses.values(result)


@dataclasses.dataclass(frozen=True)
class Outputs:
    """Outputs ``[rows, ...]`` of every microbatch, which are put in the order of the batch's rows.

    ``shapes`` are those of a microbatch, or of one of its slices, of which there are
    ``microbatches`` in all.
    """

    shapes: Shapes
    microbatches: int
    num_slices: int

    def empty(self) -> Tree:
        def buffer(leaf: jax.ShapeDtypeStruct) -> jax.Array:
            rows, *others = leaf.shape
            return jnp.zeros((rows, self.microbatches, *others), leaf.dtype)

        return jax.tree.map(buffer, self.shapes)

    def add(self, collected: Tree, new: Tree, i: Index) -> Tree:
        return jax.tree.map(
            lambda kept, w: lax.dynamic_update_index_in_dim(kept, w, i, 1), collected, new
        )

    def result(self, collected: Tree, layer_losses: Tree) -> Tree:
        """This data shard's rows, the same on every stage."""
        return join_rows(collected, self.num_slices)


def check_output(output: Shapes, rows: Batch, num_slices: int) -> None:
    """Raises ValueError if what `Model.output` returns does not begin with a microbatch's rows, or
    with the rows and the positions of a slice."""
    num_rows = jax.tree.leaves(rows)[0].shape[0]
    leaves = jax.tree.leaves(output)
    if not leaves or any(leaf.shape[:1] != (num_rows,) for leaf in leaves):
        raise ValueError(
            f"Model.output returns {describe(output)}; it must return arrays whose first dimension "
            f"is the {num_rows} rows of a microbatch. What is not per row is a metric of "
            "`Model.head_loss`."
        )
    if num_slices > 1:
        length = next(w.shape[1] for w in jax.tree.leaves(rows) if w.ndim > 1)
        if any(leaf.shape[1:2] != (length,) for leaf in leaves):
            raise ValueError(
                f"Model.output returns {describe(output)} for a slice of a sequence; its arrays "
                f"must begin with rows and the {length} positions of the slice. Use a schedule "
                "without slices for other outputs."
            )
