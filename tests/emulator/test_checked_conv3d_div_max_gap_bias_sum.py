"""The CUDA variants of conv3d_div_max_gap_bias_sum under check mode, and copies with mistakes."""

import planted

globals().update(planted.tests_of("conv3d_div_max_gap_bias_sum"))
