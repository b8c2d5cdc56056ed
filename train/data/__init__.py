"""Reads the data of ``train.prepare`` as batches with exact resume.

`text` serves language models, `masked_lm` masks the same text, `images` and `translation` have
folders of their own; `stream` gives all of them the same order, resume and rows per process.
"""
