"""Properties of every model family: published sizes, the first loss, dropout, refusals."""

import dataclasses
import functools
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from batches import batch_of

import jaxpipe
from models import bert, gpt, resnet, transformer
from models.bert import BERTConfig
from models.gpt import GPTConfig
from models.resnet import ResNetConfig
from models.transformer import TransformerConfig
from models.translate import greedy

SHAPE = {"vocab_size": 61, "sequence_length": 12, "width": 16, "num_heads": 4}
GPT = GPTConfig(**SHAPE, num_layers=2, num_kv_heads=2)
BERT = BERTConfig(**SHAPE, num_layers=1, mlp_width=32)
TRANSFORMER = TransformerConfig(
    **SHAPE, num_encoder_layers=1, num_decoder_layers=1, mlp_width=32, label_smoothing=0.0
)
MIXTURE = dataclasses.replace(GPT, num_experts=4, experts_per_token=2, expert_width=6)
RESNET = ResNetConfig(depth=20, num_classes=10)
IMAGENET = {"num_classes": 1000, "style": "imagenet"}


def configuration(name: str) -> GPTConfig:
    return GPTConfig(**yaml.safe_load(pathlib.Path(f"configs/{name}.yaml").read_text())["model"])


@pytest.mark.parametrize(
    ("module", "config", "count", "off"),
    [
        (gpt, GPTConfig.gpt2_124m(), 124_439_808, 0),
        (gpt, GPTConfig.llama_7b(), 6_738_415_616, 0),
        (gpt, configuration("llama-7b"), 6_738_415_616, 0),
        (gpt, configuration("llama3-8b"), 8_030_261_248, 0),
        (gpt, configuration("qwen3-8b"), 8_190_735_360, 0),
        (gpt, configuration("gemma2-9b"), 9_241_705_984, 0),
        (gpt, configuration("mixtral-8x7b"), 46_702_792_704, 0),
        # Devlin et al. 2019, section 3.
        (bert, BERTConfig.base(), 110e6, 0.012),
        (bert, BERTConfig.large(), 340e6, 0.012),
        # Vaswani et al. 2017, table 3; the paper does not say what its counts include.
        (transformer, TransformerConfig.base(), 65e6, 0.03),
        (transformer, TransformerConfig.big(), 213e6, 0.03),
        # He et al. 2016, table 6.
        (resnet, RESNET, 0.27e6, 0.02),
        (resnet, ResNetConfig(depth=56, num_classes=10), 0.85e6, 0.01),
        # As torchvision documents them.
        (resnet, ResNetConfig(depth=18, norm="batch", **IMAGENET), 11_689_512, 0),
        (resnet, ResNetConfig(depth=50, **IMAGENET), 25_557_032, 0),
    ],
)
def test_sizes_are_those_published(module, config, count, off):
    assert module.num_parameters(config) == pytest.approx(count, rel=off, abs=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("module", "config"),
    [(gpt, GPT), (bert, dataclasses.replace(BERT, next_sentence=True)), (transformer, TRANSFORMER)],
)
def test_parameters_logits_and_losses_are_float32(module, config, dtype):
    config = dataclasses.replace(config, dtype=dtype)
    model, batch = module.model(config), batch_of(config, 3)
    params = jax.eval_shape(functools.partial(module.init, config), jax.random.key(0))
    assert set(params) == {"embed", "layers", "head"}
    x = jax.eval_shape(lambda params: model.embed(params, batch, None), params)
    assert {leaf.dtype for leaf in jax.tree.leaves(x)} == {jnp.dtype(dtype)}
    tokens = jax.ShapeDtypeStruct((3, config.sequence_length), jnp.int32)
    inputs = {gpt: [tokens], bert: [{"tokens": tokens}], transformer: [tokens, tokens]}[module]
    logits = jax.eval_shape(functools.partial(module.logits, config), params, *inputs)
    assert logits.shape == (3, config.sequence_length, config.vocab_size)
    step = jax.value_and_grad(functools.partial(jaxpipe.unpipelined.loss, model))
    found = params, logits, jax.eval_shape(step, params, batch)
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype("float32")}


@pytest.mark.pipeline
@pytest.mark.parametrize(
    ("module", "config"), [(gpt, GPT), (bert, BERT), (transformer, TRANSFORMER)]
)
def test_the_first_loss_is_a_uniform_guess_and_dropout_depends_on_the_key_alone(module, config):
    params = jax.jit(functools.partial(module.init, config))(jax.random.key(0))
    batch = batch_of(config, 16)

    plain, dropping = (
        jax.jit(functools.partial(jaxpipe.unpipelined.loss, module.model(given)))
        for given in (config, dataclasses.replace(config, dropout=0.3))
    )
    first, again, other = (dropping(params, batch, jax.random.key(k)) for k in (1, 1, 2))
    assert first == again != other
    loss = plain(params, batch)
    np.testing.assert_allclose(dropping(params, batch), loss, rtol=1e-6)
    if module is not transformer:  # whose embedding is large
        np.testing.assert_allclose(loss, math.log(config.vocab_size), rtol=0.02)


LATENT = {"kv_rank": 4, "rotary_size": 3, "value_size": 9, "qk_norm": True}


@pytest.mark.parametrize(
    ("config", "changes", "texts"),
    [
        (
            *(GPT, {"num_heads": 5, "norm": "batch", "dropout": 1.0}),
            """num_heads=5 must divide width=16.
            num_kv_heads=2 must divide num_heads=5.
            norm='batch' must be one of: rms, layer.
            dropout=1.0""",
        ),
        (
            *(GPT, {"global_every": 2, "rope_low_freq_factor": 2.0, "value_size": 4}),
            """global_every=2 has no effect without window.
            rope_low_freq_factor=2.0 has no effect without rope_original_length.
            value_size=4 has no effect without kv_rank.""",
        ),
        (
            *(GPT, LATENT),
            """num_kv_heads=2 must be num_heads=4 with kv_rank=4.
            qk_norm=True cannot be combined with kv_rank=4.
            rotary_size=3 must be even.
            value_size=9 must be at most head_size=4 + rotary_size=3.""",
        ),
        (
            *(GPT, {"linear_heads": 2, "linear_value_heads": 3, "linear_conv": 1, "window": 4}),
            """window=4 does not go with linear_heads=2.
            linear_heads=2 must divide linear_value_heads=3.
            linear_conv=1 must be at least 2""",
        ),
        (GPT, {"linear_key_size": 8}, "linear_key_size=8 has no effect without linear_heads."),
        (
            *(GPT, {"residual_streams": 4, "residual": "parallel", "mtp_loss": 0.1}),
            """residual_streams=4 cannot be combined with residual='parallel'.
            Nearest valid: 1.
            residual_streams=4 cannot be combined with mtp_loss=0.1.
            Nearest valid: 1.""",
        ),
        (GPT, {"positions": "learned", "rope_factor": 2.0}, "no effect with positions='learned'."),
        (GPT, {"norm_epsilon": math.nan}, "norm_epsilon=nan must be finite."),
        (GPT, {"rope_theta": 1.0}, "rope_theta=1.0 must be above 1: wavelengths grow by its"),
        (GPT, {"rope_mscale": -1.0}, "rope_mscale=-1.0 must not be negative."),
        (GPT, {"head_size": 3}, "head_size=3 is odd"),
        (GPT, {"width": 12}, "Nearest valid: 8, 16."),
        (GPT, {"num_layers": 0}, "num_layers=0 must be at least 1"),
        (BERT, {"num_heads": 3}, "num_heads=3 must divide width=16.\nNearest valid: 2, 4."),
        (BERT, {"dtype": "float16"}, "dtype='float16' must be one of: float32, bfloat16."),
        (TRANSFORMER, {"pad_id": 61}, "pad_id=61 must be in [0, vocab_size=61)."),
        (TRANSFORMER, {"end_id": 1}, "must all differ"),
        (
            *(RESNET, {"depth": 21, "num_classes": 0, "norm": "layer"}),
            """depth=21 must be 6 n + 2 for style='cifar'
            num_classes=0 must be at least 1
            norm='layer' must be one of: group, batch.""",
        ),
        (RESNET, {"style": "imagenet"}, "depth=20 must be one of 18, 34, 50, 101"),
        (RESNET, {"num_groups": 5}, "num_groups=5 must divide width=16."),
        (MIXTURE, {"experts_per_token": 5}, "experts_per_token=5 must be at most num_experts=4."),
        (MIXTURE, {"expert_every": 3}, "expert_every=3 must be at most num_layers=2."),
        (MIXTURE, {"balance_loss": -1.0}, "balance_loss=-1.0 must not be negative."),
        (MIXTURE, {"expert_groups": 3}, "expert_groups=3 must divide num_experts=4"),
        (MIXTURE, {"expert_groups": 4}, "experts_per_token=2 must be at most the experts of gr"),
        (MIXTURE, {"dense_layers": -1}, "dense_layers=-1 must be at least 1"),
        (MIXTURE, {"dense_layers": 2}, "dense_layers=2 leaves none of num_layers"),
        (MIXTURE, {"num_experts": None}, "expert_width=6 has no effect without num_experts"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_with_all_that_is_wrong(config, changes, texts):
    with pytest.raises(ValueError, match="=") as error:
        dataclasses.replace(config, **changes)
    for text in texts.split("\n            "):
        assert text in str(error.value)


def test_longer_rows_than_the_model_has_positions_for_are_refused():
    def row(length):
        return jnp.zeros((1, length), int)

    params = {
        config: jax.eval_shape(functools.partial(module.init, config), jax.random.key(0))
        for module, config in ((gpt, GPT), (bert, BERT), (transformer, TRANSFORMER))
    }
    for function, *given in (
        (gpt.logits, GPT, params[GPT], row(14)),
        (bert.logits, BERT, params[BERT], {"tokens": row(14)}),
        (transformer.logits, TRANSFORMER, params[TRANSFORMER], row(14), row(2)),
    ):
        with pytest.raises(ValueError, match=r"14 inputs per row.*sequence_length=12"):
            function(*given)
    with pytest.raises(ValueError, match=r"max_length=13 must be in.*Nearest valid: 12"):
        greedy(TRANSFORMER, params[TRANSFORMER], row(2), max_length=13)
