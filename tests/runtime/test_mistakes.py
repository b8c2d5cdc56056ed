"""What users get wrong: every mistake is refused before anything compiles, and the remedy named."""

import collections
import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
import toys
import uneven
from compilations import refusal
from flax import linen, nnx

import jaxpipe
from jaxpipe.runtime.memory import buffers
from jaxpipe.runtime.mesh import Axes
from jaxpipe.runtime.pipeline import named_schedule

MODEL = jaxpipe.Model(
    embed=lambda outer, batch, rng: batch["x"] @ outer["embed"]["kernel"],
    layer=lambda w, x, batch, rng: x + jnp.tanh(x @ w["kernel"] + w["bias"]),
    head_loss=lambda outer, x, batch, rng: jnp.mean((x @ outer["head"] - batch["y"]) ** 2),
)
F32 = functools.partial(jax.ShapeDtypeStruct, dtype="float32")
LAYER = {"kernel": F32((4, 4)), "bias": F32((4,))}
PARAMS = {
    "embed": {"kernel": F32((3, 4))},
    "layers": {"kernel": F32((4, 4, 4)), "bias": F32((4, 4))},
    "head": F32((4, 1)),
}
BATCH = {"x": F32((8, 3)), "y": F32((8, 1))}
MESH = jaxpipe.make_mesh(stage=2)
START, UNEVEN = toys.named("ends", 4).params, toys.named("uneven").params
LAYERS, STATES = START["layers"], uneven.states()
SGD, ADAM = optax.sgd(0.1), optax.adam(0.1, mu_dtype="bfloat16")


def build(*, params=PARAMS, schedule="1f1b", mesh=MESH, microbatches=4, **changes):
    """The pipeline of the model with some of its fields changed; other options pass on."""
    fields = {field.name for field in dataclasses.fields(MODEL)}
    options = {key: changes.pop(key) for key in changes.keys() - fields}
    options |= {"schedule": schedule, "mesh": mesh, "microbatches": microbatches}
    return jaxpipe.Pipeline(dataclasses.replace(MODEL, **changes), params, **options)


def step(*, batch=BATCH, rng=None, **changes):
    """Traces a step of that pipeline."""
    pipe = build(**changes)
    return jax.eval_shape(pipe.value_and_grad, pipe.placed_params, batch, rng)


def asynchronous(*, at_init, at_step, layer):
    training = jaxpipe.AsyncPipeline(build(layer=layer), SGD)
    placed = training.pipe.placed_params
    state = jax.eval_shape(training.init, placed, SGD.init(placed), BATCH, at_init)
    return jax.eval_shape(training.step, state, BATCH, at_step)


@functools.cache
def pipe(name: str = "ends") -> jaxpipe.Pipeline:
    """A pipeline of a toy of which ``START`` or ``UNEVEN`` are parameters."""
    return toys.pipeline(name, num_layers=4, microbatches=2)


PLACED = pipe().placed_params


@functools.cache
def states() -> jaxpipe.Pipeline:
    return toys.pipeline("stateful", microbatches=2)


def place(tree, name: str = "ends"):
    return pipe(name).place(tree)


def with_layers(layers, start=START):
    return start | {"layers": layers}


def mean(*arguments):
    """A loss whatever it is called with."""
    return jnp.mean(arguments[1])


def drops(w, x, batch, rng):
    return jnp.where(jax.random.bernoulli(rng, 0.5, x.shape), x @ w["kernel"] + w["bias"], 0)


class Linen(linen.Module):
    """A module of the older interface."""

    operation: type | None = None

    @linen.compact
    def __call__(self, x):
        return linen.Dense(4, dot_general_cls=self.operation)(x)


FLOAT8 = Linen(linen.Fp8DirectDotGeneralOp)
SCALED = jax.eval_shape(lambda: FLOAT8.init(jax.random.key(0), jnp.ones((2, 4))))


class Tensor:
    """As of PyTorch: with a shape and a dtype, which JAX does not know."""

    shape, dtype = (8, 3), "torch.float32"

    def __dlpack__(self):
        raise AssertionError


def float8_module():
    module = nnx.bridge.ToNNX(FLOAT8, rngs=nnx.Rngs(0))
    return nnx.bridge.lazy_init(module, jnp.ones((2, 4)))


ABSTRACT = nnx.eval_shape(lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0)))


def nnx_model(layers, module=None):
    """A model of these layers, with a loss of nothing but their output."""
    functions = {"embed": lambda module, batch: batch["x"], "loss": mean}
    return jaxpipe.nnx.model(module or {}, layers=layers, **functions)


KEY = jax.eval_shape(lambda: jax.random.key(0))
ON_ONE = jax.device_put(jax.tree.map(lambda w: np.ones(w.shape, w.dtype), BATCH), jax.devices()[0])
CANONICAL = "is in canonical order, not placed"
IN_A_TUPLE, STACKED = "a tuple of one tree per layer", "one tree whose arrays stack all layers"

# fmt: off
MISTAKES = [
    # The model's functions.
    (lambda: step(head_loss=lambda outer, x, batch, rng: jnp.mean(x @ jnp.ones((5, 1)))),
     "Model.head_loss cannot take what the last layer returns, float32[2, 4]: dot_general",
     "x, from the last layer: float32[2, 4]", "rng: None"),
    (lambda: build(embed=lambda outer, batch: batch["x"]),
     "Model.embed cannot be called as embed(outer, microbatch, rng): too many positional"),
    (lambda: build(layer=lambda w, x, batch, rng, mask: x),
     "Model.layer cannot be called as layer(layer_params, x, microbatch, rng): "
     "missing a required argument: 'mask'."),
    (lambda: build(stateful=True),
     "layer(layer_params, x, microbatch, rng, state)", "stateful=True, but Pipeline was given"),
    (lambda: build(head_loss=lambda x, batch: jnp.mean(x), embed=None),
     "Model.embed is a NoneType; it must be a function embed(outer, microbatch, rng).",
     "Model.head_loss cannot be called as head_loss(outer, x, microbatch, rng): too many"),
    (lambda: jaxpipe.Pipeline(mean, PARAMS, schedule="1f1b", mesh=MESH),
     "model is a function; it must be a jaxpipe.Model."),
    (lambda: step(embed=lambda outer, batch, rng: batch["x"]),
     "Layer 0 cannot take what the embedding returns, float32[2, 3]: dot_general"),
    (lambda: step(embed=lambda outer, batch, rng: jnp.arange(3)),
     "The embedding returns int32[3]; only floating"),
    (lambda: step(layer=lambda w, x, batch, rng: x @ w["w"]),
     "Layer 0 reads the key 'w', which is missing.", "layer_params: {'bias': float32[4], 'ker"),
    (lambda: step(
        params=with_layers((*UNEVEN["layers"][:5], {}, *UNEVEN["layers"][6:]), UNEVEN),
        batch=uneven.batch(8), embed=uneven.model().embed, layer=uneven.FUNCTIONS),
     "Layer 5 reads the key 'main', ", "\n  x, from layer 4: "),
    (lambda: step(batch={"inputs": BATCH["x"], "y": BATCH["y"]}),
     "Model.embed reads the key 'x', which is missing.", "microbatch: {'inputs': float32[2, 3"),
    (lambda: jaxpipe.nnx.functional(Linen()), "Linen", "module.apply(",
     "no flax nnx module: a linen module is a pure function already"),
    (lambda: jaxpipe.nnx.functional(nnx.Linear),
     "no flax nnx module: give an instance, such as Linear(..., rngs=nnx.Rngs(0))."),
    # Random keys.
    (lambda: step(layer=drops),
     "Layer 0 needs a random key, but rng=None", "with rng=jax.random.key("),
    (lambda: step(layer=drops, rng=0),
     "rng is int32[]; it must be one random key, such as jax.random.key(0)."),
    (lambda: asynchronous(at_init=KEY, at_step=None, layer=drops),
     "rng is missing; expected key<fry>[].", "If `init` was given a key, pass every `step` one "
     "of its own, such as rng=jax.random.fold_in(key, number)"),
    # What a pipeline is built from.
    (lambda: build(params=[PARAMS]), "found a list."),
    (lambda: build(params=PARAMS | {"head": "linear"}), "params['head'] is a str, not an array."),
    (lambda: build(params=with_layers({}, PARAMS)), "found no array."),
    *((lambda b=b: build(params=with_layers({"w": F32((4, 3)), "b": b}, PARAMS)),
       f"found params['layers']['b'] is float32{text}, params['layers']['w'] is f")
      for b, text in ((F32((3,)), "[3]"), (1.0, "[]"))),
    (lambda: build(params={"embed": {}, "layers": PARAMS["layers"], "norm": PARAMS["head"]}),
     "found the keys ['embed', 'layers', 'norm'].",
     "params['head'] is missing; without parameters it is {}.",
     "params['norm'] belongs to no function of the model: put it under 'embed' or 'head'"),
    (lambda: build(params=PARAMS | {
        "head": {"kernel": PARAMS["head"], "steps": 3, "table": np.arange(4, dtype=np.int8)}}),
     "params['head']['steps'] is int32[]; parameters that are trained must be floating",
     "params['head']['table'] is int8[4]; parameters that are trained", "close over constants"),
    (lambda: build(params=PARAMS | {"head": SCALED}),
     "params['head']['_overwrite_with_gradient']['Dense_0']['Fp8DirectDotGeneralOp_0']"
     "['input_amax_history'] is overwritten with its gradient by flax, and a pipeline sums "
     "gradients over microbatches and data shards (6 such arrays).",
     "a parameter that `trainable` leaves out"),
    (lambda: nnx_model([nnx.eval_shape(float8_module)]),
     "layers[0].Dense_0['Fp8DirectDotGeneralOp_0']['input_scale'] is overwritten with its"),
    (lambda: nnx_model([ABSTRACT], module=[nnx.eval_shape(float8_module)]),
     "module[0].Dense_0['Fp8DirectDotGeneralOp_0']['input_scale'] is overwritten with its"),
    (lambda: build(params=with_layers([LAYER] * 4, PARAMS)),
     "params['layers'] is a list and Model.layer is not", "jnp.stack(w)", "4 functions"),
    (lambda: build(params=with_layers([LAYER] * 4, PARAMS), layer=[MODEL.layer] * 5),
     "has 5 functions and params['layers'] 4 trees"),
    (lambda: build(layer_counts=(2, 3)),
     "layer_counts=(2, 3) must be 2 numbers, one per virtual stage of schedule '1f1b', that add up "
     "to the 4 layers of params['layers']."),
    (lambda: build(params=with_layers({"w": F32((1, 4))}, PARAMS)),
     "params['layers'] holds 1 layer, and schedule '1f1b' has 2 virtual stages: each needs a "
     "layer. Use fewer stages or chunks, or give layer_counts with 0 for those that "
     "stay empty."),
    (lambda: build(layer=lambda w, x, batch, rng, state: x, stateful=True, states=({},) * 3),
     "states holds 3 layers and params['layers'] 4."),
    (lambda: build(states=3), "Model.stateful=False, but Pipeline was given states",
     "states must stack every layer on the leading dimension"),
    (lambda: build(stage_split={"embed": {"kernel": True}}),
     "Model.stage_split['embed']['kernel'] is True, and params['embed']['kernel'] is float32"),
    (lambda: build(stage_split={"embed": {"kernel": "a"}, "shared": {"w": 0}}),
     "Model.stage_split['embed']['kernel'] is 'a', and params['embed']['kernel'] is float32",
     "Model.stage_split['shared']['w'] is 0, and splits no array of params['embed'] or"),
    # Trees to place, and placed ones.
    (lambda: place(with_layers(jax.tree.map(lambda w: w[:3], LAYERS))),
     "params['layers'] holds 3 layers; expected 4.",
     "params['layers']['up'] is float32[3, 8, 16]; expected float32[4, 8, 16]."),
    *((lambda tree=tree: place(tree), "params['head']['scale'] is missing; expected float32[8].")
      for tree in (None, (), [1.0], {"layers": None})),
    (lambda: place(LAYERS),
     "params['head']", "params['bias'] is float32[4, 16]; nothing is expected there"),
    (lambda: place(jax.eval_shape(SGD.init, START)),
     "params['head']", "placed by `pipe.optimizer_placing(optimizer).place`."),
    (lambda: place(jax.tree.map(lambda w: w.astype("bfloat16"), START)),
     "params['head']['table'] is bfloat16[11, 8]; expected float32[11, 8].",
     "\nCast params to these dtypes."),
    (lambda: place(with_layers(tuple(UNEVEN["layers"]))),
     f"params['layers'] is {IN_A_TUPLE}; expected {STACKED}."),
    (lambda: place(with_layers(dict(enumerate(UNEVEN["layers"])), UNEVEN), "uneven"),
     f"params['layers'] is {STACKED}; expected {IN_A_TUPLE}."),
    (lambda: place(with_layers(UNEVEN["layers"][:-1], UNEVEN), "uneven"),
     "params['layers'] holds 7 layers; expected 8."),
    (lambda: place(with_layers((*UNEVEN["layers"][:7], {"main": LAYERS["up"]}), UNEVEN), "uneven"),
     "params['layers'][7]['main'] is float32[4, 8, 16]; expected float32[4, 4]."),
    *((lambda name=name: place(pipe(name).placed_params, name), "params is placed already.")
      for name in ("ends", "uneven")),
    *((lambda name=name: pipe(name).unplace(toys.named(name, 4).params),
       f"placed {CANONICAL}; call `pipe.place` first.") for name in ("ends", "uneven")),
    (lambda: jax.eval_shape(pipe().value_and_grad, START, toy.batch(4)),
     f"placed {CANONICAL}; call `pipe.place` first."),
    (lambda: pipe().init(SGD, START), f"params {CANONICAL}; call `pipe.place` first."),
    (lambda: pipe().value_and_grad(PLACED | {"head": PLACED["embed"]}, toy.batch(4)),
     "placed['head']['scale'] is missing; expected float32[8].",
     "placed['head']['positions'] is float32[5, 8]; nothing is expected there."),
    (lambda: states().place_states(STATES[:-1]),
     "states[7]['mean'] is missing; expected float32[4]."),
    (lambda: states().unplace_states(STATES),
     f"placed {CANONICAL}; call `pipe.place_states` first."),
    (lambda: states().loss(states().placed_params, uneven.batch(4), states=STATES),
     f"states {CANONICAL}; call `pipe.place_states` first."),
    (lambda: states().value_and_grad(states().placed_params, uneven.batch(4)), "states=None"),
    (lambda: pipe("uneven").loss(pipe("uneven").placed_params, uneven.batch(4), states=STATES),
     "layers keep no state"),
    (lambda: pipe("uneven").place_states(STATES), "layers keep no state"),
    # Optimizers.
    *((lambda optimizer=optimizer: pipe().init(optimizer, PLACED),
       "it must be an optax transformation, such as") for optimizer in (0.1, optax.adam)),
    (lambda: pipe().optimizer_placing(ADAM).place(pipe().optimizer_placing(ADAM).placed),
     "state is placed already."),
    (lambda: pipe().optimizer_placing(ADAM).place(
        jax.eval_shape(ADAM.init, toys.named("ends", 5).params)),
     "state[0].mu['layers']['bias'] is bfloat16[5, 16]; expected bfloat16[4, 16]."),
    (lambda: pipe().update(ADAM, START, pipe().optimizer_placing(SGD).placed, PLACED),
     "state[0].count is missing; expected int32[].",
     f"grads {CANONICAL}; call `pipe.place` first."),
    (lambda: jax.eval_shape(
        lambda w: pipe().update(
            optax.lbfgs(), w, pipe().optimizer_placing(optax.lbfgs()).placed, w), PLACED),
     "This optimizer needs further arguments: ", "a line search, as of optax.lbfgs"),
    (lambda: pipe().update(SGD, None, None, PLACED, value_fn=mean),
     "extra['value_fn'] is a function, not an array."),
    # Batches.
    (lambda: pipe().value_and_grad(PLACED, BATCH | {"x": Tensor()}),
     "batch['x'] is a Tensor, not an array of JAX or NumPy: convert it with `numpy.asarray`"),
    (lambda: pipe().value_and_grad(PLACED, BATCH | {"x": np.ones((8, 3), object)}),
     "batch['x'] is an array of dtype object, which JAX has not: convert it with `leaf.astype`;"),
    (lambda: pipe().value_and_grad(PLACED, BATCH | {"x": np.ma.ones((8, 3))}),
     "batch['x'] is a MaskedArray, not an array of JAX or NumPy: fill it with `leaf.filled("),
    (lambda: pipe().value_and_grad(PLACED, ON_ONE),
     "batch['x'] has been put on the devices [0]", "`jax.device_put(batch, pipe.batch_shar"),
    # Schedules and meshes.
    (lambda: build(schedule="1f2b", microbatches=0, zero="3"),
     "schedule='1f2b' is not a known schedule.", "Nearest valid: '1f1b'.",
     "microbatches=0 must be at least 1.", "zero='3' is not a level."),
    (lambda: build(schedule="pipemare"), "schedule='pipemare' never drains", "AsyncPipeline"),
    (lambda: build(
        schedule=jaxpipe.schedules.build("1f1b", stages=2, microbatches=4), microbatches=8),
     "microbatches=8 is for a schedule that is given by its name",
     "Nearest valid: 4, or leave microbatches out."),
    (lambda: build(mesh=2), "mesh is 2; it must be a mesh, such as jaxpipe.make_mesh returns."),
    (lambda: jaxpipe.make_mesh(stage=2, data=4, replica=3),
     "replica=3 does not divide data=4.\nNearest valid: 1, 2, 4"),
    (lambda: jaxpipe.make_mesh(stage=2, data=2.0),
     "data=2.0 must be a whole number of at least 1."),
    (lambda: jaxpipe.make_mesh(stage=-1, data=0), "data=0 must be", "stage=-1 must be"),
    (lambda: jaxpipe.make_mesh(stage=None, data=True),
     "data=True must be a whole number of at least 1.", "stage must be a whole number of at least"),
    *((lambda found=found: jaxpipe.make_mesh(stage=2, devices=found), "devices=[",
       "must be a list or array of different devices of jax.")
      for found in ([], 3, "cpu", [0, 1], {*jax.devices()}, jax.devices()[:1] * 2)),
]
OPTIONS = [
    ("tied", {"weights": "rows"}, "weights='rows' is not a layout; choose one of auto, stacked"),
    ("tied", {"remat": "some"}, "remat='some' is not a policy; choose one of none, dots, full"),
    ("tied", {"residuals": "disk"}, "residuals='disk' is not one of device, host"),
    ("tied", {"zero": 3, "weight_slots": 0},
     "weight_slots=0 must be a whole number of at least 1.\nNearest valid: 1"),
    ("tied", {"weight_slots": "2"}, "weight_slots='2' must be a whole number"),
    ("tied", {"weight_slots": True}, "weight_slots=True must be a whole number"),
    ("tied", {"zero": True}, "zero=True is not a level.\nNearest valid: 0, 1, 2, 3"),
    ("tied", {"zero": 5}, "zero=5 is not a level.\nNearest valid: 3"),
    *(("tied", {"layer_counts": counts}, "is not a list or tuple of whole numbers.")
      for counts in (4, (2.0, 2.0), ["2", "2"], np.array([2, 2]))),
    # The dtype that layers compute in.
    ("tied", {"compute_dtype": "bf17"},
     "compute_dtype='bf17' is not a dtype.\nNearest valid: 'bfloat16'"),
    ("tied", {"compute_dtype": "int8"}, "compute_dtype='int8' is not floating point"),
    ("tied", {"compute_dtype": "float32"}, "compute_dtype='float32' is not narrower than the"),
    ("tied", {"full_precision": "*bias*"}, "full_precision needs compute_dtype or fp8"),
    ("tied", {"compute_dtype": "float8_e5m2"}, "'float8_e5m2' needs scales: choose the weights"),
    ("tied", {"fp8": "*kernel"}, "fp8: '*kernel' is the path of no parameter.\nPaths: layers/"),
    ("tied", {"fp8": "*up", "full_precision": "*"}, "fp8='*up' chooses no weight."),
    ("tied", {"fp8": "*up", "fp8_recipe": "delayed"}, "is not a recipe; choose one of tensorwise"),
    ("tied", {"fp8_recipe": "mxfp8"}, "needs weights to quantize: choose them by fp8"),
    ("places", {"fp8": "*up", "weights": "stacked", "num_layers": 8},
     "fp8='*up' cannot be combined with weights='stacked' if layers differ.\n"
     "Nearest valid: weights='unrolled'."),
    ("places", {"compute_dtype": "bfloat16", "full_precision": "*3/gain", "num_layers": 8},
     "full_precision='*3/gain' needs one dtype for each array that layers at the same place of "
     "their chunks share, and layers 3 and 7 read one in different dtypes.\nLeave full_"),
    ("tied", {"compute_dtype": "bfloat16", "full_precision": "*norm*"},
     "full_precision: '*norm*' is the path of no parameter"),
    # What is trained.
    ("tied", {"trainable": "lora"}, "'lora' is the path of no parameter.\nPaths: embed/"),
    ("tied", {"trainable": ["head/*", "lora_*"]}, "'lora_*' is the path of no parameter.\n"),
    ("tied", {"trainable": lambda path, leaf: False}, "chooses none of the parameters"),
    ("tied", {"trainable": ["head/*", "layers/3/*"]},
     "layers/up.\nThe layers are stacked, so that a path holds an array of all of them. To choose "
     "single layers, give params['layers'] as a tuple of one tree per layer, and Model.layer"),
    ("tied", {"trainable": [True]}, "trainable is [True]; give a pattern of paths"),
    ("tied", {"trainable": lambda path: True},
     "trainable('embed/positions', float32[5, 8]) raised TypeError: "),
]
BATCHES = [
    ({"x": np.ones((8, 2)), "y": np.ones((4, 2)), "z": np.ones(8)},
     "The arrays of a batch must have equally many rows, but batch['x'] has 8, batch['y'] has 4, "
     "batch['z'] has 8."),
    ({"x": np.ones((8, 2)), "n": 3, "name": "a"},
     "batch['n'] is int32[]; expected an array whose first dimension is rows. Repeat it for every "
     "row, as `jnp.full(rows, value)` does.\n"
     "batch['name'] is a str, not an array; expected an array whose first dimension is rows."),
    ({}, "batch holds no array; expected arrays whose rows can be split evenly into 2 "
     "microbatches x 1 data shards."),
    ({"x": np.ones((0, 2))}, "batch['x'] has 0 rows, which cannot be split evenly into 2 "
     "microbatches x 1 data shards.\nNearest valid: 2."),
    ({"x": np.ones((3, 2)), "y": np.ones(3)},
     "batch['x'] has 3 rows, which cannot be split evenly into 2 microbatches x 1 data "
     "shards.\nNearest valid: 2, 4. Or add masked rows: `pipe.pad_batch(batch)`."),
]
# fmt: on


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refused_with_its_remedy(mistake):
    call, *texts = mistake
    found = refusal(call)
    for text in texts:
        assert text in found


@pytest.mark.parametrize(("name", "options", "message"), OPTIONS)
def test_an_option_that_does_not_fit_is_refused(name, options, message):
    assert message in refusal(toys.pipeline, name, **{"num_layers": 5} | options)


def test_every_difference_of_a_tree_is_in_one_error():
    wrong = {
        "embed": {"table": np.ones((3, 8)), "positions": "sinusoidal"},
        "layers": LAYERS | {"bias": jnp.ones((4, 16), jnp.bfloat16), "gate": 2.0},
        "head": {"table": START["head"]["table"]},
    }
    assert set(refusal(place, wrong).split("\n")) == {
        "params['embed']['table'] is float32[3, 8]; expected float32[11, 8].",
        "params['embed']['positions'] is a str, not an array; expected float32[5, 8].",
        "params['layers']['bias'] is bfloat16[4, 16]; expected float32[4, 16].",
        "params['layers']['gate'] is float32[]; nothing is expected there.",
        "params['head']['scale'] is missing; expected float32[8].",
    }


def test_training_steps_compare_parameters_and_optimizer_state():
    state, batch = pipe().optimizer_placing(ADAM).placed, toy.batch(4)
    steps = [(pipe().train_step(ADAM, update=update), "state") for update in ("step", "chunk")]
    for step, name in (*steps, (jaxpipe.AsyncPipeline(pipe(), ADAM).init, "optimizer_state")):
        assert refusal(step, START, state, batch) == f"params {CANONICAL}; call `pipe.place` first."
        placing = "call `pipe.optimizer_placing(optimizer).place` first."
        assert refusal(step, PLACED, ADAM.init(START), batch) == f"{name} {CANONICAL}; {placing}"


def test_without_jit_nothing_runs_and_the_loss_without_a_pipeline_does():
    """At every door; what is traced before is as good as a real state."""
    training, whole = jaxpipe.AsyncPipeline(pipe(), SGD), toys.named("ends", 4)
    state, batch = pipe().optimizer_placing(SGD).placed, toy.batch(4)
    flying = jax.eval_shape(training.init, PLACED, state, batch)
    doors = [
        (pipe().place, START), (pipe().unplace, PLACED), (pipe().init, SGD, PLACED),
        (pipe().loss, PLACED, batch), (pipe().outputs, PLACED, batch),
        (pipe().value_and_grad, PLACED, batch), (jax.grad(pipe().loss), PLACED, batch),
        (pipe().train_step(SGD), PLACED, state, batch),
        (pipe().update, SGD, PLACED, state, PLACED),
        (pipe().params_placing.to_host, PLACED), (states().place_states, STATES),
        (training.init, PLACED, state, batch), (training.step, flying, batch),
        (training.drain, flying), (training.finish, flying),
        (jaxpipe.init_params, pipe(), lambda key: START, jax.random.key(0)),
        (jaxpipe.load_params, pipe(), lambda *part: {}),
    ]  # fmt: skip
    with jax.disable_jit():
        for call, *arguments in doors:
            assert refusal(call, *arguments).startswith("jax.disable_jit is set, and ")
        alone = jaxpipe.unpipelined.loss(whole.model, START, batch)
    np.testing.assert_allclose(alone, whole.reference(START, batch), rtol=1e-6)


@pytest.mark.parametrize(("batch", "message"), BATCHES)
def test_batches_that_do_not_divide_are_refused(batch, message):
    assert refusal(pipe().value_and_grad, PLACED, batch) == message
    assert refusal(buffers, pipe(), batch) == message


# What fits.


def test_a_pipeline_prints_what_it_runs():
    """Weights are not split among data shards that are none, whatever the level."""
    text = repr(toys.pipeline("adapted", "zb-v", {"stage": 2}, microbatches=4, zero=3))
    trained, total = 192, sum(w.size for w in jax.tree.leaves(toys.named("adapted").params))
    assert text.split("\n") == [
        "Pipeline of 5 layers: schedule 'zb-v', stages=2, chunks=2, microbatches=4",
        "  mesh: data=1, stage=2; rows of a batch: a multiple of 4",
        f"  parameters: {total}, trained: {trained}; zero=0, remat='none', weights='stacked'",
    ]


@pytest.mark.parametrize("name", ["ends", "uneven"])
def test_an_optimizer_state_is_converted_in_its_own_dtypes(name):
    built, params = pipe(name), toys.named(name, 4).params
    leaves, tree = jax.tree.flatten(ADAM.init(params))
    state = tree.unflatten([jnp.full_like(w, number) for number, w in enumerate(leaves)])
    placed = built.optimizer_placing(ADAM).place(state)
    assert {w.dtype for w in jax.tree.leaves(placed[0].mu)} == {jnp.dtype(jnp.bfloat16)}
    chex.assert_trees_all_equal(built.optimizer_placing(ADAM).unplace(placed), state)


def test_shapes_are_placed_as_arrays_and_float64_as_float32():
    """Without x64 JAX has no other float64 than float32."""
    found = pipe().place(jax.tree.map(np.float64, START))
    chex.assert_trees_all_equal_shapes_and_dtypes(found, jax.eval_shape(pipe().place, START))


def values(tree):
    """Arrays for the shapes of a tree."""
    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(tree))))
    return jax.tree.map(lambda w: 0.3 * jax.random.normal(next(keys), w.shape, w.dtype), tree)


def test_layers_may_be_in_a_list_or_stacked_in_a_named_tuple():
    params, batch = values(PARAMS), values(BATCH)
    layers = [jax.tree.map(lambda w, n=n: w[n], params["layers"]) for n in range(4)]
    named = collections.namedtuple("Named", params["layers"])(**params["layers"])
    reference = functools.partial(jaxpipe.unpipelined.value_and_grad, MODEL, num_microbatches=4)
    expected = jax.jit(reference)(params, batch)
    for given, layer, as_given in (
        (layers, [MODEL.layer] * 4, lambda w: [{k: w[k][n] for k in w} for n in range(4)]),
        (named, lambda w, *args: MODEL.layer(w._asdict(), *args), lambda w: type(named)(**w)),
    ):
        built = build(params=with_layers(given, params), layer=layer)
        placed = built.place(with_layers(given, params))
        loss, found = jax.jit(built.value_and_grad)(placed, batch)
        wanted = with_layers(as_given(expected[1]["layers"]), expected[1])
        # Sums that nearly cancel differ in the last bits of their terms, of up to .2.
        close = functools.partial(chex.assert_trees_all_close, rtol=1e-5, atol=1e-7)
        close((loss, built.unplace(found)), (expected[0], wanted))
        chex.assert_trees_all_equal(built.unplace(placed), with_layers(given, params))


def test_layers_may_have_dtypes_that_other_layers_lack():
    layers = tuple(jnp.ones((3, 3), dtype) for dtype in ("float32", "bfloat16") * 2)
    params = {"embed": {}, "layers": layers, "head": {}}
    built = build(
        params=params,
        mesh=jaxpipe.make_mesh(stage=2, data=2),
        zero=2,
        embed=lambda outer, batch, rng: batch["x"],
        layer=(lambda w, x, batch, rng: x + jnp.tanh(x @ w.astype(x.dtype)),) * 4,
        head_loss=lambda outer, x, batch, rng: jnp.mean(x**2),
    )
    placed = built.place(params)
    chex.assert_trees_all_equal(built.unplace(placed), params)
    _, grads = jax.eval_shape(built.value_and_grad, placed, BATCH)
    assert {name: w.dtype for name, w in grads["layers"].items()} == {
        name: w.dtype for name, w in placed["layers"].items()
    }


def test_the_name_of_a_schedule_is_that_schedule_for_the_mesh():
    named = build(schedule="zb-h1", microbatches=6)
    assert named.schedule == jaxpipe.schedules.build("zb-h1", stages=2, microbatches=6)
    assert build(schedule="zb-h1", microbatches=None).schedule.num_microbatches == 4
    assert build(schedule=named.schedule, microbatches=None).schedule == named.schedule


def test_every_schedule_takes_the_default_microbatches():
    for num_stages in (1, 2, 3, 8):
        mesh = jaxpipe.make_mesh(stage=num_stages)
        for entry in jaxpipe.schedules.entries():
            schedule, problems = named_schedule(entry.name, mesh, Axes(), None)
            assert problems == []
            assert schedule.num_microbatches == 2 * num_stages


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
