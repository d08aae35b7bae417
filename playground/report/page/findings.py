"""What went wrong with a variant, at the lines of its file."""

import re

OTHER_PARTY = re.compile(r"; the other party is (.+?) \(line (\d+)(?:, called from line \d+)*\)\s*$")


def at_lines(result, path):
    """(line, text) of every finding and of a reason or traceback that names a line of the file, in the order of lines."""
    found = {}
    texts = [*(result.get("findings") or []), *([result["reason"]] if result.get("reason") else [])]
    for text in texts:
        if any(text in known or known in text for _, known in found):
            continue
        place = re.search(rf"(?:^|[\s/\"']){re.escape(path.name)}:(\d+)", text)
        if place:
            found.setdefault((int(place[1]), text))
        other = OTHER_PARTY.search(text)
        if place and other:
            found.setdefault((int(other[2]), f"the other party of line {place[1]}: {other[1]}"))
    if result.get("reason") and not found and (line := _last_line_of_traceback(result.get("details") or "", path)):
        found.setdefault((line, result["reason"]))
    return sorted(found)


def _last_line_of_traceback(details, path):
    lines = re.findall(rf'File "(?:[^"\n]*/)?{re.escape(path.name)}", line (\d+)', details)
    return int(lines[-1]) if lines else None
