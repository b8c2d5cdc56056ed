"""Griffe shows the doctests of "Examples:" as code, but sections here are called "Example:"."""

import re

import griffe


class Doctests(griffe.Extension):
    """Renames the section in every docstring that mkdocstrings reads."""

    def on_instance(self, *, obj: griffe.Object, **_) -> None:
        doc = obj.docstring
        if doc is not None:
            doc.value = re.sub(r"^Example:$", "Examples:", doc.value, flags=re.MULTILINE)
