"""Logits equal those of the transformers library, and folders are read and written exactly.

Its models are initialised at random, so nothing is downloaded. Biases, norms and statistics are
drawn, too: at their initial zeros and ones, mixing them up would not show.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hugging_face_help import DECODERS, assert_equal_logits, drawn, randomise, rewrite, shard

import jaxpipe
from models import bert, gpt, hugging_face, hugging_face_files, resnet
from models.bert import BERTConfig
from models.gpt import GPTConfig
from models.resnet import ResNetConfig
from models.sample import sample

pytestmark = pytest.mark.pipeline

GPT2 = GPTConfig(
    vocab_size=37, sequence_length=12, num_layers=3, width=32, num_heads=4, positions="learned",
    norm="layer", activation="gelu", bias=True,
)  # fmt: skip
LLAMA = GPTConfig(
    vocab_size=37, sequence_length=12, num_layers=3, width=32, num_heads=4, num_kv_heads=2,
    mlp_width=48, tied=False, rope_theta=500.0, norm_epsilon=1e-6,
)  # fmt: skip
BERT = BERTConfig(
    vocab_size=37, sequence_length=12, num_layers=3, width=32, num_heads=4, mlp_width=48,
    next_sentence=True,
)  # fmt: skip
RESNET18 = ResNetConfig(depth=18, num_classes=7, style="imagenet", norm="batch")
RESNET50 = dataclasses.replace(RESNET18, depth=50)
SMALL_RESNET = dataclasses.replace(RESNET18, width=8)


@pytest.fixture(scope="module")
def transformers():
    """The library with its torch models; what follows needs both installed."""
    pytest.importorskip("torch", reason="torch is not installed: make test-parity")
    return pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, 37, (3, 10))


# Logits.


def test_gpt2_logits(transformers, tokens, tmp_path):
    import torch

    theirs = randomise(
        transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=37, n_positions=12, n_embd=32, n_layer=3, n_head=4,
                bos_token_id=0, eos_token_id=0,
            )
        )
    )  # fmt: skip
    theirs.save_pretrained(tmp_path)
    config, params, *_ = hugging_face.load(tmp_path)
    assert config == dataclasses.replace(GPT2, dropout=0.1)
    assert_equal_logits(gpt.logits(config, params, tokens), theirs(torch.tensor(tokens)).logits)


def bert_batch(tokens):
    """Two segments a row, and padding at the end of the second row."""
    mask = np.ones_like(tokens)
    mask[1, 6:] = 0
    segments = np.broadcast_to(np.arange(tokens.shape[1]) >= 4, tokens.shape).astype(int)
    return {"tokens": tokens, "mask": mask, "segments": segments}


@pytest.mark.parametrize("head", ["BertForPreTraining", "BertForMaskedLM"])
def test_bert_logits(transformers, tokens, tmp_path, head):
    import torch

    theirs = randomise(
        getattr(transformers, head)(
            transformers.BertConfig(
                vocab_size=37, max_position_embeddings=12, hidden_size=32, num_hidden_layers=3,
                num_attention_heads=4, intermediate_size=48,
            )
        )
    )  # fmt: skip
    theirs.save_pretrained(tmp_path)
    config, params, *_ = hugging_face.load(tmp_path)
    both = head == "BertForPreTraining"
    assert config == dataclasses.replace(BERT, dropout=0.1, next_sentence=both)
    batch = bert_batch(tokens)
    output = theirs(
        torch.tensor(batch["tokens"]),
        attention_mask=torch.tensor(batch["mask"]),
        token_type_ids=torch.tensor(batch["segments"]),
    )
    assert_equal_logits(bert.logits(config, params, batch), output[0])
    if both:
        assert_equal_logits(
            bert.next_sentence_logits(config, params, batch), output.seq_relationship_logits
        )


@pytest.mark.parametrize("config", [RESNET18, RESNET50], ids=["18", "50"])
def test_resnet_logits(transformers, tmp_path, config):
    import torch

    theirs = randomise(
        transformers.ResNetForImageClassification(
            transformers.ResNetConfig(
                depths=list(config.blocks), hidden_sizes=list(config.group_channels),
                layer_type="bottleneck" if config.bottleneck else "basic",
                num_labels=config.num_classes,
            )
        )
    )  # fmt: skip
    theirs.save_pretrained(tmp_path)
    read, params, state, _ = hugging_face.load(tmp_path)
    assert read == dataclasses.replace(config, width=64)
    images = np.random.default_rng(0).standard_normal((2, 3, 48, 40)).astype(np.float32)
    assert_equal_logits(
        jax.jit(resnet.logits, static_argnums=0)(read, params, images.transpose(0, 2, 3, 1), state),
        theirs(torch.tensor(images)).logits,
    )


@pytest.mark.parametrize(
    ("config", "model"),
    [
        (GPT2, "GPT2LMHeadModel"),
        (BERT, "BertForPreTraining"),
        (dataclasses.replace(BERT, next_sentence=False), "BertForMaskedLM"),
        (SMALL_RESNET, "ResNetForImageClassification"),
    ],
    ids=["gpt2", "bert", "masked-lm", "resnet"],
)
def test_what_is_written_the_library_reads(transformers, tokens, tmp_path, config, model):
    import torch

    params, state = drawn(config)
    hugging_face.save(tmp_path, config, params, state)
    theirs, notes = getattr(transformers, model).from_pretrained(tmp_path, output_loading_info=True)
    theirs.eval()
    assert not notes["missing_keys"] - {"bert.embeddings.position_ids"}
    assert not notes["unexpected_keys"]
    if isinstance(config, ResNetConfig):
        images = np.random.default_rng(0).standard_normal((2, 3, 48, 40)).astype(np.float32)
        ours = resnet.logits(config, params, images.transpose(0, 2, 3, 1), state)
        assert_equal_logits(ours, theirs(torch.tensor(images)).logits)
    elif isinstance(config, BERTConfig):
        ours = bert.logits(config, params, {"tokens": tokens})
        assert_equal_logits(ours, theirs(torch.tensor(tokens))[0])
    else:
        assert_equal_logits(gpt.logits(config, params, tokens), theirs(torch.tensor(tokens)).logits)


@pytest.mark.parametrize("name", DECODERS)
def test_theirs_is_read_and_ours_is_written(transformers, tmp_path, name):
    """Both ways the logits are equal, and so is the likeliest continuation of a text."""
    import torch

    config = DECODERS[name]
    hugging_face.save(tmp_path / "empty", config, *drawn(config))
    # A model of theirs with the same config, but weights of its own.
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(tmp_path / "empty"), attn_implementation="eager"
    )
    randomise(theirs, size=8.0).save_pretrained(tmp_path / "theirs")
    read, params, state, _ = hugging_face.load(tmp_path / "theirs")
    assert read == config
    shape = 3, config.sequence_length
    ids = np.random.default_rng(0).integers(0, config.vocab_size, shape)
    ours = jax.jit(gpt.logits, static_argnums=0)(read, params, ids, state)
    assert_equal_logits(ours, theirs(torch.tensor(ids)).logits)

    hugging_face.save(tmp_path / "ours", read, params, state)
    again, notes = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", output_loading_info=True
    )
    assert not notes["missing_keys"]
    assert not notes["unexpected_keys"]
    assert_equal_logits(ours, again.eval()(torch.tensor(ids)).logits)
    generated = again.generate(
        torch.tensor(ids[:, :6]), max_new_tokens=8, do_sample=False, pad_token_id=0
    )
    drawn_ids = sample(
        *(read, params, ids[:, :6]),
        num_tokens=8,
        temperature=0.0,
        rng=jax.random.key(0),
        state=state,
    )
    np.testing.assert_array_equal(drawn_ids, generated[:, 6:])


# Folders; these need no torch.


@pytest.mark.parametrize(
    "config",
    [
        *(GPT2, LLAMA, dataclasses.replace(LLAMA, tied=True, num_layers=1), BERT, SMALL_RESNET),
        *DECODERS.values(),
    ],
)
def test_round_trip_is_exact(tmp_path, config):
    params, state = drawn(config)
    hugging_face.save(tmp_path, config, params, state)
    read = hugging_face.load(tmp_path)
    # What is None for "the default" is read as the number it stands for.
    given = {k: v for k, v in dataclasses.asdict(config).items() if v is not None}
    assert dataclasses.replace(read.config, **given) == read.config
    assert jax.tree.structure((read.params, read.state)) == jax.tree.structure((params, state))
    jax.tree.map(np.testing.assert_array_equal, (read.params, read.state), (params, state))


def test_weights_pass_through_a_pipeline_byte_for_byte(tmp_path):
    config = dataclasses.replace(LLAMA, num_layers=8)
    hugging_face.save(tmp_path / "first", config, *drawn(config))
    _, params, *_ = hugging_face.load(tmp_path / "first")
    pipe = jaxpipe.Pipeline(
        gpt.model(config, vocabulary_axis="stage"),
        params,
        schedule="zb-v",
        mesh=jaxpipe.make_mesh(stage=4, data=2),
        zero=3,
    )
    hugging_face.save(tmp_path / "second", config, pipe.unplace(pipe.place(params)))
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
    jax.tree.map(np.testing.assert_array_equal, hugging_face.load(tmp_path).params, params)


def test_names_of_bare_and_of_early_files(tmp_path):
    """GPT-2 without its head's prefix and with causal masks; BERT with gamma and beta."""
    params, _ = drawn(GPT2)
    hugging_face.save(tmp_path / "gpt2", GPT2, params)
    masks = {f"h.{i}.attn.bias": np.ones((1, 1, 12, 12), np.uint8) for i in range(3)}
    rewrite(
        tmp_path / "gpt2",
        lambda t: {k.removeprefix("transformer."): v for k, v in t.items()} | masks,
    )
    jax.tree.map(np.testing.assert_array_equal, hugging_face.load(tmp_path / "gpt2").params, params)

    params, _ = drawn(BERT)
    hugging_face.save(tmp_path / "bert", BERT, params)
    rewrite(
        tmp_path / "bert",
        lambda t: {
            k.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            ): v
            for k, v in t.items()
        },
    )
    jax.tree.map(np.testing.assert_array_equal, hugging_face.load(tmp_path / "bert").params, params)


def test_folders_without_a_model_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        hugging_face.load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(
        ValueError, match=r"model_type='t5'; only gpt2, llama, .*, bert, resnet can"
    ):
        hugging_face.load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ValueError, match=r"holds no model\.safetensors; it must hold"):
        hugging_face.load(tmp_path)


@pytest.mark.parametrize(
    ("config", "nearest"),
    [
        (dataclasses.replace(LLAMA, norm="layer"), "llama, has no models with norm='layer'"),
        (
            dataclasses.replace(GPT2, attention_soft_cap=50.0, window=4),
            r"gpt2, has no models with attention_soft_cap=50\.0, window=4",
        ),
        (
            dataclasses.replace(DECODERS["gpt_oss"], expert_bias=False),
            "gpt_oss, has no models with expert_bias=False",
        ),
    ],
    ids=["llama", "gpt2", "gpt_oss"],
)
def test_the_fields_that_keep_a_model_from_being_written_are_named(tmp_path, config, nearest):
    with pytest.raises(ValueError, match=rf"none of gpt2, llama, .* The nearest, {nearest}"):
        hugging_face.save(tmp_path, config, {})


def test_models_that_the_library_lacks_are_not_written(tmp_path):
    with pytest.raises(ValueError, match="config is a dict, of which the library has no model"):
        hugging_face.save(tmp_path, {}, {})
    with pytest.raises(ValueError, match=r"layers of a resnet keep states: pass state"):
        hugging_face.save(tmp_path, SMALL_RESNET, {})


# Read part by part.


@pytest.mark.parametrize(
    ("config", "zero"),
    [(GPT2, 0), (DECODERS["gemma2"], 3)],
    ids=["gpt2", "gemma2"],
)
def test_parts_are_read_into_their_place(tmp_path, config, zero):
    params, _ = drawn(config)
    hugging_face.save(tmp_path, config, params)
    folder = hugging_face.Folder(tmp_path)
    pipe = jaxpipe.Pipeline(
        gpt.model(config, vocabulary_axis="stage"),
        jax.eval_shape(lambda: params),
        schedule="1f1b",
        microbatches=2,
        mesh=jaxpipe.make_mesh(stage=2, data=2),
        zero=zero,
    )
    placed = jaxpipe.load_params(pipe, folder.read)
    for one, two in zip(jax.tree.leaves(placed), jax.tree.leaves(pipe.place(params)), strict=True):
        assert one.sharding == two.sharding
        np.testing.assert_array_equal(one, two)


def test_nothing_is_read_before_it_is_asked_for(tmp_path, monkeypatch):
    """And then the tensors of one layer alone, even where layers differ."""
    params, state = drawn(SMALL_RESNET)
    hugging_face.save(tmp_path, SMALL_RESNET, params, state)
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
    assert folder.config == SMALL_RESNET
    assert len(resnet.init_state(SMALL_RESNET)) == len(folder.read_state())
