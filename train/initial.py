"""The weights that a run begins with: drawn, or those of ``init_from``.

``init_from`` names a Hugging Face folder or another run. Weights are read layer by layer, or each
device's part alone, into the arrays where they are trained.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from jaxpipe import Checkpoints, load_params
from models import hugging_face
from models.types import PyTree
from train import adapters, tasks
from train.config import Config, upgraded
from train.config_file import load_yaml
from train.data.folder import TOKENIZER_FILE
from train.errors import ConfigError, Failure, refused
from train.object_store import is_url
from train.runs import checkpoint, mirror, run_folder
from train.step import Setup, TrainState
from train.watch.metrics import say

LATEST, BEST, EMA = "latest", "best", "ema"


@dataclasses.dataclass(frozen=True)
class Source:
    """The source of weights.

    Args:
      folder: a Hugging Face folder or that of a run.
      which: one of the run's checkpoints: `LATEST`, `BEST`, or a step.
      averaged: whether the moving average of its weights is meant.
      copy: what the folder is of a run in an object store; None for any other.
    """

    folder: Path
    which: str = LATEST
    averaged: bool = False
    copy: mirror.Copy | None = dataclasses.field(default=None, repr=False)

    @property
    def name(self) -> str:
        """The folder or the URL that was given."""
        return str(self.folder) if self.copy is None else self.copy.store.url

    @property
    def is_run(self) -> bool:
        return (self.folder / run_folder.CHECKPOINTS).is_dir()

    @property
    def what(self) -> str:
        return "average of the weights" if self.averaged else "weights"

    def checkpoints(self) -> Checkpoints:
        """Opens the run's checkpoints to read them."""
        folder = self.folder / run_folder.CHECKPOINTS
        fetch = None if self.copy is None else self.copy.fetch
        return Checkpoints(folder, read_only=True, fetch=fetch)

    def find(self, checkpoints: Checkpoints) -> int:
        """Returns the step that is meant; every process must ask.

        Raises:
          ValueError: there is no such checkpoint, or it is damaged.
        """
        if self.which == LATEST:
            step = checkpoints.latest
            why = checkpoints.found.reasons or "it has none"
        elif self.which == BEST:
            step, why = checkpoints.best, "none was evaluated"
        else:
            step, why = int(self.which), ""
        if step is None:
            raise ValueError(f"{self.name} has no {self.which} checkpoint: {why}.")
        step = checkpoints.whole(step)
        if self.copy is not None:  # process 0 has completed its own; each process has one
            self.copy.fetch(step)
        return step


def parse(text: str) -> Source:
    """Reads ``FOLDER``, ``FOLDER@latest``, ``FOLDER@best`` or ``FOLDER@STEP``; ``@ema`` may follow.

    A URL is copied.

    Raises:
      ValueError: a URL that cannot be read.

    Example:
      >>> parse("runs/gpt@300")
      Source(folder=PosixPath('runs/gpt'), which='300', averaged=False)
    """
    folder, _, which = text.rpartition("@")
    if folder and which == EMA and not Path(text).exists():
        return dataclasses.replace(parse(folder), averaged=True)
    is_named = which in (LATEST, BEST) or (which.isascii() and which.isdecimal())
    if not (folder and is_named) or Path(text).exists():
        folder, which = text, LATEST
    if not is_url(folder):
        return Source(Path(folder), which)
    copy = mirror.read_only(folder)
    return Source(copy.folder, which, copy=copy)


def described(source: Source) -> tuple[str, dict[str, Any]]:
    """Returns the task of some weights, and the fields of its section ``model``.

    Raises:
      ValueError: they cannot be read, or are of a model that no task trains.
    """
    if source.is_run:
        raw = upgraded(load_yaml(source.folder / run_folder.CONFIG_FILE))
        config = Config.model_validate(raw)
        return config.task, config.model.model_dump()
    if not source.folder.is_dir():
        raise ValueError("there is no such folder.")
    if source != Source(source.folder):
        raise ValueError(f"{source.folder} is not a run: it has no checkpoints to choose from.")
    shape = hugging_face.Folder(source.folder).config
    named = {name: tasks.find(name) for name in tasks.names()}
    (name,) = (name for name, task in named.items() if type(task.default) is type(shape))
    fields = dataclasses.asdict(shape)
    for field in named[name].fixed:
        if fields.pop(field) != getattr(named[name].default, field):
            raise ValueError(f"its {field} is not that of task={name}.")
    del fields["dtype"]  # in which the run computes, whatever the weights were saved in
    return name, fields


def completed(raw: dict[str, Any], init_from: str, *, task: str | None) -> dict[str, Any]:
    """Adds what ``init_from`` says about the model to a configuration, where the file is silent.

    Args:
      raw: the file's content.
      init_from: as given; one that cannot be read changes nothing, and `failures` says why.
      task: as given on the command line.
    """
    try:
        name, model = described(parse(init_from))
        own = task or raw.get("task", name)
        is_alike = tasks.alike(own, name)
    except ValueError:
        return raw
    given = raw.get("model") or {}
    if not isinstance(given, dict) or not is_alike:
        return raw
    return raw | {"task": own, "model": model | given}


def failures(config: Config, *, resume: bool) -> Iterator[Failure]:
    """Says why a run cannot begin with these weights; nothing if it has already begun."""
    if resume and run_folder.has_begun(config):
        return
    if config.lora.init_from is not None and (
        config.init_from is None or parse(config.init_from).is_run
    ):
        yield config.failure(
            "$lora.init_from adapts a Hugging Face model, and $init_from is none. Nearest valid: "
            "init_from=FOLDER, with that model."
        )
    if config.init_from is None:
        return
    what = _weights_of(config)
    try:
        source = parse(config.init_from)
        task, model = described(source)
    except ValueError as error:
        yield from (Failure(f"{what}: {line}", ("init_from",)) for line in str(error).split("\n"))
        return
    other = [*_other_model(config, task, model)]
    yield from other
    if config.lora.rank and config.lora.init_from and not (other or source.is_run):
        yield from adapters.other_targets(config, tasks.make(config).shape)
    if source.is_run:
        then = Config.model_validate(upgraded(load_yaml(source.folder / run_folder.CONFIG_FILE)))
        yield from adapters.others(then, config, source.name)
    tokenizer = source.folder / TOKENIZER_FILE
    if tasks.find(config.task).data_kind == "text" and tokenizer.is_file() and not source.is_run:
        yield from _other_tokenizer(config, tokenizer)


def _weights_of(config: Config) -> str:
    """The option that names the weights; ``--evaluate`` takes those of its run by default."""
    name = "run_dir" if config.init_from == config.run_dir else "init_from"
    return f"{name}={config.init_from}"


def _other_model(config: Config, name: str, model: Mapping[str, Any]) -> Iterator[Failure]:
    """Says which fields of the model differ from those of the weights' model."""
    what = _weights_of(config)
    if not tasks.alike(name, config.task):
        yield Failure(
            f"task={config.task} does not train the model of {what}. Nearest valid: {name}.",
            ("task", "init_from"),
        )
        return
    own = config.model.model_dump()
    free = {*tasks.find(name).free, "dtype", "model_type"}
    if own.get("positions") == "rotary":  # no weight depends on it
        free.add("sequence_length")
    for field, value in model.items():
        if field not in free and own[field] != value:
            yield Failure(
                f"model.{field}={own[field]} is not that of the weights of {what}. Nearest valid: "
                f"{value}.",
                (f"model.{field}", "init_from"),
            )


def _other_tokenizer(config: Config, file: Path) -> Iterator[Failure]:
    own = Path(config.data.path) / TOKENIZER_FILE
    if not own.is_file():
        return  # another rule says so
    if hashlib.sha256(own.read_bytes()).digest() != hashlib.sha256(file.read_bytes()).digest():
        yield _tokenizer_failure(config, file.parent)


def _tokenizer_failure(config: Config, folder: Path | str) -> Failure:
    return Failure(
        f"data.path={config.data.path} was prepared with another tokenizer than the model of "
        f"{_weights_of(config)}. Prepare it with: python -m train.prepare --tokenizer "
        f"{folder} --out {config.data.path}",
        ("data.path", "init_from"),
    )


def state(setup: Setup, console: Console) -> TrainState:
    """Makes the state before the first step, on the devices that hold it.

    Raises:
      ConfigError: the weights of ``init_from`` cannot be read, or are not this model's.
    """
    config = setup.config
    if config.init_from is None:
        return setup.init()
    try:
        source = parse(config.init_from)
        if source.is_run:
            params, layers = _from_run(setup, source, console)
        else:
            params, layers = _from_hugging_face(setup, source.folder, console)
    except ConfigError:
        raise
    except ValueError as error:
        raise refused(f"{_weights_of(config)}: {error}", "init_from") from error

    def begin(params: PyTree, layers: PyTree) -> TrainState:
        states = None if layers is None else setup.pipe.place_states(layers)
        return TrainState(params, setup.pipe.init(setup.optimizer, params), states)

    shardings = setup.state_shardings
    return jax.jit(begin, out_shardings=shardings, donate_argnums=0)(params, layers)


def _from_hugging_face(setup: Setup, path: Path, console: Console) -> tuple[PyTree, PyTree]:
    """Reads placed parameters, layer by layer, and canonical states."""
    folder = hugging_face.Folder(path)
    say(console, f"weights of {path}")
    read = adapters.reader(setup.config, setup.task.shape, folder.read)
    return load_params(setup.pipe, read), folder.read_state()


def _from_run(setup: Setup, source: Source, console: Console) -> tuple[PyTree, PyTree]:
    """Reads placed parameters and canonical states of another run."""
    config = setup.config
    checkpoints = source.checkpoints()
    step = source.find(checkpoints)
    saved = checkpoint.description(checkpoints, step)
    then = Config(**saved["config"])
    checkpoint.require_drained(saved, step)
    failures = list(_other_model(config, then.task, then.model.model_dump()))
    failures += adapters.others(then, config, source.name)
    kind, digest = setup.task.data_kind, setup.task.data_digest()
    if kind not in (None, "images") and saved["data_sha256"] != digest:
        failures.append(_tokenizer_failure(config, then.data.path))
    if failures:
        raise ConfigError(failures)
    say(console, f"{source.what} of {source.name}, step {step}")
    shapes = setup.canonical_shapes
    wanted = {"params": shapes.params} | (
        {} if shapes.layers is None else {"layers": shapes.layers}
    )
    arrays = checkpoint.restore_weights(checkpoints, step, wanted, averaged=source.averaged)
    place = jax.jit(setup.pipe.place, out_shardings=setup.state_shardings.params)
    return place(arrays["params"]), arrays.get("layers")
