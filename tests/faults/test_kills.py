"""SIGKILL at random moments and while checkpoints are written, until the run has ended.

Whatever was killed, losses and weights equal those of an unbroken run, to the bit. Together with
the tests beside it this is `make test-faults`.
"""

import os
import random
import signal

import pytest
from command import NUM_STEPS, assert_same_run, finish, kill_when, num_lines

pytestmark = [pytest.mark.end_to_end, pytest.mark.slow]

KILLS = int(os.environ.get("JAXPIPE_KILLS", "204"))
STEPS = ("--train.checkpoint-every", 2)
KINDS = {
    "1f1b": (),
    "zb-v, ZeRO-3": ("--pipeline.schedule", "zb-v", "--pipeline.zero", 3),
    "updates by chunk": (
        *("--pipeline.schedule", "modular", "--pipeline.chunks", 2, "--pipeline.update", "chunk"),
        *("--optimizer.clip-norm", 0),
    ),
    "pipemare": ("--pipeline.schedule", "pipemare", "--asynchronous.warmup-steps", 4),
}


def _is_writing(run):
    folder = run / "checkpoints"
    names = os.listdir(folder) if folder.is_dir() else []
    return any(not name.isdigit() and "damaged" not in name for name in names)


def _kill_once(toy_trainer, run, options, random_):
    """Starts or continues a run and kills it; returns whether it was killed before its end."""
    done = num_lines(run)
    process = toy_trainer.start("--run-dir", run, "--resume", *options)
    in_a_write = random_.random() < 0.5
    goal, delay = random_.randint(done, min(done + 3, NUM_STEPS)), random_.expovariate(20)

    def ready():
        return num_lines(run) >= goal and (not in_a_write or _is_writing(run))

    if random_.random() < 0.2:  # before the first step
        goal, in_a_write, delay = done, False, random_.uniform(0, 4)
    kill_when(process, ready, number=signal.SIGKILL, delay_seconds=delay)
    finished = finish(process, None)
    assert finished.status in (0, -signal.SIGKILL), str(finished)
    assert "Traceback" not in finished.err, str(finished)
    return finished.status != 0


@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_killed_again_and_again(toy_trainer, tmp_path, kind, part):
    random_ = random.Random(f"{kind} {part}")
    options = *KINDS[kind], *STEPS
    unbroken = tmp_path / "unbroken"
    toy_trainer.run("--run-dir", unbroken, *options)
    kills, number, enough = 0, 0, KILLS // (3 * len(KINDS))
    while kills < enough:
        run, number = tmp_path / f"run{number}", number + 1
        # A run that is killed faster than it gets on would never end.
        while kills < enough and _kill_once(toy_trainer, run, options, random_):
            kills += 1
            if kills % 8 == 0:
                break
        toy_trainer.run("--run-dir", run, "--resume", *options)
        assert_same_run(run, unbroken)
        assert sorted(path.name for path in run.glob(".lock")) == []
