"""The layers of a model, sorted into kinds: layers with the same function and shapes.

A stage runs one loop over its layers; inside, every kind is one compiled body. A model whose layers
are alike has one kind and pays nothing for the others.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp

from jaxpipe.runtime.layers.jaxprs import Collective, collectives, dependent
from jaxpipe.runtime.layers.losses import WithLoss, check_loss
from jaxpipe.runtime.layers.model import Model, output_shapes
from jaxpipe.runtime.layers.slices import Carry, carry_of, on_slices
from jaxpipe.runtime.layers.split import Split, split_layer
from jaxpipe.runtime.trees import bare_shapes, describe, divide, form_of
from jaxpipe.runtime.types import Activation, LayerParams, Shapes, States, Tree
from jaxpipe.schedule.problems import refuse


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """A kind of layer.

    Args:
      example: canonical number of the first layer of this kind.
      function: `Model.layer` of these layers.
      args: shapes of its arguments.
      x: number of the layer's input among `Layers.activations`.
      y: number of its output among them.
      flows: for every leaf of y, whether it has a gradient; None if all have.
      carry: what it hands from slice to slice of a sequence; None where these are whole. Functions
        and split then have the pair of activation and carry as x and y.
    """

    number: int
    example: int
    function: Callable[..., Tree]
    args: tuple[Shapes, ...]
    x: int
    y: int
    split: Split
    flows: tuple[bool, ...] | None
    carry: Carry | None


@dataclasses.dataclass(frozen=True)
class Layers:
    """All layers of a model.

    Args:
      kind_of: for every layer, the number of its kind.
      activations: the distinct activations between layers, trees of shapes.
      first: number of the first layer's input among them.
      last: number of the last layer's output.
      embedded: what `Model.embed` returns, a tree of shapes.
      merged: what the head takes.
    """

    kinds: tuple[LayerKind, ...]
    kind_of: tuple[int, ...]
    activations: tuple[Activation, ...]
    first: int
    last: int
    embedded: Activation
    merged: Activation

    @property
    def losses(self) -> list[Shapes]:
        """Shapes of the losses and metrics of all layers that have any."""
        found = (self.kinds[number].split.traced.loss for number in self.kind_of)
        return [loss for loss in found if loss is not None]


def sort_layers(
    model: Model,
    params: Sequence[LayerParams],
    x: Activation,
    *context: Shapes,
    cut: Callable[..., Split] = split_layer,
    quantized: Sequence[Sequence[str | None]],
    frozen: Sequence[LayerParams] | None = None,
    flows: tuple[bool, ...] | None = None,
    states: Sequence[States] | None = None,
    num_slices: int = 1,
    stage_axis: str = "stage",
) -> Layers:
    """Follows the activations through all layers and splits each kind once.

    Args:
      params, x, context, states: shapes of the layers' parameters, of the embedding's result, of
        the microbatch's rows and the key, and of the layers' states.
      cut: `split_layer` with the options of the run.
      quantized, frozen: for every layer as of `split_layer`.
      flows: for every leaf of x, whether it depends on what is trained; None if all do. Layers in
        front of the first that is trained have no gradients of others.
      num_slices: of a sequence; x is one of them.
    """
    seen: dict[object, int] = {}
    kinds: list[LayerKind] = []
    kind_of: list[int] = []
    activations: dict[object, Activation] = {}

    def number(activation: Activation, layer: int) -> int:
        _check_activation(activation, layer)
        activations.setdefault(form_of(activation), bare_shapes(activation))
        return list(activations).index(form_of(activation))

    embedded = bare_shapes(x)
    first = here = number(jax.eval_shape(model.spread, embedded), -1)
    for n, layer_params in enumerate(params):
        function = model.layer_function(n)
        state = None if states is None else states[n]
        constant = None if frozen is None else frozen[n]
        carry = None if num_slices == 1 else model.carry_function(n)
        if constant is None or jax.tree.leaves(divide(layer_params, constant)[0]) or carry:
            flows = None
        elif flows is not None and model.layers_are_alike:  # then all are of one kind
            flows = None if any(flows) else flows
        form = form_of(layer_params), form_of(constant), here, form_of(state)
        narrow = tuple(name is not None for name in quantized[n])
        key = (function, carry, flows, narrow, *form)
        if key not in seen:
            args = (layer_params, list(activations.values())[here], *context)
            kept, carried = {} if state is None else {"state": state}, None
            if carry is not None:
                carried = carry_of(model, n, args[1], context[0], num_slices)
                kept = {"carry": carried.shapes, "start": jax.ShapeDtypeStruct((), jnp.int32)}
            y = _output(function, args, kept, n)
            if model.layers_are_alike and form_of(y) != form_of(args[1]):
                raise ValueError(
                    f"The layer maps x {describe(args[1])} to {describe(y)}; as the one function "
                    "of all layers it must return what it takes. If layers differ, give "
                    "`Model.layer` a tuple of functions."
                )
            if carried is not None:
                function, (own, x, *others) = on_slices(function, carried), args
                args = own, (x, carried.shapes), *others, kept["start"]
            # An evaluation runs the function itself, of which derivatives by hand show nothing.
            all_args = *args, *([] if state is None else [state])
            alone = jax.make_jaxpr(function)(*all_args)
            appended = () if carried is None else carried.appended
            options = {"state": state, "appended": appended, "flows": flows}
            split = cut(function, *args, quantized=quantized[n], frozen=constant, **options)
            found = [*split.traced.collectives, *collectives(alone.jaxpr)]
            refuse(barred(f"Layer {n}", found, stage_axis))
            if flows is not None:
                before = len(jax.tree.leaves(layer_params))
                given = [before + k for k, flow in enumerate(flows) if flow]
                flows = dependent(alone, given)[: len(jax.tree.leaves(y))]
            seen[key] = len(kinds)
            ends = here, number(y, n)
            kinds.append(LayerKind(len(kinds), n, function, all_args, *ends, split, flows, carried))
        kind_of.append(seen[key])
        here, flows = kinds[seen[key]].y, kinds[seen[key]].flows
    shapes = tuple(activations.values())
    merged = bare_shapes(jax.eval_shape(model.merge, shapes[here]))
    return Layers(tuple(kinds), tuple(kind_of), shapes, first, here, embedded, merged)


def _output(
    function: Callable[..., Tree], args: tuple[Shapes, ...], kept: dict[str, Shapes], n: int
) -> Activation:
    """Computes the shape of the activation that a layer passes on.

    ``kept`` are its further arguments, the first of which it also returns."""
    layer_params, x, microbatch, rng = args
    given = {"layer_params": layer_params, "x": x, "microbatch": microbatch, "rng": rng}
    name, giver = f"Layer {n}", "the embedding" if n == 0 else f"layer {n - 1}"
    y = output_shapes(name, function, giver=giver, **given, **kept)
    if kept:
        what, before = next(iter(kept.items()))
        if not isinstance(y, tuple) or len(y) != 2:
            raise ValueError(
                f"{name}, which has a {what}, returns {describe(y)}; it must return the pair "
                f"(x, {what})."
            )
        y, after = y
        if form_of(after) != form_of(before):
            raise ValueError(
                f"{name} was given the {what} {describe(before)} and returns {describe(after)}; "
                f"a {what} must keep its structure, shapes and dtypes."
            )
    if isinstance(y, WithLoss):
        check_loss(y.loss, f"{name} returns WithLoss with the loss", weighted=False)
        y = y.x
    return y


def barred(name: str, collectives: Iterable[Collective], stage_axis: str) -> Iterator[str]:
    """Names the first collective of a function that would wait for devices of other stages."""
    for collective, axes, place in collectives:
        if stage_axis in axes or collective == "ppermute":
            along = ", ".join(map(repr, axes))
            yield (
                f"{name} calls {collective} along {along} ({place}). All stages would have to take "
                "part in it, and they do not run it at the same time. It may call psum, pmax, "
                "pmin, all_gather, psum_scatter and all_to_all along axes other than "
                f"{stage_axis!r}; `Model.embed` and `Model.head_loss` may call any collective if "
                "`Model.stage_split` is given."
            )
            return


def _check_activation(tree: Activation, layer: int) -> None:
    giver = "The embedding" if layer < 0 else f"Layer {layer}"
    if not jax.tree.leaves(tree):
        raise ValueError(f"{giver} returns no array; the next layer needs one.")
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(tree)]
    if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        remedy = "A layer can read masks, positions and targets from its microbatch."
        if any(jnp.issubdtype(dtype, jnp.complexfloating) for dtype in dtypes):
            remedy = (
                "Let a complex array z travel as a tree of its parts, (z.real, z.imag), which a "
                "layer joins again with `jax.lax.complex`."
            )
        raise ValueError(
            f"{giver} returns {describe(tree)}; only floating-point arrays travel between layers. "
            f"{remedy}"
        )
