"""Every schedule, mesh, ZeRO level and policy gives the unpipelined model's loss and gradients."""

from __future__ import annotations

import itertools
import math
from functools import cache, partial

import jax
import optax
import pytest
import toy
from covering import covering

import jaxpipe
from jaxpipe.testing import assert_matches_unpipelined

SCHEDULES = ("gpipe", "gpipe-fused", "1f1b", "1f1b-fused")
STAGES, DATA, ZERO = (1, 2, 4), (1, 2), (0, 1, 2, 3)
REMAT, TIED, MICROBATCHES = ("none", "dots", "full"), (True, False), (1, 3, 8)
FULL = [
    case
    for case in itertools.product(SCHEDULES, STAGES, DATA, ZERO, REMAT, TIED, MICROBATCHES)
    if case[2] > 1 or case[3] == 0  # one data shard has nothing to shard
]
COVERING = covering(FULL)


@cache
def reference(tied):
    """The toy with whole tables; many cases share one program."""
    return partial(jaxpipe.unpipelined.loss, toy.model(tied=tied, axis=None))


def check(
    schedule,
    stages,
    data,
    zero,
    remat,
    tied,
    microbatches,
    *,
    num_layers=6,
    rng=None,
    axis="stage",
    **options,
):
    """Compares losses and gradients; returns the pipeline."""
    (pipe,) = assert_matches_unpipelined(
        toy.model(tied=tied, axis=axis),
        toy.params(tied=tied, num_layers=num_layers),
        toy.batch(2 * data * microbatches),
        schedules=[schedule],
        meshes=[jaxpipe.make_mesh(stage=stages, data=data)],
        microbatches=microbatches,
        rng=rng,
        reference=reference(tied),
        remat=remat,
        zero=zero,
        **options,
    )
    return pipe


@pytest.mark.pipeline
@pytest.mark.parametrize("case", COVERING, ids=lambda case: "-".join(map(str, case)))
def test_gradients_equal_the_unpipelined_model(case):
    check(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", FULL, ids=lambda case: "-".join(map(str, case)))
def test_gradients_equal_the_unpipelined_model_everywhere(case):
    check(*case)


@pytest.mark.pipeline
@pytest.mark.parametrize(
    "case",
    [
        *(("1f1b", 4, 2, 3, "none", True, 3), ("1f1b-fused", 1, 2, 2, "full", True, 3)),
        *(("zb-v", 4, 1, 0, "full", False, 8), ("interleaved", 2, 2, 1, "dots", True, 4)),
        *(
            ("breadth-first", 4, 2, 3, "none", False, 3),
            ("breadth-first", 2, 1, 0, "full", True, 8),
        ),
    ],
    ids=lambda case: "-".join(map(str, case)),
)
def test_gradients_of_tables_at_the_ends_equal_the_unpipelined_model(case):
    pipe = check(*case, num_layers=9, rng=jax.random.key(7), axis=None)
    assert not pipe.table.together
    # No stage keeps a whole table, nor its moments, between steps.
    state = pipe.optimizer_placing(optax.adam(1e-3)).placed
    for tree in (pipe.placed_params, state[0].mu, state[0].nu):
        for w in jax.tree.leaves({name: tree[name] for name in ("embed", "head")}):
            kept = math.prod(w.sharding.shard_shape(w.shape))
            divides = any(n % (case[1] * case[2]) == 0 for n in w.shape)
            assert not divides or w.ndim < 2 or kept * case[1] <= w.size


@pytest.mark.pipeline
@pytest.mark.parametrize("remat", REMAT)
@pytest.mark.parametrize("schedule", ["1f1b", "1f1b-fused"])
def test_randomness_depends_on_microbatch_and_layer_only(schedule, remat):
    rng = jax.random.key(7)
    check(schedule, 4, 2, 3, remat, True, 3, rng=rng)


PIPELINE = pytest.mark.pipeline


@pytest.mark.parametrize(
    "num_layers", [pytest.param(4, marks=PIPELINE), 5, pytest.param(7, marks=PIPELINE)]
)
def test_uneven_chunks_drop_nothing(num_layers):
    check("1f1b", 4, 2, 3, "none", False, 3, num_layers=num_layers)


def test_a_schedule_with_two_copies_of_the_weights_is_only_simulated():
    with pytest.raises(ValueError, match=r"'chimera' can only be simulated: it needs 2 copies"):
        check("chimera", 2, 1, 0, "none", True, 2)
