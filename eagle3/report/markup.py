"""HTML by construction: a string is escaped unless it is markup already."""

import html
from collections.abc import Iterable
from typing import Any


class Markup(str):
    """Text that is HTML."""


def escaped(value: Any) -> Markup:
    """Markup stays, anything else becomes text."""
    return value if isinstance(value, Markup) else Markup(html.escape(str(value)))


def join(parts: Iterable[Any]) -> Markup:
    return Markup("".join(map(escaped, parts)))


def tag(name: str, *parts: Any, **attributes: Any) -> Markup:
    """<name attributes>parts</name>. class_ is class, an underscore in an attribute's name a hyphen."""
    pairs = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"' for key, value in attributes.items()
    )
    return Markup(f"<{name}{pairs}>{join(parts)}</{name}>")


def table(heads: list[Any], rows: Iterable[list[Any]]) -> Markup:
    """Cells of numbers stand right, as their text begins with a digit, a sign or a dash."""

    def cell(value: Any, kind: str = "td") -> Markup:
        number = not isinstance(value, Markup) and str(value)[:1] in "0123456789-–+"
        return tag(kind, value, class_="number") if number and str(value) else tag(kind, value)

    head = tag("thead", tag("tr", *(tag("th", one, scope="col") for one in heads))) if heads else ""
    body = tag("tbody", *(tag("tr", *map(cell, row)) for row in rows))
    return tag("div", tag("table", head, body), class_="wide")


def facts(values: dict[str, Any]) -> Markup:
    """Names and values, a row each; a value that is None is left out."""
    rows = [
        tag("tr", tag("th", name, scope="row"), tag("td", value)) for name, value in values.items() if value is not None
    ]
    return tag("table", tag("tbody", *rows), class_="facts")
