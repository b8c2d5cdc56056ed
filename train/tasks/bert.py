"""Masked language modelling: a BERT on the text that the GPT reads."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe import Model
from models import bert
from models.types import PyTree
from train.config import Config
from train.data import masked_lm, text
from train.data.stream import Examples, Unnumbered
from train.task import Task, averaging, shared_counts

_ROWS = 256
"""Held-out rows for the accuracy."""


class BERT(Task):
    # 2048 tokens and the special ones.
    default = bert.BERTConfig(
        vocab_size=2051, sequence_length=128, num_layers=8, width=128, num_heads=4
    )
    fixed = ("num_segments",)
    unit = "tokens"
    loss_unit = "nats"
    data_kind = "text"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.units_per_row = self.shape.sequence_length

    def model(self, *, train: bool, axis: str | None = "stage") -> Model:
        model = bert.model(self.shape, **self.named_axes(axis))
        return averaging(model) if train else model

    def shared(self, axis: str) -> dict[str, int]:
        return shared_counts(self.shape) if axis == "tensor" else {}

    def init(self, rng: jax.Array) -> PyTree:
        return bert.init(self.shape, rng)

    def row_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        row = jax.ShapeDtypeStruct((self.shape.sequence_length,), jnp.int32)
        shapes = {"tokens": row, "targets": row}
        if self.shape.next_sentence:
            shapes |= {"segments": row, "next_sentence": jax.ShapeDtypeStruct((), jnp.int32)}
        return shapes

    def load(self) -> tuple[Examples | Unnumbered, Examples]:
        needed = max(masked_lm.special_tokens(text.read_meta(self.config.data.path).vocab_size)) + 1
        if self.shape.vocab_size < needed:
            raise ValueError(
                f"model.vocab_size={self.shape.vocab_size} is smaller than the {needed} tokens of "
                f"data.path={self.config.data.path}, special ones included. "
                f"Nearest valid: {needed}."
            )
        return masked_lm.load(
            self.config.data.path,
            sequence_length=self.shape.sequence_length,
            next_sentence=self.shape.next_sentence,
        )

    def data_digest(self) -> str:
        return text.read_meta(self.config.data.path).tokenizer_sha256

    def baseline(self, train: Examples | Unnumbered, heldout: Examples) -> str:
        del train
        folder = self.config.data.path
        accuracy = masked_lm.unigram_accuracy(
            text.read_tokens(f"{folder}/{text.TRAIN_FILE}"),
            [self.rows(heldout, _ROWS)],
            vocab_size=text.read_meta(folder).vocab_size,
        )
        return f"always the most frequent token is right in {accuracy:.1%} of the masked ones"

    def report(self, params: PyTree, states: PyTree, heldout: Examples) -> tuple[str, float | None]:
        del states
        batch = self.rows(heldout, _ROWS)
        logits = jax.jit(bert.logits, static_argnums=0)
        guesses = np.asarray(logits(self.shape, params, batch)).argmax(-1)
        accuracy = masked_lm.masked_accuracy(guesses, batch["targets"])
        return (
            f"masked accuracy on {len(batch['targets'])} held-out rows: {accuracy:.1%}",
            float(accuracy),
        )
