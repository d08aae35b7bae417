#pragma once
#include <torch/types.h>
#ifdef LIGHT_PYBIND
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#endif
