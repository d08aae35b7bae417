import json

import pytest
from made import read

from playground import catalog
from playground.report import document as documents
from playground.report import page
from playground.serial import dump


@pytest.fixture(scope="session")
def known():
    """The project's own files."""
    return [page.Files(model.path, variant.path) for model in catalog.models() for variant in catalog.variants(model)]


@pytest.fixture(scope="session")
def h200():
    """The recorded run on a GPU, with ceilings and work where the record is older than those."""
    recorded = dump(documents.read(catalog.ROOT / "results" / "nvidia-h200.json"))
    for result in recorded["results"]:
        result["ceilings"] = result.get("ceilings") or {
            **{"read_bytes_per_second": 4.3e12, "copy_bytes_per_second": 4.2e12},
            **{"fp32_flops": 5e13, "tf32_flops": 3.7e14},
        }
        result["work"] = result.get("work") or {
            "least": {"bytes": 6e8, "flops": 1e10},
            "as_written": {"bytes": 1e10, "flops": 2e11},
        }
    return json.loads(json.dumps(recorded))


@pytest.fixture(scope="session")
def h200_page(h200, known):
    return page.render(read(h200), known)
