"""Reads the data of ``train.prepare`` as batches with exact resume.

`text` serves language models, `masked_lm` masks the same text, `images` and `translation` have
folders of their own; `stream` gives all of them the same order, resume and rows per process.
"""

from train.data.folder import META_FILE, TOKENIZER_FILE
from train.data.stream import Batch
from train.data.text import (
    END_OF_TEXT,
    HELDOUT_FILE,
    TRAIN_FILE,
    DataMeta,
    SplitMeta,
    batches,
    heldout_batches,
    load_tokenizer,
    read_meta,
    read_tokens,
    unigram_loss,
    write_tokens,
)

__all__ = [
    "END_OF_TEXT",
    "HELDOUT_FILE",
    "META_FILE",
    "TOKENIZER_FILE",
    "TRAIN_FILE",
    "Batch",
    "DataMeta",
    "SplitMeta",
    "batches",
    "heldout_batches",
    "load_tokenizer",
    "read_meta",
    "read_tokens",
    "unigram_loss",
    "write_tokens",
]
