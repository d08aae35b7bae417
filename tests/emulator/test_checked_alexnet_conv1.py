"""The CUDA variants of alexnet_conv1 under check mode, and copies with mistakes."""

import planted

globals().update(planted.tests_of("alexnet_conv1"))
