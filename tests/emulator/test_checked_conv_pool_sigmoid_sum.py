"""The CUDA variants of conv_pool_sigmoid_sum under check mode, and copies with mistakes."""

import planted

globals().update(planted.tests_of("conv_pool_sigmoid_sum"))
