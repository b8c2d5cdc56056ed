"""Every model in a pipeline: loss, gradients and statistics equal the unpipelined model's."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest
from batches import batch_of
from covering import covering

import jaxpipe
from models import bert, gpt, resnet, transformer
from models.bert import BERTConfig
from models.gpt import GPTConfig
from models.resnet import ResNetConfig
from models.transformer import TransformerConfig

pytestmark = pytest.mark.pipeline

MICROBATCHES = 4
MIXTURE = GPTConfig(
    vocab_size=19, sequence_length=6, num_layers=8, width=8, num_heads=2, num_experts=4,
    expert_width=8, mlp_width=12, balance_loss=0.1, z_loss=0.1,
)  # fmt: skip
RESNET = ResNetConfig(depth=20, num_classes=5, channels=1, width=4)
CONFIGS = {
    "bert": BERTConfig(
        vocab_size=19, sequence_length=6, num_layers=8, width=8, num_heads=2, mlp_width=16,
        next_sentence=True, dropout=0.1,
    ),
    "transformer": TransformerConfig(
        vocab_size=19, sequence_length=6, num_encoder_layers=4, num_decoder_layers=4, width=8,
        num_heads=2, mlp_width=16,
    ),
    "mixture": MIXTURE,
    "mixture-between": dataclasses.replace(
        MIXTURE, expert_every=2, shared_width=4, shared_gate=True, router="sigmoid"
    ),
    "gemma": GPTConfig(
        vocab_size=19, sequence_length=6, num_layers=8, width=8, num_heads=2, num_kv_heads=1,
        activation="geglu", mlp_width=12, post_norm=True, qk_norm=True, scaled_embedding=True,
        attention_soft_cap=0.5, logit_soft_cap=0.5, window=3, global_every=2,
        local_rope_theta=100.0,
    ),
    "resnet": RESNET,
    "resnet-batch-norm": dataclasses.replace(RESNET, norm="batch"),
}  # fmt: skip
SMALL = {
    "resnet-8-batch-norm": dataclasses.replace(RESNET, depth=8, norm="batch"),
    "mixture-of-2-layers": dataclasses.replace(MIXTURE, num_layers=2),
    "gemma-with-experts": dataclasses.replace(
        CONFIGS["gemma"], num_layers=2, num_experts=4, expert_every=2, balance_loss=0.1
    ),
}
MODULES = {
    BERTConfig: bert,
    GPTConfig: gpt,
    ResNetConfig: resnet,
    TransformerConfig: transformer,
}
SYNCHRONOUS = (
    "1f1b", "gpipe", "interleaved", "breadth-first", "hanayo", "zb-h1", "zb-h2", "interleaved-zb",
    "dualpipe-v", "zb-v", "v-half", "v-min", "1f1b-v", "1f1b-fused", "auto",
)  # fmt: skip
COVERING = covering(
    [
        case
        for case in itertools.product(
            SYNCHRONOUS, (2, 4), (1, 2), (0, 3), ("none", "dots", "full"), CONFIGS
        )
        if case[2] > 1 or case[3] == 0
    ]
)
FEW = [
    ("zb-v", 4, 2, 3, "none", "transformer"),
    ("1f1b", 2, 2, 0, "none", "resnet-8-batch-norm"),
    ("1f1b", 2, 2, 0, "full", "mixture-of-2-layers"),
    ("zb-h1", 2, 2, 3, "dots", "gemma-with-experts"),
]
OTHERS = [
    ("1f1b", 4, 2, 3, "dots", "bert"),
    ("interleaved", 2, 2, 3, "full", "resnet"),
]


def check(schedule, stages, data, zero, remat, name):
    config = (CONFIGS | SMALL)[name]
    module, rows = MODULES[type(config)], 2 * data * MICROBATCHES
    on_stages = {} if module is resnet else {"vocabulary_axis": "stage"}
    params = jax.jit(functools.partial(module.init, config))(jax.random.key(0))
    batch, rng = batch_of(config, rows), jax.random.key(2)
    model = module.model(config)
    states = resnet.init_state(config) if model.stateful else None
    pipe = jaxpipe.Pipeline(
        module.model(config, **on_stages),
        params,
        schedule=jaxpipe.schedules.build(schedule, stages=stages, microbatches=MICROBATCHES),
        mesh=jaxpipe.make_mesh(stage=stages, data=data),
        remat=remat,
        zero=zero,
        states=states,
        poison=True,
    )
    placed_states = pipe.place_states(states) if model.stateful else None
    got, grads = jax.jit(pipe.value_and_grad)(pipe.place(params), batch, rng, states=placed_states)
    if model.stateful:
        got = got[0], pipe.unplace_states(got[1])
    oracle = functools.partial(
        jaxpipe.unpipelined.loss,
        model,
        num_microbatches=MICROBATCHES,
        data_shards=data,
        states=states,
    )
    expected = jax.jit(jax.value_and_grad(oracle, has_aux=model.stateful))(params, batch, rng)
    # The gradient of a key's bias is zero, and what is computed for it is rounding: a unit in the
    # last place of the largest gradient.
    rounding = 1.2e-7 * max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected[1]))
    for (path, value), wanted in zip(
        jax.tree.leaves_with_path((got, pipe.unplace(grads))),
        jax.tree.leaves(expected),
        strict=True,
    ):
        atol = max(1e-5 * np.abs(wanted).max(), rounding)
        np.testing.assert_allclose(
            value, wanted, rtol=1e-5, atol=atol, err_msg=jax.tree_util.keystr(path)
        )


@pytest.mark.parametrize("case", FEW, ids=lambda case: "-".join(map(str, case)))
def test_gradients_equal_the_unpipelined_model(case):
    check(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*OTHERS, *COVERING], ids=lambda case: "-".join(map(str, case)))
def test_gradients_equal_the_unpipelined_model_everywhere(case):
    check(*case)
