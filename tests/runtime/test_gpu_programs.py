"""What benchmarks read from programs that are compiled for GPUs and TPUs."""

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from benchmarks import (
    compiled_ticks,
    gpu_check,
    gpu_compile,
    gpu_exposed,
    modelled_steps,
    plain_steps,
)
from benchmarks.hlo import HloProgram, Scope, is_around, layers_of, scope_of
from benchmarks.kernels import Use, kernel
from benchmarks.roofline import LAUNCH, PEAKS, WAIT, Roofline, device_groups, known_trips
from jaxpipe.planning.devices import Device, find
from jaxpipe.planning.without_devices import attention_of_gpus
from jaxpipe.runtime.defaults import RESIDUALS_OF
from jaxpipe.runtime.layers.split import REMAT_POLICIES
from jaxpipe.schedule import catalog
from jaxpipe.schedule.lowering.lower import lower
from jaxpipe.schedule.lowering.table import NONE
from models import gpt

# The roofline model of `benchmarks/gpu_roofline.py`.

WEIGHTS = {(64, 256)}
SCOPE = 'metadata={op_name="jit(f)/while/body/closed_call/%s/while"}'
CUBLAS = 'custom_call_target="__cublas$lt$matmul", "lhs_contracting_dimensions":["0"]'
PROGRAM = f"""HloModule step, is_scheduled=true

%multiply (a: bf16[32,64], w: bf16[64,256]) -> bf16[32,256] {{
  %a = bf16[32,64]{{1,0}} parameter(0)
  %w = bf16[64,256]{{1,0}} parameter(1)
  ROOT %dot = bf16[32,256]{{1,0}} dot(%a, %w), lhs_contracting_dims={{1}}
}}

%cut (stack: f32[4,64,256], at: s32[]) -> bf16[1,64,256] {{
  %stack = f32[4,64,256]{{2,1,0}} parameter(0)
  %at = s32[] parameter(1)
  %one = f32[1,64,256]{{2,1,0}} dynamic-slice(%stack, %at), dynamic_slice_sizes={{1,64,256}}
  ROOT %cast = bf16[1,64,256]{{2,1,0}} convert(%one)
}}

%store (slots: bf16[8,8192], value: bf16[32,256], at: s32[]) -> bf16[8,8192] {{
  %slots = bf16[8,8192]{{1,0}} parameter(0)
  %value = bf16[32,256]{{1,0}} parameter(1)
  %at = s32[] parameter(2)
  %flat = bf16[1,8192]{{1,0}} bitcast(%value)
  ROOT %stored = bf16[8,8192]{{1,0}} dynamic-update-slice(%slots, %flat, %at)
}}

%load (slots: bf16[8,8192], at: s32[]) -> bf16[1,8192] {{
  %slots = bf16[8,8192]{{1,0}} parameter(0)
  %at = s32[] parameter(1)
  ROOT %loaded = bf16[1,8192]{{1,0}} dynamic-slice(%slots, %at), dynamic_slice_sizes={{1,8192}}
}}

%narrowed (wide: f32[64,256]) -> bf16[64,256] {{
  %wide = f32[64,256]{{1,0}} parameter(0)
  ROOT %cast = bf16[64,256]{{1,0}} convert(%wide)
}}

%pick (table: f32[64,256], at: s32[64]) -> f32[64] {{
  %table = f32[64,256]{{1,0}} parameter(0)
  %at = s32[64]{{0}} parameter(1)
  %negated = f32[64,256]{{1,0}} negate(%table)
  ROOT %chosen = f32[64]{{0}} gather(%negated, %at)
}}

%sum (old: f32[64,256], new: f32[64,256]) -> f32[64,256] {{
  %old = f32[64,256]{{1,0}} parameter(0)
  %new = f32[64,256]{{1,0}} parameter(1)
  ROOT %added = f32[64,256]{{1,0}} add(%old, %new)
}}

%added (stack: f32[4,64,256], at: s32[], b: bf16[96,64], c: bf16[96,256]) -> f32[4,64,256] {{
  %stack = f32[4,64,256]{{2,1,0}} parameter(0)
  %at = s32[] parameter(1)
  %b = bf16[96,64]{{1,0}} parameter(2)
  %c = bf16[96,256]{{1,0}} parameter(3)
  %old = f32[1,64,256]{{2,1,0}} dynamic-slice(%stack, %at), dynamic_slice_sizes={{1,64,256}}
  %row = f32[64,256]{{1,0}} bitcast(%old)
  %both = (f32[64,256], s8[4096]) custom-call(%b, %c, %row), {CUBLAS}
  %new = f32[64,256]{{1,0}} get-tuple-element(%both), index=0
  %space = s8[4096]{{0}} get-tuple-element(%both), index=1
  %put = f32[4,64,256]{{2,1,0}} dynamic-update-slice(%stack, %new, %at)
  ROOT %out = (f32[4,64,256], s8[4096]) tuple(%put, %space)
}}

%layer (p: (bf16[32,64], bf16[64,256])) -> (bf16[32,64], bf16[64,256]) {{
  %p = (bf16[32,64], bf16[64,256]) parameter(0)
  %a = bf16[32,64]{{1,0}} get-tuple-element(%p), index=0
  %w = bf16[64,256]{{1,0}} get-tuple-element(%p), index=1
  %product = bf16[32,256]{{1,0}} fusion(%a, %w), kind=kCustom, calls=%multiply
  ROOT %out = (bf16[32,64], bf16[64,256]) tuple(%a, %w)
}}

%nothing (p: bf16[8192]) -> bf16[8192] {{
  ROOT %p = bf16[8192]{{0}} parameter(0)
}}

%meeting (p: bf16[8192]) -> bf16[8192] {{
  %p = bf16[8192]{{0}} parameter(0)
  ROOT %got = bf16[8192]{{0}} collective-permute(%p), source_target_pairs={{{{0,1}},{{1,2}}}}
}}

ENTRY %main (a: bf16[32,64], w: bf16[64,256], stack: f32[4,64,256]) -> f32[] {{
  %a = bf16[32,64]{{1,0}} parameter(0)
  %w = bf16[64,256]{{1,0}} parameter(1)
  %stack = f32[4,64,256]{{2,1,0}} parameter(2)
  %slots = bf16[8,8192]{{1,0}} parameter(3)
  %shard = f32[1048576]{{0}} parameter(4)
  %at = s32[] constant(1)
  %early = (f32[1048576], f32[4194304]) all-gather-start(%shard), replica_groups={{{{0,1,2,3}}}}
  %both = (bf16[32,64], bf16[64,256]) tuple(%a, %w)
  %layers = (bf16[32,64], bf16[64,256]) while(%both), body=%layer, {SCOPE % "F/chunk1_layer2"}
  %all = f32[4194304]{{0}} all-gather-done(%early)
  %product = bf16[32,256]{{1,0}} fusion(%a, %w), kind=kCustom, calls=%multiply
  %weight = bf16[1,64,256]{{2,1,0}} fusion(%stack, %at), kind=kLoop, calls=%cut
  %saved = bf16[8,8192]{{1,0}} fusion(%slots, %product, %at), kind=kLoop, calls=%store
  %read = bf16[1,8192]{{1,0}} fusion(%saved, %at), kind=kLoop, calls=%load
  %gradient = f32[64,256]{{1,0}} custom-call(%a)
  %narrow = bf16[64,256]{{1,0}} fusion(%gradient), kind=kLoop, calls=%narrowed
  %places = s32[64]{{0}} constant(0)
  %picked = f32[64]{{0}} fusion(%gradient, %places), kind=kLoop, calls=%pick
  %summed = f32[64,256]{{1,0}} fusion(%gradient, %gradient), kind=kLoop, calls=%sum
  %b = bf16[96,64]{{1,0}} parameter(5)
  %c = bf16[96,256]{{1,0}} parameter(6)
  %sums = (f32[4,64,256], s8[4096]) fusion(%stack, %at, %b, %c), kind=kCustom, calls=%added
  %message = bf16[8192]{{0}} bitcast(%product)
  %met = bf16[8192]{{0}} while(%message), body=%meeting, {SCOPE % "leave"}
  ROOT %loss = f32[] constant(0)
}}
"""


def kernel_named(name: str):
    program = HloProgram(PROGRAM)
    (row,) = (row for row in program.computations["main"] if row.name == name)
    return kernel(program, "main", row, WEIGHTS)


@pytest.mark.parametrize(
    ("name", "use", "flops", "moved"),
    [
        ("product", Use.MATMUL, 2 * 32 * 64 * 256, 2 * (32 * 64 + 64 * 256 + 32 * 256)),
        # Of a stack it reads the part that it cuts out; the number of that part has 4 bytes.
        ("weight", Use.WEIGHTS, 0, 64 * 256 * (4 + 2) + 4),
        # In place: the slots are neither read nor written but where the value goes.
        ("saved", Use.WRITES, 0, 2 * 2 * 32 * 256 + 4),
        ("read", Use.READS, 0, 2 * 2 * 32 * 256 + 4),
        ("summed", Use.SUMS, 0, 3 * 4 * 64 * 256),
        # A matmul that adds to a row of a stack; its work space is no traffic.
        ("sums", Use.MATMUL, 2 * 96 * 64 * 256, 2 * 96 * (64 + 256) + 2 * 4 * 64 * 256 + 4),
        # A cast reads its operand whole, and what picks elements computes no others.
        ("narrow", Use.WEIGHTS, 0, 64 * 256 * (4 + 2)),
        ("picked", Use.OTHER, 0, 4 * (2 * 64 + 64)),
    ],
)
def test_what_a_kernel_does(name, use, flops, moved):
    found = kernel_named(name)
    assert (found.use, found.flops, found.bytes) == (use, flops, moved)


def attention(call: str):
    """The kernel of a custom call on 48 queries and 96 keys and values of 4 and 2 heads."""
    text = f"""
ENTRY %main (q: bf16[2,48,4,16]) -> bf16[2,48,4,16] {{
  %q = bf16[2,48,4,16]{{3,2,1,0}} parameter(0)
  %k = bf16[2,96,2,16]{{3,2,1,0}} parameter(1)
  ROOT %y = {call}
}}
"""
    program = HloProgram(text)
    found = kernel(program, "main", program.computations["main"][-1], WEIGHTS)
    assert found.use is Use.ATTENTION
    return found


@pytest.mark.parametrize(
    ("target", "mask", "matmuls"),
    [("Softmax", "CAUSAL", 1), ("Softmax", "NO_MASK", 2), ("SoftmaxBackward", "CAUSAL", 2.5)],
)
def test_attention_is_two_matmuls_and_five_backward_half_of_them_if_causal(target, mask, matmuls):
    result, call = "(bf16[2,4,48,16]{3,1,2,0}, u8[0]{0})", f'"__cudnn$fmha{target}", {mask}'
    found = attention(f"{result} custom-call(%q, %q, %q), custom_call_target={call}")
    assert found.flops == matmuls * 2 * (2 * 4) * 48 * 48 * 16
    assert found.bytes == 4 * 2 * 2 * 48 * 4 * 16


KEYS = "bf16[2,96,2,16]{3,2,1,0}"


@pytest.mark.parametrize(
    ("results", "matmuls"),
    [
        ("(bf16[2,48,4,16]{3,2,1,0}, f32[2,4,48]{2,1,0})", 2),
        ("bf16[2,48,4,16]{3,2,1,0}", 3),
        (f"({KEYS}, {KEYS})", 4),
    ],
    ids=["forward", "queries", "keys and values"],
)
def test_kernels_of_attention_over_blocks_compute_half_of_all_pairs(results, matmuls):
    target = 'custom_call_target="__gpu$xla.gpu.triton"'
    found = attention(f"{results} custom-call(%q, %k, %k), {target}")
    assert found.flops == matmuls * 2 * (2 * 4) * (48 * 96 / 2) * 16


def seconds(**trips: float):
    """The entry's time by use, if these loops run so often."""
    roofline = Roofline(HloProgram(PROGRAM), WEIGHTS)
    return roofline.run("main", lambda loop: trips[loop.name])


@pytest.mark.parametrize(
    ("hosts", "bandwidth"),
    [
        ((0, 0, 0, 0), PEAKS["nvlink"]),
        ((0, 1, 2, 3), PEAKS["network"]),
        ((0, 0, 0, 1), PEAKS["network"]),
    ],
)
def test_only_what_remains_of_a_transfer_when_it_is_waited_for_is_exposed(hosts, bandwidth):
    """A shard goes to three others."""
    program = HloProgram(PROGRAM)
    gather = 3 * 4 * 1048576 / bandwidth.value
    product = 2 * (32 * 64 + 64 * 256 + 32 * 256) / PEAKS["memory"].value + LAUNCH.value
    for trips in (0, 1, 5):
        between = trips * (product + LAUNCH.value) + LAUNCH.value
        spent = Roofline(program, WEIGHTS, hosts).run(
            "main", lambda row, n=trips: n * (row.name == "layers")
        )
        assert spent[Use.TRANSFERS] == pytest.approx(max(0.0, gather - between))


def test_transfers_are_told_apart_by_the_axes_that_they_connect():
    """Those alone take all of their time; of others at most what nothing hides is exposed."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("stage", "data"))
    done = "  %all = f32[4194304]{0} all-gather-done(%early)\n"
    sent = (
        "  %sent = f32[1048576]{0} collective-permute(%shard), source_target_pairs={{0,2},{2,0}}\n"
    )

    def spent_of(text, *, alone):
        roofline = gpu_exposed.ByAxes(HloProgram(text), WEIGHTS, mesh=mesh, alone=alone)
        return roofline.run("main", lambda loop: {"layers": 5, "met": 3}[loop.name])

    gather, message, beside = 3 * 4 * 1048576, 3 * 2 * 8192, 4 * 1048576
    alone = spent_of(PROGRAM.replace(done, sent + done), alone=True)
    moved = {
        ("stage+data", "all-gather"): gather / PEAKS["nvlink"].value,
        ("data", "collective-permute"): message / PEAKS["nvlink"].value,
        ("stage", "collective-permute"): beside / PEAKS["nvlink"].value,
    }
    assert alone == pytest.approx(moved)
    spent, alone = (spent_of(PROGRAM, alone=alone) for alone in (False, True))
    rows = gpu_exposed.rows_of(spent, alone)
    assert [name for name, *_ in rows] == ["stage+data all-gather", "stage+data in all"]
    (_, whole, exposed), in_all = rows
    assert in_all[1:] == (whole, exposed)
    assert 0 < exposed == pytest.approx(1e3 * seconds(layers=5, met=0)[Use.TRANSFERS])
    assert exposed < whole == pytest.approx(1e3 * gather / PEAKS["nvlink"].value)


def test_a_loop_takes_its_trips_and_a_launch_for_every_question_whether_to_go_on():
    none, three = seconds(layers=0, met=0), seconds(layers=3, met=0)
    product = 2 * (32 * 64 + 64 * 256 + 32 * 256) / PEAKS["memory"].value
    assert three[Use.MATMUL] - none[Use.MATMUL] == pytest.approx(3 * product)
    assert three[Use.LAUNCHES] - none[Use.LAUNCHES] == pytest.approx(6 * LAUNCH.value)


def test_layers_of_one_kind_run_in_a_loop_as_often_as_a_layer_is_of_it():
    assert known_trips(loop("F/while/body/kind1_4of16")) == 0.25
    assert known_trips(loop("F/while/body/others")) == 1


def test_the_host_waits_for_loops_that_communicate():
    none, once = seconds(layers=0, met=0), seconds(layers=5, met=1)
    assert none[Use.WAITS] == pytest.approx(WAIT.value)
    assert once[Use.WAITS] == pytest.approx(2 * WAIT.value)
    without = seconds(layers=5, met=0)[Use.TRANSFERS]
    message = 2 * 8192 / PEAKS["nvlink"].value
    assert once[Use.TRANSFERS] - without == pytest.approx(message)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,4},{1,5}}, x", [[0, 4], [1, 5]]),
        ("source_target_pairs={{0,1},{1,2}}, x", [[0, 1], [1, 2]]),
        ("replica_groups=[2,4]<=[8], x", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=[4,2]<=[2,4]T(1,0), x", [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ],
)
def test_device_groups(text, groups):
    assert device_groups(text) == groups


def loop(scope: str):
    text = PROGRAM.replace("F/chunk1_layer2", scope)
    return next(row for row in HloProgram(text).computations["main"] if row.name == "layers")


@pytest.mark.parametrize("form", ["stacked", "unrolled", "known"])
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "breadth-first-fused"])
def test_the_loops_of_all_ticks_run_every_layer_of_every_action_once(name, form):
    schedule = catalog.build(name, stages=4, microbatches=8)
    counts = [3] * schedule.placement.num_virtual_stages
    table = lower(schedule, counts, own_slots=True)
    places = {
        "stacked": [""],
        "unrolled": [f"/chunk{c}_layer{n}" for c in range(schedule.num_chunks) for n in range(3)],
    }
    for kind in table.passes:
        cells = table.cells(kind, ("chunk", "layers", *RESIDUALS_OF[kind])).values()
        places["known"] = ["/" + "_".join(f"{k}{n}" for k, n in cell.items()) for cell in cells]
        loops = [loop(f"{kind.name}{place}") for place in places[form]]
        for stage, order in enumerate(schedule.orders):
            trips = [
                modelled_steps.Trips(table, tick, stage)(row)
                for tick in range(table.num_ticks)
                for row in loops
            ]
            trips = [n * layers_of(row) for n, row in zip(trips, itertools.cycle(loops))]
            assert sum(trips) == 3 * sum(action.kind is kind for action in order)


@pytest.mark.parametrize("together", [False, True])
def test_loops_over_chunks_and_the_vocabulary_run_as_the_table_says(together):
    schedule = catalog.build("breadth-first", stages=2, microbatches=4)
    table = lower(schedule, [2] * 4, together=together)
    places = [(tick, stage) for tick in range(table.num_ticks) for stage in range(2)]

    def runs(scope: str) -> float:
        return sum(modelled_steps.Trips(table, *place)(loop(scope)) for place in places)

    # On both stages, or on one of the ends.
    number = 4 * (2 if together else 1)
    assert runs("enter") == runs("leave") == runs("embed_gradient") == number
    assert runs("gather/chunk0") + runs("gather/chunk1") == sum(table.gathers.counts)
    assert runs("reduce") == 2 * sum(table.reduces.counts)
    # Messages that one permute may bring share a loop.
    arrivals = [slots for arrival in table.rows.arrivals for slots in arrival]
    received = [runs(f"meet/receive{n}") for n in range(len(arrivals))]
    assert received == [(slots != NONE).sum() for slots in arrivals]
    assert runs("meet/receive0_1") == sum(received[:2])


def test_a_loop_is_of_the_tick_that_it_stands_in():
    own, other = "tick_forward", "tick_backward_reduce"
    inside = loop(f"{own}/while/body/closed_call/F/chunk1_layer2")
    assert scope_of(inside) == Scope(own, "F", 1, 2)
    known = "chunk0_layers3_until_w5"
    assert scope_of(loop(f"B/{known}")).cell == (("layers", 3), ("until_w", 5))
    around = loop(f"{own}/while/body/closed_call/B/cells0_to15/while/body/cells4_to7")
    one = loop(
        f"{own}/while/body/closed_call/B/cells0_to15/while/body/cells4_to7/while/body/{known}"
    )
    assert scope_of(around)[:4] == (own, "B", None, None)
    assert is_around(around)
    assert scope_of(one) == Scope(own, "B", 0, None, (("layers", 3), ("until_w", 5)))
    assert modelled_steps.is_of(inside, own)
    assert not modelled_steps.is_of(inside, other)
    assert not modelled_steps.is_of(loop(other), own)  # the loop over other ticks
    assert modelled_steps.is_of(loop("nameless"), own)  # and an error, then


def test_the_model_that_is_costed_has_cudnns_attention():
    config = gpt.GPTConfig(
        vocab_size=64, sequence_length=64, num_layers=1, width=64, num_heads=2, dtype="bfloat16"
    )
    params = jax.eval_shape(lambda: gpt.init(config, jax.random.key(0)))
    tokens = jax.ShapeDtypeStruct((1, 64), "int32")
    with attention_of_gpus():
        program = jax.make_jaxpr(lambda params, tokens: gpt.logits(config, params, tokens))
        assert "dot_product_attention_fwd" in str(program(params, tokens))


@pytest.mark.parametrize(("remat", "forwards"), [("none", 1), ("dots", 1), ("full", 2)])
def test_only_full_remat_runs_cudnns_attention_again(remat, forwards):
    query = jax.ShapeDtypeStruct((1, 64, 2, 64), "bfloat16")

    def layer(x):
        y = jax.nn.dot_product_attention(x, x, x, is_causal=True, implementation="cudnn")
        return y.sum().astype("float32")

    kept = REMAT_POLICIES[remat]
    layer = layer if kept is None else jax.checkpoint(layer, policy=kept)
    with attention_of_gpus():
        program = str(jax.make_jaxpr(jax.grad(layer))(query))
    assert program.count("= dot_product_attention_fwd_wrapper[") == forwards


# Transfers, copies and waits: `benchmarks/gpu_compile.py` and `tpu_compile.py`.

TICK_SCOPE = 'metadata={op_name="jit(step)/tick_forward/while/body/closed_call/%s/while"}'
TICK_PROGRAM = f"""HloModule step, is_scheduled=true

%layer (p: (f32[4,8,8], f32[8,8])) -> (f32[4,8,8], f32[8,8]) {{
  %p = (f32[4,8,8], f32[8,8]) parameter(0)
  %w = f32[4,8,8]{{2,1,0}} get-tuple-element(%p), index=0
  %x = f32[8,8]{{1,0}} get-tuple-element(%p), index=1
  %cut = bf16[1,8,8]{{2,1,0}} fusion(%w), kind=kLoop, calls=%cut_computation
  %y = f32[8,8]{{1,0}} dot(%cut, %x)
  ROOT %out = (f32[4,8,8], f32[8,8]) tuple(%w, %y)
}}

%cut_computation (w: f32[4,8,8]) -> bf16[1,8,8] {{
  %w = f32[4,8,8]{{2,1,0}} parameter(0)
  ROOT %cut = bf16[1,8,8]{{2,1,0}} slice(%w)
}}

%continue (p: (f32[4,8,8], f32[8,8])) -> pred[] {{
  %p = (f32[4,8,8], f32[8,8]) parameter(0)
  ROOT %no = pred[] constant(false)
}}

%tick (p: (f32[4,8,8], f32[8,8])) -> (f32[4,8,8], f32[8,8]) {{
  %p = (f32[4,8,8], f32[8,8]) parameter(0)
  %x = f32[8,8]{{1,0}} get-tuple-element(%p), index=1
  %early = (f32[8,8], f32[8,8]) collective-permute-start(%x), CONFIG
  %p1 = (f32[4,8,8], f32[8,8]) while(%p), body=%layer, {TICK_SCOPE % "F/chunk0_layer0"}
  %p2 = (f32[4,8,8], f32[8,8]) while(%p1), body=%layer, {TICK_SCOPE % "F/chunk0_layer1"}
  %arrived = f32[8,8]{{1,0}} collective-permute-done(%early)
  %w = f32[4,8,8]{{2,1,0}} get-tuple-element(%p2), index=0
  %again = f32[4,8,8]{{2,1,0}} copy(%w)
  ROOT %out = (f32[4,8,8], f32[8,8]) tuple(%again, %arrived)
}}

ENTRY %main (p: (f32[4,8,8], f32[8,8])) -> (f32[4,8,8], f32[8,8]) {{
  %p = (f32[4,8,8], f32[8,8]) parameter(0)
  ROOT %ticks = (f32[4,8,8], f32[8,8]) while(%p), condition=%continue, body=%tick
}}
"""

GATHER = """%gather (x: f32[8,8]) -> (f32[8,8], f32[16,8]) {
  %x = f32[8,8]{1,0} parameter(0)
  %whole = f32[16,8]{1,0} all-gather(%x), dimensions={0}
  ROOT %out = (f32[8,8], f32[16,8]) tuple(%x, %whole)
}

"""

THUNKS = """000: kCommandBuffer [source | sink]
033: kWhile         [prev=000 (1) | sink]
condition:
    034: kCustomKernel [source | sink] compare
  body:
    047: kWhile         [source | sink]
condition:
        048: kCustomKernel [source | sink] compare
      body:
        052: kWhile         [source | sink]
condition:
          body:
            053: kAllReduce [source | sink]
    000: kCommandBuffer [prev=047 (1) | sink]
        060: kWhile         [source | sink]
condition:
          body:
            061: kCustomKernel [source | sink] matmul
"""


@pytest.mark.parametrize(("sync", "hidden_by"), [("false", 2), ("true", 0)])
def test_a_transfer_is_hidden_by_the_layer_loops_before_its_end(sync, hidden_by):
    program = HloProgram(TICK_PROGRAM.replace("CONFIG", f'backend_config={{"is_sync":{sync}}}'))
    (found,) = compiled_ticks.collectives(program)
    assert found == compiled_ticks.Collective(
        "collective-permute", bytes=256, place="tick", hidden_by=hidden_by, tick="tick_forward"
    )


def test_tpus_gather_and_reduce_in_fusions():
    """The loops that hide a gather hand on the values that its end reads."""
    start = "%early = (f32[8,8], f32[8,8]) collective-permute-start(%x), CONFIG"
    gather = "%async-collective-start.1 = (f32[8,8], f32[16,8]) fusion(%x), calls=%gather"
    text = TICK_PROGRAM.replace(start, gather).replace("%layer (p", GATHER + "%layer (p", 1)
    done = "%async-collective-done.1 = f32[8,8]{1,0} fusion(%p2), calls=%gather"
    text = text.replace("%arrived = f32[8,8]{1,0} collective-permute-done(%early)", done)
    (found,) = compiled_ticks.collectives(HloProgram(text))
    assert (found.opcode, found.hidden_by) == ("all-gather", 2)

    reduce = "%early = f32[4,8]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1"
    (found,) = compiled_ticks.collectives(HloProgram(TICK_PROGRAM.replace(start, reduce)))
    assert (found.opcode, found.hidden_by) == ("reduce-scatter", 0)


def test_a_transfer_without_an_end_of_its_own_is_synchronous():
    text = TICK_PROGRAM.replace(
        "(f32[8,8], f32[8,8]) collective-permute-start", "f32[8,8] collective-permute"
    )
    (found,) = compiled_ticks.collectives(HloProgram(text))
    assert found.hidden_by == 0


def test_copies_of_buffers_and_weights():
    program = HloProgram(TICK_PROGRAM)
    assert [row.name for row in compiled_ticks.whole_buffers(program, {(4, 8, 8)})] == ["again"]
    assert compiled_ticks.whole_buffers(program, {(5, 8, 8)}) == []


@pytest.mark.parametrize(("scope", "passes"), [("F/chunk0_layer1", 1), ("W/chunk0_layer1", 2)])
def test_what_a_layer_writes_of_its_weights(scope, passes):
    """Each of the two loops cuts one from a stack; as two loops of one pass they count once."""
    text = TICK_PROGRAM.replace("F/chunk0_layer1", scope)
    found = gpu_compile.weight_traffic(HloProgram(text), {(8, 8)})
    assert found == [gpu_compile.WeightTraffic(copied=128, cast=0)] * passes
    cast = text.replace("bf16[1,8,8]{2,1,0} slice", "bf16[1,8,8]{2,1,0} convert")
    found = gpu_compile.weight_traffic(HloProgram(cast), {(8, 8)})
    assert found == [gpu_compile.WeightTraffic(copied=0, cast=128)] * passes


def test_only_what_is_outside_cuda_graphs_waits_for_the_host():
    assert gpu_compile.host_waits(THUNKS) == (1, 0)
    choice = "    062: kConditional [source | sink]\n      branch_0:\n        063: kWhile [sink]\n"
    assert gpu_compile.host_waits(THUNKS + choice) == (1, 1)


# Steps without a pipeline: `benchmarks/plain_steps.py`.


@pytest.mark.pipeline
@pytest.mark.parametrize(("remat", "shards"), [("full", 1), ("none", 2)])
def test_steps_without_a_pipeline_have_the_models_loss_and_gradients(remat, shards):
    config = gpt.GPTConfig(
        vocab_size=48, sequence_length=12, num_layers=2, width=32, num_heads=2, dtype="bfloat16"
    )
    model, init = gpt.model(config), jax.jit(gpt.init, static_argnums=0)
    params = plain_steps.by_layer(jax.device_get(init(config, jax.random.key(0))))
    tokens = np.random.default_rng(1).integers(48, size=(3, 2, 13))  # three microbatches

    @jax.jit
    @jax.value_and_grad
    def expected(params):
        def loss(rows):
            x = model.embed(params, {"tokens": rows}, None)
            for weights in params["layers"]:
                x = model.layer(weights, x, None, None)
            return model.head_loss(params, x, {"tokens": rows}, None)

        return sum(map(loss, tokens))

    devices = jax.devices()[:shards]
    make = plain_steps.plain_step if shards == 1 else plain_steps.sharded_step
    step = make(config, remat, *((devices[0],) if shards == 1 else (devices,)), tokens.shape)
    placed = jax.device_put((params, np.int32(tokens)), step.input_shardings[0])
    loss, gradients = jax.device_get(step(*placed))
    expected_loss, whole = jax.device_get(expected(params))
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for found, wanted in zip(jax.tree.leaves(gradients), jax.tree.leaves(whole), strict=True):
        # What is computed again is rounded to bfloat16 elsewhere.
        assert np.abs(found / shards - wanted).max() <= 0.02 * np.abs(wanted).max()


@pytest.mark.slow
def test_the_check_of_a_machine_with_one_gpu_writes_tables_and_the_device_that_plans_read(tmp_path):
    tables = gpu_check.main(gpu_check.SMALL, tmp_path)
    plain = ["plain, none", "plain, dots", "plain, full"]
    stages = [str(stage) for stage in gpu_check.SMALL.stages]
    assert [row["name"] for row in tables["steps"]] == [*plain, *stages]
    assert all(row["ms"] > 0 for rows in tables.values() for row in rows)
    device = find(str(tmp_path / "gpu_check_device.json"))
    assert isinstance(device, Device)
    best = max(row["T/s"] for row in tables["rates"] if row["name"].startswith("matmul"))
    assert device.efficiency.flops == best * 1e12 / device.flops


def test_a_check_whose_time_is_over_names_what_it_leaves_out(tmp_path, capsys):
    assert not any(gpu_check.main(gpu_check.SMALL, tmp_path, minutes=0).values())
    assert f"Left out after 0 minutes: {gpu_check.SMALL.stages[0]}" in capsys.readouterr().out
