// The part of the runtime that knows PyTorch and Python: findings become Python exceptions.
#include <Python.h>
#include <pybind11/pybind11.h>

extern "C" void emulator_set_receiver(void (*receiver)(const char*));

namespace {

PyObject* to_exception = nullptr;  // a Python function from the runtime's report to an exception

// Called where the launch was made. What it throws passes through the operator and PyTorch's dispatcher as a Python error.
[[noreturn]] void raise(const char* report) {
    pybind11::gil_scoped_acquire acquired;
    if (PyObject* exception = PyObject_CallFunction(to_exception, "s", report)) {
        PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception)), exception);
        Py_DECREF(exception);
    }
    throw pybind11::error_already_set();
}

}  // namespace

extern "C" {
void emulator_torch_raise_with(PyObject* function) {
    Py_XINCREF(function);
    Py_XDECREF(to_exception);
    to_exception = function;
    emulator_set_receiver(function ? raise : nullptr);
}
}
