"""A disk that is full at any write: one line, no finished checkpoint lost, and the run goes on."""

import shutil

import pytest
from command import assert_same_run, finish, saved

pytestmark = [pytest.mark.end_to_end, pytest.mark.slow]

PAGE = 4
"""Kilobytes of a tmpfs that the smallest file takes."""
SIZES = range(60, 360, 12)
"""From less than the first picture to all of the run, in kilobytes: about every third file."""


def _kilobytes(run):
    pages = (-(-path.stat().st_size // (1024 * PAGE)) for path in run.rglob("*") if path.is_file())
    return PAGE * sum(pages)


@pytest.mark.parametrize("size", SIZES)
def test_a_disk_of_any_size(unbroken_toy, toy_trainer, small_disk, tmp_path, size):
    assert SIZES[0] < _kilobytes(unbroken_toy) < SIZES[-1] + 100
    run = small_disk(size) / "run"
    finished = finish(toy_trainer.start("--run-dir", run), None)
    if finished.status != 0:
        assert finished.status == 2, str(finished)
        assert finished.err == (
            f"error: run_dir={run} cannot be written: No space left on device. Free some space or "
            "name another --run-dir.\n"
        )
    last = max(saved(run), default=0)
    moved = shutil.copytree(run, tmp_path / "moved")
    finished = toy_trainer.run("--run-dir", moved, "--resume")
    assert f"resuming {moved} at step {last}" in finished.out, str(finished)
    assert_same_run(moved, unbroken_toy)
