"""Figures as inline SVG for a page: text stays text, ink takes the page's colour, ids belong to one figure."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from io import BytesIO
from xml.etree import ElementTree

import matplotlib.style
from markupsafe import Markup
from matplotlib.figure import Figure

INK = "#010203"
"""Becomes the page's text colour."""
_WIDTH = 4.2  # inches, of a phone, where the text then need not shrink
_STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": INK,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "figure.facecolor": "none",
    "font.sans-serif": ["DejaVu Sans"],  # what matplotlib measures with; the page sets its own, which is narrower
    "font.size": 9,
    "grid.alpha": 0.2,
    "grid.color": INK,
    "hatch.linewidth": 0.5,
    "legend.frameon": False,
    "savefig.facecolor": "none",
    "svg.fonttype": "none",
    "svg.hashsalt": "pilotfish",
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": INK,
    "ytick.color": INK,
}


def draw_svg(name: str, height: float, draw: Callable[[Figure], None], words: str) -> Markup:
    """The figure that `draw` fills, `height` inches high; `words` say what it shows. Ids begin with `name`."""
    file = BytesIO()
    with matplotlib.style.context(["default", _STYLE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # the page's font may have what matplotlib's has not
        figure = Figure(figsize=(_WIDTH, height))
        draw(figure)
        figure.savefig(file, format="svg", metadata={"Date": None})
    root = ElementTree.fromstring(file.getvalue())
    for element in root.iter():
        for child in list(element):
            if child.tag.rpartition("}")[2] in ("metadata", "style"):  # a style would hold for the whole page
                element.remove(child)
    for element in root.iter():
        element.tag = _local(element.tag)
        attributes = {_local(key): _attribute(name, _local(key), value) for key, value in element.attrib.items()}
        element.attrib.clear()
        element.attrib.update(attributes)
    view_box = root.attrib["viewBox"]
    root.attrib.clear()
    root.attrib.update({"viewBox": view_box, "role": "img", "aria-label": words})
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _attribute(figure: str, key: str, value: str) -> str:
    if key == "id":
        return f"{figure}-{value}"
    if key == "href":
        return f"#{figure}-{value.removeprefix('#')}"
    return value.replace("url(#", f"url(#{figure}-").replace(INK, "currentColor")
