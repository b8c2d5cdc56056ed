"""Translation: an encoder-decoder Transformer on pairs of sentences."""

from __future__ import annotations

import statistics

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe import Model
from models import transformer, translate
from models.types import PyTree
from train.config import Config
from train.data import translation
from train.data.stream import Examples, Unnumbered
from train.task import Task, averaging, shared_counts

_ROWS = 64
"""Sentences translated at once."""


class Transformer(Task):
    default = transformer.TransformerConfig(
        vocab_size=4096, sequence_length=64, num_encoder_layers=4, num_decoder_layers=4,
        width=128, num_heads=4, dropout=0.1,
    )  # fmt: skip
    fixed = ("pad_id", "begin_id", "end_id")
    free = ("dropout", "label_smoothing")
    depth = ("num_encoder_layers", "num_decoder_layers")
    unit = "tokens"
    loss_unit = "nats"
    data_kind = "translation"
    report_file = "translations.tsv"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.units_per_row = 2 * self.shape.sequence_length

    def model(self, *, train: bool, axis: str | None = "stage") -> Model:
        model = transformer.model(self.shape, **self.named_axes(axis))
        return averaging(model) if train else model

    def shared(self, axis: str) -> dict[str, int]:
        return shared_counts(self.shape) if axis == "tensor" else {}

    def init(self, rng: jax.Array) -> PyTree:
        return transformer.init(self.shape, rng)

    def row_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        length = self.shape.sequence_length
        return {
            "source": jax.ShapeDtypeStruct((length,), jnp.int32),
            "target": jax.ShapeDtypeStruct((length + 1,), jnp.int32),
        }

    def load(self) -> tuple[Examples | Unnumbered, Examples]:
        folder, shape = self.config.data.path, self.shape
        meta = translation.read_meta(folder)
        longest = max(meta.source_length, meta.target_length)
        if shape.vocab_size < meta.vocab_size or shape.sequence_length < longest:
            raise ValueError(
                f"model.vocab_size={shape.vocab_size} with model.sequence_length="
                f"{shape.sequence_length} does not fit data.path={folder}, which has "
                f"{meta.vocab_size} tokens and sentences of up to {longest}. Nearest valid: "
                f"model.vocab_size={meta.vocab_size}, model.sequence_length={longest}."
            )
        length = shape.sequence_length
        return translation.load(folder, source_length=length, target_length=length)

    def data_digest(self) -> str:
        return translation.read_meta(self.config.data.path).tokenizer_sha256

    def baseline(self, train: Examples | Unnumbered, heldout: Examples) -> str:
        del train
        assert isinstance(heldout, translation.Pairs)
        return f"BLEU of copying the source: {_scores(translation.copy_bleu(heldout.pairs))}"

    def report(self, params: PyTree, states: PyTree, heldout: Examples) -> tuple[str, float | None]:
        del states
        assert isinstance(heldout, translation.Pairs)
        tokenizer = translation.load_tokenizer(self.config.data.path)
        length, written = self.shape.sequence_length, []
        for start in range(0, len(heldout), _ROWS):
            # The last few are translated twice rather than compiled anew.
            numbers = np.arange(start, start + _ROWS).clip(max=len(heldout) - 1)
            batch = heldout.read(numbers, np.zeros((len(numbers), 3), np.int64))
            source = jnp.asarray(batch["source"])
            tokens = translate.greedy(self.shape, params, source, max_length=length)
            written += [translation.decode(tokenizer, row) for row in np.asarray(tokens).tolist()]
        written = written[: len(heldout)]
        path = self.config.folder / self.report_file
        lines = [
            f"{pair.locale}\t{pair.source}\t{pair.target}\t{text}"
            for pair, text in zip(heldout.pairs, written, strict=True)
        ]
        path.write_text("locale\tsource\ttarget\ttranslation\n" + "\n".join(lines) + "\n", "utf-8")
        scores = translation.bleu(written, heldout.pairs)
        where = f"{self.config.run_dir}/{self.report_file}"
        text = f"BLEU of {len(heldout)} held-out sentences ({where}): {_scores(scores)}"
        return text, statistics.mean(scores.values())


def _scores(by_locale: dict[str, float]) -> str:
    return ", ".join(f"{locale} {score:.1f}" for locale, score in by_locale.items())
