"""Readings of scheduled programs by `benchmarks/gpu_compile.py` and `tpu_compile.py`."""

from __future__ import annotations

import pytest

from benchmarks import compiled_ticks, gpu_compile
from benchmarks.hlo import HloProgram

SCOPE = 'metadata={op_name="jit(step)/tick_forward/while/body/closed_call/%s/while"}'
PROGRAM = f"""HloModule step, is_scheduled=true

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
  %p1 = (f32[4,8,8], f32[8,8]) while(%p), body=%layer, {SCOPE % "F/chunk0_layer0"}
  %p2 = (f32[4,8,8], f32[8,8]) while(%p1), body=%layer, {SCOPE % "F/chunk0_layer1"}
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
    program = HloProgram(PROGRAM.replace("CONFIG", f'backend_config={{"is_sync":{sync}}}'))
    (found,) = compiled_ticks.collectives(program)
    assert found == compiled_ticks.Collective(
        "collective-permute", bytes=256, place="tick", hidden_by=hidden_by, tick="tick_forward"
    )


def test_tpus_gather_and_reduce_in_fusions():
    """The loops that hide a gather hand on the values that its end reads."""
    start = "%early = (f32[8,8], f32[8,8]) collective-permute-start(%x), CONFIG"
    gather = "%async-collective-start.1 = (f32[8,8], f32[16,8]) fusion(%x), calls=%gather"
    text = PROGRAM.replace(start, gather).replace("%layer (p", GATHER + "%layer (p", 1)
    done = "%async-collective-done.1 = f32[8,8]{1,0} fusion(%p2), calls=%gather"
    text = text.replace("%arrived = f32[8,8]{1,0} collective-permute-done(%early)", done)
    (found,) = compiled_ticks.collectives(HloProgram(text))
    assert (found.opcode, found.hidden_by) == ("all-gather", 2)

    reduce = "%early = f32[4,8]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1"
    (found,) = compiled_ticks.collectives(HloProgram(PROGRAM.replace(start, reduce)))
    assert (found.opcode, found.hidden_by) == ("reduce-scatter", 0)


def test_a_transfer_without_an_end_of_its_own_is_synchronous():
    text = PROGRAM.replace(
        "(f32[8,8], f32[8,8]) collective-permute-start", "f32[8,8] collective-permute"
    )
    (found,) = compiled_ticks.collectives(HloProgram(text))
    assert found.hidden_by == 0


def test_copies_of_buffers_and_weights():
    program = HloProgram(PROGRAM)
    assert [row.name for row in compiled_ticks.whole_buffers(program, {(4, 8, 8)})] == ["again"]
    assert compiled_ticks.whole_buffers(program, {(5, 8, 8)}) == []


@pytest.mark.parametrize(("scope", "passes"), [("F/chunk0_layer1", 1), ("W/chunk0_layer1", 2)])
def test_what_a_layer_writes_of_its_weights(scope, passes):
    """Each of the two loops cuts one from a stack; as two loops of one pass they count once."""
    text = PROGRAM.replace("F/chunk0_layer1", scope)
    found = gpu_compile.weight_traffic(HloProgram(text), {(8, 8)})
    assert found == [gpu_compile.WeightTraffic(copied=128, cast=0)] * passes
    cast = text.replace("bf16[1,8,8]{2,1,0} slice", "bf16[1,8,8]{2,1,0} convert")
    found = gpu_compile.weight_traffic(HloProgram(cast), {(8, 8)})
    assert found == [gpu_compile.WeightTraffic(copied=0, cast=128)] * passes


def test_only_what_is_outside_cuda_graphs_waits_for_the_host():
    assert gpu_compile.host_waits(THUNKS) == (1, 0)
    choice = "    062: kConditional [source | sink]\n      branch_0:\n        063: kWhile [sink]\n"
    assert gpu_compile.host_waits(THUNKS + choice) == (1, 1)
