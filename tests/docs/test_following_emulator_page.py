"""Every block of the emulator's page, run in order in a copy of the checkout."""

import doc_pages
import pytest

pytestmark = pytest.mark.full


@pytest.mark.parametrize("step", doc_pages.steps("cuda_emulator/README.md"), ids=str)
def test_it_does_what_the_page_says(reader, step):
    reader.follow(step)
