"""The task of a run: a model family, its data, and its score.

`make` picks the task that ``config.task`` names. A new one needs a file here, with a `Task`, and a
section of the configuration with the same name.
"""

from __future__ import annotations

from train.config import Config
from train.tasks.task import Task


def make(config: Config) -> Task:
    """The task of a configuration.

    Raises:
      ValueError: the model's numbers do not fit together; the message names the fields.
    """
    from train.tasks import bert, gpt, resnet, transformer

    tasks: dict[str, type[Task]] = {
        "gpt": gpt.GPT,
        "bert": bert.BERT,
        "resnet": resnet.ResNet,
        "transformer": transformer.Transformer,
    }
    try:
        return tasks[config.task](config)
    except ValueError as error:
        # A model names its fields "model.x", whatever section it was configured in.
        raise ValueError(str(error).replace("model.", f"{config.section}.")) from error
