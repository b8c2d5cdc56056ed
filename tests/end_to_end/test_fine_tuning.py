"""The page "Fine-tune and export", followed literally, with a Llama and a GPT-2.

With torch (`make test-parity`) the transformers library saves the models and loads the results.
"""

import importlib.util
import json
import re

import jax
import numpy as np
import pytest
from byte_tokenizer import byte_tokenizer
from command import TOP, blocks, shell, steps, weights

pytestmark = [pytest.mark.end_to_end, pytest.mark.slow]  # `make test-parity` runs it

pytest.importorskip("safetensors", reason="safetensors is not installed")
HAS_TORCH = importlib.util.find_spec("torch") is not None
PAGE = "docs/fine-tuning.md"
# A document is the same three words; a model that has learned them ends after the third.
DOCUMENT = "the pipeline waits"
TRAIN = "python train/train.py --config fine-tune.yaml"
SIZES = {"vocab_size": 300, "num_layers": 4, "width": 32, "num_heads": 4, "sequence_length": 24}


def _save_ours(folder, kind):
    """A folder like the library's, written without it."""
    from models import gpt, hugging_face
    from models.hugging_face_fields import TokenIds

    llama = {"num_kv_heads": 2, "mlp_width": 48, "tied": False}
    gpt2 = {"positions": "learned", "norm": "layer", "activation": "gelu", "bias": True}
    config = gpt.GPTConfig(**SIZES, **(llama if kind == "llama" else gpt2))
    params = gpt.init(config, jax.random.key(0))
    hugging_face.save(folder, config, params, token_ids=TokenIds(1, 2, 0))
    byte_tokenizer(begins=kind == "llama").save(str(folder / "tokenizer.json"))
    fields = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))


def _save_theirs(folder, kind):
    import torch
    import transformers

    torch.manual_seed(0)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if kind == "llama":
        config = transformers.LlamaConfig(
            vocab_size=300, max_position_embeddings=24, hidden_size=32, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, intermediate_size=48, **ids,
        )  # fmt: skip
    else:
        config = transformers.GPT2Config(
            vocab_size=300, n_positions=24, n_embd=32, n_layer=4, n_head=4, resid_pdrop=0.0,
            embd_pdrop=0.0, **ids,
        )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(begins=kind == "llama"),
        bos_token="<s>", eos_token="</s>", pad_token="<unk>",
    ).save_pretrained(folder)  # fmt: skip


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def followed(request, tmp_path_factory):
    """A folder in which every command of the page was run, and the kind of its model."""
    folder = tmp_path_factory.mktemp(request.param)
    for name in ("text", "model"):
        (folder / name).mkdir()
    for number in range(600):
        (folder / "text" / f"{number}.txt").write_text(DOCUMENT)
    (_save_theirs if HAS_TORCH else _save_ours)(folder / "model", request.param)
    configuration, task = blocks(PAGE, "yaml")
    (folder / "mine.yaml").write_text(task)
    (folder / "fine-tune.yaml").write_text(configuration)
    shell(folder, "".join(blocks(PAGE, "sh")))
    return folder, request.param


def test_the_exported_model_is_the_trained_one(followed):
    from models import hugging_face

    folder, _ = followed
    before, after = (hugging_face.load(folder / name) for name in ("model", "exported"))
    assert after.token_ids == before.token_ids == (1, 2, 0)
    assert after.config == before.config
    records = steps(folder / "runs/mine")
    best = min((r["eval_loss"], r["step"]) for r in records if "eval_loss" in r)[1]
    saved = {n: x for n, x in weights(folder / "runs/mine", best) if n.startswith("['params']")}
    for path, leaf in jax.tree_util.tree_leaves_with_path(after.params):
        np.testing.assert_array_equal(leaf, saved["['params']" + jax.tree_util.keystr(path)])
    assert records[-1]["loss"] < 1 < 5 < records[0]["loss"]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (folder / "exported" / name).read_bytes() == (folder / "model" / name).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("followed", ["llama"], indirect=True)
def test_a_run_begins_with_the_weights_of_another(followed):
    """Without a step's change they are exported as they were, from another layout."""
    folder, _ = followed
    second = (
        "--init-from runs/mine@best --run-dir runs/second --mesh.stage 4 --mesh.data 1 "
        "--pipeline.zero 0 --train.steps 1 --optimizer.warmup-steps 1 --optimizer.peak-lr 1e-30"
    )
    done = shell(folder, f"{TRAIN} {second}")
    assert re.search(r"weights of runs/mine, step \d0\n", done.out)
    shell(folder, "python -m train.export runs/second --out second")
    one, two = ((folder / name / "model.safetensors") for name in ("exported", "second"))
    assert one.read_bytes() == two.read_bytes()

    third = f"{TRAIN} --run-dir runs/third --train.steps 2 --init-from runs/mine@7"
    done = shell(folder, f"{third} --model.width 64", status=2)
    assert "model.width=64 is not that of the weights of init_from=runs/mine@7." in done.err
    done = shell(folder, third, status=2)
    assert "error: init_from=runs/mine@7: step=7 has no checkpoint in folder=" in done.err
    assert "Traceback" not in done.err


@pytest.mark.skipif(not importlib.util.find_spec("lm_eval"), reason="lm-eval is not installed")
@pytest.mark.parametrize("followed", ["llama"], indirect=True)
def test_the_harness_scores_the_export_as_our_model_does(followed):
    """By the page's command and its task, without any download."""
    from models import gpt, hugging_face

    folder, _ = followed
    choices = ["waits", "sends", "is"]
    questions = [{"text": text, "choices": choices, "answer": 0} for text in ("the pipeline", "a")]
    lines = "".join(f"{json.dumps(question)}\n" for question in questions)
    (folder / "questions.jsonl").write_text(lines)
    (command,) = re.findall(r"lm_eval .* mine\.yaml", (TOP / PAGE).read_text())
    options = "--device cpu --output_path scores --log_samples"
    shell(folder, f"PYTHONWARNINGS= HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 {command} {options}")
    (results,), (samples,) = (
        [*folder.glob(f"scores/**/{name}*")] for name in ("results", "samples")
    )
    config, params, *_ = hugging_face.load(folder / "exported")
    tokenizer = byte_tokenizer(begins=True)

    def log_probability(text, choice):
        tokens = np.array([tokenizer.encode(f"{text} {choice}").ids])
        logs = jax.nn.log_softmax(gpt.logits(config, params, tokens[:, :-1]))
        own = np.take_along_axis(np.asarray(logs), tokens[:, 1:, None], axis=-1)[0, :, 0]
        return own[len(tokenizer.encode(text).ids) - 1 :].sum()

    expected = [[log_probability(q["text"], choice) for choice in choices] for q in questions]
    rows = map(json.loads, samples.read_text().splitlines())
    found = [[float(value) for value, _ in row["filtered_resps"]] for row in rows]
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    accuracy = np.mean([np.argmax(row) == 0 for row in expected])
    assert json.loads(results.read_text())["results"]["mine"]["acc,none"] == accuracy


def test_transformers_loads_it_and_stops_at_the_end_of_a_text(followed, monkeypatch, capsys):
    """Its logits are those of our model, and the page's program prints the document."""
    pytest.importorskip("torch", reason="torch is not installed: make test-parity")
    import torch
    import transformers

    from models import gpt, hugging_face

    folder, kind = followed
    config, params, *_ = hugging_face.load(folder / "exported")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "exported").eval()
    tokens = np.random.default_rng(0).integers(0, 300, (3, 24))
    expected = theirs(torch.tensor(tokens)).logits.detach().numpy()
    ours = gpt.logits(config, params, tokens)
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=2e-6 * np.abs(expected).max())

    monkeypatch.chdir(folder)
    (program,) = blocks(PAGE, "python")
    exec(program, {})
    begins = "<s>" if kind == "llama" else ""
    assert capsys.readouterr().out.strip().endswith(f"{begins}{DOCUMENT}</s>")
