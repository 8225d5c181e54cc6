"""Elements of a page as trees: whatever is put into one is escaped when the tree is written, so no text can become markup."""

from xml.etree.ElementTree import Element, tostring

Content = Element | str | None


def element(tag: str, *content: Content, **attributes: str | float) -> Element:
    """One element with its text and children in order; `class_` is the attribute `class`, `stroke_width` is `stroke-width`, None is nothing."""
    made = Element(tag, {name.rstrip("_").replace("_", "-"): str(value) for name, value in attributes.items()})
    for part in content:
        if isinstance(part, Element):
            made.append(part)
        elif part is not None and len(made):
            made[-1].tail = (made[-1].tail or "") + part
        elif part is not None:
            made.text = (made.text or "") + part
    return made


def document(root: Element) -> str:
    """The tree as an HTML document, all of it text that UTF-8 can hold."""
    # JSON may hold half of a surrogate pair.
    return f"<!doctype html>\n{tostring(root, encoding='unicode', method='html')}\n".encode(errors="replace").decode()


def table(headings: list[str], rows: list[list[Content]], *, caption: str, numbers: frozenset[int]) -> Element:
    """A table whose first column names its rows and whose columns `numbers` are set to the right; the caption is for screen readers."""

    def cell(tag: str, column: int, content: Content, **attributes: str) -> Element:
        return element(tag, content, **attributes, **({"class_": "number"} if column in numbers else {}))

    head = [cell("th", column, heading, scope="col") for column, heading in enumerate(headings)]
    body = [
        element(
            "tr",
            *(
                cell("td", column, content) if column else cell("th", column, content, scope="row")
                for column, content in enumerate(row)
            ),
        )
        for row in rows
    ]
    made = element(
        "table",
        element("caption", caption, class_="away"),
        element("thead", element("tr", *head)),
        element("tbody", *body),
        class_="data",
    )
    return element("div", made, class_="scroll", tabindex="0", role="region", aria_label=caption)
