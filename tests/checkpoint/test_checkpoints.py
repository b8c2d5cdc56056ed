"""Checkpoints of people's own loops: any pipeline of the same model continues them, or a whole one
before them."""

import functools
import shutil
import threading

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from command import blocks, finish, start

import jaxpipe

pytestmark = pytest.mark.pipeline

OPTIMIZER = optax.adamw(1e-2)


@functools.cache
def pipeline(name, schedule="1f1b", *, stage=2, data=1, **options) -> jaxpipe.Pipeline:
    sizes = {"stage": stage, "data": data}
    return toys.pipeline(name, schedule, sizes, num_layers=5, **options)


def begin(pipe, name):
    toy = toys.named(name, 5)
    params, states = pipe.place(toy.params), toy.options.get("states")
    placed = None if states is None else pipe.place_states(states)
    return params, pipe.init(OPTIMIZER, params), placed


def canonical(pipe, run):
    params, state, states = run
    held = pipe.unplace(params), pipe.optimizer_placing(OPTIMIZER).unplace(state)
    return jax.device_get((*held, states if states is None else pipe.unplace_states(states)))


LAYOUTS = {
    "tied": [
        {"schedule": "zb-v", "stage": 2, "data": 2, "zero": 1, "layer_counts": (1, 2, 0, 2)},
        {"schedule": "interleaved", "stage": 2, "data": 4, "zero": 3, "weights": "unrolled"},
    ],
    "places": [
        {"schedule": "1f1b", "stage": 4, "weights": "stacked"},
        {"schedule": "zb-v", "data": 2, "zero": 3, "layer_counts": (1, 0, 2, 2)},
    ],
    "stateful": [
        {"schedule": "1f1b", "stage": 4},
        {"schedule": "gpipe", "stage": 2, "layer_counts": (3, 5)},
    ],
}
OTHERS = [{"schedule": "1f1b", "stage": 4}, {"schedule": "interleaved", "data": 2, "zero": 3}]


@pytest.mark.parametrize(
    "name",
    [
        *("tied", "places", "stateful"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("uneven", "adapted", "adapted tuple")
        ),
    ],
)
def test_another_layout_restores_what_one_has_saved(name, tmp_path):
    """Parameters that are not trained come back as well, though they have no state."""
    here, there = (pipeline(name, **layout) for layout in LAYOUTS.get(name, OTHERS))
    data = {"next": 2, "seeds": [1, 2]}
    params, state, states = begin(here, name)
    state = jax.jit(functools.partial(jax.tree.map, lambda w: w + 1))(state)
    saved = canonical(here, (params, state, states))
    with jaxpipe.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, here, OPTIMIZER, params, state, states=states, data=data)
        found = checkpoints.restore(there, OPTIMIZER)
        part = checkpoints.restore_parts(2, {"params": there.canonical_params})
    again = found.params, found.state, found.states
    chex.assert_trees_all_equal(canonical(there, again), saved)
    chex.assert_trees_all_equal(jax.device_get(part), {"params": saved[0]})
    assert (found.step, found.data) == (2, data)
    assert (found.states is None) == (name != "stateful")
    expected = there.placed_params, there.optimizer_placing(OPTIMIZER).placed
    shardings = [jax.tree.map(lambda w: w.sharding, tree) for tree in (again[:2], expected)]
    assert shardings[0] == shardings[1]  # a step is not compiled again


def test_a_run_goes_on_bit_by_bit_as_if_nothing_had_been_broken(tmp_path):
    pipe = pipeline("tied", **LAYOUTS["tied"][0])
    step, batch = pipe.train_step(OPTIMIZER), toys.named("tied", 5).batch(16)

    def steps(params, state):
        for _ in range(2):
            _, params, state = step(params, state, batch)
        return params, state, None

    params, state, _ = steps(*begin(pipe, "tied")[:2])
    with jaxpipe.Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(2, pipe, OPTIMIZER, params, state)
        unbroken = canonical(pipe, steps(params, state))  # donates what is being written
        found = checkpoints.restore(pipe, OPTIMIZER)
    again = steps(found.params, found.state)
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


def test_a_damaged_checkpoint_goes_aside_and_the_one_before_is_restored(two, tmp_path):
    whole, pipe = two
    folder = shutil.copytree(whole, tmp_path / "run")
    damaged = max(folder.glob("2/state/**/d/*"), key=lambda path: path.stat().st_size)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
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
    code = next(code for code in blocks("docs/checkpoints.md", "python") if f"def {name}" in code)
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


def test_a_folder_without_checkpoints(two, tmp_path, caplog):
    """A run may begin there; a mistyped folder is answered with the name of one beside it."""
    whole, pipe = two
    assert jaxpipe.Checkpoints(tmp_path, read_only=True).restore(pipe, OPTIMIZER) is None
    assert jaxpipe.Checkpoints(tmp_path / "new").restore(pipe, OPTIMIZER) is None
    assert not (tmp_path / "new").exists()
    for other in (whole.with_name("rnu"), whole.parent, next(whole.glob("[0-9]*"))):
        caplog.clear()
        assert jaxpipe.Checkpoints(other).restore(pipe, OPTIMIZER) is None
        assert f"holds no checkpoint to restore. Nearest with checkpoints: {whole}." in caplog.text
    run, mistyped = (tmp_path / name / "checkpoints" for name in ("one", "oen"))
    shutil.copytree(whole, run)
    assert jaxpipe.Checkpoints(mistyped).restore(pipe, OPTIMIZER) is None
    assert f"Nearest with checkpoints: {run}." in caplog.text


def test_what_cannot_be_restored_is_refused(two, tmp_path):
    whole, pipe = two
    one, none = (shutil.copytree(whole, tmp_path / name) for name in ("one", "none"))
    (one / "1" / "data" / "metadata").unlink()
    for n in ("1", "2"):
        (none / n / "checksums.json").unlink()

    def restore(folder=one, pipe=pipe, optimizer=OPTIMIZER, **options):
        checkpoints = jaxpipe.Checkpoints(folder, read_only=True)
        return checkpoints.restore(pipe, optimizer, **options)

    assert restore(step=2).step == 2
    other_model = r"2 is of another model:\nparams\['layers'\]\['"
    for options, message in (
        ({"step": 1}, r"step=1 in .* is damaged: data/metadata is missing\."),
        ({"step": 3}, r"step=3 has no checkpoint .*; it holds 1, 2\."),
        ({"folder": none}, r"no whole checkpoint \(checkpoint 2: checksums.json "),
        ({"folder": whole.with_name("rnu")}, rf"rnu' does not exist.* checkpoints: {whole}\."),
        ({"pipe": small(width=6)}, rf"{other_model}bias.*\n.*kernel'\] is float32\[2, 64, 64\]; e"),
        ({"pipe": small(64, layers=3)}, rf"{other_model}bias'\] is float32\[2, 64\]; exp.*\[3, 64"),
        (
            {"pipe": small(64, dtype="bfloat16")},
            rf"{other_model}bias'\] .* expected bfloat16\[2, 64",
        ),
        (
            {"optimizer": optax.lion(1e-2)},
            r"(?s)2 is of another optimizer, or other.*"
            r"optimizer\[0\]\['nu'\]\['layers'\]\['bias'\] is float32\[2, 64\]; nothing",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            restore(**options)


def test_states_of_layers_that_are_not_there(tmp_path):
    pipe, stateful = pipeline("uneven"), pipeline("stateful")
    params, state, _ = begin(pipe, "uneven")
    with jaxpipe.Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, pipe, OPTIMIZER, params, state)
        with pytest.raises(ValueError, match=r"keep other states:\nlayers.* is missing"):
            checkpoints.restore(stateful, OPTIMIZER)
        with pytest.raises(ValueError, match="states=None, but this model"):
            checkpoints.save(2, stateful, OPTIMIZER, params, state)


def test_what_cannot_be_saved_is_refused(two, tmp_path):
    """Refusals come before anything is written; numbers of any library are steps and losses."""
    _, pipe = two
    start, params, state = filled(pipe, 0)
    file, folder = tmp_path / "file", tmp_path / "run"
    file.write_text("")
    checkpoints = jaxpipe.Checkpoints(folder)

    def save(step=2, params=params, checkpoints=checkpoints, **options):
        checkpoints.save(step, pipe, OPTIMIZER, params, state, **options)

    def refuse(error, message, call, *given, **options):
        with pytest.raises(error, match=message):
            call(*given, **options)

    url = "folder='s3://bucket/run' is a URL; checkpoints need a f"
    refuse(ValueError, url, jaxpipe.Checkpoints, "s3://bucket/run")
    refuse(ValueError, "file' is a file; checkpoints need", jaxpipe.Checkpoints, file)
    refuse(ValueError, "keep=0 must be at least 1", jaxpipe.Checkpoints, folder, keep=0)
    read_only = jaxpipe.Checkpoints(tmp_path, read_only=True)
    refuse(ValueError, "read_only=True", save, checkpoints=read_only)
    refuse(ValueError, "in canonical order, not placed", save, params=start)
    small_arrays = r"data\['rng'\] must be .* small arrays as x.tolist\(\)"
    refuse(TypeError, small_arrays, save, data={"rng": jax.random.key(0)})
    for step in (-1, 1.5, "1"):
        refuse(ValueError, "must be a whole number", save, step)
    assert not folder.exists()
    with checkpoints:
        save(1, loss=jnp.float32(2))
        for step in (0, np.int32(1), True):
            refuse(ValueError, r"is not after step=1, .* another folder\.", save, step)
        json = {"data": {}, "run": {"seeds": np.ones(2)}}
        message = r"run\['seeds'\] must be what JSON can hold"
        refuse(TypeError, message, checkpoints.save_arrays, 2, {"w": params}, **json)
    assert checkpoints.steps == [1]
    refuse(ValueError, "was left: save inside", save)


def test_a_save_as_the_last_line_of_a_script_is_finished_and_one_after_its_end_refused(tmp_path):
    script = """
import atexit, sys, jax.numpy as jnp, jaxpipe
checkpoints, arrays = jaxpipe.Checkpoints(sys.argv[1]), {"w": jnp.ones(3)}
atexit.register(lambda: checkpoints.save_arrays(2, arrays, data={}))
checkpoints.save_arrays(1, arrays, data={})
"""
    errors = finish(start("python", "-c", script, tmp_path)).err
    assert errors.count("Error:") == 1, errors
    assert "step=2 comes too late: the program is ending" in errors
    assert jaxpipe.Checkpoints(tmp_path, read_only=True).steps == [1]


def test_who_opens_a_folder_last_writes_it_and_the_one_before_has_finished(tmp_path):
    """As when a cell of a notebook runs again."""
    arrays = {"w": jnp.ones(1 << 22)}
    first, second = jaxpipe.Checkpoints(tmp_path, keep=2), jaxpipe.Checkpoints(tmp_path, keep=2)
    first.save_arrays(1, arrays, data={})
    second.save_arrays(2, arrays, data={})
    with pytest.raises(ValueError, match="and with the `Checkpoints` of this folder that was made"):
        first.save_arrays(3, arrays, data={})
    first.wait()
    assert second.steps == [1, 2]
    assert jaxpipe.Checkpoints(tmp_path, read_only=True).latest == 2


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
