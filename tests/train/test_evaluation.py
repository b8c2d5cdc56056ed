"""The held-out loss is that of the rows, however they are divided into batches and microbatches."""

import jax
import numpy as np
import pytest
from covering import some
from tiny_tasks import config

from jaxpipe import unpipelined
from train import evaluation
from train.data.folder import ANSWER, BEGIN, PROMPT
from train.data.masked_lm import MaskedWindows
from train.data.packing import Packed
from train.data.stream import heldout_batches
from train.step import Setup

ROWS = 16
DRAW = np.random.default_rng(5)


class Pairs:
    """Sentences of 1 to 8 tokens."""

    def __init__(self, count: int) -> None:
        self.target = DRAW.integers(4, 40, (count, 9), dtype=np.int32)
        ends = DRAW.integers(2, 10, (count, 1))
        self.target[np.arange(9) >= ends] = 0  # the padding of the tiny Transformer

    def __len__(self) -> int:
        return len(self.target)

    def read(self, numbers, keys):
        return {"source": self.target[numbers, 1:], "target": self.target[numbers]}


def packed(*, roles: bool) -> Packed:
    tokens = DRAW.integers(1, 50, 400)
    tokens[DRAW.random(400) < 0.2] = 0
    said = DRAW.choice([ANSWER, PROMPT], 400, p=[0.2, 0.8])
    said[np.append(True, tokens[:-1] == 0)] = BEGIN
    return Packed(tokens, 8, end_of_text=0, roles=said if roles else None)


HELDOUT = {
    "packed": ("gpt", packed(roles=False)),
    "conversations": ("gpt", packed(roles=True)),
    "masked words": (
        "bert",
        MaskedWindows(DRAW.integers(0, 2, 400), sequence_length=8, vocab_size=37, end_of_text=0),
    ),
    "sentence pairs": ("transformer", Pairs(40)),
}
OF_ONE, OF_EIGHT = (1, {"microbatches": 1}, {}), (8, {"microbatches": 2}, {"stage": 2, "data": 2})


@pytest.mark.pipeline
@pytest.mark.parametrize(
    ("name", "batch_size", "pipeline", "mesh"),
    some(
        [("conversations", *OF_ONE), *((name, *OF_EIGHT) for name in HELDOUT)],
        ("conversations", *OF_EIGHT),
    ),
)
def test_the_heldout_loss_does_not_depend_on_the_batch_size(name, batch_size, pipeline, mesh):
    task, heldout = HELDOUT[name]
    data = {"documents": "packed"} if task == "gpt" else {}
    train, mesh = {"batch_size": batch_size}, mesh or {"stage": 1, "data": 1}
    setup = Setup(config(task, data=data, train=train, mesh=mesh, pipeline=pipeline))
    state = setup.init()
    (rows,) = heldout_batches(heldout, batch_size=ROWS, num_batches=1)
    model = type(setup.task)(setup.config).model(train=False, axis=None)
    expected = jax.jit(unpipelined.loss, static_argnums=0)(
        model, jax.device_get(setup.pipe.unplace(state.params)), rows
    )
    found = evaluation.means(setup, state, heldout, ROWS // batch_size)
    np.testing.assert_allclose(found["loss"], expected, rtol=1e-6)
