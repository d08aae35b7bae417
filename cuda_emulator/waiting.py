"""Loops in which a thread waits for what others do."""

import re

from .text import UnsupportedError, matching


def waiting_lines(tokens):
    """The lines of loops that look for a change: conditions that read memory, and bodies that write none."""
    words = [token for token in tokens if not token.blank]
    volatiles = {
        words[i].text
        for i in range(1, len(words))
        if words[i].kind == "word" and "volatile" in {token.text for token in words[max(0, i - 5) : i]}
    }
    lines = set()

    def note(begin, end):
        lines.update(token.line for token in words[begin:end])

    def reads_memory(begin, end):
        return any(token.text in ("[", "*", "->", "(") or token.text in volatiles for token in words[begin:end])

    def writes_memory(begin, end):
        for i in range(begin, end):
            if words[i].text in ("]", ")") and i + 1 < end:
                behind = "".join(token.text for token in words[i + 1 : i + 4])
                if re.match(r"=(?!=)|(?:[-+*/%&|^]|<<|>>)=|\+\+|--", behind):
                    return True
            if words[i].text == "*" and words[i - 1].text in (";", "{", "}", ")") and i + 2 < end and words[i + 2].text == "=":
                return True
        return False

    for at, token in enumerate(words):
        if token.text not in ("while", "for", "do", "if") or token.kind != "word" or at + 1 >= len(words):
            continue
        try:
            if token.text == "do":
                body_end = matching(words, at + 1) if words[at + 1].text == "{" else at + 1
                if not writes_memory(at + 1, body_end):
                    note(at + 1, body_end)
                continue
            if words[at + 1].text != "(":
                continue
            close = matching(words, at + 1)
        except UnsupportedError:
            continue
        behind = words[close + 1].text if close + 1 < len(words) else ";"
        if token.text == "if":
            if behind == "break" or (words[close + 1 : close + 3] and words[close + 2].text == "break" and behind == "{"):
                note(at, close)
            continue
        if token.text == "for" and words[close - 1].text != ";":
            continue
        if not reads_memory(at + 2, close) and behind != "{":
            continue
        if reads_memory(at + 2, close):
            note(at, close)
        if behind == "{":
            body_end = matching(words, close + 1)
            if not writes_memory(close + 1, body_end):
                note(close + 1, body_end)
    return lines
