"""Writes the model of a run as a Hugging Face folder: ``python -m train.export RUN --out FOLDER``.

The transformers library loads the folder: weights, configuration with the tokens that begin and end
a text, and tokenizer. The checkpoint may be of any mesh, schedule and ZeRO level.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro

from jaxpipe.errors import printable
from models import hugging_face
from models.adapters import merged
from models.hugging_face_fields import TokenIds
from models.types import PyTree
from train import initial, tasks
from train.config import Config
from train.data.tokenizer_files import Exported
from train.errors import ConfigError
from train.runs import checkpoint, run_folder
from train.step import with_sharding


@dataclasses.dataclass(frozen=True)
class Options:
    """Writes the model of a run as a folder that the transformers library loads."""

    run: Annotated[str, tyro.conf.Positional]
    """The run's folder, whose latest checkpoint is meant; or FOLDER@best, or FOLDER@STEP.
    FOLDER@ema, FOLDER@best@ema and FOLDER@STEP@ema are the moving average of its weights."""
    out: Path
    """Folder to write; a model in it is replaced."""
    adapters: bool = False
    """Write the adapters of lora.rank alone, as the peft library reads them; else they are merged
    with the weights that they adapt."""
    data_path: Path | None = None
    """Prepared folder of the run, if it has moved: its tokenizer is written, too."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 2 after a message when the input or the disk is at fault."""
    options = tyro.cli(Options, args=arguments, prog="python -m train.export")
    try:
        print(export(options))
    except (ValueError, ConfigError) as error:
        lines = printable(str(error)).split("\n")
        print("\n".join(f"error: {line}" for line in lines), file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: --out={options.out}: {error.strerror or error}.", file=sys.stderr)
        return 2
    return 0


def export(options: Options) -> str:
    """Writes a model; returns what was written, in words.

    Raises:
      ValueError: there is no such checkpoint, or its model is none of the library's.
      OSError: the folder cannot be written.
    """
    source = initial.parse(options.run)
    if not source.is_run:
        raise ValueError(f"{source.name} is not a run: it holds no {run_folder.CHECKPOINTS}.")
    checkpoints = source.checkpoints()
    step = source.find(checkpoints)
    saved = checkpoint.description(checkpoints, step)
    checkpoint.require_drained(saved, step)
    config = Config(**saved["config"])
    folder = Path(config.data.path) if options.data_path is None else options.data_path
    task = tasks.make(config)
    tokenizer = task.exported_tokenizer(folder)
    if tokenizer is not None and tokenizer.sha256 != saved["data_sha256"]:
        raise ValueError(
            f"{folder} has another tokenizer than {source.name} was trained with. Name the "
            "prepared folder of the run with --data-path."
        )
    ids = TokenIds() if tokenizer is None else TokenIds(**tokenizer.token_ids)
    shapes = _shapes(task)
    arrays = checkpoint.restore_weights(checkpoints, step, shapes, averaged=source.averaged)
    params, layers = arrays["params"], arrays.get("layers")
    what = source.what
    if options.adapters:
        _save_adapters(options.out, task.shape, params, config)
        what = "adapters"
    else:
        shape = task.shape
        if config.lora.rank:
            params = params | {"layers": merged(shape, params["layers"])}
            shape = dataclasses.replace(shape, adapters=None)
        hugging_face.save(options.out, shape, params, layers, token_ids=ids)
    if tokenizer is not None:
        _write(options.out, tokenizer)
    parts = f"{what}, configuration{', tokenizer' if tokenizer is not None else ''}"
    return f"{options.out}: {parts} of {source.name}, step {step}"


def _save_adapters(out: Path, shape: Any, params: PyTree, config: Config) -> None:
    """Writes adapters alone; raises ValueError if they are not all that was trained."""
    if not config.lora.rank:
        raise ValueError("The run trained no adapters: its lora.rank is 0.")
    if config.train.trainable:
        raise ValueError(
            f"The run also trained train.trainable={config.train.trainable}, which no adapter "
            "holds. Leave --adapters out: the merged model has all of it."
        )
    if config.init_from is None or initial.parse(config.init_from).is_run:
        raise ValueError(
            f"The adapters belong to the weights of init_from={config.init_from}, which is no "
            "Hugging Face folder. Leave --adapters out: the merged model has both."
        )
    hugging_face.save_adapters(out, shape, params, base=config.init_from)


def _shapes(task: Any) -> dict[str, PyTree]:
    """Shapes of the arrays to read, on the host."""
    here = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    shapes = {"params": jax.eval_shape(task.init, jax.random.key(0))}
    if (states := task.init_states()) is not None:
        shapes["layers"] = states
    return jax.tree.map(functools.partial(with_sharding, sharding=here), shapes)


def _write(folder: Path, tokenizer: Exported) -> None:
    for name, content in tokenizer.files.items():
        (folder / name).write_bytes(content)


if __name__ == "__main__":
    sys.exit(main())
