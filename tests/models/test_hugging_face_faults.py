"""Folders and models that are wrong: each ends in one error that names the file and what is wrong.

And the tokens with a meaning, which the library would otherwise make up.
"""

import json
import math
import os
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from covering import some
from hugging_face_models import (
    BERT,
    DECODERS,
    FURTHER,
    GPT2,
    INDEX,
    LLAMA,
    RESNET,
    WEIGHTS,
    drawn,
    rewrite,
    shard,
)

from models import hugging_face
from models.hugging_face_fields import TokenIds

CONFIGS = {"gpt2": GPT2, "bert": BERT, "resnet": RESNET, **DECODERS}
FEW = ("gpt2", "bert", "resnet", "llama", "gemma3_text", "qwen2_moe", "gpt_oss", "deepseek_v3")
"""Families that together have every field."""
UNREAD = {"architectures", "dtype", "label2id", "rope_theta", "rope_local_base_freq"}
UNREAD |= {"embd_pdrop", "attn_pdrop", "attention_probs_dropout_prob", "partial_rotary_factor"}
"""Fields of ``config.json`` that nothing here reads, or that stand twice."""
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
MAY_BE_ANYTHING = {"rope_parameters", "id2label"}
MAY_BE_NULL = {"n_inner", "num_key_value_heads", "head_dim", "rope_scaling", "layer_types"}
MAY_BE_NULL |= {"attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"}
MAY_BE_NULL |= {"mlp_only_layers", "sliding_window"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 12, "mscale": 0.7}
EXPLAINED = r"must|only|gives|describes|of no use|lacks"


def edit(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture
def folder(tmp_path):
    """A model in two parts."""
    hugging_face.save(tmp_path, LLAMA, drawn(LLAMA)[0])
    shard(tmp_path)
    return tmp_path


@pytest.mark.parametrize("family", some(zip(CONFIGS), *zip(FEW)))
def test_every_field_of_a_config_is_checked(tmp_path, family):
    config = CONFIGS[family]
    hugging_face.save(tmp_path, config, *drawn(config))
    file = tmp_path / "config.json"
    right = file.read_text()
    fields = json.loads(right)
    for name in fields.keys() - UNREAD - MAY_BE_ANYTHING:
        for value in ("x", None, {"x": 1}, 10**30, -1, math.nan, math.inf, [1.5]):
            # An id outside the vocabulary is none.
            is_allowed = value is None and name in MAY_BE_NULL
            is_allowed |= name in IDS and (value is None or type(value) is int)
            if is_allowed or (isinstance(fields[name], float | None) and value == 10**30):
                continue
            file.write_text(right)
            edit(file, **{name: value})
            with pytest.raises(ValueError, match=EXPLAINED) as error:
                hugging_face.load(tmp_path)
            assert str(error.value).startswith(str(tmp_path)), (name, value)


@pytest.mark.parametrize(
    ("family", "field", "value", "message"),
    [
        ("gpt2", "n_layer", 1.5, "has n_layer=1.5; it must be a whole number from 1 to 10000."),
        ("llama", "hidden_act", "gelu", "hidden_act='gelu'; it can only be read with 'silu'"),
        ("qwen3", "rope_parameters", {"rope_type": "xpos"}, "rope_type='xpos'"),
        ("gpt_oss", "swiglu_limit", 5.0, "swiglu_limit=5.0; it can only be read with 7.0."),
        ("gpt_oss", "rope_scaling", YARN | {"mscale": 0.5}, "mscale=0.5; it can only be read"),
        ("deepseek_v3", "rope_scaling", YARN | {"mscale_all_dim": 0.5}, "mscale=0.7; it can only"),
        ("deepseek_v3", "rope_interleave", False, "rope_interleave=False; it can only be read"),
        ("deepseek_v3", "num_nextn_predict_layers", 2, "=2; it can only be read with 0 or 1."),
        ("deepseek_v3", "topk_group", 5, "groups_per_token=5 must be at most expert_groups=4"),
        ("llama", "rope_parameters", 3, "has rope_parameters=3; it must be an object."),
        ("llama", "tie_word_embeddings", 0, "has tie_word_embeddings=0; it must be true or false."),
        ("bert", "num_attention_heads", 3, "describes no model of ours: num_heads=3 must divide"),
        ("resnet", "layer_type", "x", "can only be read with 'bottleneck' or 'basic'."),
        pytest.param("gpt2", "n_layer", "x" * 10**4, "x...x", id="long"),
        pytest.param("gpt2", "model_type", "x" * 10**4, "x...x", id="long-type"),
    ],
)
def test_a_wrong_field_is_named(tmp_path, family, field, value, message):
    config = CONFIGS[family]
    hugging_face.save(tmp_path, config, *drawn(config))
    file = tmp_path / "config.json"
    edit(file, **{field: value})
    with pytest.raises(ValueError, match=r"config\.json") as error:
        hugging_face.load(tmp_path)
    assert str(error.value).startswith(f"{file} ")
    assert message in str(error.value)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b"\xff", "config.json is damaged: it is not JSON"),
        ("config.json", b"[]", "config.json is damaged: it holds no JSON object"),
        pytest.param("config.json", b"[" * 100_000, "json is damaged: it is not JSON", id="deep"),
        ("config.json", b'{"model_type": []}', r"config.json has model_type='\[\]'"),
        ("config.json", b'{"model_type": "llama"}', "config.json lacks 'vocab_size'"),
        (INDEX, b"{", "index.json is damaged: it is not JSON"),
        (INDEX, b'{"weight_map": {"a": 3, "b": "c"}}', "it must have a weight_map"),
        (INDEX, b'{"weight_map": {"a": "b\\u0000"}}', "it must have a weight_map"),
        pytest.param(INDEX, b'{"weight_map": {"a": "%s"}}' % (b"x" * 5000), "have a", id="long"),
        (INDEX, b'{"weight_map": {"a": ".."}}', "it must have a weight_map"),
        ("model-00002-of-00002.safetensors", b"12345678{}", "00002.safetensors is damaged: "),
    ],
)
def test_damaged_files_are_named(folder, name, content, message):
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        hugging_face.load(folder)


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_what_is_no_file_of_this_size_is_not_read(folder, name):
    os.truncate(folder / name, 1 << 40)
    with pytest.raises(ValueError, match=f"{name} cannot be read: it has more than 64 MiB"):
        hugging_face.load(folder)
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=f"{name} cannot be read: it is not a regular file"):
        hugging_face.load(folder)
    (folder / name).unlink()
    (folder / name).mkdir()
    with pytest.raises(ValueError, match=name):
        hugging_face.load(folder)


def test_no_name_in_a_file_commands_the_terminal(tmp_path):
    red = "\x1b[31mred\x07"
    hugging_face.save(tmp_path, LLAMA, drawn(LLAMA)[0])
    rewrite(tmp_path, lambda tensors: tensors | {red: np.zeros(1, "f4")})
    with pytest.raises(ValueError, match="of no use") as of_tensor:
        hugging_face.load(tmp_path)
    shard(tmp_path)
    files = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    edit(tmp_path / INDEX, weight_map=files | {"x" + red: next(iter(files.values()))})
    with pytest.raises(ValueError, match="lacks x") as of_index:
        hugging_face.load(tmp_path)
    for error in of_tensor, of_index:
        assert r"\x1b[31mred\x07" in str(error.value)
        assert str(error.value).isprintable()


def test_numbers_of_kinds_that_cannot_be_read_are_named(tmp_path):
    """Kinds that numpy lacks, and integers, which come with scales of their own."""
    hugging_face.save(tmp_path, LLAMA, drawn(LLAMA)[0])
    before = rewrite(tmp_path, lambda tensors: {k: x.astype("i1") for k, x in tensors.items()})
    assert sorted(failures(tmp_path)) == sorted(
        f"{tmp_path / WEIGHTS}: {name} gives int8 numbers; weights must be floating-point, not "
        "quantized."
        for name in before
    )
    header, end = {}, 0
    for name, x in before.items():
        begin, end = end, end + x.size
        header[name] = {"dtype": "F8_E4M3", "shape": x.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    (tmp_path / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        hugging_face.load(tmp_path)


def test_files_hold_what_the_index_says(folder):
    files = json.loads((folder / INDEX).read_text())["weight_map"]
    name, file = next(iter(files.items()))
    other = next(other for other in files.values() if other != file)
    edit(folder / INDEX, weight_map=files | {name: other})
    with pytest.raises(ValueError, match="lacks") as error:
        hugging_face.load(folder)
    assert str(error.value) == f"{folder / other} lacks {name}, which {INDEX} says it holds."

    edit(folder / INDEX, weight_map=files)
    moved = {part: safetensors.numpy.load_file(folder / part) for part in (file, other)}
    safetensors.numpy.save_file(moved[other] | {name: moved[file][name]}, folder / other)
    with pytest.raises(ValueError, match=f"both hold {name}") as error:
        hugging_face.load(folder)
    assert str(folder / file) in str(error.value)
    assert str(folder / other) in str(error.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.float32(-1.1e-6), r"gives -1\.1e-06; it can only be read with -1e-06"),
        (np.float32([-1e-6] * 2), r"gives a tensor of shape \[2\], but config\.json asks for \[\]"),
        (np.int8(0), "gives int8 numbers; weights must be floating-point, not quantized"),
    ],
)
def test_constants_are_those_of_the_formula(tmp_path, value, message):
    """With others the weights mean another function; in bfloat16 they are rounded."""
    config, name = FURTHER["apertus"], "model.layers.1.mlp.act_fn.eps"
    hugging_face.save(tmp_path, config, drawn(config)[0])
    rounded = np.array(-1e-6, jnp.bfloat16).astype("f4")
    rewrite(tmp_path, lambda tensors: tensors | {name: rounded})
    hugging_face.load(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors | {name: np.array(value)})
    with pytest.raises(ValueError, match=rf"{name} {message}\.$"):
        hugging_face.load(tmp_path)


def failures(folder):
    with pytest.raises(ValueError, match="gives") as error:
        hugging_face.load(folder)
    return str(error.value).splitlines()


CHANGES = {
    "a row more": lambda x: np.concatenate([x, x[:1]]),
    "a column less": lambda x: x[..., :-1],
    "an axis more": lambda x: x[None],
    "a last axis more": lambda x: x.reshape(*x.shape, 1),
    "no matrices": lambda x: x.reshape(-1) if x.ndim > 1 else x[:0],
    "transposed": lambda x: x.T,
}


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "resnet"])
def test_every_tensors_shape_is_the_configs(tmp_path, family):
    config = CONFIGS[family]
    hugging_face.save(tmp_path, config, *drawn(config))
    file = tmp_path / WEIGHTS
    right = safetensors.numpy.load_file(file)
    for change in CHANGES.values():
        wrong = {k: np.ascontiguousarray(change(x)) if x.ndim else x for k, x in right.items()}
        safetensors.numpy.save_file(wrong, file)
        assert sorted(failures(tmp_path)) == sorted(
            f"{file}: {name} gives a tensor of shape {list(wrong[name].shape)}, but config.json "
            f"asks for {list(x.shape)}."
            for name, x in right.items()
            if x.shape != wrong[name].shape
        )


def test_everything_that_is_wrong_is_said_at_once(tmp_path):
    hugging_face.save(tmp_path, GPT2, drawn(GPT2)[0])
    rewrite(
        tmp_path,
        lambda tensors: {
            name.replace("h.1.ln_2.bias", "h.1.ln_3.bias"): x[:5] if "wpe" in name else x
            for name, x in tensors.items()
        },
    )
    text = "\n".join(failures(tmp_path))
    for part in (
        "lacks tensors: transformer.h.1.ln_2.bias",
        "of no use: transformer.h.1.ln_3.bias",
        "wpe.weight gives",
    ):
        assert part in text


def test_missing_and_wrong_tensors_have_the_names_of_the_files(tmp_path):
    """Experts are joined there: a published folder without some does not have our names."""
    config = CONFIGS["gpt_oss"]
    hugging_face.save(tmp_path, config, drawn(config)[0])
    layer = "model.layers.1.mlp.experts."
    shape = [4, config.width, 2 * config.hidden_width]

    def change(tensors):
        tensors[layer + "renamed_blocks"] = tensors.pop(layer + "down_proj")
        tensors[layer + "gate_up_proj"] = tensors[layer + "gate_up_proj"][:, :-1]
        return {name: np.ascontiguousarray(x) for name, x in tensors.items()}

    rewrite(tmp_path, change)
    with pytest.raises(ValueError, match="lacks") as error:
        hugging_face.load(tmp_path)
    wrong = [shape[0], shape[1] - 1, shape[2]]
    assert str(error.value).splitlines() == [
        f"{tmp_path} lacks tensors: {layer}down_proj.",
        f"{tmp_path} has tensors of no use: {layer}renamed_blocks.",
        f"{tmp_path / WEIGHTS}: {layer}gate_up_proj gives a tensor of shape {wrong}, but "
        f"config.json asks for {shape}.",
    ]


@pytest.mark.parametrize(
    ("family", "saved"),
    [("llama", ["LlamaModel"]), ("gemma2", None), ("qwen3", ["Qwen3ForSequenceClassification"])],
)
def test_a_model_without_its_head_is_told_why(tmp_path, family, saved):
    config = CONFIGS[family]
    hugging_face.save(tmp_path, config, drawn(config)[0])
    (whole,) = json.loads((tmp_path / "config.json").read_text())["architectures"]
    is_bare = saved is None or saved[0].endswith("Model")

    def change(tensors):
        bare = {name: x for name, x in tensors.items() if not name.startswith(("lm_head", "cls."))}
        return {name.partition(".")[2]: x for name, x in bare.items()} if is_bare else bare

    rewrite(tmp_path, change)
    edit(tmp_path / "config.json", architectures=saved)
    with pytest.raises(ValueError, match="lacks") as error:
        hugging_face.load(tmp_path)
    first, second, *_ = str(error.value).splitlines()
    assert first.startswith(f"{tmp_path / 'config.json'} has architectures={saved}, a model with")
    assert f"Load the folder as {whole}" in first
    assert " lacks tensors: " in second


@pytest.mark.parametrize("kind", ["int8", "renamed"])
def test_quantized_weights_are_named_with_the_remedy(tmp_path, kind):
    config = CONFIGS["qwen3_moe"]
    hugging_face.save(tmp_path, config, drawn(config)[0])
    edit(tmp_path / "config.json", quantization_config={"quant_method": "awq", "bits": 4})
    hugging_face.load(tmp_path)  # the weights are none of it
    changes = {
        "int8": lambda tensors: {name: x.astype("i1") for name, x in tensors.items()},
        "renamed": lambda tensors: {
            name.replace("down_proj.weight", "down_proj.qweight"): x for name, x in tensors.items()
        },
    }
    rewrite(tmp_path, changes[kind])
    with pytest.raises(ValueError, match="quantization_config") as error:
        hugging_face.load(tmp_path)
    assert str(error.value) == (
        f"{tmp_path / 'config.json'} has a quantization_config (quant_method='awq'); only weights "
        "in floating-point can be read. Dequantize the model with the transformers library, then "
        "save_pretrained."
    )


@pytest.mark.parametrize(("value", "count"), [(np.nan, 1), (-np.inf, 3)])
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "model.layers.1.self_attn.k_proj.weight"),
        ("gpt_oss", "model.layers.2.mlp.experts.gate_up_proj"),
        ("gemma2", "model.norm.weight"),
    ],
)
def test_weights_that_are_no_numbers_are_named(tmp_path, family, name, value, count):
    config = CONFIGS[family]
    hugging_face.save(tmp_path, config, drawn(config)[0])

    def change(tensors):
        tensors[name] = tensors[name].copy()
        tensors[name].reshape(-1)[: 2 * count : 2] = value
        return tensors

    rewrite(tmp_path, change)
    with pytest.raises(ValueError, match="must be finite") as error:
        hugging_face.load(tmp_path)
    assert str(error.value) == (
        f"{tmp_path / WEIGHTS}: {name} holds {count} numbers that are NaN or infinite in float32; "
        "weights must be finite."
    )


def test_an_index_may_list_a_tied_head_that_no_file_has(tmp_path):
    config = CONFIGS["qwen2"]
    params, _ = drawn(config)
    hugging_face.save(tmp_path, config, params)
    shard(tmp_path)
    files = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    file = next(iter(files.values()))
    edit(tmp_path / INDEX, weight_map=files | {"lm_head.weight": file})
    jax.tree.map(np.testing.assert_array_equal, hugging_face.load(tmp_path).params, params)
    # It is missing where it is not tied.
    edit(tmp_path / "config.json", tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"lacks tensors: lm_head\.weight\."):
        hugging_face.load(tmp_path)


def test_an_index_that_names_too_much_is_refused_in_short(folder):
    files = json.loads((folder / INDEX).read_text())["weight_map"]
    file = next(iter(files.values()))
    edit(folder / INDEX, weight_map=files | {f"no.{n}": file for n in range(50_000)})
    with pytest.raises(ValueError, match="lacks") as error:
        hugging_face.load(folder)
    some = ", ".join(f"no.{n}" for n in range(8))
    assert str(error.value) == (
        f"{folder / file} lacks {some} and 49992 more, which {INDEX} says it holds."
    )


@pytest.mark.parametrize("family", FEW)
def test_parameters_that_are_not_the_configs_are_not_written(tmp_path, family):
    config = CONFIGS[family]
    params, state = drawn(config)
    first, *others = jax.tree_util.tree_leaves_with_path(params)
    path = "params/" + "/".join(str(getattr(k, "key", getattr(k, "idx", None))) for k in first[0])
    shape = list(first[1].shape)

    def changed(change):
        tree = jax.tree.structure(params)
        return jax.tree.unflatten(tree, [change(first[1]), *(leaf for _, leaf in others)])

    wrong = {
        f"{path} has shape {[*shape, 1]}, but the config asks for {shape}.": lambda x: x[..., None],
        f"{path} holds no floating-point numbers.": lambda x: x.astype("i4"),
        f"{path} is missing.": lambda x: None,
    }
    wrong = {message: changed(change) for message, change in wrong.items()}
    wrong["params/more is not a part of the model."] = {**params, "more": np.zeros(3)}
    for message, tree in wrong.items():
        with pytest.raises(ValueError, match="params") as error:
            hugging_face.save(tmp_path / "out", config, tree, state)
        assert str(error.value) == message
    assert not (tmp_path / "out").exists()


# Tokens with a meaning.


@pytest.mark.parametrize("config", [GPT2, LLAMA, BERT])
@pytest.mark.parametrize("ids", [TokenIds(3, 4, 5), TokenIds(0, [1, 2], None), TokenIds()])
def test_token_ids_are_written_and_read_and_none_is_made_up(tmp_path, config, ids):
    """The library takes 50256 for a GPT-2 without the fields, whatever its vocabulary."""
    given = {"token_ids": ids} if any(ids) else {}
    hugging_face.save(tmp_path, config, *drawn(config), **given)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert tuple(fields[name] for name in IDS) == ids
    assert hugging_face.load(tmp_path).token_ids == ids


def test_missing_ids_are_the_librarys_within_the_vocabulary(tmp_path):
    for config, expected in ((GPT2, TokenIds()), (LLAMA, TokenIds(1, 2)), (BERT, TokenIds(pad=0))):
        hugging_face.save(tmp_path, config, *drawn(config))
        file = tmp_path / "config.json"
        fields = json.loads(file.read_text())
        file.write_text(json.dumps({name: fields[name] for name in fields if name not in IDS}))
        assert hugging_face.load(tmp_path).token_ids == expected


def test_ids_outside_the_vocabulary_are_not_written(tmp_path):
    ids = TokenIds(50256, [1, 37], -1)
    with pytest.raises(ValueError, match="vocab_size=37") as error:
        hugging_face.save(tmp_path / "out", GPT2, drawn(GPT2)[0], token_ids=ids)
    named = [line.split()[0] for line in str(error.value).splitlines()]
    assert named == ["token_ids.bos=50256", "token_ids.eos=[1,", "token_ids.pad=-1"]
    assert not (tmp_path / "out").exists()
