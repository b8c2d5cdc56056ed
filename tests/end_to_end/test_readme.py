"""The README's example runs as it is pasted."""

import os
import re
import subprocess
import sys
from pathlib import Path

import limits
import pytest

ROOT = Path(__file__).parents[2]
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


@pytest.mark.end_to_end
def test_the_training_step_of_the_readme_trains():
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["JAX_LOG_COMPILES"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", code + AFTERWARDS],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=limits.hang(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    loss, afterwards = done.stdout.splitlines()
    assert 0 < float(loss) < 0.1  # the targets' variance is about 0.5
    # Every device holds one of 4 stages' part of one of 2 data shards.
    assert afterwards == f"True [] {{{8 * 64 * 64 // 4 // 2}}}"
    assert done.stderr.count("Finished XLA compilation of jit(step)") == 1
    assert "rematerialization" not in done.stderr
