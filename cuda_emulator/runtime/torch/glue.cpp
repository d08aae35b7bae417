// The part of the runtime that knows PyTorch and Python: findings become Python exceptions, and in check mode tensors lie in
// the emulated device's memory.
#include <Python.h>
#include <c10/core/CPUAllocator.h>
#include <pybind11/pybind11.h>

#include <cstring>

extern "C" void emulator_set_receiver(void (*receiver)(const char*));
extern "C" void* emulator_guarded_allocate(size_t bytes);
extern "C" void emulator_guarded_release(void* pointer);

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

struct GuardedAllocator final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override {
        void* data = emulator_guarded_allocate(bytes);
        return {data, data, &emulator_guarded_release, c10::Device(c10::kCPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &emulator_guarded_release; }
    void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

GuardedAllocator guarded;
c10::Allocator* original = nullptr;

}  // namespace

extern "C" {
void emulator_torch_raise_with(PyObject* function) {
    Py_XINCREF(function);
    Py_XDECREF(to_exception);
    to_exception = function;
    emulator_set_receiver(function ? raise : nullptr);
}

void emulator_torch_guard_tensors(int on) {
    constexpr uint8_t PRIORITY = 100;
    if (!original) original = c10::GetCPUAllocator();
    c10::SetCPUAllocator(on ? static_cast<c10::Allocator*>(&guarded) : original, PRIORITY);
}
}
