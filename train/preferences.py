"""Preferences: a GPT's adapters are trained on pairs of answers, by DPO.

The reference is the model with its adapters turned off, in the same pipeline.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe import Model
from models import preferences
from models.gpt_config import GPTConfig
from train.data import text
from train.data.folder import ANSWER, BEGIN
from train.data.stream import Batch, Examples, Unnumbered
from train.errors import Failure
from train.tasks.gpt import GPT


class DPO(GPT):
    """``task: train.preferences:DPO``, with what ``train.prepare --preferences`` writes."""

    loss_unit = ""
    slices = False
    data_options: ClassVar[tuple[str, ...]] = ()

    def model(self, *, train: bool, axis: str | None = "stage") -> Model:
        return self._pairs(self.shape if train else self.shape.without_layer_losses(), axis)

    def reference(self, *, axis: str | None = "stage") -> Model:
        adapters = dataclasses.replace(self.shape.adapters, alpha=0.0)
        shape = dataclasses.replace(self.shape.without_layer_losses(), adapters=adapters)
        return self._pairs(shape, axis)

    def _pairs(self, shape: GPTConfig, axis: str | None) -> Model:
        return preferences.model(shape, self.config.train.dpo_beta, **self.named_axes(axis))

    def row_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        pair = jax.ShapeDtypeStruct((2, self.shape.sequence_length), jnp.int32)
        return {"tokens": pair, "targets": pair, "reference": jax.ShapeDtypeStruct((), jnp.float32)}

    def load(self) -> tuple[Pairs, Pairs]:
        folder, length = Path(self.config.data.path), self.shape.sequence_length
        return Pairs(folder, text.TRAIN_FILE, length), Pairs(folder, text.HELDOUT_FILE, length)

    def data_failures(self) -> Iterator[Failure]:
        config = self.config
        if not config.lora.rank:
            yield config.failure(
                "$lora.rank leaves no reference: it is the model without its adapters. Nearest "
                "valid: lora.rank=8."
            )
        for name in ("mtp_loss", "bias_speed"):
            if getattr(config.model, name) is not None:
                yield config.failure(
                    f"$model.{name} cannot be combined with pairs. Nearest valid: null."
                )
        if config.train.noise_every:
            yield config.failure(
                "$train.noise_every does not know the reference. Nearest valid: 0."
            )
        try:
            train, heldout = self.load()
        except ValueError as error:
            yield Failure(str(error), ("data.path",))
            return
        needed = config.train.eval_batches * config.train.batch_size
        for pairs, least in ((train, config.train.batch_size), (heldout, needed)):
            if len(pairs) < least:
                yield config.failure(
                    f"$data.path: {pairs.name} holds {len(pairs)} pairs, and {least} are needed "
                    "for $train.batch_size and $train.eval_batches. Nearest valid: smaller ones."
                )

    def flops_per_row(self) -> int:
        of_row = super().flops_per_row()
        assert of_row is not None
        per_token = of_row // self.units_per_row
        # Two answers, and a forward pass of each through the reference.
        return 2 * self.units_per_row * per_token * 3 // 2

    def baseline(self, train: Examples | Unnumbered, heldout: Examples) -> str:
        del train, heldout
        return f"the reference: {np.log(2):.4f}"


class Pairs:
    """Pairs of conversations, the chosen one first, cut to the length of a row.

    Args:
      folder: as ``train.prepare --preferences`` writes it.
      name: its file of tokens.
      length: tokens of a row.

    Raises:
      ValueError: the folder holds no pairs.
    """

    def __init__(self, folder: Path, name: str, length: int) -> None:
        self.name, self._length = name, length
        if not text.read_meta(folder).settings.get("preferences"):
            raise ValueError(
                f"data.path={folder} holds no pairs. Prepare some: python -m train.prepare "
                f"--preferences pairs.jsonl --tokenizer MODEL --out {folder}"
            )
        self._tokens, roles = text.read_tokens(folder / name), text.read_roles(folder, name)
        assert roles is not None
        self._roles = roles
        self._starts = np.append(np.flatnonzero(roles[:] == BEGIN), len(roles))

    def __len__(self) -> int:
        return (len(self._starts) - 1) // 2

    def read(self, numbers: np.ndarray, keys: np.ndarray) -> Batch:
        """Reads ``tokens`` and ``targets``, int32 [pairs, 2, length], and a place for the
        reference's margin."""
        del keys
        tokens = np.zeros((len(numbers), 2, self._length), np.int32)
        targets = np.full_like(tokens, -1)
        for row, number in enumerate(numbers.astype(np.int64)):
            for answer in range(2):
                first, end = self._starts[2 * number + answer : 2 * number + answer + 2]
                own = slice(int(first), min(int(end), int(first) + self._length + 1))
                ids, roles = self._tokens[own].astype(np.int32), self._roles[own]
                tokens[row, answer, : len(ids) - 1] = ids[:-1]
                targets[row, answer, : len(ids) - 1] = np.where(roles[1:] == ANSWER, ids[1:], -1)
        return {
            "tokens": tokens, "targets": targets, "reference": np.zeros(len(numbers), np.float32),
        }  # fmt: skip
