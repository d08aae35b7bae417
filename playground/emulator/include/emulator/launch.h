// What a rewritten `kernel<<<config>>>(arguments)` calls.
#pragma once
#include <emulator/runtime_api.h>
#include <cstddef>
#include <tuple>
#include <type_traits>
#include <utility>

namespace emulator {

// A literal 0 or NULL among a launch's arguments: it must still convert to a pointer after it has been handed on.
struct Zero {
    template <class T>
    constexpr operator T*() const {
        return nullptr;
    }
    template <class T, class = decltype(T(0)), class = std::enable_if_t<std::is_arithmetic<T>::value>>
    constexpr operator T() const {
        return T(0);
    }
};

template <class F>
const void* kernel_key(F* function) {
    return (const void*)function;
}
inline const void* kernel_key(std::nullptr_t) { return nullptr; }  // a kernel whose template arguments are deduced

template <class Call, class... Arguments>
void launch(const char* name, int line, const void* kernel, const LaunchConfig& config, Call call, Arguments... arguments) {
    using Pack = std::tuple<Call, Arguments...>;
    Pack pack(call, arguments...);
    run_grid(
        name, line, kernel, config,
        [](void* p) {
            std::apply([](const Call& call, const Arguments&... arguments) { call(arguments...); }, *static_cast<Pack*>(p));
        },
        &pack, sizeof pack);
}

}  // namespace emulator
