"""The list of faults that tests are to notice stays true; seeding them is done by hand."""

import pytest
import seeded_faults


@pytest.mark.parametrize("fault", seeded_faults.FAULTS, ids=str)
def test_its_text_and_its_tests_are_still_there(fault):
    assert not fault.gone()
