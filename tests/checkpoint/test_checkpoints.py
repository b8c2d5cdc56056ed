"""Checkpoints of people's own loops: any pipeline of the same model continues them, or a whole one
before them."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import adapted
import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
import uneven

import jaxpipe

pytestmark = pytest.mark.pipeline

ROWS, LAYERS = 16, 5
OPTIMIZER = optax.adamw(1e-2)


@functools.cache
def pipeline(model="alike", schedule="1f1b", *, stage=2, data=1, **options) -> jaxpipe.Pipeline:
    if model == "alike":
        made, start = toy.model(tied=True, axis="stage"), toy.params(tied=True, num_layers=LAYERS)
    else:
        made, start = uneven.model(stateful=model == "stateful"), uneven.params()
        options["states"] = uneven.states() if model == "stateful" else None
    mesh = jaxpipe.make_mesh(stage=stage, data=data)
    return jaxpipe.Pipeline(made, start, schedule=schedule, microbatches=4, mesh=mesh, **options)


def begin(pipe, model):
    start = toy.params(tied=True, num_layers=LAYERS) if model == "alike" else uneven.params()
    params = pipe.place(start)
    states = pipe.place_states(uneven.states()) if model == "stateful" else None
    return params, pipe.init(OPTIMIZER, params), states


def canonical(pipe, run):
    params, state, states = run
    held = pipe.unplace(params), pipe.optimizer_placing(OPTIMIZER).unplace(state)
    return jax.device_get((*held, states if states is None else pipe.unplace_states(states)))


LAYOUTS = {
    "alike": [
        {"schedule": "1f1b", "stage": 4},
        {"schedule": "zb-v", "stage": 2, "data": 2, "zero": 1, "layer_counts": (1, 2, 0, 2)},
        {"schedule": "interleaved", "stage": 2, "data": 4, "zero": 3, "weights": "unrolled"},
    ],
    "differ": [
        {"schedule": "1f1b", "stage": 2, "data": 2, "zero": 3},
        {"schedule": "interleaved", "stage": 4},
    ],
    "stateful": [
        {"schedule": "1f1b", "stage": 4},
        {"schedule": "gpipe", "stage": 2, "layer_counts": (3, 5)},
    ],
}


@pytest.mark.parametrize(
    "model", ["alike", pytest.param("differ", marks=pytest.mark.slow), "stateful"]
)
def test_another_layout_restores_what_one_has_saved(model, tmp_path):
    pipes = [pipeline(model, **layout) for layout in LAYOUTS[model]]
    data = {"next": 2, "seeds": [1, 2]}
    for number, (here, there) in enumerate(zip(pipes, pipes[1:] + pipes[:1], strict=True)):
        params, state, states = begin(here, model)
        state = jax.jit(functools.partial(jax.tree.map, lambda w: w + 1))(state)
        saved = canonical(here, (params, state, states))
        with jaxpipe.Checkpoints(tmp_path / str(number)) as checkpoints:
            checkpoints.save(2, here, OPTIMIZER, params, state, states=states, data=data)
            found = checkpoints.restore(there, OPTIMIZER)
            part = checkpoints.restore_parts(2, {"params": there.canonical_params})
        again = found.params, found.state, found.states
        chex.assert_trees_all_equal(canonical(there, again), saved)
        chex.assert_trees_all_equal(jax.device_get(part), {"params": saved[0]})
        assert (found.step, found.data) == (2, data)
        assert (found.states is None) == (model != "stateful")
        expected = there.placed_params, there.optimizer_placing(OPTIMIZER).placed
        shardings = [jax.tree.map(lambda w: w.sharding, tree) for tree in (again[:2], expected)]
        assert shardings[0] == shardings[1]  # a step is not compiled again


def test_a_run_goes_on_bit_by_bit_as_if_nothing_had_been_broken(tmp_path):
    pipe = pipeline("stateful", **LAYOUTS["stateful"][1])
    step, batch = pipe.train_step(OPTIMIZER), uneven.batch(ROWS)

    def steps(run):
        params, state, states = run
        for _ in range(2):
            (_, states), params, state = step(params, state, batch, states=states)
        return params, state, states

    params, state, states = run = steps(begin(pipe, "stateful"))
    with jaxpipe.Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(2, pipe, OPTIMIZER, params, state, states=states)
        unbroken = canonical(pipe, steps(run))  # donates what is being written
        found = checkpoints.restore(pipe, OPTIMIZER)
    again = steps((found.params, found.state, found.states))
    chex.assert_trees_all_equal(canonical(pipe, again), unbroken)
    assert step._cache_size() == 1


def small(width=4, layers=2, dtype="float32"):
    """A pipeline that places and saves at once, because nothing is trained with it."""
    model = jaxpipe.Model(
        lambda outer, batch, rng: batch["x"],
        lambda w, x, batch, rng: jnp.tanh(x @ w["kernel"] + w["bias"]),
        lambda outer, x, batch, rng: jnp.mean(x),
    )
    shape = jax.ShapeDtypeStruct((layers, width, width), dtype)
    start = {"kernel": shape, "bias": jax.ShapeDtypeStruct((layers, width), dtype)}
    params = {"embed": {}, "layers": start, "head": {}}
    return jaxpipe.Pipeline(model, params, schedule="1f1b", mesh=jaxpipe.make_mesh(stage=2))


def filled(pipe, value, optimizer=OPTIMIZER):
    noise = np.random.default_rng(value)
    start = jax.tree.map(
        lambda leaf: np.asarray(noise.standard_normal(leaf.shape), leaf.dtype),
        pipe.canonical_params,
    )
    params = pipe.place(start)
    return start, params, pipe.init(optimizer, params)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A folder of two checkpoints; tests damage copies."""
    folder, pipe = tmp_path_factory.mktemp("two") / "run", small(width=64)
    with jaxpipe.Checkpoints(folder, keep=2) as checkpoints:
        for n in (1, 2):
            _, params, state = filled(pipe, n)
            checkpoints.save(n, pipe, OPTIMIZER, params, state, data={"next": n})
    return folder, pipe


def _flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


DAMAGE = {
    "flipped byte": _flip,
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", ["flipped byte", "missing", "missing checksums"])
def test_a_damaged_checkpoint_goes_aside_and_the_one_before_is_restored(two, damage, tmp_path):
    whole, pipe = two
    folder = shutil.copytree(whole, tmp_path / "run")
    if damage == "missing checksums":
        damaged = folder / "2" / "checksums.json"
        damaged.unlink()
    else:
        damaged = max(folder.glob("2/state/**/d/*"), key=lambda path: path.stat().st_size)
        DAMAGE[damage](damaged)
    with jaxpipe.Checkpoints(folder, keep=2) as checkpoints:
        found = checkpoints.restore(pipe, OPTIMIZER)
        (note,) = checkpoints.found.notes()
        assert damaged.name in note
        assert (found.step, found.data) == (1, {"next": 1})
        chex.assert_trees_all_equal(pipe.unplace(found.params), filled(pipe, 1)[0])
        # The step is saved again, and what was damaged is still there.
        checkpoints.save(2, pipe, OPTIMIZER, found.params, found.state)
        assert checkpoints.restore(pipe, OPTIMIZER).step == 2
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2", "2.damaged"]


def test_the_best_is_the_one_of_the_lowest_loss(tmp_path):
    pipe = small()
    with jaxpipe.Checkpoints(tmp_path, keep=4) as checkpoints:
        assert checkpoints.best is None
        for step, loss in enumerate((2.0, 1.0, None, 3.0)):
            checkpoints.save(step, pipe, OPTIMIZER, *filled(pipe, step)[1:], loss=loss)
    assert jaxpipe.Checkpoints(tmp_path, read_only=True).best == 1


def test_a_damaged_one_that_was_asked_for_is_refused(two, tmp_path):
    whole, pipe = two
    folder = shutil.copytree(whole, tmp_path / "run")
    (folder / "1" / "data" / "metadata").unlink()
    checkpoints = jaxpipe.Checkpoints(folder, read_only=True)
    assert checkpoints.restore(pipe, OPTIMIZER, step=2).step == 2
    with pytest.raises(ValueError, match=r"step=1 in .* is damaged: data/metadata is missing\."):
        checkpoints.restore(pipe, OPTIMIZER, step=1)
    with pytest.raises(ValueError, match=r"step=3 has no checkpoint .*; it holds 1, 2\."):
        checkpoints.restore(pipe, OPTIMIZER, step=3)


def test_what_is_written_is_not_torn_by_steps_that_follow(tmp_path):
    """Arrays are large enough for the writing to go on while steps overwrite them."""
    pipe = small(width=512, layers=8)
    start, params, state = filled(pipe, 0)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def overwrite(params, state):
        return jax.tree.map(lambda w: w + 1, (params, state))

    checkpoints = jaxpipe.Checkpoints(tmp_path / "run", keep=9)
    with checkpoints:
        for n in range(3):
            checkpoints.save(n, pipe, OPTIMIZER, params, state)
            params, state = overwrite(params, state)
    for n in range(3):
        found = checkpoints.restore(pipe, OPTIMIZER, step=n)
        want = start
        for _ in range(n):
            want = jax.tree.map(lambda w: w + np.float32(1), want)
        chex.assert_trees_all_equal(pipe.unplace(found.params), want)
        assert int(found.state[0].count) == n


def documented(name):
    """A function that docs/checkpoints.md shows."""
    page = Path(__file__).parents[2] / "docs" / "checkpoints.md"
    (code,) = re.findall(rf"```python\n(def {name}.*?)```", page.read_text(), re.DOTALL)
    names = {"jax": jax, "jnp": jnp, "optax": optax}
    exec(code, names)
    return names[name]


OPTIMIZERS = {
    "averaged": optax.chain(optax.adam(1e-2), documented("averaged")(0.9)),
    "frozen": optax.multi_transform(
        {"train": optax.adam(1e-2), "freeze": optax.set_to_zero()},
        lambda params: {
            "embed": {},
            "layers": tuple({"kernel": "train", "bias": "freeze"} for _ in params["layers"]),
            "head": {},
        },
    ),
    "many": optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(1e-2)), 2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_state_comes_back_in_its_own_structure(name, tmp_path):
    pipe, optimizer = small(), OPTIMIZERS[name]
    start, params, state = filled(pipe, 0, optimizer)
    with jaxpipe.Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, pipe, optimizer, params, state)
        found = checkpoints.restore(pipe, optimizer)
    chex.assert_trees_all_equal((found.params, found.state), (params, state))
    if name == "averaged":
        chex.assert_trees_all_equal(pipe.optimizer_placing(optimizer).unplace(state)[-1], start)
    assert jax.tree.structure(found.state) == jax.tree.structure(state)
    shardings = jax.tree.map(lambda w: w.sharding, (params, state))
    assert jax.tree.map(lambda w: w.sharding, (found.params, found.state)) == shardings


@pytest.mark.parametrize("differ", [False, True])
def test_parameters_that_are_not_trained_are_saved_and_have_no_state(differ, tmp_path):
    params = jax.device_get(adapted.params(differ=differ))

    def pipe(**options):
        model = adapted.model(differ=differ)
        return jaxpipe.Pipeline(model, params, trainable=adapted.TRAINABLE, **options)

    here = pipe(schedule="1f1b", mesh=jaxpipe.make_mesh(stage=4))
    there = pipe(schedule="interleaved", mesh=jaxpipe.make_mesh(stage=2, data=2), zero=3)
    placed = here.place(params)
    state = here.init(OPTIMIZER, placed)
    with jaxpipe.Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, here, OPTIMIZER, placed, state)
        found = checkpoints.restore(there, OPTIMIZER)
    chex.assert_trees_all_equal(jax.device_get(there.unplace(found.params)), params)
    held = [pipe.optimizer_placing(OPTIMIZER).unplace for pipe in (here, there)]
    chex.assert_trees_all_equal(
        jax.device_get(held[1](found.state)), jax.device_get(held[0](state))
    )


# What is refused.


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (small(width=6), "['kernel'] is float32[2, 64, 64]; expected float32[2, 6, 6]."),
        (small(64, layers=3), "['bias'] is float32[2, 64]; expected float32[3, 64]."),
        (small(64, dtype="bfloat16"), "['bias'] is float32[2, 64]; expected bfloat16[2, 64]."),
    ],
)
def test_another_model_names_the_leaf_and_both_shapes(two, other, expected):
    folder, _ = two
    with pytest.raises(ValueError, match="2 is of another model:\n") as caught:
        jaxpipe.Checkpoints(folder, read_only=True).restore(other, OPTIMIZER)
    assert f"params['layers']{expected}" in str(caught.value)


def test_another_optimizer_names_what_differs(two):
    folder, pipe = two
    with pytest.raises(ValueError, match="2 is of another optimizer, or other") as caught:
        jaxpipe.Checkpoints(folder, read_only=True).restore(pipe, optax.lion(1e-2))
    assert "optimizer[0]['nu']['layers']['bias'] is float32[2, 64]; nothing" in str(caught.value)


def test_states_of_layers_that_are_not_there(two, tmp_path):
    pipe, stateful = pipeline("differ", stage=2), pipeline("stateful", stage=2)
    params, state, _ = begin(pipe, "differ")
    with jaxpipe.Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, pipe, OPTIMIZER, params, state)
        with pytest.raises(ValueError, match=r"keep other states:\nlayers.* is missing"):
            checkpoints.restore(stateful, OPTIMIZER)
        with pytest.raises(ValueError, match="states=None, but this model"):
            checkpoints.save(2, stateful, OPTIMIZER, params, state)


def test_a_folder_without_checkpoints(two, tmp_path):
    _, pipe = two
    assert jaxpipe.Checkpoints(tmp_path, read_only=True).restore(pipe, OPTIMIZER) is None
    assert jaxpipe.Checkpoints(tmp_path / "new").restore(pipe, OPTIMIZER) is None
    assert not (tmp_path / "new").exists()


def test_a_mistyped_folder_is_said_to_be_one(two, caplog):
    whole, pipe = two
    mistyped = whole.with_name("rnu")
    with pytest.raises(ValueError, match=rf"rnu' does not exist.* checkpoints: {whole}\."):
        jaxpipe.Checkpoints(mistyped, read_only=True).restore(pipe, OPTIMIZER)
    # Where a run may begin, None is an answer.
    assert jaxpipe.Checkpoints(mistyped).restore(pipe, OPTIMIZER) is None
    assert f"holds no checkpoint to restore. Nearest with checkpoints: {whole}." in caplog.text
    for other in (whole.parent, next(whole.glob("[0-9]*"))):
        caplog.clear()
        assert jaxpipe.Checkpoints(other).restore(pipe, OPTIMIZER) is None
        assert f"Nearest with checkpoints: {whole}." in caplog.text


def test_a_file_and_a_url_are_no_folders(tmp_path):
    with pytest.raises(
        ValueError, match=r"folder='s3://bucket/run' is a URL; checkpoints need a f"
    ):
        jaxpipe.Checkpoints("s3://bucket/run")
    (tmp_path / "run").write_text("")
    with pytest.raises(ValueError, match=r"run' is a file; checkpoints need a folder"):
        jaxpipe.Checkpoints(tmp_path / "run")
    with pytest.raises(ValueError, match=r"keep=0 must be at least 1"):
        jaxpipe.Checkpoints(tmp_path / "other", keep=0)


def test_only_damaged_ones_are_no_fresh_start(two, tmp_path):
    whole, pipe = two
    folder = shutil.copytree(whole, tmp_path / "run")
    for n in ("1", "2"):
        (folder / n / "checksums.json").unlink()
    with pytest.raises(ValueError, match=r"no whole checkpoint \(checkpoint 2: checksums.json "):
        jaxpipe.Checkpoints(folder, read_only=True).restore(pipe, OPTIMIZER)


def test_what_cannot_be_saved(two, tmp_path):
    _, pipe = two
    start, params, state = filled(pipe, 0)
    checkpoints = jaxpipe.Checkpoints(tmp_path / "run")
    with pytest.raises(ValueError, match="in canonical order, not placed"):
        checkpoints.save(1, pipe, OPTIMIZER, start, state)
    with pytest.raises(TypeError, match=r"data\['rng'\] must be .* small arrays as x.tolist\(\)"):
        checkpoints.save(1, pipe, OPTIMIZER, params, state, data={"rng": jax.random.key(0)})
    with pytest.raises(ValueError, match="read_only=True"):
        jaxpipe.Checkpoints(tmp_path, read_only=True).save(1, pipe, OPTIMIZER, params, state)
    assert not (tmp_path / "run").exists()


def test_what_would_be_lost_later_is_refused_or_written(tmp_path):
    pipe = pipeline("alike", stage=2)
    params, state, _ = begin(pipe, "alike")
    with jaxpipe.Checkpoints(tmp_path / "run") as checkpoints:
        for step in (-1, 1.5, "1"):
            with pytest.raises(ValueError, match="must be a whole number"):
                checkpoints.save(step, pipe, OPTIMIZER, params, state)
        checkpoints.save(1, pipe, OPTIMIZER, params, state, loss=jnp.float32(2))
        with pytest.raises(ValueError, match=r"step=1 is saved in .* already.* another folder\."):
            checkpoints.save(np.int32(1), pipe, OPTIMIZER, params, state)
        with pytest.raises(TypeError, match=r"run\['seeds'\] must be what JSON can hold"):
            checkpoints.save_arrays(2, {"w": params}, data={}, run={"seeds": np.ones(2)})
    assert checkpoints.steps == [1]
    with pytest.raises(ValueError, match="was left: save inside"):
        checkpoints.save(2, pipe, OPTIMIZER, params, state)


def test_a_save_as_the_last_line_of_a_script_is_finished(tmp_path):
    script = """
import sys, jax.numpy as jnp, jaxpipe
jaxpipe.Checkpoints(sys.argv[1]).save_arrays(1, {"w": jnp.ones(3)}, data={})
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert jaxpipe.Checkpoints(tmp_path, read_only=True).latest == 1


def test_a_folder_that_cannot_be_made_leaves_no_thread_that_keeps_the_program_alive(tmp_path):
    folder, before = tmp_path / "checkpoints", set(threading.enumerate())

    def save_twice():
        with jaxpipe.Checkpoints(folder) as checkpoints:
            checkpoints.save_arrays(1, {"w": jnp.ones(3)}, data={})
            checkpoints.wait()
            # A folder that is gone would be made again.
            shutil.rmtree(folder)
            folder.write_text("")
            checkpoints.save_arrays(2, {"w": jnp.ones(3)}, data={})

    with pytest.raises(NotADirectoryError):
        save_twice()
    left = [one for one in threading.enumerate() if one not in before and not one.daemon]
    for thread in left:
        threading.Thread.join(thread, 5)
    assert not [thread for thread in left if thread.is_alive()]


def test_entered_again_it_moves_nothing_aside_a_second_time(tmp_path):
    arrays = {"w": jnp.arange(4.0)}
    with jaxpipe.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save_arrays(1, arrays, data={})
    (tmp_path / "1" / "run" / "metadata").write_text("{")
    checkpoints = jaxpipe.Checkpoints(tmp_path, keep=3)
    checkpoints.save_arrays(1, arrays, data={}, loss=2.0)
    for step in (2, 3):
        with checkpoints:
            checkpoints.save_arrays(step, arrays, data={}, loss=2.0)
    assert (checkpoints.steps, checkpoints.best) == ([1, 2, 3], 3)
    assert [checkpoints.whole(step) for step in checkpoints.steps] == [1, 2, 3]
    assert len(list(tmp_path.glob("1*"))) == 2  # saved again, and moved aside
