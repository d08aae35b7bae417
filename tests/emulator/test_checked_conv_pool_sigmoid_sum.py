"""The CUDA variants of conv_pool_sigmoid_sum under check mode, and copies with mistakes; see planted.py."""

import planted
import pytest

from playground import catalog

pytestmark = pytest.mark.full

MODEL = catalog.find_model("conv_pool_sigmoid_sum")
VARIANTS = planted.cuda_variants(MODEL)


@pytest.fixture(scope="module")
def checked():
    return planted.check(MODEL)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return planted.examine(MODEL, tmp_path_factory.mktemp("planted"))


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_nothing_is_reported(checked, variant):
    planted.assert_nothing_reported(checked[variant.name])


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_planted_mistakes_are_reported(found, variant):
    planted.assert_planted_mistakes_are_reported(found, MODEL, variant)


@pytest.mark.parametrize("variant", list(filter(planted.has_strict_kernels, VARIANTS)), ids=lambda variant: variant.name)
def test_nothing_is_reported_where_tf32_is_forbidden(found, variant):
    planted.assert_nothing_reported(found[variant.name, "strict"])
