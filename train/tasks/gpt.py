"""Language modelling: a GPT on a text; at the end it continues a prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpipe import Model
from models import gpt
from models.adapters import Adapters
from models.gpt_config import GPTConfig
from models.qk_clip import qk_clip
from models.sample import sample
from models.tensor import divides_heads
from models.types import PyTree
from train.config import Config
from train.data import text, tokenizer_files
from train.data.folder import META_FILE
from train.data.packing import Packed
from train.data.rows import Shard, find_shards
from train.data.stream import Examples, Mixture, Unnumbered
from train.data.streamed import Streamed
from train.data.tokenizer_files import Exported
from train.errors import Failure
from train.task import Task


class GPT(Task):
    default = GPTConfig(vocab_size=2048, sequence_length=128, num_layers=8, width=128, num_heads=4)
    unit = "tokens"
    loss_unit = "nats"
    slices = True
    adapts = True
    fixed = ("adapters",)
    data_options: ClassVar[tuple[str, ...]] = ("mix", "documents", "rows", "domains")
    data_kind = "text"
    report_file = "sample.txt"
    free = ("dropout", "balance_loss", "z_loss", "bias_speed", "mtp_loss", "qk_clip")

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if (lora := config.lora).rank:
            of_layers = Adapters(
                lora.rank, lora.alpha, tuple(lora.targets), lora.dropout, lora.base
            )
            self.shape = dataclasses.replace(self.shape, adapters=of_layers)
            self.dropout = self.dropout or lora.dropout > 0
        self.units_per_row = self.shape.sequence_length
        self.num_layers = self.shape.num_layers + self.shape.num_further

    @property
    def in_pieces(self) -> bool:
        return all(map(self.shape.in_pieces, self.shape.layer_kinds))

    def few_layers(self) -> tuple[Config, Sequence[int]]:
        shape, kinds = self.shape, self.shape.layer_kinds
        if shape.layers_are_alike or shape.global_layers or shape.unrotated_layers:
            return super().few_layers()  # nothing to save, or numbers of layers of the whole model
        few = 1 + max(kinds.index(kind) for kind in set(shape.main_kinds))
        shorter = dataclasses.replace(shape, num_layers=few).layer_kinds
        like = [shorter.index(kind) for kind in kinds]
        return self.config.changed(model={"num_layers": few}), like

    def model(self, *, train: bool, axis: str | None = "stage") -> Model:
        shape = self.shape if train else self.shape.without_layer_losses()
        mesh, sizes = self.config.mesh, dict[str, int]()
        if shape.qk_clip is not None and axis is not None:
            sizes = {"replica": mesh.replica, "data": mesh.data, "expert": mesh.expert}
        data_axes = tuple(name for name, size in sizes.items() if size > 1)
        return gpt.model(shape, **self.named_axes(axis), data_axes=data_axes)

    def shared(self, axis: str) -> dict[str, int]:
        shape = self.shape
        if axis == "expert":
            return {} if shape.num_experts is None else {"num_experts": shape.num_experts}
        counts = {"sequence_length": shape.sequence_length}
        if axis == "tensor":
            counts |= {"num_heads": shape.num_heads}
            if not shape.tied:  # the embedding is split by its columns
                counts["width"] = shape.width
            if shape.linear_heads is not None:
                counts["linear_heads"] = shape.linear_heads
            if not all(kind.has_experts for kind in shape.layer_kinds):
                counts["mlp_width"] = shape.hidden_width
            if shape.shared_width is not None:
                counts["shared_width"] = shape.shared_width
            if not divides_heads(shape.kv_heads, shape.head_width, self.config.mesh.tensor):
                counts["num_kv_heads"] = shape.kv_heads
        return counts

    def init(self, rng: jax.Array) -> PyTree:
        return gpt.init(self.shape, rng)

    def init_states(self) -> tuple[PyTree, ...] | None:
        return gpt.init_state(self.shape)

    def end_step(self, states: tuple[PyTree, ...] | None) -> tuple[PyTree, ...] | None:
        return None if states is None else gpt.end_step(self.shape, states)

    def last_transformation(self) -> optax.GradientTransformation | None:
        return None if self.shape.qk_clip is None else qk_clip(self.shape)

    def optimizer_arguments(self, states: tuple[PyTree, ...]) -> dict[str, PyTree]:
        return {} if self.shape.qk_clip is None else {"max_logits": gpt.max_logits(states)}

    def row_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        length = self.shape.sequence_length
        documents = self.config.data.documents
        with_targets = documents == "packed" or self.config.pipeline.sequence_slices > 1
        names = ["tokens", *(("targets", "positions") if with_targets else ())]
        names += ["documents"] if documents != "joined" else []
        lengths = dict.fromkeys(names, length) | ({} if with_targets else {"tokens": length + 1})
        return {name: jax.ShapeDtypeStruct((n,), jnp.int32) for name, n in lengths.items()}

    def _side(self, folder: str, name: str) -> Examples:
        return self._rows(text.read_tokens(Path(folder) / name), text.read_roles(folder, name))

    def _rows(self, tokens: text.Tokens, roles: text.Tokens | None = None) -> Examples:
        settings, length = self.config.data, self.shape.sequence_length
        end = None if settings.documents == "joined" else text.end_of_text(settings.path)
        if settings.documents == "packed":
            assert end is not None
            return Packed(tokens, length, end_of_text=end, roles=roles)
        with_targets = self.config.pipeline.sequence_slices > 1
        return text.Windows(tokens, length, end_of_text=end, with_targets=with_targets)

    def load_domains(self) -> dict[str, Examples]:
        domains = self.config.data.domains
        return {name: self._side(folder, text.HELDOUT_FILE) for name, folder in domains.items()}

    def load(self) -> tuple[Examples | Unnumbered, Examples]:
        settings, length = self.config.data, self.shape.sequence_length
        heldout = self._side(settings.path, text.HELDOUT_FILE)
        if settings.rows is not None:
            shards = self._shards()
            folder = Path(settings.path)
            return Streamed(shards, folder, sequence_length=length, rows=self._rows), heldout
        train = self._side(settings.path, text.TRAIN_FILE)
        if settings.mix:
            mixed = [self._side(folder, text.TRAIN_FILE) for folder in settings.mix]
            train = Mixture([train, *mixed], [1.0, *settings.mix.values()])
        return train, heldout

    def _shards(self) -> list[Shard]:
        """Lists the shards of the texts to read; raises ValueError if they cannot be read."""
        settings = self.config.data
        assert settings.rows is not None
        return find_shards(settings.rows, settings.column, option="data.rows")

    def data_failures(self) -> Iterator[Failure]:
        settings, failures = self.config.data, list(self._path_failures())
        yield from failures
        if settings.rows is not None:
            yield from self._rows_failures()
        if failures:
            return
        for folder in settings.mix:
            try:
                self._check_beside("data.mix", Path(folder), text.TRAIN_FILE)
            except ValueError as error:
                yield Failure(str(error), ("data.mix",))
        for name, folder in settings.domains.items():
            try:
                self._check_domain(Path(folder))
            except ValueError as error:
                yield Failure(f"data.domains.{name}: {error}", ("data.domains",))

    def _check_domain(self, folder: Path) -> None:
        """Raises ValueError unless there are enough held-out rows of a domain."""
        self._check_beside("data.domains", folder, text.HELDOUT_FILE)
        config = self.config.train
        needed = config.eval_batches * config.batch_size
        if (count := len(self._side(str(folder), text.HELDOUT_FILE))) < needed:
            raise ValueError(
                f"data.domains={folder} has {count} held-out rows, too few for train.eval_batches="
                f"{config.eval_batches} x train.batch_size={config.batch_size}. Prepare more text."
            )

    def _rows_failures(self) -> Iterator[Failure]:
        settings = self.config.data
        if settings.mix:
            yield self.config.failure(
                "$data.mix cannot be drawn beside $data.rows. Nearest valid: data.mix={}, and a "
                "function that interleaves data sets."
            )
        try:
            if text.read_meta(settings.path).conversations:
                raise ValueError(
                    f"data.path={settings.path} holds conversations, and data.rows={settings.rows} "
                    "texts of which all is predicted. Nearest valid: data.rows=null."
                )
            for _ in self._shards()[0].texts():
                return
        except ValueError as error:
            yield Failure(str(error), ("data.rows", "data.column"))

    def _check_beside(self, field: str, folder: Path, name: str) -> None:
        """Raises ValueError unless the rows of another folder can be read beside those of path."""
        try:
            meta = text.read_meta(folder)
            tokens = self._checked_tokens(folder, name, meta)
        except ValueError as error:
            message = str(error).replace(f"data.path={folder}", f"{field}={folder}")
            raise ValueError(message) from error
        if meta.tokenizer_sha256 != self.data_digest():
            raise ValueError(
                f"{field}={folder} was prepared with another tokenizer than data.path="
                f"{self.config.data.path}. Prepare it with: python -m train.prepare --tokenizer "
                f"{self.config.data.path} --out {folder}"
            )
        if not len(text.Windows(tokens, self.shape.sequence_length)):
            raise ValueError(
                f"{field}={folder} has {len(tokens)} tokens, too few for one row of "
                f"model.sequence_length={self.shape.sequence_length}. Prepare more text."
            )

    def _checked_tokens(self, folder: Path, name: str, meta: text.DataMeta) -> text.Tokens:
        """Opens a token file; raises ValueError if it is damaged, or cannot be read as configured.

        Tokens that are not predicted can only be left out of packed rows.
        """
        tokens = text.read_tokens(folder / name)
        text.check_tokens(folder / name, tokens, vocab_size=meta.vocab_size)
        documents = self.config.data.documents
        if text.read_roles(folder, name) is not None and documents != "packed":
            raise ValueError(
                f"data.path={folder} holds conversations, of which only the assistant's part is "
                f"predicted, and data.documents={documents} predicts all. Nearest valid: "
                "data.documents=packed."
            )
        return tokens

    def _path_failures(self) -> Iterator[Failure]:
        config, folder = self.config, Path(self.config.data.path)
        try:
            meta = text.read_meta(folder)
        except ValueError as error:
            yield Failure(str(error), ("data.path",))
            return
        if self.shape.vocab_size < meta.vocab_size:
            yield config.failure(
                f"$model.vocab_size is smaller than the tokenizer's {meta.vocab_size} tokens "
                f"($data.path). Nearest valid: {meta.vocab_size}."
            )
        batches, size = config.train.eval_batches, config.train.batch_size
        heldout = f"train.eval_batches={batches} x train.batch_size={size} rows"
        for name, side, needed, what in (
            (text.TRAIN_FILE, meta.train, 1, "one row"),
            (text.HELDOUT_FILE, meta.heldout, batches * size, heldout),
        ):
            try:
                tokens = self._checked_tokens(folder, name, meta)
            except ValueError as error:
                yield Failure(str(error), ("data.path",))
                continue
            if len(tokens) != side.tokens:
                yield Failure(
                    f"data.path={folder}: {name} holds {len(tokens)} tokens, but {META_FILE} says "
                    f"{side.tokens}: the files are not from one preparation. Prepare the folder "
                    "again.",
                    ("data.path",),
                )
            # Windows predict all but the text's first token, packed rows all but documents' first.
            first = side.documents if config.data.documents == "packed" else 1
            yield from self._long_enough(name, (len(tokens), first), needed, what)

    def _long_enough(
        self, name: str, counts: tuple[int, int], needed: int, what: str
    ) -> Iterator[Failure]:
        """Compares rows with tokens, of which so many are not predicted."""
        config, length, (count, first) = self.config, self.shape.sequence_length, counts
        if (count - first) // length >= needed:
            return
        longest = (count - first) // needed
        valid = [f"model.sequence_length={longest}"] if longest > 0 else []
        fields = ["data.path", "model.sequence_length"]
        if name == text.HELDOUT_FILE:
            fields += ["train.eval_batches", "train.batch_size"]
            batches = (count - first) // length // config.train.batch_size
            valid += [f"train.eval_batches={batches}"] if batches else []
        nearest = f"Nearest valid: {' or '.join(valid)}" if valid else "Prepare more text"
        yield Failure(
            f"data.path={config.data.path}: the {count} tokens of {name} are too few: {what} of "
            f"model.sequence_length={length} need {needed * length + first}. {nearest}.",
            tuple(fields),
        )

    def data_digest(self) -> str:
        return text.read_meta(self.config.data.path).tokenizer_sha256

    def exported_tokenizer(self, folder: Path) -> Exported | None:
        return tokenizer_files.export(folder, sequence_length=self.shape.sequence_length)

    def flops_per_row(self) -> int | None:
        return self.units_per_row * gpt.flops_per_token(self.shape)

    def num_parameters(self) -> int:
        return gpt.num_parameters(self.shape)

    def baseline(self, train: Examples | Unnumbered, heldout: Examples) -> str:
        del train, heldout
        folder = Path(self.config.data.path)
        seen, tokens = (text.predicted(folder, name) for name in text.ROLE_FILES)
        loss = text.unigram_loss(seen, tokens, self.shape.vocab_size)
        return f"a unigram model of the same tokens: {loss:.4f}"

    def report(self, params: PyTree, states: PyTree, heldout: Examples) -> tuple[str, float | None]:
        settings = self.config.sample
        if not settings.num_tokens:
            return "", None
        tokenizer = text.load_tokenizer(self.config.data.path)
        prompt = tokenizer.encode(settings.prompt).ids or [text.end_of_text(self.config.data.path)]
        tokens = sample(
            self.shape,
            params,
            jnp.asarray([prompt]),
            num_tokens=settings.num_tokens,
            temperature=settings.temperature,
            top_k=settings.top_k,
            rng=jax.random.key(self.config.train.seed),
            state=states,
        )
        written = settings.prompt + tokenizer.decode(np.asarray(tokens)[0].tolist())
        file = self.config.folder / self.report_file
        file.write_text(written + "\n", encoding="utf-8")
        return f"sample ({self.config.run_dir}/{self.report_file}):\n{written}", None
