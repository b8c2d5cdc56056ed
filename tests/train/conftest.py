"""A data folder and configurations for it."""

import hashlib
import json

import numpy as np
import pytest

from train.config import Config
from train.data.folder import META_FILE, TOKENIZER_FILE
from train.data.text import write_tokens

VOCAB_SIZE = 300


@pytest.fixture
def folder(tmp_path):
    """A data folder as `train.prepare` leaves it; its tokenizer is only hashed here."""
    folder = tmp_path / "data"
    folder.mkdir()
    tokenizer = b"{}"
    (folder / TOKENIZER_FILE).write_bytes(tokenizer)
    sizes = {}
    for name, count in (("train", 2000), ("heldout", 1025)):
        tokens = np.arange(count) % VOCAB_SIZE
        write_tokens(folder / f"{name}.tokens", tokens, vocab_size=VOCAB_SIZE)
        sizes[name] = {"documents": 1, "bytes": count, "tokens": count}
    meta = {
        "vocab_size": VOCAB_SIZE,
        "tokenizer_sha256": hashlib.sha256(tokenizer).hexdigest(),
        "documents_sha256": "",
        "settings": {},
        **sizes,
    }
    (folder / META_FILE).write_text(json.dumps(meta))
    return folder


@pytest.fixture
def make(tmp_path, folder):
    """Makes a configuration that is right but for the fields given, such as ``mesh.stage``."""

    def build(fields=()):
        tree = {
            "run_dir": str(tmp_path / "run"),
            "data": {"path": str(folder)},
            "model": {"vocab_size": VOCAB_SIZE, "sequence_length": 16, "num_layers": 4},
            "mesh": {"stage": 2, "data": 2},
            "pipeline": {"schedule": "1f1b", "microbatches": 4},
            "train": {"steps": 30, "batch_size": 16},
        }
        for path, value in dict(fields).items():
            *sections, name = path.split(".")
            target = tree
            for section in sections:
                target = target.setdefault(section, {})
            target[name] = value
        return Config(**tree)

    return build
