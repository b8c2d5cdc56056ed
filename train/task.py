"""The interface between the trainer and a model family with its data."""

from __future__ import annotations

import abc
import dataclasses
import functools
import hashlib
import math
import re
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

import docstring_parser
import jax
import numpy as np
import optax
import pydantic

from jaxpipe import Model
from models.types import PyTree
from train.config import Config, DataConfig, Section
from train.data.stream import Examples, Unnumbered, heldout_batches
from train.data.tokenizer_files import Exported
from train.errors import Failure, in_yaml

_DIGESTED = 16
"""Held-out rows that stand for all of the data."""


def _from_yaml(declared: Any) -> Any:
    """Makes a type that takes lists, which is what YAML has, where a tuple is declared."""
    origins = [typing.get_origin(part) for part in (declared, *typing.get_args(declared))]
    as_tuple = pydantic.BeforeValidator(lambda w: tuple(w) if isinstance(w, list) else w)
    return Annotated[declared, as_tuple] if tuple in origins else declared


class Task(abc.ABC):
    """A model family with its data, as far as the trainer knows it.

    The shape of the model is a frozen dataclass with ``num_layers``. If its numbers do not fit
    together, it raises ArgumentError with one `Problem` per field. The section ``model``
    of the configuration and its options follow from the shape: their types from its fields, their
    help from its docstring's ``Args:``.

    Attributes:
      default: the shape if the configuration sets no field of it.
      fixed: fields of the shape that are no options, because the data decides them.
      free: fields of the shape that may change when a run is resumed, because no weight depends on
        them.
      depth: fields that decide the number of layers.
      unit: unit of which a row holds several, in the plural, such as "tokens".
      loss_unit: unit of the loss, such as "nats"; empty for a number without a unit.
      slices: whether layers run sequences slice by slice, as their model's `jaxpipe.Model.carry`.
      adapts: whether its layers can have low-rank adapters.
      data_options: fields of the section ``data``, beside ``path``, that the family reads.
      data_kind: one of `train.data.folder.KINDS`; None if ``data.path`` is not read.
      report_file: the file that `report` writes to the run folder; None if it writes none.
      shape: shape of the model.
      units_per_row: number of units in a row.
      num_layers: layers of the pipeline.
      dropout: whether a step needs a random key.
      dtype: dtype in which the model computes, for the share of the devices' peak; None if the
        shape does not say.
    """

    default: ClassVar[Any]
    fixed: ClassVar[tuple[str, ...]] = ()
    free: ClassVar[tuple[str, ...]] = ("dropout",)
    depth: ClassVar[tuple[str, ...]] = ("num_layers",)
    unit: ClassVar[str] = "rows"
    loss_unit: ClassVar[str] = ""
    slices: ClassVar[bool] = False
    adapts: ClassVar[bool] = False
    data_options: ClassVar[tuple[str, ...]] = ()
    data_kind: ClassVar[str | None] = None
    report_file: ClassVar[str | None] = None
    units_per_row: int = 1

    def __init__(self, config: Config) -> None:
        self.config = config
        self.shape: Any = dataclasses.replace(self.default, **config.model.model_dump())
        self.num_layers: int = self.shape.num_layers
        self.dtype: str | None = getattr(self.shape, "dtype", None)
        self.dropout: bool = getattr(self.shape, "dropout", 0) > 0

    @classmethod
    @functools.cache
    def section(cls) -> type[Section]:
        """Returns the type of the section ``model``: the shape's fields except the fixed ones."""
        shape = type(cls.default)
        types, descriptions = typing.get_type_hints(shape), _descriptions(shape)
        fields: dict[str, Any] = {
            field.name: (
                _from_yaml(types[field.name]),
                pydantic.Field(
                    getattr(cls.default, field.name), description=descriptions.get(field.name)
                ),
            )
            for field in dataclasses.fields(shape)
            if field.name not in cls.fixed
        }
        return pydantic.create_model(shape.__name__, __base__=Section, **fields)

    def few_layers(self) -> tuple[Config, Sequence[int]]:
        """Shortens the model for what is counted layer by layer.

        Returns:
          A configuration with fewer layers, if the family can shorten it, and for every layer of
          the pipeline the number of one there that is like it.
        """
        return self.config, range(self.num_layers)

    @abc.abstractmethod
    def model(self, *, train: bool, axis: str | None = "stage") -> Model:
        """Makes the model.

        Args:
          train: False for evaluation.
          axis: mesh axis over which a vocabulary is split; None for whole tables.
        """

    def reference(self, *, axis: str | None = "stage") -> Model | None:
        """Makes the model whose output is the batch's "reference" in a step; None for none."""
        del axis
        return None

    def named_axes(self, axis: str | None) -> dict[str, str | None]:
        """Returns the arguments that name the mesh's axes to a family's model."""
        shared = {} if axis is None else self.config.mesh.shared_axes()
        vocabulary = None if self.config.pipeline.vocabulary == "ends" else axis
        return {"vocabulary_axis": vocabulary} | {f"{name}_axis": name for name in shared}

    def shared(self, axis: str) -> dict[str, int]:
        """Returns the counts that devices along an axis of ``mesh`` share, by the shape's fields.

        The result is empty for a family whose layers are not shared along this axis.
        """
        del axis
        return {}

    @property
    def in_pieces(self) -> bool:
        """Whether layers on tensor devices run in pieces of the sequence (`models.pieces`)."""
        return False

    @abc.abstractmethod
    def init(self, rng: jax.Array) -> PyTree:
        """Makes the canonical initial parameters."""

    def init_states(self) -> tuple[PyTree, ...] | None:
        """Makes the initial states of the layers; None if they keep none."""
        return None

    def end_step(self, states: tuple[PyTree, ...] | None) -> tuple[PyTree, ...] | None:
        """Changes canonical states of the layers after a step; None if they stay as they are."""
        del states
        return None

    def last_transformation(self) -> optax.GradientTransformation | None:
        """Makes what follows the optimizer, such as a bound on weights; None for nothing."""
        return None

    def optimizer_arguments(self, states: tuple[PyTree, ...]) -> dict[str, PyTree]:
        """Makes further arguments of the optimizer's update, from canonical states after a step."""
        del states
        return {}

    @abc.abstractmethod
    def load(self) -> tuple[Examples | Unnumbered, Examples]:
        """Loads the examples to train on and the held-out ones.

        Raises:
          ValueError: the data is missing or damaged, or does not fit the model.
        """

    def load_domains(self) -> dict[str, Examples]:
        """Loads the held-out examples of further kinds of data, by their names."""
        return {}

    def unread_options(self) -> Iterator[Failure]:
        """Yields a failure for every given field of ``data`` that the family does not read."""
        given, default = self.config.data, DataConfig()
        for name in ("mix", "documents", "rows", "domains"):
            if name not in self.data_options and getattr(given, name) != getattr(default, name):
                yield self.config.failure(
                    f"$data.{name} has no effect: $task does not read it. Nearest valid: "
                    f"{in_yaml(getattr(default, name))}."
                )

    def data_failures(self) -> Iterator[Failure]:
        """Yields the problems of the data, before anything is compiled."""
        batch_size = self.config.train.batch_size
        try:
            _, heldout = self.load()
        except ValueError as error:
            yield Failure(str(error), ("data.path",))
            return
        needed = self.config.train.eval_batches * batch_size
        if len(heldout) < needed:
            fitting = len(heldout) // batch_size
            near = (
                f"train.eval_batches={fitting}" if fitting else f"train.batch_size={len(heldout)}"
            )
            yield self.config.failure(
                f"$data.path has {len(heldout)} held-out rows, too few for $train.eval_batches x "
                f"$train.batch_size. Nearest valid: {near}."
            )

    def row_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shape and dtype of one row of a batch, by name; by default of a held-out one."""
        return {
            name: jax.ShapeDtypeStruct(leaf.shape[1:], jax.dtypes.canonicalize_dtype(leaf.dtype))
            for name, leaf in self._few_rows.items()
        }

    def data_digest(self) -> str:
        """Returns a digest of the tokenizer or the data, which must not change during a run; by
        default of a few held-out rows."""
        leaves = (leaf for _, leaf in sorted(self._few_rows.items()))
        return hashlib.sha256(b"".join(map(np.ndarray.tobytes, leaves))).hexdigest()

    @functools.cached_property
    def _few_rows(self) -> dict[str, np.ndarray]:
        _, heldout = self.load()
        return self.rows(heldout, _DIGESTED)

    def exported_tokenizer(self, folder: Path) -> Exported | None:
        """Returns the tokenizer that `train.export` writes beside the weights; None without one.

        Raises:
          ValueError: the data is not there or damaged.
        """
        del folder
        return None

    def flops_per_row(self) -> int | None:
        """Returns the floating-point operations of a training step per row; None if not counted."""
        return None

    def baseline(self, train: Examples | Unnumbered, heldout: Examples) -> str | None:
        """Returns the loss or score of a trivial model of the same data, in words; by default
        None."""
        del train, heldout
        return None

    def report(self, params: PyTree, states: PyTree, heldout: Examples) -> tuple[str, float | None]:
        """Measures the trained model at the end of a run; may write to ``run_dir``. By default it
        says nothing.

        Args:
          params: canonical parameters, on the host.
          states: states of the layers, likewise, or None.
          heldout: the held-out examples.

        Returns:
          The result in words, and as a number of which higher is better; None if there is none.
        """
        del params, states, heldout
        return "", None

    def num_parameters(self) -> int:
        """Returns the number of parameters of the whole model."""
        shapes = jax.eval_shape(self.init, jax.random.key(0))
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))

    def rows(self, examples: Examples, most: int) -> dict[str, np.ndarray]:
        """Reads up to ``most`` evenly spread examples, as an evaluation does."""
        count = min(most, len(examples))
        return next(heldout_batches(examples, batch_size=count, num_batches=1))


def averaging(model: Model) -> Model:
    """Lets microbatches count alike in a step, however many tokens each is to predict.

    The steps of BERT and of translation always did, and older runs of them must go on with the same
    losses. Evaluation weighs tokens, so that a held-out loss does not depend on the batch size.
    """

    def head_loss(*args: PyTree) -> jax.Array:
        return model.head_loss(*args).mean

    return dataclasses.replace(model, head_loss=head_loss)


def shared_counts(shape: Any) -> dict[str, int]:
    """Lists the counts devices along ``mesh.tensor`` share in layers with attention and MLP."""
    return {
        "sequence_length": shape.sequence_length,
        "num_heads": shape.num_heads,
        "mlp_width": shape.hidden_width,
    }


def _descriptions(shape: type) -> dict[str, str]:
    """Returns the ``Args:`` in the docstrings of a dataclass and of those that it extends."""
    descriptions = {}
    for extended in filter(dataclasses.is_dataclass, reversed(shape.__mro__)):
        for argument in docstring_parser.parse(extended.__doc__ or "").params:
            # The fields of a configuration are in YAML.
            text = re.sub(r"\bNone\b", "null", " ".join((argument.description or "").split()))
            descriptions[argument.arg_name] = text[:1].upper() + text[1:]
    return descriptions
