"""A step multiplies what the model says and no more: nothing in bubbles, nothing twice."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from compilations import AS_USED
from covering import some

import jaxpipe
from benchmarks.hlo import HloProgram
from jaxpipe.runtime.measure import memory
from models import gpt

pytestmark = pytest.mark.pipeline
STAGES, ROWS, MICROBATCHES, LAYERS = 4, 2, 6, 8
CONFIG = gpt.GPTConfig(
    vocab_size=96, sequence_length=16, num_layers=LAYERS, width=32, num_heads=2, dtype="float32"
)
TOKENS = ROWS * CONFIG.sequence_length
WEIGHT_FLOPS = {
    "qkv": 2 * TOKENS * CONFIG.width * 3 * CONFIG.width,
    "out": 2 * TOKENS * CONFIG.width * CONFIG.width,
    "mlp": 2 * TOKENS * CONFIG.width * CONFIG.hidden_width * 2,
    "down": 2 * TOKENS * CONFIG.hidden_width * CONFIG.width,
}
ATTENTION_FLOPS = 2 * (2 * TOKENS * CONFIG.sequence_length * CONFIG.width)  # scores, and their use
FORWARD_FLOPS = sum(WEIGHT_FLOPS.values()) + ATTENTION_FLOPS
RECOMPUTED_FLOPS = {
    "none": 0,
    "dots": ATTENTION_FLOPS,
    "full": FORWARD_FLOPS - WEIGHT_FLOPS["down"],  # the layer's output is no residual
}
CASES = [
    *(("1f1b", "dots", 1), ("1f1b", "full", 1), ("1f1b-fused", "none", 1)),
    *(("zb-v", "full", 1), ("zb-v", "none", 2), ("gpipe", "none", 1)),
]


def pipeline(name: str, remat: str, data: int) -> jaxpipe.Pipeline:
    """GPT layers between an embedding and a head that multiply no matrices."""
    schedule = jaxpipe.schedules.build(name, stages=STAGES, microbatches=MICROBATCHES)
    layers = jax.eval_shape(lambda: gpt.init(CONFIG, jax.random.key(0))["layers"])
    model = jaxpipe.Model(
        embed=lambda outer, batch, rng: batch["x"],
        layer=gpt.model(CONFIG).layer,
        head_loss=lambda outer, x, batch, rng: jnp.mean(x**2),
    )
    return jaxpipe.Pipeline(
        model,
        {"embed": {}, "layers": layers, "head": {}},
        schedule=schedule,
        mesh=jaxpipe.make_mesh(stage=STAGES, data=data),
        remat=remat,
        zero=3,
    )


@functools.cache
def program(name: str, remat: str, data: int) -> HloProgram:
    pipe = pipeline(name, remat, data)
    shape = (ROWS * MICROBATCHES * data, CONFIG.sequence_length, CONFIG.width)
    batch = {"x": jax.ShapeDtypeStruct(shape, jnp.float32)}
    return HloProgram(memory.compiled(pipe, batch, options=AS_USED).as_text())


def layer_flops(program: HloProgram) -> list[int]:
    """FLOPs of one layer in each loop of ticks that multiplies matrices."""
    loops = [loop for body in program.tick_bodies().values() for loop in program.loops(body)]
    flops = [program.dot_flops(loop.calls["body"]) for loop in loops]
    return [count for count in flops if count]


FEW = [("1f1b", "none", 1), ("1f1b-fused", "full", 2), ("zb-v", "dots", 1)]


@pytest.mark.parametrize("case", some(zip([*FEW, *CASES]), *zip(FEW)))
def test_a_layer_multiplies_what_the_model_and_its_remat_policy_say(case):
    expected = 3 * FORWARD_FLOPS + RECOMPUTED_FLOPS[case[1]]
    assert sum(layer_flops(program(*case))) == expected


def test_split_backwards_share_the_work():
    forward, backward, weights = layer_flops(program("1f1b", "none", 1))
    assert forward == FORWARD_FLOPS
    assert backward == FORWARD_FLOPS + ATTENTION_FLOPS  # both factors of scores and of their use
    assert weights == FORWARD_FLOPS - ATTENTION_FLOPS
