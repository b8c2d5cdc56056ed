"""Bad values in every field of every family, in one process: each is refused in lines, or fits."""

import math
import random
import time

import pytest

from train import checks, config_file, errors, tasks
from train.config import Config
from train.processes import distributed

CPU_SECONDS = 30
VALUES = (
    *(-1, 0, 1, 3, 10**9 + 7, 10**12, 2**63, -(2**70), 10**4000, True, False),
    *(-1.0, 0.5, 1e-300, 1e308, math.inf, -math.inf, math.nan),
    *("", "x", "a" * 5000, "1 " * 5000, "\ud800", "\0", "../..", "1,2,3", "none", "\n"),
    *(None, [], [1], {}, {"a": 1}, {"a": {"b": [None]}}),
)


def _cases():
    """Every field of every family with every value."""
    for task in tasks.names():
        for path in Config(task=task).flat():
            for value in VALUES:
                yield task, path, value


def _messages(tmp_path, task, path, value):
    """What a file with this value makes the trainer say before it looks for devices."""
    raw = {"run_dir": str(tmp_path / "run"), "data": {"path": str(tmp_path / "data")}, "task": task}
    raw["pipeline"] = {"schedule": "1f1b"}  # the default would be searched for every value
    *sections, name = path.split(".")
    target = raw
    for section in sections:
        target = target.setdefault(section, {})
    target[name] = value
    config, broken = config_file.validate(raw, source="a.yaml")
    config, out_of_range = checks.in_range(config)
    found = [*broken, *out_of_range]
    try:
        distributed.find_processes(config, {})
    except errors.ConfigError as error:
        found += error.failures
    found += checks.check(config, reads=False)
    return [failure.message for failure in found]


def _try(tmp_path, cases):
    slow, raised = [], []
    for task, path, value in cases:
        began = time.process_time()
        try:
            messages = _messages(tmp_path, task, path, value)
        except errors.ConfigError:
            messages = []
        except Exception as error:
            raised.append((task, path, str(value)[:50], repr(error)[:300]))
            continue
        if time.process_time() - began > CPU_SECONDS:
            slow.append((task, path, str(value)[:50]))
        assert all(0 < len(message) < 1500 for message in messages), (task, path, messages)
    assert not raised, f"{len(raised)} tracebacks:\n" + "\n".join(map(str, raised[:20]))
    assert not slow
    assert not (tmp_path / "run").exists()


def test_some_bad_values(tmp_path):
    _try(tmp_path, random.Random(0).sample(list(_cases()), 120))


@pytest.mark.slow
@pytest.mark.parametrize("task", tasks.names())
def test_every_bad_value_of_every_field(tmp_path, task):
    cases = [case for case in _cases() if case[0] == task]
    assert len(cases) > 800
    _try(tmp_path, cases)
