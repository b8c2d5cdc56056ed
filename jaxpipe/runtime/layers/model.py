"""The model that a user gives to the pipeline: three pure functions, their keys and their calls.

Keys depend on (step, microbatch, layer) and the data shard, never on stage or tick: the same run
draws the same numbers whatever its schedule, number of stages or rematerialization.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxpipe.runtime.trees import describe
from jaxpipe.runtime.types import Activation, Batch, Index, Key, OuterParams, Shapes, Tree


def _same(x: Activation) -> Activation:
    return x


def _last_activation(outer: OuterParams, x: Activation, microbatch: Batch, rng: Key) -> Activation:
    return x


@dataclasses.dataclass(frozen=True)
class Model:
    """A model as pure functions over ``{"embed", "layers", "head"}`` parameters, and "shared".

    ``outer`` below is ``{"embed": ..., "head": ...}``. Embedding and head both see all of it, so
    tied embeddings are one array that is read twice. ``microbatch`` is the batch's rows of one
    microbatch. Every stage has them, so masks, positions and targets are never sent. ``rng`` is a
    key that depends on (step, microbatch, layer) and on the data shard, or None if the caller gave
    none.

    An activation ``x`` is an array or a tree of arrays, all floating point. A layer returns
    unchanged any parts that it does not use; in this way an encoder's output passes every decoder
    layer.

    Stages run layers at different times. With ``stage_split``, all stages compute embed, head and
    output together. Without it, the stages of the first and the last layer compute them alone, and
    no stage waits for others. So these functions may call

    | collectives | in layers, or without ``stage_split`` | elsewhere |
    |---|---|---|
    | psum, pmax, pmin, all_gather, psum_scatter, all_to_all along model and data axes | yes | yes |
    | any along the axis of stages | no | yes |
    | ppermute along any axis | no | yes |

    Args:
      embed: ``embed(outer, microbatch, rng) -> x``, the input of the first layer. Its time is not
        counted when layers are split over stages, so an expensive first layer, such as a
        convolution, should be one of the layers.
      layer: ``layer(layer_params, x, microbatch, rng) -> x``. If all layers are alike, one
        function; ``params["layers"]`` then stacks ``layer_params`` on a leading layer dimension,
        and x keeps its structure, shape and dtype. If they differ, a tuple or list of functions,
        one per layer; ``params["layers"]`` is then a tuple or list of trees. Layers with the same
        function and shapes share compiled code. With ``params["shared"]``, which all layers read,
        ``layer_params`` is the pair (the layer's own, shared). A layer with its own loss, such as
        the balance loss of a mixture of experts, returns `jaxpipe.WithLoss(x, loss)` instead of x.
      paired_layer: replaces ``layer`` in pipelines with ``pair_layers``. These hide a forward's
        collectives under a backward's matmuls, so a layer need not hide its own. None for ``layer``
        itself.
      head_loss: ``head_loss(outer, x, microbatch, rng) -> loss``, a float32 scalar, or float64
        under ``jax_enable_x64``: the mean loss of one microbatch. The loss of a batch is the mean
        over microbatches and data shards. (A sum would be divided by their number.) If they have
        different weights, such as numbers of tokens, return `jaxpipe.Weighted(total, weight)`.
        ``(loss, metrics)`` also returns a dictionary of metrics: arrays that are averaged like the
        loss, `jaxpipe.Weighted`, or `jaxpipe.Sum`.
      stage_split: a tree like ``outer`` whose leaves are the dimension in which a parameter is
        split over the ``stage`` axis, or None for a replicated parameter. Functions receive the
        stage's slice of a split parameter and communicate by axis name (see
        `jaxpipe.runtime.vocabulary`). None splits nothing, and the ends of the pipeline compute
        embedding and head.
      axes: the mesh's model axes, such as "tensor", along which devices share the work of a
        microbatch. The functions use collectives with these names, as far as the table above
        allows. Every device along them returns a loss (the step's loss is their mean) and its
        activation, whole or a part. Keys are equal along them.
      axis_split: the split of parameters over these axes or the data axes: a dictionary like
        params, or a prefix of it below the first keys, whose leaves are None, a
        `jax.sharding.PartitionSpec` (of one layer, if layers are alike), or a `jaxpipe.Joined` of
        one. Functions see a device's part. A dimension that stages also split need not divide. None
        splits nothing.
      stateful: layers also take a state and return a new one, ``layer(layer_params, x, microbatch,
        rng, state) -> (x, state)``. States are running statistics, which are not differentiated.
        `Pipeline` then takes and returns a tuple of states, one tree per layer. Devices along
        ``axes`` cannot share such layers.
      carry: ``carry(x, microbatch, num_slices)``, for schedules that cut sequences into slices. It
        returns a layer's first carry, a tree of floating-point arrays, given the first slice of its
        input. `jaxpipe.Appended` marks buffers for the whole sequence, to which every slice
        appends. Layers then have two more arguments, ``layer(layer_params, x, microbatch, rng,
        carry, start) -> (x, carry)``: ``start`` is the position of the slice in its sequence, and
        ``microbatch`` is cut like x. Without slices, layers are called without these arguments, for
        the whole sequence. If layers differ, ``carry`` is a tuple of functions; it is ``()`` for
        layers that do not mix tokens. Embed, head and output also see slices: positions come with
        the batch, and losses and metrics are combined like those of microbatches.
      output: ``output(outer, x, microbatch, rng)``, arrays ``[rows, ...]`` such as logits, for
        `Pipeline.outputs`; by default the last layer's x. It must be the same on every stage and
        along every model axis, so it must gather split arrays.

      spread: ``spread(x) -> x``, a linear function of what ``embed`` returns, which the first layer
        takes. Only the stage of that layer computes it, so that all stages together embed no more
        than ``embed`` returns: residual streams, for example, begin as copies.
      merge: likewise a linear function of the last layer's x, for head and output.

    Example:
      >>> import jax.numpy as jnp
      >>> Model(
      ...     embed=lambda outer, batch, rng: batch["x"] @ outer["embed"],
      ...     layer=lambda w, x, batch, rng: x + jnp.tanh(x @ w),
      ...     head_loss=lambda outer, x, batch, rng: jnp.mean((x - batch["y"]) ** 2),
      ... ).stage_split is None
      True
    """

    embed: Callable[[OuterParams, Batch, Key], Activation]
    layer: Any  # a function or a tuple of them; only the model's author knows which
    head_loss: Callable[[OuterParams, Activation, Batch, Key], Tree]
    stage_split: Tree = None
    axes: tuple[str, ...] = ()
    axis_split: Tree = None
    stateful: bool = False
    carry: Any = None  # a function or a tuple of them, as layer
    output: Callable[[OuterParams, Activation, Batch, Key], Tree] = _last_activation
    paired_layer: Any = None  # as layer
    spread: Callable[[Activation], Activation] = _same
    merge: Callable[[Activation], Activation] = _same

    def __post_init__(self) -> None:
        for name in ("layer", "carry", "paired_layer"):  # a model is compared and hashed
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def uses_axes(self) -> bool:
        """Whether layers name mesh axes."""
        return bool(self.axes) or self.axis_split is not None

    @property
    def layers_are_alike(self) -> bool:
        """Whether all layers have the same function."""
        return not isinstance(self.layer, tuple)

    def in_pairs(self) -> "Model":
        """The model whose layers are those for pairs."""
        pairs = self.paired_layer
        return self if pairs is None else dataclasses.replace(self, layer=pairs)

    def layer_function(self, number: int) -> Callable[..., Tree]:
        """The function of a layer, by its canonical number."""
        return self.layer if self.layers_are_alike else self.layer[number]

    def carry_function(self, number: int) -> Callable[[Activation, Batch, int], Tree]:
        """The function that makes a layer's first carry, by its canonical number."""
        return self.carry[number] if isinstance(self.carry, tuple) else self.carry


def layer_key(rng: Key, *, microbatch: Index, shard: Index, layer: Index) -> Key:
    """Makes a layer's key for a microbatch, or None; ``shard`` is the data shard's number."""
    if rng is None:
        return None
    for value in (microbatch, shard, layer):
        rng = jax.random.fold_in(rng, value)
    return rng


def embed_layer(num_layers: int) -> int:
    """The layer number that stands for the embedding in `layer_key`."""
    return num_layers


def head_layer(num_layers: int) -> int:
    """The layer number that stands for the head in `layer_key`."""
    return num_layers + 1


_ARGUMENTS = {
    "embed": ("outer", "microbatch", "rng"),
    "layer": ("layer_params", "x", "microbatch", "rng"),
    "head_loss": ("outer", "x", "microbatch", "rng"),
}


def misfits(model: Model) -> Iterator[str]:
    """Says which functions of a model cannot be called with the arguments that they are given."""
    functions = [model.layer] if model.paired_layer is None else [model.layer, model.paired_layer]
    if len({len(given) if isinstance(given, tuple) else 0 for given in functions}) > 1:
        yield (
            "Model.paired_layer must be one function if Model.layer is one, and otherwise one "
            "function for each of its functions."
        )
    layers = [("layer", model.layer)]
    if not model.layers_are_alike:
        layers = [(f"layer[{n}]", function) for n, function in enumerate(model.layer)]
    for name, function in (("embed", model.embed), *layers, ("head_loss", model.head_loss)):
        kind = name.partition("[")[0]
        arguments = _ARGUMENTS[kind] + (("state",) if kind == "layer" and model.stateful else ())
        call = f"{kind}({', '.join(arguments)})"
        if not callable(function):
            yield f"Model.{name} is a {type(function).__name__}; it must be a function {call}."
            continue
        try:
            inspect.signature(function).bind(*arguments)
            if kind == "layer" and model.carry is not None:
                arguments += "carry", "start"
                call = f"{kind}({', '.join(arguments)})"
                inspect.signature(function).bind(*arguments)
        except TypeError as error:
            whole = kind == "layer" and model.carry is not None and "carry" not in arguments
            note = " A layer with a carry also runs whole sequences, without one." if whole else ""
            yield f"Model.{name} cannot be called as {call}: {error}.{note}"
        except ValueError:  # some built-in functions do not say what they take
            continue


def output_shapes(
    name: str, function: Callable[..., Tree], *, giver: str | None = None, **arguments: Shapes
) -> Shapes:
    """Computes the shapes of what a function of the model returns.

    Args:
      name: name of the function in errors.
      giver: what returned the argument ``x``, for errors.
      arguments: shapes, by the names of the documentation.
    """
    try:
        return jax.eval_shape(function, *arguments.values())
    except Exception as error:  # a user's function may raise anything
        reason = _reason(name, function, giver, arguments, error)
        labels = {"x": f"x, from {giver}"}
        given = (f"  {labels.get(k, k)}: {describe(v)}" for k, v in arguments.items())
        raise ValueError("\n".join([reason, f"{name} was given", *given])) from error


def _reason(
    name: str,
    function: Callable[..., Tree],
    giver: str | None,
    arguments: dict[str, Shapes],
    error: Exception,
) -> str:
    if arguments["rng"] is None and _runs_with_a_key(function, arguments):
        return (
            f"{name} needs a random key, but rng=None ({type(error).__name__}: {error}). Call the "
            "step with rng=jax.random.key(number of the step)."
        )
    if isinstance(error, KeyError):
        return f"{name} reads the key {error}, which is missing."
    if giver is not None and isinstance(error, (TypeError, ValueError)):
        return f"{name} cannot take what {giver} returns, {describe(arguments['x'])}: {error}"
    return f"{name} raised {type(error).__name__}: {error}"


def _runs_with_a_key(function: Callable[..., Tree], arguments: dict[str, Shapes]) -> bool:
    key = jax.eval_shape(lambda: jax.random.key(0))
    try:
        jax.eval_shape(function, *(arguments | {"rng": key}).values())
    except Exception:  # whatever it is, a key does not help
        return False
    return True
