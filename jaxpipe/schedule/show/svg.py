"""SVG, written element by element: the same picture gives the same bytes."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path

GREY = "#555555"
DIGIT = 0.6
"""Width of a digit, as a share of the font size."""


def element(name: str, content: str = "", **attributes: float | str) -> str:
    """Writes one element; an attribute's underscores stand for hyphens.

    Example:
      >>> element("text", "F < B", x=1.25, font_size=8)
      '<text x="1.25" font-size="8">F &lt; B</text>'
    """
    written = "".join(
        f' {key.replace("_", "-")}="{value if isinstance(value, str) else _number(value)}"'
        for key, value in attributes.items()
    )
    return f"<{name}{written}>{html.escape(content)}</{name}>"


def inside(x: float, y: float, width: float, height: float, elements: Iterable[str]) -> str:
    """Places elements in a window of the picture, which hides what goes beyond it."""
    name = f"window-{x:.0f}-{y:.0f}"
    window = f'<clipPath id="{name}">{rectangle(0, 0, width, height, "none")}</clipPath>'
    place = f'transform="translate({_number(x)} {_number(y)})" clip-path="url(#{name})"'
    return f"{window}<g {place}>{''.join(elements)}</g>"


def text(
    x: float, y: float, content: str, *, size: float = 8, anchor: str = "start", fill: str = "black"
) -> str:
    """Writes text whose middle line is at ``y``."""
    y += 0.35 * size
    return element("text", content, x=x, y=y, font_size=size, text_anchor=anchor, fill=fill)


def rectangle(
    x: float, y: float, width: float, height: float, fill: str, stroke: str = "none"
) -> str:
    """Draws a rectangle, from its upper left corner."""
    return element("rect", x=x, y=y, width=width, height=height, fill=fill, stroke=stroke)


def line(points: Sequence[tuple[float, float]], stroke: str, width: float = 0.7) -> str:
    """Draws a line through points."""
    written = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
    return element("polyline", points=written, fill="none", stroke=stroke, stroke_width=width)


class Picture(str):
    """An SVG document, which a notebook shows as a picture."""

    def __repr__(self) -> str:
        return f"<SVG of {len(self)} characters>"

    def _repr_svg_(self) -> str:
        return str(self)


def document(width: float, height: float, elements: Iterable[str]) -> Picture:
    """Writes a picture of this size, in pixels, on white."""
    size = f'width="{_number(width)}" height="{_number(height)}"'
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">',
        rectangle(0, 0, width, height, "white"),
        *elements,
    ]
    return Picture("\n".join([*lines, "</svg>"]) + "\n")


def save(picture: str, path: str | Path) -> Path:
    """Writes a picture to a file, and returns the path.

    Raises:
      ValueError: the ending is not .svg.
      OSError: the file cannot be written.
    """
    path = Path(path)
    if path.suffix.lower() != ".svg":
        raise ValueError(f"{str(path)!r} does not end in a picture format. Nearest valid: .svg.")
    path.write_text(picture, encoding="utf-8")
    return path


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
