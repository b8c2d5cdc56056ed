"""Checkpoints of a run: what is kept, all damage is found, nothing is deleted, and it goes on."""

import json
import os
import random
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe import Checkpoints
from jaxpipe.checkpoint import integrity
from train.config import Config
from train.data import stream
from train.data.text import Windows
from train.errors import ConfigError
from train.runs import checkpoint
from train.runs.checkpoint import none_whole
from train.step import TrainState

LOSSES = {1: 2.0, 2: 3.0}


def _state(step):
    # Enough numbers for files of their own; they do not compress.
    noise = np.random.default_rng(step).standard_normal((64, 64)).astype(np.float32)
    return TrainState({"weight": jnp.asarray(noise), "bias": jnp.full(3, step)}, {"count": step})


def _save(checkpoints, step, eval_loss=None):
    data = {"next": step}
    checkpoint.save(checkpoints, step, _state(step), data=data, run={"a": 1}, eval_loss=eval_loss)
    checkpoints.wait()


def _latest(folder):
    return Checkpoints(folder, read_only=True).latest


def _opened(folder, **options):
    """The newest step that is whole, and what is said when a run opens a folder."""
    with Checkpoints(folder, **options) as checkpoints:
        return checkpoints.latest, checkpoints.found.notes()


def _assert_restores(folder, step):
    with Checkpoints(folder, read_only=True) as checkpoints:
        state, data = checkpoint.restore(checkpoints, step, _state(0))
    assert data == {"next": step}
    for name, expected in _state(step).params.items():
        np.testing.assert_array_equal(state.params[name], expected, strict=True)
    assert state.optimizer["count"] == step


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder of two checkpoints; tests damage copies."""
    folder = tmp_path_factory.mktemp("whole") / "c"
    with Checkpoints(folder, keep=3) as checkpoints:
        assert checkpoints.latest is None
        for step, loss in LOSSES.items():
            _save(checkpoints, step, loss)
    assert _latest(folder) == 2
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "c")


@pytest.mark.parametrize("reopens", [False, True])
def test_the_latest_the_best_and_every_fourth_are_kept(tmp_path, reopens):
    losses = {1: 3.0, 2: 1.0, 3: None, 4: 2.0, 5: None, 6: 2.5}
    for options, kept in (({}, [2, 5, 6]), ({"keep_every": 4}, [2, 4, 5, 6])):
        path = tmp_path / str(len(kept))
        checkpoints = Checkpoints(path, keep=2, **options)
        for step, loss in losses.items():
            _save(checkpoints, step, loss)
            if reopens:
                checkpoints.__exit__()
                checkpoints = Checkpoints(path, keep=2, **options)
        checkpoints.__exit__()
        assert list(checkpoints.steps) == kept


def test_reading_makes_and_removes_nothing(tmp_path):
    half = tmp_path / "7.orbax-checkpoint-tmp"
    half.mkdir()
    assert _latest(tmp_path) is None
    assert list(tmp_path.iterdir()) == [half]


def test_another_model_names_every_field(tmp_path):
    config = Config(run_dir=str(tmp_path))
    saved = checkpoint.describe(config, data_sha256="a")
    assert list(checkpoint.other_model(saved, config, data_sha256="a")) == []
    other = Config(run_dir=str(tmp_path), model={"width": 64, "tied": False, "dropout": 0.1})
    found = list(checkpoint.other_model(saved, other, data_sha256="b"))
    fields = [field for failure in found for field in failure.fields]
    assert fields == ["model.width", "model.tied", "data.path"]
    assert "model.width=64 is not the model of the checkpoint" in found[0].message
    assert "Nearest valid: 128, or another --run-dir." in found[0].message
    assert "has another tokenizer than the checkpoint" in found[2].message


def test_changes_are_said():
    saved = checkpoint.describe(Config(), data_sha256="a")
    other = Config(run_dir="elsewhere", train={"seed": 1}, mesh={"stage": 2})
    found = checkpoint.changes(saved, other)
    assert found == ["mesh.stage 4 -> 2", "train.seed 0 -> 1"]
    assert checkpoint.changes(saved, Config()) == []
    assert checkpoint.changes(saved, Config(pipeline={"remat": "none"})) == []
    assert "task gpt -> bert" in checkpoint.changes(saved, Config(task="bert"))


# Damage.


def _files(step_folder):
    """All but the one that orbax writes when it renames the folder, and never reads."""
    late = step_folder / "commit_success.txt"
    return sorted(path for path in step_folder.rglob("*") if path.is_file() and path != late)


def _flip(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


DAMAGE = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "binary": lambda path: path.write_bytes(b"\xff\xfe\x00" * 9),
    "other JSON": lambda path: path.write_text("[1, {}]"),
    "empty JSON": lambda path: path.write_text("{}"),
    "missing": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a link to itself": lambda path: (path.unlink(), path.symlink_to(path)),
    "a device": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    "without end": lambda path: os.truncate(path, 1 << 40),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_the_newest_whole_one_is_found(folder, damage):
    """Every file of the newest is damaged in turn; an older one is not read, its loss does not
    count, and it goes when its time has come."""
    for path in _files(folder / "2"):
        content = path.read_bytes()
        damage(path)
        latest, (note,) = _opened(folder, read_only=True)
        assert latest == 1
        assert note.startswith("skipping checkpoint 2: ")
        assert note.endswith("; it is kept as 2.damaged")
        assert path.relative_to(folder / "2").as_posix() in note
        path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
        path.write_bytes(content)
    _assert_restores(folder, 2)
    for path in _files(folder / "1"):
        damage(path)
    with Checkpoints(folder, keep=2) as checkpoints:
        assert checkpoints.found.notes() == []
        assert checkpoints.latest == 2
        _save(checkpoints, 3)
        assert checkpoints.steps == [2, 3]
    _assert_restores(folder, 3)


@pytest.mark.parametrize("damage", [*DAMAGE.values()][::3], ids=[*DAMAGE][::3])
def test_a_damaged_metrics_file_is_no_metric(folder, damage):
    damage(folder / "1" / "metrics" / "metrics")
    with Checkpoints(folder, keep=1) as checkpoints:
        _save(checkpoints, 3, 5.0)
        assert checkpoints.steps == [2, 3]
        _save(checkpoints, 4, 2.5)
        assert checkpoints.steps == [4]


def test_a_loss_that_became_better_by_itself_is_not_the_best(folder):
    path = folder / "2" / "metrics" / "metrics"
    path.write_text(path.read_text().replace("3.0", "1.0"))
    with Checkpoints(folder, keep=1) as checkpoints:
        assert checkpoints.latest == 1
        _save(checkpoints, 2, 3.0)
        _save(checkpoints, 3, 4.0)
        assert checkpoints.steps == [1, 3]


def test_every_flipped_bit_is_found_or_harmless(folder):
    random_ = random.Random(0)
    files, num_found = [path for path in (folder / "2").rglob("*") if path.is_file()], 0
    sizes = [path.stat().st_size for path in files]  # large files have most of the bits
    for path in random_.choices(files, k=8) + random_.choices(files, sizes, k=8):
        bit = random_.randrange(8 * path.stat().st_size)
        _flip(path, bit)
        if _latest(folder) == 1:
            num_found += 1
        else:
            _assert_restores(folder, 2)
        _flip(path, bit)
    assert num_found >= 10
    assert _latest(folder) == 2


def test_the_damaged_step_is_saved_again_and_nothing_is_deleted(folder):
    for name in ("2.damaged", "2.damaged.2"):
        with (folder / "2" / "data" / "metadata").open("ab") as file:
            file.write(b" ")
        before = {path.name: path.read_bytes() for path in _files(folder / "2")}
        reason = "data/metadata does not have its checksum (flipped or truncated)"
        notes = [f"skipping checkpoint 2: {reason}; it is kept as {name}"]
        with Checkpoints(folder, keep=1) as checkpoints:
            assert (checkpoints.latest, checkpoints.found.notes()) == (1, notes)
            _save(checkpoints, 2, 3.0)
            assert checkpoints.latest == 2
        assert {path.name: path.read_bytes() for path in _files(folder / name)} == before
        _assert_restores(folder, 2)
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2", "2.damaged", "2.damaged.2"]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path.write_text("not a folder"), "it is not a folder"),
        (lambda path: path.mkdir(), "its folder is empty"),
        (lambda path: (path / "state" / "d").mkdir(parents=True), "checksums.json is missing"),
        (
            lambda path: shutil.copytree(path.with_name("1"), path),
            "its files are those of step 1, under another",
        ),
    ],
)
def test_what_is_no_checkpoint_is_skipped(folder, make, reason):
    make(folder / "3")
    with Checkpoints(folder, keep=1) as checkpoints:
        assert checkpoints.latest == 2
        (note,) = checkpoints.found.notes()
        assert note.startswith(f"skipping checkpoint 3: {reason}")
        _save(checkpoints, 3)
    assert (folder / "3.damaged").exists()
    _assert_restores(folder, 3)


def test_a_record_of_checksums_is_not_trusted(folder):
    """A name in it commands no terminal, none of no file is whole, and older ones have no sizes."""
    path = folder / "2" / integrity.CHECKSUMS_FILE
    record = json.loads(path.read_text())
    files = record["files"] | {"data/\x1b[31mred": [0, 0]}
    path.write_text(json.dumps(record | {"files": files}))
    (note,) = Checkpoints(folder, read_only=True).found.notes()
    assert r"data/\x1b[31mred is missing" in note
    assert note.isprintable()
    path.write_text('{"step": 2, "files": {}}')
    assert _latest(folder) == 1
    path.write_text(json.dumps({name: value[0] for name, value in record["files"].items()}))
    _assert_restores(folder, 2)
    assert _latest(folder) == 2
    _flip(folder / "2" / "data" / "metadata", 9)
    assert _latest(folder) == 1


_RUN = {"config": {"task": "gpt"}, "data_sha256": "a"}
_CONFIGS = 3, {}, {"task": "gpt", "mesh": 3}
FOREIGN = [
    *((name, text) for name in ("run", "data") for text in ("null", "3", "[]", "[" * 10**5)),
    *(("run", json.dumps(_RUN | {"config": config})) for config in _CONFIGS),
    ("run", json.dumps(_RUN | {"in_flight": 3})),
    ("run", json.dumps({"config": _RUN["config"]})),
    *(("data", json.dumps({"next_index": n})) for n in (1.5, "2", -1, True, None, 10**30)),
    ("data", "{}"),
    *(("state", text) for text in ("null", "{}", '{"tree_metadata": {"x": 3}}')),
]


def _resume(folder, item, text):
    """Continues checkpoint 2 with another text in one of its files, and the right checksums."""
    (folder / "2" / "run" / "metadata").write_text(json.dumps(_RUN))
    (folder / "2" / item / ("_METADATA" if item == "state" else "metadata")).write_text(text)
    (folder / "2" / integrity.CHECKSUMS_FILE).unlink()
    integrity.write_checksums(folder / "2", 2)
    checkpoints = Checkpoints(folder, read_only=True)
    assert checkpoints.latest == 2
    checkpoint.description(checkpoints, 2)
    _, position = checkpoint.restore(checkpoints, 2, _state(0))
    batches = stream.batches(Windows(np.arange(90), 4), batch_size=2, seed=0)
    with checkpoint.readable(2):
        stream.continue_at(batches, position)


@pytest.mark.parametrize(("item", "text"), FOREIGN, ids=[f"{a}-{b[:30]}" for a, b in FOREIGN])
def test_what_no_run_has_written_is_one_line_whatever_its_checksum(folder, item, text):
    _resume(folder, "data", '{"next_index": 2}')
    with pytest.raises(ConfigError, match=r"checkpoint \S*2 cannot be read .* backup") as caught:
        _resume(folder, item, text)
    assert "\n" not in str(caught.value)


def test_a_link_to_nowhere_is_not_replaced(folder):
    (folder / "2" / integrity.CHECKSUMS_FILE).unlink()
    (folder / "2.damaged").symlink_to(folder / "nowhere")
    assert _opened(folder, keep=1)[0] == 1
    assert (folder / "2.damaged").is_symlink()
    assert (folder / "2.damaged.2").is_dir()


def test_other_names_are_no_steps(folder):
    for name in ("007", "8.orbax-checkpoint-tmp", "9.damaged", "step_10", "-11"):
        (folder / name).mkdir()
    (folder / "notes.txt").write_text("12")
    (folder / "2" / "notes.txt").write_text("a file that came later")
    with Checkpoints(folder, keep=2) as checkpoints:
        assert checkpoints.found.notes() == []
        assert checkpoints.latest == 2
        _save(checkpoints, 3)
        assert checkpoints.steps == [1, 2, 3]
    # What a killed run left half written is removed, and nothing else.
    left = {path.name for path in folder.iterdir()}
    assert left == {"1", "2", "3", "007", "9.damaged", "step_10", "-11", "notes.txt"}


def test_no_whole_one_is_refused_in_one_line(folder):
    (folder / "2" / integrity.CHECKSUMS_FILE).unlink()
    shutil.rmtree(folder / "1" / "state")
    with Checkpoints(folder, read_only=True) as checkpoints:
        assert checkpoints.latest is None
        (failure,) = none_whole(checkpoints.found, Config(run_dir="runs/one"))
    message = failure.message
    assert "run_dir=runs/one has no whole checkpoint to resume from" in message
    assert "checkpoint 2: checksums.json is missing; checkpoint 1: state/" in message
    assert "\n" not in message
    assert not list(none_whole(Checkpoints(folder / "new").found, Config(run_dir="runs/one")))
