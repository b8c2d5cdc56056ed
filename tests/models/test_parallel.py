"""Every model on every kind of mesh: loss, gradients and statistics are those of one device."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import pytest
from batches import batch_of

import jaxpipe
from jaxpipe.schedule import catalog
from jaxpipe.testing import assert_matches_unpipelined
from models import bert, gpt, resnet, transformer
from models.bert import BERTConfig
from models.gpt import GPTConfig
from models.resnet import ResNetConfig
from models.transformer import TransformerConfig

pytestmark = pytest.mark.pipeline

MODULES = {
    BERTConfig: bert,
    GPTConfig: gpt,
    ResNetConfig: resnet,
    TransformerConfig: transformer,
}
SHAPE = {"vocab_size": 19, "sequence_length": 8, "width": 16, "num_heads": 4, "mlp_width": 12}
SHAPE |= {"dropout": 0.2}
QWEN = GPTConfig(  # devices share the one key head
    **SHAPE, num_layers=8, num_kv_heads=1, tied=False, qk_norm=True, qkv_bias=True
)
MIXTURE = GPTConfig(
    **SHAPE, num_layers=8, num_experts=4, expert_width=8, balance_loss=0.1, z_loss=0.1
)
GEMMA = GPTConfig(
    **SHAPE, num_layers=8, num_kv_heads=2, activation="geglu", post_norm=True, qk_norm=True,
    scaled_embedding=True, attention_soft_cap=0.5, logit_soft_cap=0.5, window=3, global_every=2,
    local_rope_theta=100.0,
)  # fmt: skip
GPT_OSS = GPTConfig(
    **SHAPE, num_layers=8, num_kv_heads=2, activation="clamped_swiglu", bias=True,
    attention_sinks=True, window=3, global_every=2, num_experts=4, expert_bias=True,
    rope_factor=8.0, rope_original_length=4, rope_ramp="yarn", rope_mscale=1.0, balance_loss=0.1,
)  # fmt: skip
LATENT = {"kv_rank": 8, "query_rank": 6, "head_size": 4, "rotary_size": 4, "value_size": 6}
DEEPSEEK = GPTConfig(  # the first step moves no bias, but every microbatch adds to the counts
    **SHAPE, **LATENT, num_layers=7, num_experts=8, experts_per_token=3, expert_width=8,
    shared_width=8, router="sigmoid", dense_layers=1, expert_groups=4, groups_per_token=2,
    score_factor=2.5, bias_speed=0.1, mtp_loss=0.5,
)  # fmt: skip
OLMO = GPTConfig(  # what the families of further readers combine
    **SHAPE, num_layers=8, num_kv_heads=2, pre_norm=False, post_norm=True, qk_norm=True,
    qk_norm_scope="all", rotary_size=2, rope_magnitude=1.5, unrotated_layers=(2, 5), tied=False,
    head_bias=True, embedding_scale=2.0, residual_scale=0.5, logit_scale=3.0, attention_scale=0.4,
)  # fmt: skip
COHERE = GPTConfig(
    **SHAPE, num_layers=8, num_kv_heads=2, norm="layer", norms_from_zero=True, residual="parallel",
    qk_norm=True, qk_norm_scope="each", activation="xielu", out_bias=True, norm_bias=True,
    query_growth=0.5, rope_factor=2.0, rope_original_length=3,
)  # fmt: skip
QWEN_NEXT = GPTConfig(
    **SHAPE, num_layers=8, num_kv_heads=1, tied=False, qk_norm=True, attention_gate=True,
    rotary_size=2, linear_heads=2, linear_value_heads=4, linear_key_size=6, linear_value_size=5,
    global_every=4, num_experts=4, expert_width=8, shared_width=4, shared_gate=True,
)  # fmt: skip
QWEN_DENSE = dataclasses.replace(
    QWEN_NEXT, global_every=2, num_experts=None, expert_width=None, shared_width=None,
    shared_gate=False,
)  # fmt: skip
DROPPING = {"num_experts": 4, "expert_every": 2, "balance_loss": 0.1, "capacity_factor": 0.5}
RESNET = ResNetConfig(depth=20, num_classes=5, channels=1, width=4)
BERT = BERTConfig(**SHAPE, num_layers=8, next_sentence=True)
TRANSFORMER = TransformerConfig(**SHAPE, num_encoder_layers=4, num_decoder_layers=4)
CONFIGS = {
    "bert": BERT,
    "transformer": TRANSFORMER,
    "qwen": QWEN,
    "gpt2": GPTConfig(
        **SHAPE, num_layers=8, positions="learned", norm="layer", activation="gelu", bias=True
    ),
    "gemma": GEMMA,
    "gemma-with-experts": dataclasses.replace(GEMMA, **DROPPING),
    "mixture": MIXTURE,
    "mixture-between": dataclasses.replace(
        MIXTURE,
        expert_every=2,
        shared_width=4,
        shared_gate=True,
        router="sigmoid",
        device_capacity_factor=4.0,
    ),
    "multi-token": dataclasses.replace(GEMMA, num_layers=7, mtp_loss=0.5),
    "gpt-oss": GPT_OSS,
    "olmo": OLMO,
    "cohere": COHERE,
    "deepseek": DEEPSEEK,
    "qwen-next": QWEN_NEXT,
    "latent-attention": dataclasses.replace(
        QWEN, **LATENT, num_kv_heads=None, qk_norm=False, qkv_bias=False
    ),
    "resnet": RESNET,
    "resnet-batch-norm": dataclasses.replace(RESNET, norm="batch"),
}
PLAIN = [{"stage": 4, "data": 2}, {"stage": 2, "data": 2}, {"stage": 4, "data": 1}]
TENSOR = [{"stage": 2, "data": 2, "tensor": 2}, {"stage": 2, "tensor": 2}]
CONTEXT = [{"stage": 2, "data": 2, "context": 2}, {"stage": 2, "context": 2, "tensor": 2}]
EXPERT = [
    *({"stage": 2, "data": 4, "expert": 2}, {"stage": 2, "data": 4, "expert": 4}),
    {"stage": 2, "data": 4, "expert": 2, "replica": 2},
]
# Devices that share tokens have a capacity of their own, and drop others.
DROPLESS = [{"stage": 2, "data": 2, "expert": 2, axis: 2} for axis in ("tensor", "context")]


class Case(NamedTuple):
    config: Any
    schedule: str
    mesh: dict[str, int]
    zero: int = 0
    remat: str = "none"
    weights: str = "stacked"


FEW = {
    "olmo": Case(dataclasses.replace(OLMO, num_layers=2, unrotated_layers=()), "zb-h1", TENSOR[1]),
    # Devices share the one key head.
    "cohere": Case(
        dataclasses.replace(COHERE, num_layers=2, num_kv_heads=1, qkv_bias=True),
        *("1f1b-fused", CONTEXT[1], 3),
    ),
    # Layers and the head communicate among the same devices in one tick.
    "bert": Case(dataclasses.replace(BERT, num_layers=2, dropout=0.0), "zb-h2", TENSOR[1], 1),
    "transformer": Case(
        dataclasses.replace(TRANSFORMER, num_encoder_layers=1, num_decoder_layers=1, dropout=0.0),
        *("1f1b-fused", {"stage": 2}),
    ),
    "mixture": Case(
        dataclasses.replace(MIXTURE, num_layers=2, dropout=0.0, capacity_factor=0.5),
        *("1f1b-fused", EXPERT[0], 3),
    ),
    "mixture-sent-to-devices": Case(
        dataclasses.replace(
            MIXTURE, num_layers=2, dropout=0.0, shared_width=4, device_capacity_factor=4.0
        ),
        *("zb-h1", EXPERT[1], 3, "dots", "unrolled"),
    ),
    # Without a capacity.
    "deepseek": Case(
        dataclasses.replace(DEEPSEEK, num_layers=1, dense_layers=None, dropout=0.0),
        *("zb-h1", {"stage": 2, "data": 2, "expert": 2}, 3, "dots"),
    ),
    # A place has the arrays of all kinds of layers that chunks have there.
    "deepseek-dense-first": Case(
        dataclasses.replace(DEEPSEEK, num_layers=3, mtp_loss=None, dropout=0.0),
        *("1f1b-fused", {"stage": 2, "data": 2, "expert": 2}, 3, "dots", "unrolled"),
    ),
    "gemma": Case(
        dataclasses.replace(GEMMA, num_layers=2, dropout=0.0),
        *("1f1b-fused", {"stage": 2, "data": 2}, 3, "dots", "unrolled"),
    ),
    "gemma-in-v": Case(GEMMA, "zb-v", {"stage": 2, "tensor": 2}, 0, "none", "unrolled"),
    "qwen-next": Case(
        dataclasses.replace(QWEN_DENSE, num_layers=5),
        *("1f1b-fused", {"stage": 2, "data": 2}, 3, "dots", "unrolled"),
    ),
    "qwen-next-in-turn": Case(QWEN_DENSE, "interleaved", {"stage": 2}, 0, "none", "unrolled"),
    "resnet-8-batch-norm": Case(
        dataclasses.replace(RESNET, depth=8, norm="batch"), "1f1b-fused", {"stage": 2}
    ),
}


def drawn_states(module, config):
    """States that are not all alike, and positive, since some of them are variances."""
    return jax.tree.map(
        lambda leaf: jax.random.uniform(jax.random.key(leaf.size), leaf.shape),
        module.init_state(config),
    )


class Whole(NamedTuple):
    """A model on one device: its functions, parameters and loss."""

    model: jaxpipe.Model
    params: Any
    loss: Any


@functools.cache
def whole_model(config: Any) -> Whole:
    """Both what draws the parameters and what differentiates the loss compile once for all
    schedules: of layers that differ, each takes longer than a pipeline."""
    module = MODULES[type(config)]
    params = jax.jit(functools.partial(module.init, config))(jax.random.key(0))
    model = module.model(config)
    return Whole(model, params, functools.partial(jaxpipe.unpipelined.loss, model))


def check(case: Case) -> None:
    config, module = case.config, MODULES[type(case.config)]
    shared = [name for name in ("tensor", "context", "expert") if name in case.mesh]
    axes = {f"{name}_axis": name for name in shared}
    whole = whole_model(config)
    assert_matches_unpipelined(
        whole.model if module is resnet else module.model(config, vocabulary_axis="stage", **axes),
        whole.params,
        batch_of(config, 8 * case.mesh.get("data", 1)),
        schedules=[case.schedule],
        meshes=[jaxpipe.make_mesh(**case.mesh)],
        microbatches=4,
        rng=jax.random.key(2),
        states=drawn_states(module, config) if whole.model.stateful else None,
        reference=whole.loss,
        # The bias of keys has no gradient but rounding, of gradients of up to 0.3.
        floor={gpt: 0.0, resnet: 1e-3}.get(module, 3e-3),
        zero=case.zero,
        remat=case.remat,
        weights=case.weights,
    )


# Toys have such layers, states, pairs and places; `test_expert_axis` sends tokens in one layer.
SLOW = (
    "deepseek",
    "deepseek-dense-first",
    "transformer",
    "resnet-8-batch-norm",
    "mixture-sent-to-devices",
)
SLOW += ("gemma-in-v", "qwen-next", "qwen-next-in-turn")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in FEW],
)
def test_results_equal_those_of_the_whole_model(name):
    check(FEW[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_results_equal_those_of_the_whole_model_everywhere(name):
    """All schedules, in turn on the meshes that fit the model."""
    config = CONFIGS[name]
    stateful = whole_model(config).model.stateful
    meshes = PLAIN + (TENSOR if "resnet" not in name and not stateful else [])
    if isinstance(config, GPTConfig):
        meshes = meshes + ([] if stateful else CONTEXT) + (EXPERT if config.num_experts else [])
        if config.num_experts and config.capacity_factor is None and not stateful:
            meshes = meshes + DROPLESS
    one_tree = whole_model(config).model.layers_are_alike
    for n, entry in enumerate(catalog.entries()):
        weights = "unrolled" if one_tree and n % 3 == 0 else "stacked"
        remat = ("none", "dots", "full")[n // 2 % 3]
        check(
            Case(config, entry.name, meshes[n % len(meshes)], (3, 0, 1, 2)[n % 4], remat, weights)
        )
