"""Layers whose collectives lie beside matmuls of other pieces of the sequence."""

import functools
import types
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from covering import some

import jaxpipe
from jaxpipe.runtime import memory
from jaxpipe.runtime.defaults import RESIDUALS
from jaxpipe.runtime.memory import tree_bytes
from jaxpipe.testing import assert_matches_unpipelined
from models import gpt, gpt_block
from models.pieces import num_pieces
from models.tensor import Tensor

SHAPE = {"vocab_size": 13, "num_layers": 2, "width": 16, "num_heads": 4, "sequence_length": 8}
GPT2 = {"norm": "layer", "activation": "gelu", "bias": True, "positions": "learned"}
GEMMA = {"post_norm": True, "qk_norm": True, "num_kv_heads": 1, "tied": False, "mlp_width": 12}

# fmt: off
CASES = [  # of the config, schedule, mesh, pieces, and options of the pipeline
    (GPT2, "zb-h1", {"tensor": 4}, 2, {"remat": "dots"}),
    (GEMMA, "1f1b-fused", {"data": 2, "tensor": 2}, 4,
     {"remat": "full", "zero": 3, "weights": "unrolled"}),
]
# fmt: on


@pytest.mark.pipeline
@pytest.mark.parametrize(("options", "schedule", "sizes", "count", "given"), some(CASES, CASES[0]))
def test_results_equal_those_of_the_whole_model(options, schedule, sizes, count, given):
    config = gpt.GPTConfig(**SHAPE | options)
    with mock.patch.object(gpt_block, "num_pieces", return_value=count) as asked:
        assert_matches_unpipelined(
            gpt.model(config, vocabulary_axis="stage", tensor_axis="tensor"),
            jax.jit(functools.partial(gpt.init, config))(jax.random.key(0)),
            {"tokens": jax.random.randint(jax.random.key(1), (8 * sizes.get("data", 1), 9), 0, 13)},
            schedules=[schedule],
            meshes=[jaxpipe.make_mesh(stage=2, **sizes)],
            reference=functools.partial(jaxpipe.unpipelined.loss, gpt.model(config)),
            microbatches=4,
            **given,
        )
    asked.assert_called()


def kept_bytes(**given) -> tuple[int, ...]:
    """Bytes of what F leaves for the backward, and B for W, in whole layers and in pieces."""
    config, found = gpt.GPTConfig(**SHAPE | {"width": 64, "sequence_length": 32}), []
    for count in (1, 4):
        with mock.patch.object(gpt_block, "num_pieces", return_value=count):
            pipe = jaxpipe.Pipeline(
                gpt.model(config, vocabulary_axis="stage", tensor_axis="tensor"),
                jax.eval_shape(lambda: gpt.init(config, jax.random.key(0))),
                mesh=jaxpipe.make_mesh(stage=2, tensor=4),
                microbatches=4,
                **given,
            )
            kept = memory.buffers(pipe, {"tokens": jax.ShapeDtypeStruct((8, 33), "int32")})
        found.append(tree_bytes([kept.get(name, []) for name in RESIDUALS]))
    return tuple(found)


def test_pieces_keep_no_more_than_whole_layers():
    for schedule, remat in (("1f1b-fused", "none"), ("zb-h1", "dots")):
        whole, pieces = kept_bytes(schedule=schedule, remat=remat)
        assert pieces <= whole, (schedule, remat)


def test_pairs_have_whole_layers():
    model = gpt.model(gpt.GPTConfig(**SHAPE), tensor_axis="tensor")
    assert model.in_pairs().layer is model.paired_layer is not model.layer
    assert gpt.model(gpt.GPTConfig(**SHAPE)).in_pairs().paired_layer is None
    windows = gpt.GPTConfig(**SHAPE | {"window": 8, "global_every": 2})
    model = gpt.model(windows, tensor_axis="tensor")
    assert len(model.in_pairs().layer) == len(model.layer) == windows.num_layers
    assert set(model.in_pairs().layer).isdisjoint(model.layer)


def test_pieces_are_for_gpus_and_no_smaller_than_what_a_launch_costs():
    def count(length: int, backend: str = "gpu", axis: str | None = "tensor") -> int:
        x_BTE = jax.ShapeDtypeStruct((1, length, 4096), jnp.bfloat16)
        sized = types.SimpleNamespace(axis=axis, size=4, in_pieces=True)
        with mock.patch.object(jax, "default_backend", return_value=backend):
            return num_pieces(x_BTE, sized if axis else Tensor())

    # 4 devices x 8 KiB per token.
    assert [count(n) for n in (1024, 1023, 1026, 512, 1000, 256)] == [4, 1, 2, 2, 2, 1]
    assert count(1024, backend="cpu") == count(1024, axis=None) == 1
