"""Losses and metrics that a model's functions return, and how they are combined.

`docs/design/005-losses-and-outputs.md` gives the reasons.
"""

import dataclasses
from collections.abc import Callable, Collection

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxpipe.runtime.layers import jaxprs
from jaxpipe.runtime.trees import describe
from jaxpipe.runtime.types import Activation, OuterParams, Tree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weighted:
    """A mean with weights, as a loss or a metric of one microbatch.

    The batch's value is the sum of ``total`` over all microbatches and data shards, divided by the
    sum of ``weight``, or 0 if all weights are 0. The weight of a loss may depend only on the
    microbatch and its key: it is computed before the step, because every gradient needs the sum of
    all weights. To turn a mean, such as that of `jaxpipe.vocabulary.cross_entropy`, into a total,
    multiply it by its weight. Results of several batches can be added: see `Pipeline.totals`.

    Args:
      total: a weighted sum; for a loss, a float32 scalar.
      weight: the sum of the weights; for a loss, a scalar.

    Example:
      >>> def head_loss(outer, x, batch, rng):
      ...     losses, mask = (x - batch["y"]) ** 2, batch["mask"]
      ...     return Weighted((mask * losses).sum(), mask.sum()), {"valid": Sum(mask.sum())}
      >>> batch = {"y": jnp.zeros(3), "mask": jnp.array([1.0, 1.0, 0.0])}
      >>> loss, metrics = head_loss({}, jnp.array([4.0, 2.0, 9.0]), batch, None)
      >>> float(loss.total), float(loss.weight)
      (20.0, 2.0)
    """

    total: Tree
    weight: Tree

    @property
    def mean(self) -> Tree:
        """``total / weight``; 0 if the weights are all 0."""
        return self.total / divisor(self.weight)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sum:
    """A metric that is summed over microbatches and data shards, not averaged.

    All devices along a model axis must return the same value, that of all of them together. If each
    has a part of the tokens, sum their values with `jax.lax.psum` first.

    Args:
      value: an array of one microbatch; integers stay integers.

    Example:
      >>> def head_loss(outer, x, batch, rng):
      ...     return jnp.mean(x**2), {"tokens": Sum(batch["mask"].sum())}
    """

    value: Tree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WithLoss:
    """Result of a layer that has a loss of its own.

    Args:
      x: the layer's output.
      loss: a float32 scalar, such as the balance loss of a mixture of experts times its
        coefficient. Its mean over microbatches and data shards is added to the loss. Like
        `Model.head_loss`, a layer may also return metrics: ``(loss, {"name": value})``. All layers
        with losses must return the same metrics. A step combines each metric by its rule, over
        microbatches, data shards and these layers, and returns it with those of the head.

    Example:
      >>> def layer(w, x, batch, rng):
      ...     logits = x @ w["router"]
      ...     z_loss = jnp.mean(jax.nn.logsumexp(logits, -1) ** 2)
      ...     return WithLoss(x + jax.nn.softmax(logits) @ w["experts"], 1e-3 * z_loss)
    """

    x: Tree
    loss: Tree


def parts(result: Tree) -> tuple[Tree, Tree]:
    """Splits what `Model.head_loss` returns into loss and metrics; None for no metrics."""
    return result if isinstance(result, tuple) else (result, None)


def differentiated(result: Tree) -> jax.Array:
    """The value whose gradients, but for a scale, are a microbatch's: its loss, or its total."""
    loss, _ = parts(result)
    return loss.total if isinstance(loss, Weighted) else loss


def with_aux(result: Tree, states: Tree) -> Tree:
    """Arranges a loss as `jax.value_and_grad` returns it with ``has_aux``: ``(loss, aux)``.

    ``aux`` is the metrics, the states, or both in a tuple; without any, the loss alone.
    """
    loss, metrics = parts(result)
    aux = tuple(tree for tree in (metrics, states) if tree is not None)
    if not aux:
        return loss
    return loss, aux[0] if len(aux) == 1 else aux


def without_metric_gradients(y: Tree) -> Tree:
    """Stops gradients through the metrics of what a layer returns."""
    if not isinstance(y, WithLoss):
        return y
    loss, metrics = parts(y.loss)
    return y if metrics is None else WithLoss(y.x, (loss, jax.lax.stop_gradient(metrics)))


def cotangent_of_layer(result: Tree, scale: float) -> Tree:
    """The cotangent of a layer's own loss and metrics, given their shapes."""
    loss, metrics = parts(result)
    scaled = np.full(loss.shape, scale, loss.dtype)
    if metrics is None:
        return scaled
    return scaled, jax.tree.map(lambda leaf: np.zeros(leaf.shape, _tangent_dtype(leaf)), metrics)


def _tangent_dtype(leaf: jax.Array) -> DTypeLike:
    return leaf.dtype if jnp.issubdtype(leaf.dtype, jnp.inexact) else jax.dtypes.float0


# Combining.


def with_metrics(result: Tree, loss: jax.Array, metrics: Tree) -> Tree:
    """Adds the loss and metrics of layers, if there are any, to those of a head, `reduced`."""
    own, own_metrics = parts(result)
    if isinstance(own, Weighted):
        own = Weighted(own.total + loss * divisor(own.weight), own.weight)
    else:
        own += loss
    if metrics is None:
        metrics = own_metrics
    elif own_metrics is not None:
        metrics = own_metrics | metrics
    return own if metrics is None else (own, metrics)


def addable(result: Tree) -> Tree:
    """Converts a microbatch's result to dtypes that can be added up without loss."""

    def wide(node: Tree) -> Tree:
        if isinstance(node, Sum):  # integers stay integers
            return jax.tree.map(lambda w: _at_least_float32(jnp.sum(w, axis=())), node)
        return jax.tree.map(lambda w: w.astype(jnp.promote_types(w.dtype, jnp.float32)), node)

    return jax.tree.map(wide, result, is_leaf=_has_rule)


def reduced(
    sums: Tree,
    count: int,
    *,
    mean: Callable[[Tree], Tree],
    total: Callable[[Tree], Tree],
    copies: int = 1,
) -> Tree:
    """Combines sums over microbatches and devices; `values` of the result are those of a batch.

    Args:
      sums: sums over ``count`` microbatches of the results of `addable`.
      mean, total: mean and sum over data shards, and over the devices along model axes.
      copies: number of these devices that return the same value, to be summed over data only.
    """

    def reduce(node: Tree) -> Tree:
        if isinstance(node, Weighted):
            return total(node)
        if isinstance(node, Sum):
            return jax.tree.map(lambda w: _divided(w, copies), total(node))
        return mean(node / count)

    return jax.tree.map(reduce, sums, is_leaf=_has_rule)


def values(result: Tree) -> Tree:
    """The loss and metrics of what is `reduced`."""

    def value(node: Tree) -> Tree:
        if isinstance(node, Weighted):
            return node.mean
        return node.value if isinstance(node, Sum) else node

    return jax.tree.map(value, result, is_leaf=_has_rule)


def totals(result: Tree, num_rows: int) -> Tree:
    """Makes the results of `reduced` addable over batches of any number of rows: means weigh as
    much as their rows."""

    def weighted(node: Tree) -> Tree:
        return node if _has_rule(node) else Weighted(node * num_rows, jnp.float32(num_rows))

    return jax.tree.map(weighted, result, is_leaf=_has_rule)


def _divided(w: jax.Array, count: int) -> jax.Array:
    return w / count if jnp.issubdtype(w.dtype, jnp.inexact) else w // count


def divisor(weight: Tree) -> Tree:
    """Returns the sum of all weights; 1 if it is 0, for then all weighted values are 0."""
    return weight + (weight == 0)


def _has_rule(node: object) -> bool:
    return isinstance(node, (Weighted, Sum))


def _at_least_float32(w: jax.Array) -> jax.Array:
    if jnp.issubdtype(w.dtype, jnp.inexact):
        return w.astype(jnp.promote_types(w.dtype, jnp.float32))
    return w


# Checks.


def check_loss(result: Tree, returned: str, *, weighted: bool) -> None:
    """Raises ValueError if these are not shapes of a loss, alone or with metrics.

    Args:
      returned: the beginning of the error, which says who returned them.
      weighted: whether the loss may be `Weighted`, as that of the head.
    """
    if isinstance(result, tuple) and not (len(result) == 2 and isinstance(result[1], dict)):
        raise ValueError(
            f"{returned} {describe(result)}; beside the loss there may only be a dictionary of "
            'metrics: `(loss, {"name": value})`. The mean over all tokens of a batch is a loss of '
            "the head, `jaxpipe.Weighted(total, weight)`."
        )
    loss, _ = parts(result)
    if weighted and isinstance(loss, Weighted):
        if not (_is_loss(loss.total) and _is_scalar(loss.weight)):
            raise ValueError(
                f"{returned} {describe(loss)}; as a loss, `total` must be a float32 scalar, the "
                "sum over one microbatch, and `weight` a scalar."
            )
    elif not _is_loss(loss):
        raise ValueError(
            f"{returned} {describe(loss)}; it must be a float32 scalar, the mean loss of one "
            "microbatch. Reduce it with `jnp.mean` and convert it with `.astype(jnp.float32)`."
        )


def check_metrics_of_layers(results: Collection[Tree], of_head: Tree) -> None:
    """Raises ValueError if layers that have losses differ in their metrics, or share names with the
    head's."""
    kinds = {jax.tree.structure(result): result for result in results}
    if len(kinds) > 1:
        raise ValueError(
            f"Layers return WithLoss with {' and with '.join(map(describe, kinds.values()))}; "
            "layers that have losses must all have the same metrics."
        )
    of_layers, (_, own) = [parts(result)[1] or {} for result in results], parts(of_head)
    if same := sorted({name for names in of_layers for name in names} & set(own or {})):
        raise ValueError(
            f"Layers and Model.head_loss both return a metric named {', '.join(map(repr, same))}. "
            "Give them other names."
        )


def _is_scalar(shapes: Tree) -> bool:
    return isinstance(shapes, jax.ShapeDtypeStruct) and shapes.shape == ()


def _is_loss(shapes: Tree) -> bool:
    return _is_scalar(shapes) and shapes.dtype in (jnp.float32, jnp.float64)


def weight_of(
    head_loss: Callable[..., Tree],
    outer: OuterParams,
    x: Activation,
    context: Tree,
    wanted: Collection[int] = (),
) -> Callable[[Tree], jax.Array]:
    """Cuts the weight of a microbatch's loss out of ``head_loss``, as a function of its context.

    Args:
      head_loss: ``head_loss(outer, x, *context)``, which returns a weighted loss.
      outer, x, context: its arguments, or their shapes; the context is rows and key.
      wanted: numbers of the context's arrays whose gradients are wanted.
    """

    def weight(outer: OuterParams, x: Activation, context: Tree) -> jax.Array:
        loss, _ = parts(head_loss(outer, x, *context))
        return jnp.asarray(loss.weight, loss.total.dtype)

    program = jaxprs.flatten(jax.make_jaxpr(weight)(outer, x, context))
    inputs, outputs = program.jaxpr.invars, program.jaxpr.outvars
    eqns, num_other = jaxprs.needed(program.jaxpr.eqns, outputs), len(jax.tree.leaves((outer, x)))
    read = jaxprs.reads(eqns, outputs)
    if any(inputs[num_other + n] in read for n in wanted):
        raise ValueError(
            "Pipeline.loss was differentiated with respect to an array of its batch on which the "
            "weight of the loss depends; a weight has no derivatives."
        )
    if not read.isdisjoint(inputs[:num_other]):
        raise ValueError(
            "Model.head_loss returns a Weighted loss whose weight depends on parameters or on the "
            "activation. It is needed before the step, for every gradient is divided by the "
            "weights of all microbatches: compute it from the microbatch alone, outside functions "
            "with a derivative of their own that also see the activation."
        )

    def of_context(context: Tree) -> jax.Array:
        env = jaxprs.consts(program)
        env |= dict(zip(inputs[num_other:], jax.tree.leaves(context), strict=True))
        (value,) = jaxprs.values(outputs, jaxprs.run_eqns(eqns, env))
        return value

    return of_context
