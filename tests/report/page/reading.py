"""A page as a browser takes it apart, as far as the tests ask."""

from html.parser import HTMLParser

VOID = {"meta", "br", "hr", "img", "link", "input", "use", "path"}


class Page(HTMLParser):
    """`tags`: (name, attributes) of all; `text`: what can be read; `ids`; `targets` of links; `unclosed` at the end."""

    def __init__(self, source):
        super().__init__(convert_charrefs=True)
        self.tags, self.open, self.ids, self.targets, self._data = [], [], [], [], []
        self.mismatched = []
        self.feed(source)
        self.close()
        self.text = "".join(self._data)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append((tag, attributes))
        self.ids += [attributes["id"]] if "id" in attributes else []
        self.targets += [value for key, value in attributes.items() if key in ("href", "src", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag in VOID:
            return
        if not self.open or self.open.pop() != tag:
            self.mismatched.append((tag, self.getpos()))

    def handle_data(self, data):
        if "style" not in self.open[-1:]:
            self._data.append(data)

    def names(self):
        return {tag for tag, _ in self.tags}
