"""Adapters and rounded weights: what they compute, in a pipeline and in the peft library."""

import dataclasses
import functools
import importlib.util

import hugging_face_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe
from jaxpipe import testing, unpipelined
from jaxpipe.measure import predicted_bytes
from models import gpt, hugging_face
from models.adapters import NF4, TRAINED, Adapters, beside, merged, rounded, whole
from models.gpt_config import GPTConfig

CONFIG = GPTConfig(
    vocab_size=40, sequence_length=8, num_layers=4, width=24, num_heads=4, num_kv_heads=2,
    mlp_width=48, tied=False, qkv_bias=True,
)  # fmt: skip


def adapted(config: GPTConfig, **options) -> tuple[GPTConfig, dict]:
    """A model whose adapters do not begin at zero, and its parameters."""
    config = dataclasses.replace(config, adapters=Adapters(**{"rank": 3, "alpha": 5.0} | options))
    drawn = np.random.default_rng(0)

    def leaf(path, w):
        if jnp.issubdtype(w.dtype, jnp.integer):
            numbers = jnp.iinfo(w.dtype)
            return drawn.integers(numbers.min + 1, numbers.max, size=w.shape, dtype=w.dtype)
        if path[-1].key == "kernel_scale":
            return np.full(w.shape, 0.05 if config.adapters.base == "nf4" else 0.05 / 127, w.dtype)
        size = {"lora_a": 0.12, "lora_b": 0.25}.get(path[-1].key, 0.02)
        return (path[-1].key == "scale") + np.float32(drawn.normal(0, size, w.shape))

    params = jax.eval_shape(functools.partial(gpt.init, config), jax.random.key(1))
    return config, jax.tree_util.tree_map_with_path(leaf, params)


def tokens(config: GPTConfig, rows: int) -> np.ndarray:
    drawn = np.random.default_rng(2)
    return drawn.integers(
        config.vocab_size, size=(rows, config.sequence_length + 1), dtype=np.int32
    )


@pytest.mark.parametrize(
    ("base", "plain"),
    [
        ("float32", hugging_face_models.DECODERS["qwen2_moe"]),  # whose layers differ
        ("int8", CONFIG),
        ("nf4", CONFIG),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_merged_weights_have_the_logits_of_adapters(base, plain):
    config, params = adapted(plain, base=base, targets=("out", "mlp/*"))
    given, logits = tokens(config, 2)[:, :-1], jax.jit(gpt.logits, static_argnums=0)
    without = params | {"layers": merged(config, params["layers"])}
    jax.tree.map(lambda w: np.testing.assert_equal(w.dtype, np.float32), without)
    found = logits(config, params, given)
    np.testing.assert_allclose(found, logits(plain, without, given), atol=1e-6)
    off = dataclasses.replace(config, adapters=dataclasses.replace(config.adapters, alpha=0.0))
    assert np.abs(logits(off, params, given) - found).max() > 0.01
    leaves = jax.tree.leaves(without)
    assert gpt.num_parameters(config) - gpt.num_adapter_parameters(config) == sum(
        leaf.size for leaf in leaves
    )


def test_rounded_kernels_are_the_nearest():
    drawn = np.random.default_rng(0)
    kernel = drawn.normal(size=(96, 5)).astype(np.float32)
    kernel[:, 2] = 0
    parts = rounded(jnp.asarray(kernel), "int8")
    most = np.abs(kernel).max(axis=0, keepdims=True)
    assert np.all(
        np.abs(whole(parts["kernel"], parts["kernel_scale"]) - kernel) <= most / 254 * 1.001
    )
    parts = rounded(jnp.asarray(kernel), "nf4")
    assert parts["kernel"].shape == (48, 5)
    assert parts["kernel_scale"].shape == (3, 5)  # 32 divides 96 inputs
    blocks = kernel.reshape(3, 32, 5)
    scales = np.abs(blocks).max(axis=1, keepdims=True)
    nearest = np.abs(blocks[..., None] - scales[..., None] * NF4).min(axis=-1).reshape(96, 5)
    errors = np.abs(whole(parts["kernel"], parts["kernel_scale"]) - kernel)
    np.testing.assert_allclose(errors, nearest, atol=1e-6)


@pytest.mark.pipeline
@pytest.mark.parametrize(
    ("options", "mesh"),
    [({"base": "nf4", "dropout": 0.25}, {"data": 2}), ({"base": "int8"}, {"tensor": 2})],
    ids=["nf4", "int8"],
)
def test_a_pipeline_trains_adapters_alone(options, mesh):
    """Gradients are those of the whole model."""
    shape = dataclasses.replace(CONFIG, num_layers=2)
    config, params = adapted(shape, targets=("qkv", "down", "out"), **options)
    axes = {"tensor_axis": "tensor"} if "tensor" in mesh else {}
    model = gpt.model(config, vocabulary_axis="stage", **axes)
    batch = {"tokens": tokens(config, 8)}
    key = jax.random.key(3) if config.adapters.dropout else None
    (pipe,) = testing.assert_matches_unpipelined(
        model, params, batch, schedules=["1f1b-fused"], rng=key, zero=3, trainable=TRAINED,
        meshes=[jaxpipe.make_mesh(stage=2, **mesh)],
        reference=functools.partial(unpipelined.loss, gpt.model(config)),
    )  # fmt: skip
    kept = predicted_bytes(pipe, batch, key)
    assert 0 < kept["gradients"] <= 4 * gpt.num_adapter_parameters(config) / 2


_PEFT = pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="peft is not installed")
_FAMILIES = hugging_face_models.DECODERS | hugging_face_models.FURTHER
_FAMILIES |= {"gpt2": hugging_face_models.GPT2}


def in_peft(folder, adapters):
    """The model of a folder in the peft library: with adapters of a folder, or new ones."""
    import peft
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    if isinstance(adapters, dict):
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **adapters))
        torch.manual_seed(0)
        for name, w in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(w, std=0.25)
        return model.eval()
    return peft.PeftModel.from_pretrained(model, adapters).eval()


def logits_of(model, given) -> np.ndarray:
    import torch

    return model(torch.tensor(given)).logits.detach().numpy()


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft reads what transformers renames
@_PEFT
@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("gpt2", ("*",)),  # kernels as ours; queries, keys and values in one module
        ("phi3", ("q_proj", "value", "up")),  # the same; gate and up, of which one is adapted
        ("cohere", ("mlp/*", "k_proj", "v_proj")),  # heads in another order
        ("deepseek_v3", ("attention/*",)),
    ],
)
def test_peft_reads_adapters_with_equal_logits(name, targets, tmp_path):
    """And they come back with the same outputs."""
    plain = _FAMILIES[name]
    config, params = adapted(plain, targets=targets)
    off = dataclasses.replace(config, adapters=dataclasses.replace(config.adapters, alpha=0.0))
    without = params | {"layers": merged(off, params["layers"])}
    state = gpt.init_state(plain)
    hugging_face.save(tmp_path / "base", plain, without, state)
    hugging_face.save_adapters(tmp_path / "own", config, params, base=str(tmp_path / "base"))
    given = tokens(config, 2)[:, :-1]
    logits = logits_of(in_peft(tmp_path / "base", tmp_path / "own"), given)
    expected = gpt.logits(config, params, given, state)
    np.testing.assert_allclose(expected, logits, atol=2e-6)
    read, leaves = hugging_face.load_adapters(tmp_path / "own", plain)
    found = gpt.logits(read, beside(without, leaves), given, state)
    np.testing.assert_allclose(found, expected, atol=2e-6)
    hugging_face.save(tmp_path / "merged", plain, without, state)
    with pytest.raises(ValueError, match=r"holds a model's config\.json"):
        hugging_face.save_adapters(tmp_path / "merged", config, params, base="base")


@pytest.mark.filterwarnings("ignore::FutureWarning")
@_PEFT
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3", {"target_modules": ["q_proj", "v_proj"]}),
        ("qwen3", {"target_modules": "all-linear", "use_rslora": True}),
        ("gpt2", {"target_modules": ["c_attn", "mlp.c_proj"], "fan_in_fan_out": True}),
        (
            "gpt_neox",
            {
                "target_modules": ["query_key_value"],
                "alpha_pattern": {"1.attention.query_key_value": 2},
            },
        ),
        ("phi3", {"target_modules": ["gate_up_proj"], "rank_pattern": {"gate_up_proj": 4}}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_adapters_that_peft_has_made_have_equal_logits(name, options, tmp_path):
    """Each linear map of ours has its own."""
    plain = _FAMILIES[name]
    params = gpt.init(plain, jax.random.key(1))
    hugging_face.save(tmp_path / "base", plain, params)
    theirs = in_peft(tmp_path / "base", {"r": 2, "lora_alpha": 3} | options)
    theirs.save_pretrained(tmp_path / "own")
    given = tokens(plain, 2)[:, :-1]
    config, leaves = hugging_face.load_adapters(tmp_path / "own", plain)
    found = gpt.logits(config, beside(params, leaves), given)
    np.testing.assert_allclose(found, logits_of(theirs, given), atol=2e-6)
    assert np.abs(found - gpt.logits(plain, params, given)).max() > 0.01


def test_names_of_the_library_name_linear_maps():
    """Linear maps of every family have names in the library."""
    for name, plain in _FAMILIES.items():
        config = dataclasses.replace(plain, adapters=Adapters(1, 1.0))
        modules = hugging_face._adapted_modules(hugging_face.FAMILIES[name], config)
        for module, (_, reached) in modules.items():
            named = Adapters(1, 1.0, (module.rpartition(".")[2],))
            assert all(named.adapts(own.target) for own in reached), (name, module)


def test_adapters_of_other_kinds_are_refused(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    config, params = adapted(CONFIG, targets=("q_proj", "v_proj"))
    hugging_face.save_adapters(tmp_path, config, params, base="base")
    plain, file = dataclasses.replace(config, adapters=None), tmp_path / "adapter_model.safetensors"
    whole = safetensors.load_file(file)
    q_proj = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"

    def refused(message, **tensors):
        kept = {name: w for name, w in (whole | tensors).items() if w is not None}
        safetensors.save_file(kept, file)
        with pytest.raises(ValueError, match=message):
            hugging_face.load_adapters(tmp_path, plain)

    refused("lm_head", **{"base_model.model.lm_head.lora_A.weight": np.ones((3, 24), np.float32)})
    refused("q_proj do not fit", **{q_proj.format(2, "B"): np.ones((24, 4), np.float32)})
    refused(
        r"attention/qkv/query in some layers", **{q_proj.format(1, which): None for which in "AB"}
    )


def test_adapters_of_mlps_beside_experts_are_not_written_for_peft(tmp_path):
    config, params = adapted(hugging_face_models.DECODERS["qwen2_moe"])
    with pytest.raises(ValueError, match="for experts"):
        hugging_face.save_adapters(tmp_path, config, params, base="base")
