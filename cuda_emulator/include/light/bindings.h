// What the light headers' bindings include; see precompiled_header.
#pragma once
#include <torch/extension.h>
