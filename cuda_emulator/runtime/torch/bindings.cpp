// pybind11's code for the signatures that most functions of load_inline have.
#include <emulator/bindings.h>
#include <torch/extension.h>

namespace py = pybind11;

namespace emulator {

template <class R, class... A>
void define(void* module, const char* name, const char* doc, bool checked, R (*function)(A...)) {
    auto& m = *static_cast<py::module_*>(module);
    checked ? m.def(name, torch::wrap_pybind_function(*function), doc) : m.def(name, *function, doc);
}

_object* make_module(const char* name, void (*fill)(void* module)) {
    try {
        py::detail::get_internals();
        auto module = py::module_::create_extension_module(name, nullptr, new PyModuleDef);
        fill(&module);
        return module.release().ptr();
    } catch (py::error_already_set& error) {
        py::raise_from(error, PyExc_ImportError, "initialization failed");
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_ImportError, error.what());
    }
    return nullptr;
}

using T = at::Tensor;
using Ts = std::vector<at::Tensor>;

#define SIGNATURE(R, ...) template void define(void*, const char*, const char*, bool, R (*)(__VA_ARGS__));
#define AND_A_NUMBER(R, ...)            \
    SIGNATURE(R, __VA_ARGS__)           \
    SIGNATURE(R, __VA_ARGS__, int)      \
    SIGNATURE(R, __VA_ARGS__, int64_t)  \
    SIGNATURE(R, __VA_ARGS__, float)    \
    SIGNATURE(R, __VA_ARGS__, double)   \
    SIGNATURE(R, __VA_ARGS__, int, int) \
    SIGNATURE(R, __VA_ARGS__, int64_t, int64_t)
#define OF_TENSORS(OF, R) OF(R, T) OF(R, T, T) OF(R, T, T, T) OF(R, T, T, T, T)

OF_TENSORS(AND_A_NUMBER, T)
OF_TENSORS(SIGNATURE, void)
OF_TENSORS(SIGNATURE, Ts)
SIGNATURE(T, T, T, T, T, T)
SIGNATURE(void, T, T, T, T, T)
SIGNATURE(T, const T&)
SIGNATURE(T, const T&, const T&)
SIGNATURE(T, const T&, const T&, const T&)

}  // namespace emulator
