"""Elements of a page as text: everything that is not `Markup` already is escaped.

    element("p", "a < b", class_="note")    ->    <p class="note">a &lt; b</p>

What comes from a file is a plain string, and so can only become text.
"""

from html import escape


class Markup(str):
    """Text that is HTML."""

    __slots__ = ()


# Elements that have no content, and so no end.
VOID = ("meta", "br", "input")


def element(name: str, /, *content: str | None, **attributes: str | int | None) -> Markup:
    """Return an element with its content; a content or an attribute of None is left out.

    attributes: a name may end in an underscore (`class_`); other underscores become hyphens.
    """
    start = name
    for key, value in attributes.items():
        if value is not None:
            start += f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
    if name in VOID:
        return Markup(f"<{start}>")
    return Markup(f"<{start}>{joined(*content)}</{name}>")


def joined(*content: str | None) -> Markup:
    """Return some content as one, escaped where it is not `Markup`."""
    return Markup("".join(map(_text, content)))


def table(
    head: tuple[str, ...], rows: list[tuple[str, ...]], *, caption: str, class_: str | None = None
) -> Markup:
    """Return a table, which scrolls sideways where it is wider than the page, and its caption; the
    first cell of a row names it."""
    titles = (element("th", one, scope="col") for one in head)
    lines = []
    for first, *rest in rows:
        cells = (element("td", one) for one in rest)
        lines.append(element("tr", element("th", first, scope="row"), *cells))
    made = element(
        "table", element("thead", element("tr", *titles)), element("tbody", *lines), class_=class_
    )
    words = element("p", caption, class_="caption") if caption else None
    return joined(element("div", made, class_="scroll"), words)


def bullets(*items: str) -> Markup:
    """Return a list with a point for each item; nothing for no item."""
    if not items:
        return Markup("")
    return element("ul", *(element("li", one) for one in items))


def _text(content: str | None) -> str:
    """Return content as HTML."""
    if content is None:
        return ""
    return content if isinstance(content, Markup) else escape(content)
