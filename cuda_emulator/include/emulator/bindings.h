// How functions become a Python module without pybind11 in their own text: it is compiled once, for the usual signatures.
#pragma once

struct _object;  // PyObject

namespace emulator {

// Does `module.def(name, function, doc)`; `checked`: as torch::wrap_pybind_function does.
template <class R, class... A>
void define(void* module, const char* name, const char* doc, bool checked, R (*function)(A...));

// What PYBIND11_MODULE's function returns for a module that `fill` fills.
_object* make_module(const char* name, void (*fill)(void* module));

}  // namespace emulator
