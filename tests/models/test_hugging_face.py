"""Logits equal those of the transformers library, and folders are read and written exactly.

Its models are initialised at random, so nothing is downloaded. Biases, norms and statistics are
drawn, too: at their initial zeros and ones, mixing them up would not show.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from hugging_face_models import (
    BERT,
    DECODERS,
    FURTHER,
    GPT2,
    KIMI,
    LLAMA,
    MTP,
    RESNET,
    THEIRS,
    WEIGHTS,
    drawn,
    rewrite,
    shard,
)

import jaxpipe
from models import bert, gpt, hugging_face, hugging_face_files, resnet
from models.gpt import GPTConfig
from models.resnet import ResNetConfig
from models.sample import sample

pytestmark = pytest.mark.pipeline

CONFIGS = {
    "gpt2": dataclasses.replace(GPT2, dropout=0.1),
    "bert": dataclasses.replace(BERT, dropout=0.1),
    "masked-lm": dataclasses.replace(BERT, next_sentence=False),
    "resnet-18": RESNET,
    "resnet-50": dataclasses.replace(RESNET, depth=50),
    **DECODERS,
    "kimi_k2": KIMI,
}

SIZES = {"qwen3_next": 4.0}
"""What matrices are multiplied by, where 8 would make the rounding of float32 grow: with 8, the
library's logits are up to 9e-6 from those of its own model in float64."""

GPT_J = dataclasses.replace(
    GPT2, positions="rotary", rotary_size=2, residual="parallel", tied=False, head_bias=True,
    bias=False, mlp_bias=True, norm_bias=True,
)  # fmt: skip
TIED = dataclasses.replace(LLAMA, tied=True, num_layers=1)


@pytest.fixture(scope="module")
def transformers():
    """The library with its torch models; what follows needs both installed."""
    pytest.importorskip("torch", reason="torch is not installed: make test-parity")
    return pytest.importorskip("transformers", reason="transformers is not installed")


def randomise(torch_model, *, size):
    """Draws what a fresh model initialises to zeros and ones; scalars are constants.

    Matrices are multiplied by ``size``; at first scores are too small for softmax and caps to show.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    for name, tensor in torch_model.state_dict().items():
        if tensor.ndim > 1 and "norm" not in name:
            tensor *= size
        elif name.endswith("A_log"):  # states last longer than a chunk
            tensor -= 5
        elif tensor.is_floating_point() and tensor.ndim:
            noise = torch.rand(tensor.shape, generator=generator) * 0.2
            tensor += noise if "bias" in name or "mean" in name else noise - 0.1
    return torch_model.eval()


def both_logits(config, params, state, theirs):
    """Our logits and theirs of the same inputs, a pair for every head."""
    import torch

    rng = np.random.default_rng(0)
    if isinstance(config, ResNetConfig):
        images = rng.standard_normal((2, 3, 48, 40)).astype(np.float32)
        ours = jax.jit(resnet.logits, static_argnums=0)(
            config, params, images.transpose(0, 2, 3, 1), state
        )
        return [(ours, theirs(torch.tensor(images)).logits)]
    ids = rng.integers(0, config.vocab_size, (3, config.sequence_length))
    if isinstance(config, GPTConfig):
        ours = jax.jit(gpt.logits, static_argnums=0)(config, params, ids, state)
        return [(ours, theirs(torch.tensor(ids)).logits)]
    mask = np.ones_like(ids)
    mask[1, 6:] = 0
    segments = np.broadcast_to(np.arange(ids.shape[1]) >= 4, ids.shape).astype(int)
    batch = {"tokens": ids, "mask": mask, "segments": segments}
    names = "input_ids", "attention_mask", "token_type_ids"
    output = theirs(**dict(zip(names, map(torch.tensor, batch.values()), strict=True)))
    found = [(bert.logits(config, params, batch), output[0])]
    if config.next_sentence:
        ours = bert.next_sentence_logits(config, params, batch)
        found.append((ours, output.seq_relationship_logits))
    return found


def assert_equal_logits(*args):
    """float32 on both sides: a few units in the last place of the largest logit."""
    for ours, theirs in both_logits(*args):
        theirs = theirs.detach().numpy()
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=2e-6 * np.abs(theirs).max())


@pytest.mark.parametrize("name", CONFIGS)
def test_theirs_is_read_and_ours_is_written(transformers, tmp_path, name):
    """Both ways the logits are equal, and so is the likeliest continuation of a text."""
    import torch

    config = CONFIGS[name]
    hugging_face.save(tmp_path / "empty", config, *drawn(config))
    # A model of theirs with the same config, but weights of its own.
    described = transformers.AutoConfig.from_pretrained(
        tmp_path / "empty", attn_implementation="eager"
    )
    kind = getattr(transformers, described.architectures[0])
    size = SIZES.get(name, 8.0) if isinstance(config, GPTConfig) else 1.0
    theirs = randomise(kind(described), size=size)
    theirs.save_pretrained(tmp_path / "theirs")
    read, params, state, _ = hugging_face.load(tmp_path / "theirs")
    assert read == config
    assert_equal_logits(read, params, state, theirs)

    hugging_face.save(tmp_path / "ours", read, params, state)
    again, notes = kind.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", output_loading_info=True
    )
    assert not notes["missing_keys"] - {"bert.embeddings.position_ids"}
    assert not notes["unexpected_keys"]
    assert_equal_logits(read, params, state, again.eval())
    if isinstance(config, GPTConfig):
        # Without zeros, which the library would take for padding.
        prompt, count = np.random.default_rng(0).integers(1, config.vocab_size, (3, 6)), 6
        generated = again.generate(
            torch.tensor(prompt), max_new_tokens=count, do_sample=False, pad_token_id=0
        )
        greedy = {"num_tokens": count, "temperature": 0.0, "rng": jax.random.key(0)}
        np.testing.assert_array_equal(
            sample(read, params, prompt, **greedy, state=state), generated[:, 6:]
        )


@pytest.mark.parametrize("name", THEIRS)
def test_models_of_the_library_are_read_and_written_bit_for_bit(transformers, tmp_path, name):
    config = transformers.AutoConfig.for_model(name, **THEIRS[name])
    kind = transformers.AutoModelForCausalLM
    theirs = kind.from_config(config, attn_implementation="eager")
    theirs = randomise(theirs, size=SIZES.get(name, 8.0))
    theirs.save_pretrained(tmp_path / "theirs")
    read, params, state, token_ids = hugging_face.load(tmp_path / "theirs")
    assert_equal_logits(read, params, state, theirs)

    hugging_face.save(tmp_path / "ours", read, params, state, token_ids=token_ids)
    first, second = (
        safetensors.numpy.load_file(tmp_path / folder / WEIGHTS) for folder in ("theirs", "ours")
    )
    jax.tree.map(np.testing.assert_array_equal, first, second)
    again, notes = kind.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", output_loading_info=True
    )
    assert not notes["missing_keys"]
    assert not notes["unexpected_keys"]
    assert type(again) is type(theirs)
    assert_equal_logits(read, params, state, again.eval())


def test_the_further_layer_predicts_as_theirs(transformers, tmp_path, monkeypatch):
    import torch
    from transformers.modeling_layers import MtpModel

    params, state = drawn(MTP)
    hugging_face.save(tmp_path, MTP, params, state)
    kind = transformers.DeepseekV3ForCausalLM
    # The library knows the number of the further layer of the one model that was published.
    pattern = rf"model\.layers\.{MTP.num_layers}.*"
    monkeypatch.setattr(kind, "_keys_to_ignore_on_load_unexpected", [pattern])
    main, notes = kind.from_pretrained(
        tmp_path, attn_implementation="eager", output_loading_info=True
    )
    assert not notes["missing_keys"]
    assert not notes["unexpected_keys"]
    assert_equal_logits(MTP, params, state, main.eval())

    ids = np.random.default_rng(0).integers(0, MTP.vocab_size, (3, MTP.sequence_length))
    hidden = main(torch.tensor(ids), output_hidden_states=True).hidden_states[-1]
    places, further = torch.arange(1, ids.shape[1])[None], MtpModel.from_pretrained(main).eval()
    theirs = further.forward_layer(0, hidden[:, :-1], places, None, torch.tensor(ids[:, 1:]))
    model = gpt.model(MTP)
    x = model.embed(params, {"tokens": ids, "targets": ids}, None)
    for layer, own, kept in zip(model.layer, params["layers"], state, strict=True):
        x, _ = layer(own, x, None, None, kept)
    np.testing.assert_allclose(x[1][:, :-1], theirs.detach().numpy(), rtol=1e-4, atol=1e-5)


# Folders; these need no torch.


def assert_reads(folder, params, state=None):
    found = hugging_face.load(folder)
    jax.tree.map(np.testing.assert_array_equal, found.params, params)
    if state is not None:
        jax.tree.map(np.testing.assert_array_equal, found.state, state)


@pytest.mark.parametrize(
    "config",
    [*CONFIGS.values(), *FURTHER.values(), MTP, LLAMA, TIED],
    ids=[*CONFIGS, *FURTHER, "further", "biases", "tied"],
)
def test_round_trip_is_exact(tmp_path, config):
    params, state = drawn(config)
    hugging_face.save(tmp_path, config, params, state)
    read = hugging_face.load(tmp_path).config
    # What is None for "the default" is read as the number it stands for.
    given = {k: v for k, v in dataclasses.asdict(config).items() if v is not None}
    assert dataclasses.replace(read, **given) == read
    assert_reads(tmp_path, params, state)


@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize("config", [GPT2, GPT_J, FURTHER["falcon"]], ids=["gpt2", "gptj", "falcon"])
def test_a_width_that_config_json_may_leave_out_is_left_out(tmp_path, config, is_given):
    mlp_width = 4 * config.width if is_given else None  # which means the same
    config = dataclasses.replace(config, mlp_width=mlp_width)
    hugging_face.save(tmp_path, config, *drawn(config))
    written = json.loads((tmp_path / "config.json").read_text())
    assert [written[k] for k in ("n_inner", "ffn_hidden_size") if k in written] == [mlp_width]
    read = hugging_face.Folder(tmp_path).config
    assert (read.mlp_width, read.hidden_width) == (mlp_width, config.hidden_width)


@pytest.mark.parametrize("name", FURTHER)
def test_a_model_is_written_as_the_family_it_was_read_from(tmp_path, name):
    """Though an earlier one of the table may have the same shape."""
    config = dataclasses.replace(FURTHER[name], model_type=name)
    hugging_face.save(tmp_path, config, *drawn(config))
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == name
    assert hugging_face.Folder(tmp_path).config.model_type == name


@pytest.mark.parametrize("stem", ["language_model.model.", "model.language_model."])
def test_the_decoder_of_a_model_with_images_is_read(tmp_path, stem):
    config = dataclasses.replace(DECODERS["gemma3_text"], tied=True)
    params, _ = drawn(config)
    hugging_face.save(tmp_path, config, params)
    rewrite(
        tmp_path,
        lambda tensors: (
            {"vision_tower.patches.weight": np.ones((2, 2), "f4")}
            | {stem + name.removeprefix("model."): x for name, x in tensors.items()}
        ),
    )
    text = json.loads((tmp_path / "config.json").read_text())
    whole = {"model_type": "gemma3", "text_config": text, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert_reads(tmp_path, params)


@pytest.mark.parametrize(
    ("config", "schedule", "zero"),
    [(GPT2, "1f1b", 0), (DECODERS["gemma2"], "zb-v", 3)],
    ids=["gpt2", "gemma2"],
)
def test_parts_are_read_into_their_place_and_written_byte_for_byte(
    tmp_path, config, schedule, zero
):
    params, _ = drawn(config)
    hugging_face.save(tmp_path / "first", config, params)
    pipe = jaxpipe.Pipeline(
        gpt.model(config, vocabulary_axis="stage"),
        jax.eval_shape(lambda: params),
        schedule=schedule,
        microbatches=2,
        mesh=jaxpipe.make_mesh(stage=2, data=2),
        zero=zero,
    )
    placed = jaxpipe.load_params(pipe, hugging_face.Folder(tmp_path / "first").read)
    for one, two in zip(jax.tree.leaves(placed), jax.tree.leaves(pipe.place(params)), strict=True):
        assert one.sharding == two.sharding
        np.testing.assert_array_equal(one, two)
    hugging_face.save(tmp_path / "second", config, pipe.unplace(placed))
    first, second = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second")
    )
    assert first == second


def test_files_in_several_parts_and_in_16_bits(tmp_path):
    """bfloat16 weights are exact in float32, and the index says which file holds what."""
    params, _ = drawn(GPT2)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(np.float32), params)
    hugging_face.save(tmp_path, GPT2, params)
    rewrite(tmp_path, lambda tensors: {k: x.astype(jnp.bfloat16) for k, x in tensors.items()})
    shard(tmp_path)
    assert_reads(tmp_path, params)


def published(tensors):
    """DeepSeek-V3, whose further layer has copies of both tables."""
    copies = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    layer = f"model.layers.{MTP.num_layers}"
    return tensors | {f"{layer}.{k}.weight": tensors[f"{v}.weight"] for k, v in copies.items()}


def bare(tensors):
    """GPT-2 without its head's prefix and with causal masks."""
    masks = {f"h.{i}.attn.bias": np.ones((1, 1, 12, 12), np.uint8) for i in range(2)}
    return {name.removeprefix("transformer."): x for name, x in tensors.items()} | masks


def early(tensors):
    """BERT with gamma and beta."""
    for new, old in (("weight", "gamma"), ("bias", "beta")):
        tensors = {
            name.replace(f"LayerNorm.{new}", f"LayerNorm.{old}"): x for name, x in tensors.items()
        }
    return tensors


@pytest.mark.parametrize(
    ("config", "names"),
    [(GPT2, bare), (BERT, early), (MTP, published)],
    ids=["gpt2", "bert", "deepseek"],
)
def test_names_of_bare_early_and_published_files(tmp_path, config, names):
    params, state = drawn(config)
    hugging_face.save(tmp_path, config, params, state)
    rewrite(tmp_path, names)
    assert_reads(tmp_path, params)


def test_kimi_k2_is_read_as_deepseek_v3(tmp_path):
    """Its folders name a class of their own, of DeepSeek-V3's architecture."""
    params, state = drawn(KIMI)
    hugging_face.save(tmp_path, KIMI, params, state)
    file = tmp_path / "config.json"
    file.write_text(
        file.read_text().replace('"model_type": "deepseek_v3"', '"model_type": "kimi_k2"')
    )
    assert '"kimi_k2"' in file.read_text()
    assert_reads(tmp_path, params, state)


def test_what_is_no_model_that_can_be_read_or_written_is_refused(tmp_path):
    for text, message in (
        (None, r"holds no config\.json"),
        ('{"model_type": "t5"}', r"model_type='t5'; only gpt2, llama, .*, bert, resnet can"),
        ('{"model_type": "gpt2"}', r"holds no model\.safetensors; it must hold"),
    ):
        if text is not None:
            (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            hugging_face.load(tmp_path)
    with pytest.raises(ValueError, match="config is a dict, of which the library has no model"):
        hugging_face.save(tmp_path, {}, {})
    with pytest.raises(ValueError, match=r"layers of a resnet keep states: pass state"):
        hugging_face.save(tmp_path, RESNET, {})


@pytest.mark.parametrize(
    ("config", "changes", "nearest"),
    [
        (LLAMA, {"norm": "layer"}, "llama, has no models with norm='layer'"),
        (
            *(GPT2, {"attention_soft_cap": 50.0, "window": 4}),
            r"gpt2, has no models with attention_soft_cap=50\.0, window=4",
        ),
        (DECODERS["gpt_oss"], {"expert_bias": False}, "oss, has no models with expert_bias=False"),
        (GPT_J, {"rope_theta": 500.0}, r"gptj, has no models with rope_theta=500\.0"),
    ],
    ids=["llama", "gpt2", "gpt_oss", "gptj"],
)
def test_the_fields_that_keep_a_model_from_being_written_are_named(
    tmp_path, config, changes, nearest
):
    with pytest.raises(ValueError, match=rf"none of gpt2, llama, .* The nearest, .*{nearest}"):
        hugging_face.save(tmp_path, dataclasses.replace(config, **changes), {})


def test_nothing_is_read_before_it_is_asked_for(tmp_path, monkeypatch):
    """And then the tensors of one layer alone, even where layers differ."""
    params, state = drawn(RESNET)
    hugging_face.save(tmp_path, RESNET, params, state)
    read, original = [], hugging_face_files.Tensor.read

    def noted(tensor):
        read.append(tensor.name)
        return original(tensor)

    monkeypatch.setattr(hugging_face_files.Tensor, "read", noted)
    folder = hugging_face.Folder(tmp_path)
    assert not read
    found = folder.read("layers", 3)
    assert jax.tree.map(np.shape, found) == jax.tree.map(np.shape, params["layers"][3])
    assert read
    assert all(name.startswith("resnet.encoder.stages.1.layers.0") for name in read)
    assert folder.config == RESNET
    assert len(resnet.init_state(RESNET)) == len(folder.read_state())
