"""What the compiled tick loop does and does not contain, read from the HLO."""

import dataclasses
import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
import toys
from compilations import AS_USED
from covering import some
from jax.stages import Compiled

import jaxpipe
from benchmarks import gpu_compile
from benchmarks.hlo import HloProgram, Instruction, is_around, pass_of
from benchmarks.roofline import device_groups
from jaxpipe.runtime import assembly, defaults, memory
from jaxpipe.runtime.barriers import after
from jaxpipe.runtime.defaults import RESIDUALS
from jaxpipe.runtime.memory import buffers
from jaxpipe.runtime.tick import setup
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.lowering.table import Edges
from models import gpt

pytestmark = pytest.mark.pipeline
STAGES, DATA, ROWS, MICROBATCHES = 4, 2, 2, 6
# Three layers on some stages and 40 tokens a microbatch: no other array has the shape of a buffer
# or of a weight.
CONFIG = gpt.GPTConfig(
    vocab_size=96, sequence_length=20, num_layers=10, width=32, num_heads=2, dtype="float32"
)
# Indices into buffers of one layer are constant: the compiler knows more.
ONE_LAYER = dataclasses.replace(CONFIG, num_layers=STAGES)
FEW = [("1f1b", "dots", 3), ("1f1b-fused", "full", 3)]
MANY = [
    *FEW,
    *(("1f1b", "none", 0), ("gpipe", "none", 3), ("zb-v", "dots", 1), ("zb-v", "none", 2)),
]
cases = pytest.mark.parametrize("case", some(zip(MANY), *zip(FEW)))


def make_pipeline(
    name: str,
    remat: str,
    zero: int,
    *,
    microbatches=MICROBATCHES,
    config=CONFIG,
    stages=STAGES,
    data=DATA,
    **given,
):
    return jaxpipe.Pipeline(
        gpt.model(config, vocabulary_axis="stage"),
        jax.eval_shape(lambda: gpt.init(config, jax.random.key(0))),
        schedule=jaxpipe.schedules.build(name, stages=stages, microbatches=microbatches),
        mesh=jaxpipe.make_mesh(stage=stages, data=data),
        remat=remat,
        zero=zero,
        **given,
    )


def batch(microbatches: int = MICROBATCHES):
    shape = (ROWS * DATA * microbatches, CONFIG.sequence_length + 1)
    return {"tokens": jax.ShapeDtypeStruct(shape, jnp.int32)}


def step(*case, weights="stacked", config=CONFIG, data=DATA) -> Compiled:
    return compiled(case, weights, config, data)


@functools.cache
def compiled(case: tuple, weights: str, config: gpt.GPTConfig, data: int) -> Compiled:
    pipe = make_pipeline(*case, weights=weights, config=config, data=data)
    return memory.compiled(pipe, batch(), updates=memory.PLAIN_UPDATES, options=AS_USED)


def program(*case, **given) -> HloProgram:
    return HloProgram(step(*case, **given).as_text())


def copies(program: HloProgram, shapes: set[tuple[int, ...]]) -> list[str]:
    """Copies and transposes of these shapes in the loops over ticks, at any depth."""
    return [
        instruction.text
        for loop in program.tick_loops()
        for instruction in program.reached(loop, into_loops=True)
        if instruction.opcode in ("copy", "transpose") and shapes.intersection(instruction.shapes)
    ]


@cases
def test_the_tick_loop_copies_no_whole_buffer(case):
    """Of those that hold more than one layer of one microbatch."""
    kept = jax.tree.leaves(buffers(make_pipeline(*case), batch()))
    shapes = {leaf.shape for leaf in kept if leaf.shape[0] > 1}
    assert shapes
    assert not copies(program(*case), shapes)


def test_a_buffer_that_is_cleared_beside_its_reader_is_found_to_be_copied():
    def body(buffer, x):
        def tick(carry, i):
            buffer, x = carry
            x = jax.lax.ppermute(x, "stage", [(0, 1)])

            def clear(_, carry):
                buffer, x = carry
                x = x @ jax.lax.dynamic_index_in_dim(buffer, i, keepdims=False)
                return jax.lax.dynamic_update_index_in_dim(buffer, jnp.zeros((32, 32)), i, 0), x

            return jax.lax.fori_loop(0, i, clear, (buffer, x)), None

        return jax.lax.scan(tick, (buffer, x), jnp.arange(5))[0]

    P = jax.sharding.PartitionSpec
    mesh = jaxpipe.make_mesh(stage=2)
    run = jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    shapes = jax.ShapeDtypeStruct((5, 32, 32), jnp.float32), jax.ShapeDtypeStruct((32, 32), "f4")
    found = HloProgram(jax.jit(run).lower(*shapes).compile(AS_USED).as_text())
    assert copies(found, {(5, 32, 32)})


@pytest.mark.parametrize(
    ("case", "weights"),
    some(
        itertools.product(MANY, ("stacked", "unrolled")),
        *((FEW[0], "stacked"), (FEW[1], "unrolled")),
    ),
)
def test_idle_ticks_run_no_matmul_and_no_collective_but_the_messages(case, weights):
    gated = idle_ticks_only_send(program(*case, weights=weights))
    assert ("all-gather" in gated) == (case[2] == 3)  # none is gathered ahead of the ticks
    assert ("reduce-scatter" in gated) == (case[2] >= 2)


@pytest.mark.slow
@pytest.mark.parametrize("case", MANY[:4])  # one chunk per stage
def test_idle_ticks_of_one_layer_per_chunk_run_nothing(case):
    idle_ticks_only_send(program(*case, config=ONE_LAYER))


def idle_ticks_only_send(compiled: HloProgram) -> set[str]:
    """Returns the collectives of the ticks that are not idle."""
    collectives, found = {"all-gather", "all-reduce", "reduce-scatter", "all-to-all"}, set()
    for body in compiled.tick_bodies().values():
        always = {instruction.opcode for instruction in compiled.reached(body, into_loops=False)}
        gated = {instruction.opcode for instruction in compiled.reached(body, into_loops=True)}
        assert "dot" in gated
        assert gated & collectives
        assert not always & (collectives | {"dot"})
        found |= gated
    return found


def layer_flops(compiled: HloProgram) -> list[int]:
    """FLOPs of one layer in each loop over layers."""
    loops = [loop for body in compiled.tick_bodies().values() for loop in compiled.loops(body)]
    return [compiled.dot_flops(loop.calls["body"]) for loop in loops if pass_of(loop)]


TOKENS, WIDTH, HIDDEN = ROWS * CONFIG.sequence_length, CONFIG.width, CONFIG.hidden_width
ATTENTION_FLOPS = 2 * (2 * TOKENS * CONFIG.sequence_length * WIDTH)  # scores, and their use
DOWN_FLOPS = 2 * TOKENS * HIDDEN * WIDTH
FORWARD_FLOPS = 2 * TOKENS * WIDTH * (4 * WIDTH + 2 * HIDDEN) + DOWN_FLOPS + ATTENTION_FLOPS
RECOMPUTED_FLOPS = {
    "none": 0,
    "dots": ATTENTION_FLOPS,
    "full": FORWARD_FLOPS - DOWN_FLOPS,  # the layer's output is no residual
}


@cases
def test_a_layer_multiplies_what_the_model_and_its_remat_policy_say(case):
    forward, *backward = layer_flops(program(*case))
    assert forward == FORWARD_FLOPS
    assert sum(backward) == 2 * FORWARD_FLOPS + RECOMPUTED_FLOPS[case[1]]
    if len(backward) == 2:  # W has one product for each weight
        assert backward[1] == FORWARD_FLOPS - ATTENTION_FLOPS


@cases
def test_messages_connect_the_pairs_of_the_table_when_all_layers_of_the_tick_have_run(case):
    """Sent before W, a message would make a stage that only runs W wait for the others' B. Messages
    alone pass through a choice of pairs: XLA copies whatever does."""
    compiled, table = program(*case), make_pipeline(*case).table
    of_ticks = {parts.name: parts for parts in table.parts(gathers=case[2] == 3, reduces=True)}
    in_choices = 0
    for name, body in compiled.tick_bodies().items():
        passes = sum(pass_of(loop) is not None for loop in compiled.loops(body))
        (choice,) = (i for i in compiled.computations[body] if i.opcode == "conditional")
        assert layer_loops(compiled, body, choice) == passes
        (_, *given) = compiled.operands(body, choice)
        size = ROWS * CONFIG.sequence_length * CONFIG.width
        assert {shape for one in given for shape in one.shapes} == {(size,)}
        assert set(choice.shapes) == {(size,), (1,)}  # and the zero that is computed beside them
        found = [permutes(compiled, branch) for branch in choice.calls.values()]
        in_choices += sum(map(len, found))
        kinds = [kind for kind in (Kind.F, Kind.B) if of_ticks[name].has(kind)]
        _, distinct, _ = table.branches(kinds)
        expected = [sorted(map(over_data, itertools.chain(*lists))) for lists in distinct]
        assert sorted(found) == sorted(expected)
    assert in_choices == sum(len(permutes(compiled, name)) for name in compiled.computations)
    assert len(compiled.layer_loops()) == (2 if "fused" in case[0] else 3)


def permutes(compiled: HloProgram, computation: str) -> list[list[list[int]]]:
    """The pairs of devices that each message of a computation connects."""
    rows = compiled.computations[computation]
    sent = [row for row in rows if row.opcode.startswith("collective-permute")]
    return sorted(sorted(device_groups(row.text)) for row in sent)


def over_data(edges: Edges) -> list[list[int]]:
    """Pairs of devices, from pairs of stages."""
    pairs = ([STAGES * shard + end for end in edge] for edge in edges for shard in range(DATA))
    return sorted(pairs)


def layer_loops(compiled: HloProgram, body: str, last: Instruction) -> int:
    """How many loops with matmuls run before this instruction: F, BW or F, B, W."""
    return sum(
        any(i.opcode == "dot" for i in compiled.reached(loop.calls["body"], into_loops=True))
        for loop in compiled.before(body, last)
        if loop.opcode == "while"
    )


def test_late_messages_travel_while_the_layers_run_and_the_others_leave_after(monkeypatch):
    monkeypatch.setattr(assembly, "transfers_overlap", lambda mesh: True)
    monkeypatch.setattr(setup, "FUSES_SLICES", False)  # one loop over layers for each pass
    pipe = make_pipeline("zb-v", "full", 0, microbatches=16)
    compiled = HloProgram(memory.compiled(pipe, batch(16), options=AS_USED).as_text())
    assert sum(layer_flops(compiled)) == 3 * FORWARD_FLOPS + RECOMPUTED_FLOPS["full"]
    body = compiled.tick_loop()
    rows = compiled.computations[body]
    late = [i for i in rows if i.opcode == "collective-permute"]
    assert len(late) == sum(bool(channel.late_edges) for channel in pipe.table.channels) > 0
    assert all(layer_loops(compiled, body, message) == 0 for message in late)
    (choice,) = (i for i in rows if i.opcode == "conditional")
    assert layer_loops(compiled, body, choice) == 3


def test_weights_are_sharded_along_their_leading_dimension():
    """Gathered along another, whole buffers are transposed in the program for GPUs."""
    layers = make_pipeline("1f1b", "none", 3).layout.layers.piece
    assert {leaf.data_dim for leaf in jax.tree.leaves(layers)} == {0}


# Weights in an array per layer.


def copied_bytes(case: tuple, weights: str) -> list[int]:
    """What a layer copies of its weights and gradient sums in F, B and W, or F and BW."""
    pipe = make_pipeline(*case, weights=weights)
    leaves = jax.tree.leaves(pipe.layout.layers.piece)
    shapes = {tuple(sorted(leaf.shape)) for leaf in leaves if len(leaf.shape) > 1}
    found = gpu_compile.weight_traffic(program(*case, weights=weights), shapes)
    assert len(found) == len(pipe.table.passes)
    return [one.copied for one in found]


@pytest.mark.parametrize("case", some(zip(MANY), (FEW[1],)))
def test_no_layer_copies_a_weight_or_a_gradient_sum_that_is_an_array_of_its_own(case):
    assert not any(copied_bytes(case, "unrolled"))
    stacked = copied_bytes(case, "stacked")
    assert all(stacked[:2])  # what this test would find
    assert not any(stacked[2:])  # W reads a stack of sums in the kernel that writes it


@pytest.mark.parametrize("case", some(zip([FEW[1], *MANY[2:3], *MANY[4:]]), (FEW[1],)))
def test_temporaries_are_no_more_than_those_of_stacked_weights(case):
    unrolled, stacked = (
        step(*case, weights=weights).memory_analysis().temp_size_in_bytes
        for weights in ("unrolled", "stacked")
    )
    assert unrolled <= 1.01 * stacked


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_step_copies_no_more_of_what_it_is_given_than_with_stacked_weights(zero):
    """The optimizer writes where parameters and moments lie."""
    copied = {}
    for weights in ("stacked", "unrolled"):
        pipe = toys.pipeline("tied", sizes={"stage": 4, "data": 2}, zero=zero, weights=weights)
        updates = optax.adam(1e-2), "step"
        shapes = toys.named("tied").batch(16)
        text = memory.compiled(pipe, shapes, updates=updates, options=AS_USED).as_text()
        copied[weights] = text[text.index("ENTRY") :].count("copy(%param")
    assert copied["unrolled"] <= copied["stacked"]


# Slots that the program knows.


def writes_in_slots(program: HloProgram) -> list[str]:
    """Writes in loops over layers at places that the program does not know."""
    return [
        row.text
        for loops in program.layer_loops().values()
        for loop in loops
        for row in program.reached(loop.calls["body"], into_loops=True)
        if row.opcode == "dynamic-update-slice"
    ]


def test_residuals_are_written_where_they_wait_without_a_copy(monkeypatch):
    monkeypatch.setattr(assembly, "transfers_overlap", lambda mesh: True)
    config = dataclasses.replace(CONFIG, num_layers=2)
    given = {"weights": "unrolled", "config": config, "stages": 2, "data": 1}

    def program() -> HloProgram:
        pipe = make_pipeline("zb-h1", "dots", 0, **given)
        return HloProgram(memory.compiled(pipe, batch()).as_text())

    known = program()
    assert not writes_in_slots(known)
    # A stage that runs no such action passes one loop, not one for every slot.
    (tick,) = known.tick_bodies().values()
    loops = [row for row in known.computations[tick] if row.opcode == "while"]
    around = [row for row in loops if is_around(row)]
    assert len(around) == len(known.layer_loops()) == 3
    assert sum(pass_of(row) is not None for row in known.loops(tick)) == 3 * 2
    monkeypatch.setattr(defaults, "MOST_COPIES", 0)
    assert writes_in_slots(program())


def test_nothing_is_packed_where_layers_are_alike_place_by_place(monkeypatch):
    """Two kinds of layers run without a gate and write what they keep where it waits."""
    monkeypatch.setattr(assembly, "transfers_overlap", lambda mesh: True)
    config = dataclasses.replace(CONFIG, num_layers=4, window=7, global_every=2)

    def pipeline(weights: str) -> jaxpipe.Pipeline:
        given = {"weights": weights, "config": config, "stages": 2, "data": 1}
        return make_pipeline("1f1b-fused", "dots", 0, **given)

    compiled = memory.compiled(pipeline("unrolled"), batch(), options=AS_USED).as_text()
    assert "/kind1_2of4/" not in compiled
    assert not writes_in_slots(HloProgram(compiled))
    pipe = pipeline("stacked")
    gated = jax.jit(pipe.value_and_grad).lower(pipe.placed_params, batch())
    assert "/kind1_2of4/" in gated.as_text(debug_info=True)


def test_stacked_layers_are_slices_at_the_number_of_a_loop(monkeypatch):
    """XLA for GPUs reads and writes them where they lie if the loop's trips are known."""
    monkeypatch.setattr(assembly, "transfers_overlap", lambda mesh: True)
    monkeypatch.setattr(setup, "FUSES_SLICES", True)
    config = dataclasses.replace(CONFIG, num_layers=6)
    pipe = make_pipeline("zb-h1", "dots", 0, stages=2, data=1, config=config)
    found = HloProgram(memory.compiled(pipe, batch(), options=AS_USED).as_text())
    layers = 3
    for loops in found.layer_loops().values():
        assert len(loops) == 2
        for loop in loops:
            inside = found.reached(loop.calls["body"], into_loops=False)
            (over_layers,) = (row for row in inside if row.opcode == "while")
            assert f'"known_trip_count":{{"n":"{layers}"}}' in over_layers.text
    kept = jax.tree.leaves([buffers(pipe, batch())[name] for name in RESIDUALS])
    assert {leaf.shape[0] for leaf in kept} == {layers}


def test_slots_are_known_while_the_program_does_not_grow_too_large(monkeypatch):
    monkeypatch.setattr(assembly, "transfers_overlap", lambda mesh: True)
    for microbatches, arrays in ((8, 3 * 8), (80, 1)):
        pipe = make_pipeline("gpipe", "full", 0, weights="unrolled", microbatches=microbatches)
        # A layer keeps its input: an array for every slot and layer, or one for all.
        assert len(jax.tree.leaves(buffers(pipe, batch(microbatches))["until_b"])) == arrays


# Memory.


def memory_is_predicted(name, remat, zero, **given) -> None:
    predicted = sum(
        memory.predicted_bytes(make_pipeline(name, remat, zero, **given), batch()).values()
    )
    compiled = memory.bytes_beside_arguments(step(name, remat, zero, **given))
    assert compiled == pytest.approx(predicted, rel=0.02)


def test_memory_is_predicted_with_the_same_kinds_at_the_same_places():
    """In equal chunks, places would have layers of both kinds."""
    pipe = toys.pipeline("places", num_layers=6, layer_counts=(4, 2))
    small = memory._smallest(pipe)
    assert small.schedule.num_microbatches == 2
    assert (small.layout.layers.rows == pipe.layout.layers.rows).all()


def test_predicted_memory_is_the_compiled_one():
    """The working set is read from a model with another schedule and two microbatches."""
    memory_is_predicted(*FEW[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "width", "of"),
    [
        (24, 32, [("1f1b", "none", 0, 1), ("1f1b", "full", 0, DATA), ("1f1b", "full", 1, DATA)]),
        (24, 32, [("breadth-first", "none", 2, DATA), ("zb-v", "full", 3, DATA)]),
        # The gradient of one layer is that of its chunk, and one slot from B to W is one value.
        (STAGES, 128, [("1f1b", "none", 3, DATA), ("zb-h1", "full", 3, DATA)]),
        (2 * STAGES, 128, [("breadth-first-fused", "full", 3, DATA)]),
    ],
)
def test_predicted_memory_is_the_compiled_one_however_many_layers(layers, width, of):
    for name, remat, zero, data in of:
        config = dataclasses.replace(CONFIG, num_layers=layers, width=width)
        memory_is_predicted(name, remat, zero, config=config, data=data)


def test_buffers_do_not_depend_on_the_number_of_microbatches():
    few, many = (
        buffers(make_pipeline("1f1b", "full", 3, microbatches=m), batch(m)) for m in (6, 24)
    )
    assert few == many


@pytest.mark.parametrize(
    ("name", "data", "zero"),
    some([("modular-fused", 1, 0), ("modular", DATA, 3)], ("modular-fused", 1, 0)),
)
def test_memory_of_updates_chunk_by_chunk_is_predicted_too(name, data, zero):
    config = dataclasses.replace(CONFIG, num_layers=16)
    pipe, adam = make_pipeline(name, "full", zero, config=config, data=data), optax.adam(0.1)
    predicted = memory.predicted_bytes(pipe, batch(), by_chunk=adam)
    compiled = memory.compiled(pipe, batch(), updates=(adam, "chunk"), options=AS_USED)
    assert memory.bytes_beside_arguments(compiled) == pytest.approx(
        sum(predicted.values()), rel=0.02
    )


def test_what_waits_for_many_arrays_reads_each_of_them_once():
    first = [jnp.ones((2, n)) for n in range(1, 8)]
    then = [jnp.arange(5.0), jnp.ones((3, 4)), jnp.arange(6)]
    program = jax.jit(after).lower(first, then, 0).compile(AS_USED)
    assert program.as_text().count(" slice(") == len(first)
    chex.assert_trees_all_equal(program(first, then, 0), then)
