"""Reads HTML for tests: the elements with their attributes, and the text of each place."""

import html.parser

ALONE = {"meta", "img", "br", "hr", "link", "input"}


class Reader(html.parser.HTMLParser):
    """What a page or a piece of one holds; every element that is opened is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[tuple[str, str]] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ALONE:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.words.append((self.open[-1] if self.open else "", data))

    def of(self, tag: str, class_: str = "") -> list[dict[str, str | None]]:
        return [
            a for name, a in self.elements if name == tag and {class_} - {""} <= set((a.get("class") or "").split())
        ]

    @property
    def text(self) -> str:
        return " ".join(words for tag, words in self.words if tag != "style")
