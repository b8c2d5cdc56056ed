"""The notebook, the examples and "Your own model" run as they are; traced ones take less time."""

import json
import re
import runpy
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from command import TOP, finish, start

import jaxpipe
from jaxpipe import testing

pytestmark = pytest.mark.end_to_end

LOOP = TOP / "examples" / "nnx_training_loop.py"
AROUND_MODELS = sorted({*(TOP / "examples").glob("*.py")} - {LOOP})
examples = pytest.mark.parametrize("path", AROUND_MODELS, ids=lambda path: path.stem)
some_examples = pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            path, marks=[] if path.stem in ("lora", "packed_decoder") else pytest.mark.slow
        )
        for path in AROUND_MODELS
    ],
    ids=lambda path: path.stem,
)


def script_and_shown(path: Path) -> tuple[str, str]:
    """A notebook's cells as a script that also prints pictures, and what the notebook shows."""
    code, shown = [], []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        lines = "".join(cell["source"]).splitlines() if cell["cell_type"] == "code" else []
        for output in cell.get("outputs", ()):
            shown += output.get("text", ())
            if picture := output.get("data", {}).get("image/svg+xml"):
                shown += [*picture, "\n"]
                lines[-1] = f"print({lines[-1]})"
        code += lines
    return "\n".join(code), "".join(shown)


def test_the_notebook_runs_as_it_is_and_shows_what_it_prints(tmp_path):
    script, shown = script_and_shown(TOP / "examples" / "first_pipeline.ipynb")
    (tmp_path / "notebook.py").write_text(script)
    printed = finish(start("python", tmp_path / "notebook.py")).out
    assert "   3  F3       F2       F1       F0       \n" in printed
    before, after = printed.split("without a pipeline ")
    assert shown.startswith(f"{before}without a pipeline ")
    alone, pipelined, *losses = map(float, re.findall(r"[\d.]*\.\d+", after))
    assert alone == pytest.approx(pipelined, abs=2e-6)
    assert len(losses) == 4
    assert losses[-1] < 0.1 * alone
    _, shown_after = shown.split("without a pipeline ")
    shown_losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", shown_after)]
    assert shown_losses == pytest.approx(losses, abs=0.005)


@pytest.mark.slow
def test_a_loop_of_nnx_has_the_same_losses_with_a_pipeline():
    printed = finish(start("python", LOOP)).out
    pairs = re.findall(r"step \d+: loss (.*), with a pipeline (.*)", printed)
    alone, pipelined = np.array(pairs, float).T
    assert len(alone) == 20
    np.testing.assert_allclose(pipelined, alone, rtol=1e-5)
    assert pipelined[-1] < 0.2 * pipelined[0]


@pytest.mark.slow
@examples
def test_a_model_of_somebody_else_s_is_compared_and_trains(path):
    printed = finish(start("python", path)).out
    assert printed.startswith("the pipeline gives what the model gives\n")
    losses = [float(loss) for loss in re.findall(r"step +\d+: loss ([\d.]+)", printed)]
    assert len(losses) == 4
    assert losses[-1] < 0.8 * losses[0]


def traced_comparison(model, params, batch, *, rng=None, trainable=None, **_):
    """Traces a pipeline, which compiles nothing, in place of a comparison."""
    given = {"schedule": "zb-h1", "mesh": jaxpipe.make_mesh(stage=2, data=2)}
    pipe = jaxpipe.Pipeline(model, params, trainable=trainable, **given)
    jax.eval_shape(partial(pipe.value_and_grad, rng=rng), pipe.placed_params, batch)


def traced_step(train_step):
    """Training steps that are traced once and change nothing; their losses are zero."""

    def make(pipe, optimizer):
        step, values = train_step(pipe, optimizer), []

        def run(params, state, *given):
            if not values:
                shapes, *_ = jax.eval_shape(step, params, state, *given)
                values.append(jax.tree.map(lambda leaf: np.zeros(leaf.shape), shapes))
            return values[0], params, state

        return run

    return make


@pytest.fixture(autouse=True)
def _devices(monkeypatch):
    monkeypatch.setattr(testing, "simulate_devices", lambda *_: None)  # there are 8 already


@pytest.fixture
def trace(monkeypatch, capsys):
    """Traces an example to its end, and returns what it prints: 1 for a number that is traced."""

    def trace(path: Path) -> str:
        jax.eval_shape(lambda: runpy.run_path(str(path), run_name="__main__") and None)
        return capsys.readouterr().out

    monkeypatch.setattr(jax.core.Tracer, "__format__", lambda _, spec: format(1, spec))
    monkeypatch.syspath_prepend(TOP / "examples")
    return trace


def test_a_loop_of_nnx_is_traced_with_a_pipeline(trace):
    assert trace(LOOP).count(": loss 1.000000, with a pipeline 1.000000\n") == 20


@some_examples
def test_an_example_runs_to_its_end_with_a_pipeline_that_is_traced(path, monkeypatch, trace):
    monkeypatch.setattr(testing, "assert_matches_unpipelined", traced_comparison)
    monkeypatch.setattr(jaxpipe.Pipeline, "train_step", traced_step(jaxpipe.Pipeline.train_step))
    printed = trace(path)
    assert printed.startswith("the pipeline gives what the model gives\n")
    assert printed.count(": loss 0.000") == 4


@examples
def test_an_example_is_short_and_its_model_knows_nothing_of_pipelines(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 120
    (module,) = set(re.findall(r"^from third_party\.(\w+) import", text, re.MULTILINE))
    model = (TOP / "examples" / "third_party" / f"{module}.py").read_text(encoding="utf-8")
    assert "jaxpipe" not in model
    # It compares with the model itself, by default on two meshes.
    assert re.search(r"assert_matches_unpipelined\((.|\n)*?reference=reference", text)
    assert "meshes=" not in text


BEFORE, *SECTIONS = (TOP / "docs" / "your-model.md").read_text(encoding="utf-8").split("\n## ")


def code(section: str) -> str:
    return "".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL))


@pytest.mark.parametrize("is_traced", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("section", [*filter(code, SECTIONS)], ids=lambda s: s.split("\n")[0])
def test_a_section_of_your_own_model_runs(section, is_traced, monkeypatch):
    """Sections that train run, on one of the two default meshes; others are traced."""
    mesh = jaxpipe.make_mesh(stage=2, data=2)
    compare = partial(testing.assert_matches_unpipelined, meshes=[mesh])
    if is_traced and "train_step" not in section:
        compare = traced_comparison
    monkeypatch.setattr(testing, "assert_matches_unpipelined", compare)
    exec(code(BEFORE) + code(section), {"__name__": "__main__"})
