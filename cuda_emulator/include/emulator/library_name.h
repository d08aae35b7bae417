// Stands after the last #include of a binding that names its library only in PyTorch's macros. There TORCH_EXTENSION_NAME is
// a stand-in, so that one object file serves every name: an edit of the kernels changes the library's name and not the binding.
// The name itself is linked in from an object file of its own.
#pragma once
#include <torch/library.h>

#include <cstring>

extern "C" __attribute__((visibility("hidden"))) const char emulator_library_name[];

namespace torch::detail {

struct NamedLibraryInit {
    template <class... Rest>
    NamedLibraryInit(Library::Kind kind, void (*function)(Library&), const char* name, Rest... rest)
        : registration(kind, function, std::strcmp(name, EMULATOR_STAND_IN) ? name : emulator_library_name, rest...) {}

    TorchLibraryInit registration;
};

}  // namespace torch::detail

#define TorchLibraryInit NamedLibraryInit
