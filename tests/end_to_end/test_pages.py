"""The README and pages of the documentation, followed literally."""

import re

import pytest
from command import blocks, finish, saved, shell, start, steps

pytestmark = pytest.mark.end_to_end

# The README's example.

AFTERWARDS = """
compiled_once = step._cache_size() == 1
expected = pipe.placed_params, pipe.optimizer_placing(optimizer).placed
moved = [
    jax.tree_util.keystr(path)
    for (path, leaf), placed in zip(
        jax.tree.leaves_with_path((params, state)), jax.tree.leaves(expected), strict=True
    )
    if leaf.sharding != placed.sharding
]
moments = state[0].mu["layers"].addressable_shards
elements = {shard.data.size for shard in moments}
print(compiled_once, moved, elements)
"""


def test_the_training_step_of_the_readme_trains():
    (code,) = blocks("README.md", "python")
    done = finish(start("python", "-c", code + AFTERWARDS, JAX_LOG_COMPILES="1"))
    loss, afterwards = done.out.splitlines()
    assert 0 < float(loss) < 0.1  # the targets' variance is about 0.5
    # Every device holds one of 4 stages' part of one of 2 data shards.
    assert afterwards == f"True [] {{{8 * 64 * 64 // 4 // 2}}}"
    assert done.err.count("Finished XLA compilation of jit(step)") == 1
    assert "rematerialization" not in done.err


# "Schedules" and "Your own model in the trainer".

SCHEDULE, MODEL = "docs/schedules.md", "docs/your-model-in-the-trainer.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the files of both pages: blocks whose first line is the name of a file."""
    folder = tmp_path_factory.mktemp("pages")
    for page in (SCHEDULE, MODEL):
        for block in blocks(page, "python") + blocks(page, "yaml"):
            if named := re.match(r"# ([\w.-]+\.(?:py|yaml))\n", block):
                (folder / named[1]).write_text(block, encoding="utf-8")
    return folder


def test_a_schedule_is_shown_written_read_and_timed(folder):
    done = shell(folder, "".join(blocks(SCHEDULE, "sh")))
    assert "mine:late_weights, 4 stages, 8 microbatches" in done.out
    assert "\nlate, 4 stages, 8 microbatches" in done.out
    assert (folder / "late.svg").read_text().startswith("<?xml")
    program, derived = (block for block in blocks(SCHEDULE, "python") if "# mine.py" not in block)
    done = shell(folder, f"python -c '{program}{derived}'")
    *times, of_derived = done.out.splitlines()
    assert of_derived == "3 (2, 2)"
    free, ticked, *held = re.findall(r"[\d.]+", " ".join(times))
    assert 0 < float(free) <= float(ticked) < 1
    assert held == ["8"] * 4  # W frees what F keeps, and all of them come last


def test_a_model_is_trained_and_goes_on_with_that_schedule(folder):
    done = shell(folder, "".join(blocks(MODEL, "sh")))
    records = steps(folder / "runs" / "curves")
    assert len(records) == saved(folder / "runs" / "curves")[-1] == 60
    assert records[-1]["eval_loss"] < 0.1 < 0.4 < records[0]["loss"]
    assert "changed since: pipeline.schedule 1f1b -> mine:late_weights" in done.out
    assert "nats" not in done.out
    first, second = re.findall(r"\nheld-out loss ([\d.]+), largest_error [\d.]+\n", done.out)
    assert float(second) == pytest.approx(records[-1]["eval_loss"], abs=1e-4)
    assert float(second) < 1.5 * float(first)
