"""What users get wrong: every mistake is refused before anything compiles, and the remedy named."""

from __future__ import annotations

import collections
import dataclasses

import chex
import compilations
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from flax import linen, nnx

import jaxpipe
from jaxpipe.runtime.mesh import Axes
from jaxpipe.runtime.named_schedule import named_schedule

MODEL = jaxpipe.Model(
    embed=lambda outer, batch, rng: batch["x"] @ outer["embed"]["kernel"],
    layer=lambda w, x, batch, rng: x + jnp.tanh(x @ w["kernel"] + w["bias"]),
    head_loss=lambda outer, x, batch, rng: jnp.mean((x @ outer["head"] - batch["y"]) ** 2),
)
SHAPES = {
    "embed": {"kernel": (3, 4)},
    "layers": {"kernel": (4, 4, 4), "bias": (4, 4)},
    "head": (4, 1),
}
PARAMS = jax.tree.map(
    lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
    SHAPES,
    is_leaf=lambda node: isinstance(node, tuple),
)
BATCH = {"x": jax.ShapeDtypeStruct((8, 3), "float32"), "y": jax.ShapeDtypeStruct((8, 1), "float32")}
LAYER = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape[1:], w.dtype), PARAMS["layers"])


def build(*, params=PARAMS, schedule="1f1b", mesh=None, microbatches=4, **changes):
    """The pipeline of the model with some of its fields changed; other options pass on."""
    options = {key: changes.pop(key) for key in ("zero", "layer_counts") if key in changes}
    model = dataclasses.replace(MODEL, **changes)
    mesh = jaxpipe.make_mesh(stage=2) if mesh is None else mesh
    if not isinstance(schedule, str):
        microbatches = None
    given = {"schedule": schedule, "mesh": mesh, "microbatches": microbatches}
    return jaxpipe.Pipeline(model, params, **given, **options)


def step(*, batch=BATCH, rng=None, **changes):
    """Traces a step of that pipeline."""
    pipe = build(**changes)
    return jax.eval_shape(pipe.value_and_grad, pipe.layout.placed_shapes(), batch, rng)


@pytest.mark.parametrize("optimizer", [0.1, optax.adam])
def test_what_is_no_optimizer_is_refused(optimizer):
    pipe = build()
    with pytest.raises(ValueError, match="it must be an optax transformation, such as"):
        pipe.init(optimizer, pipe.layout.placed_shapes())


def asynchronous(*, at_init, at_step, layer=MODEL.layer):
    pipe = build(layer=layer)
    training = jaxpipe.AsyncPipeline(pipe, optax.sgd(0.1))
    placed = pipe.layout.placed_shapes()
    state = jax.eval_shape(optax.sgd(0.1).init, placed)
    state = jax.eval_shape(lambda *given: training.init(*given), placed, state, BATCH, at_init)
    return jax.eval_shape(training.step, state, BATCH, at_step)


def place(tree):
    return build().place(tree)


def with_integers():
    return PARAMS | {
        "head": {"kernel": PARAMS["head"], "steps": 3, "table": np.arange(4, dtype=np.int8)}
    }


def mean(*arguments):
    """A loss whatever it is called with."""
    return jnp.mean(arguments[1])


def drops(w, x, batch, rng):
    return jnp.where(jax.random.bernoulli(rng, 0.5, x.shape), x, 0)


class Linen(linen.Module):
    """A module of the older interface."""

    operation: type | None = None

    @linen.compact
    def __call__(self, x):
        return linen.Dense(4, dot_general_cls=self.operation)(x)


FLOAT8 = Linen(linen.Fp8DirectDotGeneralOp)
LINEN = jax.eval_shape(lambda: FLOAT8.init(jax.random.key(0), jnp.ones((2, 4))))
SCALES = LINEN["_overwrite_with_gradient"]


ON_ONE = jax.device_put(jax.tree.map(lambda w: np.ones(w.shape, w.dtype), BATCH), jax.devices()[0])


class Tensor:
    """As of PyTorch: with a shape and a dtype, which JAX does not know."""

    shape, dtype = (8, 3), "torch.float32"

    def __dlpack__(self):
        raise AssertionError


def float8_module():
    module = nnx.bridge.ToNNX(FLOAT8, rngs=nnx.Rngs(0))
    return nnx.bridge.lazy_init(module, jnp.ones((2, 4)))


def nnx_model(layers, **options):
    """A model of these layers, with a loss of nothing but their output."""
    functions = {"embed": lambda module, batch: batch["x"], "loss": mean}
    return jaxpipe.nnx.model({}, layers=layers, **functions, **options)


KEY = jax.eval_shape(lambda: jax.random.key(0))
MISTAKES = {
    # The model's functions.
    "a loss that does not fit the last layer": (
        lambda: step(head_loss=lambda outer, x, batch, rng: jnp.mean(x @ jnp.ones((5, 1)))),
        [
            "Model.head_loss cannot take what the last layer returns, float32[2, 4]: dot_general",
            "x, from the last layer: float32[2, 4]",
            "rng: None",
        ],
    ),
    "an embedding of too few arguments": (
        lambda: build(embed=lambda outer, batch: batch["x"]),
        ["Model.embed cannot be called as embed(outer, microbatch, rng): too many positional"],
    ),
    "a layer of too many arguments": (
        lambda: build(layer=lambda w, x, batch, rng, mask: x),
        [
            "Model.layer cannot be called as layer(layer_params, x, microbatch, rng): "
            "missing a required argument: 'mask'."
        ],
    ),
    "a stateful layer without a state": (
        lambda: build(stateful=True),
        ["layer(layer_params, x, microbatch, rng, state)", "stateful=True, but Pipeline was given"],
    ),
    "a loss of too few arguments, and no embedding": (
        lambda: build(head_loss=lambda x, batch: jnp.mean(x), embed=None),
        [
            "Model.embed is a NoneType; it must be a function embed(outer, microbatch, rng).",
            "Model.head_loss cannot be called as head_loss(outer, x, microbatch, rng): too many",
        ],
    ),
    "a model that is a function": (
        lambda: jaxpipe.Pipeline(mean, PARAMS, schedule="1f1b", mesh=jaxpipe.make_mesh(stage=2)),
        ["model is a function; it must be a jaxpipe.Model."],
    ),
    "a layer that does not fit the embedding": (
        lambda: step(embed=lambda outer, batch, rng: batch["x"]),
        ["Layer 0 cannot take what the embedding returns, float32[2, 3]: dot_general"],
    ),
    # Random keys.
    "dropout in a layer without a key": (
        lambda: step(layer=drops),
        ["Layer 0 needs a random key, but rng=None", "with rng=jax.random.key("],
    ),
    "a number for a key": (
        lambda: step(layer=drops, rng=0),
        ["rng is int32[]; it must be one random key, such as jax.random.key(0)."],
    ),
    "an asynchronous pipeline with a key at first": (
        lambda: asynchronous(at_init=KEY, at_step=None, layer=drops),
        [
            "rng is missing; expected key<fry>[].",
            "If `init` was given a key, pass every `step` one of its own, such as "
            "rng=jax.random.fold_in(key, number)",
        ],
    ),
    # Parameters.
    "integer parameters": (
        lambda: build(params=with_integers()),
        [
            "params['head']['steps'] is int32[]; parameters that are trained must be floating",
            "params['head']['table'] is int8[4]; parameters that are trained",
            "close over constants",
        ],
    ),
    "scales that flax overwrites with their gradients": (
        lambda: build(params=PARAMS | {"head": LINEN}),
        [
            "params['head']['_overwrite_with_gradient']['Dense_0']['Fp8DirectDotGeneralOp_0']"
            "['input_amax_history'] is overwritten with its gradient by flax, and a pipeline sums "
            "gradients over microbatches and data shards (6 such arrays).",
            "a parameter that `trainable` leaves out",
        ],
    ),
    "such scales in a module": (
        lambda: nnx_model([nnx.eval_shape(float8_module)]),
        ["layers[0].Dense_0.Fp8DirectDotGeneralOp_0.input_scale is overwritten with its gradient"],
    ),
    "a missing and an extra part": (
        lambda: build(params={"embed": {}, "layers": PARAMS["layers"], "norm": PARAMS["head"]}),
        [
            "params['head'] is missing; without parameters it is {}.",
            "params['norm'] belongs to no function of the model: put it under 'embed' or 'head'",
        ],
    ),
    "a key that a layer reads and does not have": (
        lambda: step(layer=lambda w, x, batch, rng: x @ w["w"]),
        ["Layer 0 reads the key 'w', which is missing.", "layer_params: {'bias': float32[4], 'ker"],
    ),
    "trees of layers for one function": (
        lambda: build(params=PARAMS | {"layers": [LAYER] * 4}),
        ["params['layers'] is a list and Model.layer is not", "jnp.stack(w)", "4 functions"],
    ),
    "layers alone to place": (
        lambda: place(PARAMS["layers"]),
        ["params['head'] is missing", "params['bias'] is float32[4, 4]; nothing is expected ther"],
    ),
    "an optimizer's state to place": (
        lambda: place(jax.eval_shape(optax.adam(0.1).init, PARAMS)),
        ["params['head'] is missing", "placed by `pipe.optimizer_placing(optimizer).place`."],
    ),
    "layers' parameters that stages split": (
        lambda: build(stage_split={"embed": {"kernel": "a"}, "shared": {"w": 0}}),
        [
            "Model.stage_split['embed']['kernel'] is 'a', and params['embed']['kernel'] is float32",
            "Model.stage_split['shared']['w'] is 0, and splits no array of params['embed'] or",
        ],
    ),
    # Optimizers.
    "a line search": (
        lambda: jax.eval_shape(
            lambda w: build().update(
                optax.lbfgs(), w, build().optimizer_placing(optax.lbfgs()).placed, w
            ),
            build().placed_params,
        ),
        ["This optimizer needs further arguments: ", "a line search, as of optax.lbfgs"],
    ),
    "a function as an argument of an optimizer": (
        lambda: build().update(optax.sgd(0.1), None, None, build().placed_params, value_fn=mean),
        ["extra['value_fn'] is a function, not an array."],
    ),
    # Batches.
    "a tensor of another library": (
        lambda: build().value_and_grad(build().placed_params, BATCH | {"x": Tensor()}),
        ["batch['x'] is a Tensor, not an array of JAX or NumPy: convert it with `numpy.asarray`"],
    ),
    "a batch on one device": (
        lambda: build().value_and_grad(build().placed_params, ON_ONE),
        ["batch['x'] has been put on the devices [0]", "`jax.device_put(batch, pipe.batch_shar"],
    ),
    "a key that the embedding reads and the batch lacks": (
        lambda: step(batch={"inputs": BATCH["x"], "y": BATCH["y"]}),
        ["Model.embed reads the key 'x', which is missing.", "microbatch: {'inputs': float32[2, 3"],
    ),
    # Schedules and meshes.
    "an unknown schedule, and no microbatch": (
        lambda: build(schedule="1f2b", microbatches=0, zero="3"),
        [
            "schedule='1f2b' is not a known schedule.",
            "Nearest valid: '1f1b'.",
            "microbatches=0 must be at least 1.",
            "zero='3' is not a level.",
        ],
    ),
    "the name of an asynchronous method": (
        lambda: build(schedule="pipemare"),
        ["schedule='pipemare' never drains", "AsyncPipeline"],
    ),
    "microbatches beside a schedule that has others": (
        lambda: jaxpipe.Pipeline(
            MODEL,
            PARAMS,
            schedule=jaxpipe.schedules.build("1f1b", stages=2, microbatches=4),
            mesh=jaxpipe.make_mesh(stage=2),
            microbatches=8,
        ),
        ["microbatches=8 is for a schedule that is given by its name", "leave it out, 4."],
    ),
    "replicas that do not divide the data shards": (
        lambda: jaxpipe.make_mesh(stage=2, data=4, replica=3),
        ["replica=3 does not divide data=4.\nNearest valid: 1, 2, 4"],
    ),
    "a size of a mesh that is no whole number": (
        lambda: jaxpipe.make_mesh(stage=2, data=2.0),
        ["data=2.0 must be a whole number of at least 1."],
    ),
    "a number for a mesh": (
        lambda: build(mesh=2),
        ["mesh is 2; it must be a mesh, such as jaxpipe.make_mesh returns."],
    ),
    # Modules.
    "a linen module": (
        lambda: jaxpipe.nnx.functional(Linen()),
        ["Linen", "no flax nnx module: a linen module is a pure function already", "module.apply("],
    ),
    "a class of modules": (
        lambda: jaxpipe.nnx.functional(nnx.Linear),
        ["no flax nnx module: give an instance, such as Linear(..., rngs=nnx.Rngs(0))."],
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refused_with_its_remedy(mistake):
    call, texts = MISTAKES[mistake]
    found = compilations.refusal(call)
    for text in texts:
        assert text in found


OPTIONS = [
    (
        "stacked",
        {"weights": "rows"},
        "weights='rows' is no layout; choose one of stacked, unrolled",
    ),
    (
        *("tuple", {"weights": "unrolled"}),
        "weights='unrolled' needs layers that are alike, and these are a tuple",
    ),
    ("stacked", {"residuals": "disk"}, "residuals='disk' is not one of device, host"),
    ("stacked", {"zero": 3, "weight_slots": 0}, "weight_slots=0 holds no chunk.\nNearest valid: 1"),
    ("stacked", {"weight_slots": "2"}, "weight_slots='2' holds no chunk."),
    ("stacked", {"layer_counts": 4}, "layer_counts=4 is no sequence of numbers."),
    # The dtype that layers compute in.
    (
        *("stacked", {"compute_dtype": "bf17"}),
        "compute_dtype='bf17' is no dtype.\nNearest valid: 'bfloat16'",
    ),
    ("stacked", {"compute_dtype": "int8"}, "compute_dtype='int8' is not floating point"),
    ("stacked", {"compute_dtype": "float32"}, "compute_dtype='float32' is as wide as the layers'"),
    ("stacked", {"full_precision": "*bias*"}, "full_precision needs compute_dtype or fp8"),
    ("stacked", {"compute_dtype": "float8_e5m2"}, "'float8_e5m2' needs scales: choose the weights"),
    ("stacked", {"fp8": "*kernel"}, "fp8: '*kernel' is the path of no parameter.\nPaths: layers/"),
    ("stacked", {"fp8": "*up", "full_precision": "*"}, "fp8='*up' chooses no weight."),
    ("tuple", {"fp8": "*up"}, "fp8='*up' needs layers that are alike"),
    (
        *("stacked", {"compute_dtype": "bfloat16", "full_precision": "*norm*"}),
        "full_precision: '*norm*' is the path of no parameter",
    ),
    # What is trained.
    ("stacked", {"trainable": "lora"}, "'lora' is the path of no parameter.\nPaths: embed/"),
    ("stacked", {"trainable": ["head/*", "lora_*"]}, "'lora_*' is the path of no parameter.\n"),
    ("stacked", {"trainable": lambda path, leaf: False}, "chooses none of the parameters"),
    ("stacked", {"trainable": [True]}, "trainable is [True]; give a pattern of paths"),
    (
        *("stacked", {"trainable": lambda path: True}),
        "trainable('embed/positions', float32[5, 8]) raised TypeError: ",
    ),
]


@pytest.mark.parametrize(("layout", "options", "message"), OPTIONS)
def test_an_option_that_does_not_fit_is_refused(layout, options, message):
    options = {"schedule": "1f1b", "zero": 0, "mesh": jaxpipe.make_mesh(stage=2)} | options
    assert message in compilations.refusal(toys.pipeline, layout=layout, **options)


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (lambda: jaxpipe.make_mesh(stages=2), "make_mesh has no stages. It takes by name: stage,"),
        (lambda: jaxpipe.make_mesh(data=2), "make_mesh needs the number of stages. It takes"),
    ],
)
def test_a_mesh_says_which_axes_it_has(call, found):
    with pytest.raises(TypeError, match=found):
        call()


def values(tree):
    """Arrays for the shapes of a tree."""
    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(tree))))
    return jax.tree.map(lambda w: 0.3 * jax.random.normal(next(keys), w.shape, w.dtype), tree)


def gradients(params, model=MODEL, **options):
    pipe = jaxpipe.Pipeline(
        model, params, **{"schedule": "1f1b", "mesh": jaxpipe.make_mesh(stage=2)} | options
    )
    loss, grads = jax.jit(pipe.value_and_grad)(pipe.place(params), values(BATCH))
    return pipe, loss, pipe.unplace(grads)


def test_forward_mode_is_refused():
    pipe, batch = build(), values(BATCH)
    placed = pipe.place(values(PARAMS))
    with pytest.raises(ValueError, match=r"differentiated in forward mode, as by jax\.jvp"):
        jax.jvp(lambda w: pipe.loss(w, batch), (placed,), (placed,))


def test_layers_in_a_list_are_those_in_a_tuple():
    params = values(PARAMS)
    layers = [jax.tree.map(lambda w, n=n: w[n], params["layers"]) for n in range(4)]
    as_list, as_tuple = params | {"layers": layers}, params | {"layers": tuple(layers)}
    pipe, loss, grads = gradients(as_list, dataclasses.replace(MODEL, layer=[MODEL.layer] * 4))
    model = dataclasses.replace(MODEL, layer=(MODEL.layer,) * 4)
    _, expected_loss, expected = gradients(as_tuple, model)
    assert loss == expected_loss
    assert isinstance(grads["layers"], list)
    chex.assert_trees_all_equal(grads | {"layers": tuple(grads["layers"])}, expected)
    chex.assert_trees_all_equal(pipe.unplace(pipe.place(as_tuple)), as_list)


def test_stacked_layers_may_be_a_named_tuple():
    params = values(PARAMS)
    named = collections.namedtuple("Named", params["layers"])(**params["layers"])
    model = dataclasses.replace(
        MODEL, layer=lambda w, x, batch, rng: MODEL.layer(w._asdict(), x, batch, rng)
    )
    _, loss, grads = gradients(params | {"layers": named}, model)
    _, expected_loss, expected = gradients(params)
    assert loss == expected_loss
    chex.assert_trees_all_equal(grads | {"layers": grads["layers"]._asdict()}, expected)


def test_the_name_of_a_schedule_is_that_schedule_for_the_mesh():
    named = build(schedule="zb-h1", microbatches=6)
    assert named.schedule == jaxpipe.schedules.build("zb-h1", stages=2, microbatches=6)
    assert build(schedule="zb-h1", microbatches=None).schedule.num_microbatches == 4
    assert build(schedule=named.schedule).schedule == named.schedule


@pytest.mark.parametrize("num_stages", range(1, 9))
def test_every_schedule_takes_the_default_microbatches(num_stages):
    mesh = jaxpipe.make_mesh(stage=num_stages)
    for entry in jaxpipe.schedules.entries():
        schedule, problems = named_schedule(entry.name, mesh, Axes(), None)
        assert problems == []
        assert schedule.num_microbatches == 2 * num_stages
