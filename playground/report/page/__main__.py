"""Makes the HTML page of a recorded run: python -m playground.report.page results/nvidia-h200.json report.html

Sources are those of the project's variants as they stand now; the page says which are stale.
"""

import argparse
import sys
from pathlib import Path

from playground import catalog
from playground.report import document, page

parser = argparse.ArgumentParser(prog="python -m playground.report.page", description=__doc__.splitlines()[0])
parser.add_argument("json", type=Path, help="what run_all.py or compare.py wrote with --json")
parser.add_argument("html", type=Path, help="where to write the page")
given = parser.parse_args()
known = [page.Files(model.path, each.path) for model in catalog.models() for each in catalog.variants(model)]
try:
    if missing := page.missing():
        raise ValueError(missing)
    document.write_whole(given.html, page.render(document.read(given.json), known))
except (ValueError, OSError) as complaint:
    print(complaint, file=sys.stderr)
    sys.exit(2)
