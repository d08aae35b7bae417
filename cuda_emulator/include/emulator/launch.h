// What a rewritten `kernel<<<config>>>(arguments)` calls.
#pragma once
#include <emulator/host_api.h>
#include <emulator/runtime_api.h>
#include <cstddef>
#include <tuple>
#include <type_traits>
#include <utility>

extern "C" void emulator_keep_findings(int change);

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

struct AddressTaker {
    template <class F>
    const void* operator()(F* function) const {
        return (const void*)function;
    }
};
// Of a kernel whose name others share, perhaps: `take` gives its address to an AddressTaker, if the name has only one.
template <class Take>
const void* key_of(Take take) {
    if constexpr (std::is_invocable_v<Take, AddressTaker>)
        return take(AddressTaker{});
    else
        return nullptr;
}

// Nothing can be thrown through a library that has only C functions: its callers are ctypes, cffi and the like.
#ifdef EMULATOR_C_LIBRARY
struct KeptFindings {
    KeptFindings() { emulator_keep_findings(1); }
    ~KeptFindings() { emulator_keep_findings(-1); }
};
#else
struct KeptFindings {};
#endif

template <class T, class = void>
constexpr Shape pointee{};
template <class T>  // a type that is only declared has no size
constexpr Shape pointee<T*, std::enable_if_t<std::is_object_v<T> && sizeof(T) != 0>> = shape_of<T>();

template <class T>
bool holds(const T& argument, LaunchConfig::Points points, const void* address) {
    for (size_t at = 0; at + sizeof(void*) <= sizeof(T); at += sizeof(void*))
        if (points(*(void* const*)((const char*)&argument + at), address)) return true;
    return false;
}

// What launches with arguments of these types have in common, which is compiled once.
template <class... Arguments>
struct LaunchArguments {
    static constexpr Shape pointees[] = {pointee<Arguments>..., {}};
    std::tuple<Arguments...> arguments;

    // `p` is a LaunchArguments. Returns the index of the argument that holds such a pointer, or -1.
    static int argument_that(const void* p, LaunchConfig::Points points, const void* address) {
        return std::apply(
            [&](const Arguments&... arguments) {
                int found = -1, at = 0;
                (void)((holds(arguments, points, address) ? (found = at, true) : (++at, false)) || ...);
                return found;
            },
            static_cast<const LaunchArguments*>(p)->arguments);
    }
};

template <class Call, class... Arguments>
struct Pack : LaunchArguments<Arguments...> {
    Call call;
};

template <class Call, class... Arguments>
void launch(const char* name, int line, const void* kernel, const LaunchConfig& config, Call call, Arguments... arguments) {
    [[maybe_unused]] const KeptFindings kept{};
    Pack<Call, Arguments...> pack{{std::tuple<Arguments...>(arguments...)}, call};
    LaunchConfig known = config;
    known.pointees = LaunchArguments<Arguments...>::pointees;
    known.argument_that = LaunchArguments<Arguments...>::argument_that;
    run_grid(
        name, line, kernel, known,
        [](void* p) {
            const auto* pack = static_cast<::emulator::Pack<Call, Arguments...>*>(p);
            std::apply(pack->call, pack->arguments);
        },
        &pack, sizeof pack);
}

// cudaLaunchKernelEx
template <class Call, class... Arguments>
cudaError_t launch_extended(const char* name, int line, const void* kernel, const cudaLaunchConfig_t* config, dim3 cluster,
                            Call call, Arguments... arguments) {
    LaunchConfig plain(config->grid_dim, config->block_dim, config->dynamicSmemBytes, config->stream);
    plain.cluster = cluster;  // by the kernel's __cluster_dims__
    for (unsigned i = 0; i < config->numAttrs; ++i) {
        const cudaLaunchAttributeValue& value = config->attrs[i].val;
        if (config->attrs[i].id == cudaLaunchAttributeCooperative) plain.cooperative = value.cooperative != 0;
        if (config->attrs[i].id == cudaLaunchAttributeProgrammaticStreamSerialization)
            plain.programmatic = value.programmaticStreamSerializationAllowed != 0;
        if (config->attrs[i].id == cudaLaunchAttributeClusterDimension)
            plain.cluster = dim3(value.clusterDim.x, value.clusterDim.y, value.clusterDim.z);
    }
    launch(name, line, kernel, plain, call, arguments...);
    return cudaSuccess;
}

// cudaLaunchKernel and cudaLaunchCooperativeKernel: `arguments` points to the value of each parameter.
template <class... Parameters, size_t... INDEX>
void launch_pointers(const char* name, int line, const LaunchConfig& config, void (*kernel)(Parameters...), void** arguments,
                     std::index_sequence<INDEX...>) {
    launch(
        name, line, (const void*)kernel, config, [kernel](const auto&... a) { kernel(a...); },
        *static_cast<std::decay_t<Parameters>*>(arguments[INDEX])...);
}
template <class... Parameters>
cudaError_t launch_pointers(const char* name, int line, bool cooperative, void (*kernel)(Parameters...), dim3 grid, dim3 block,
                            void** arguments, size_t shared_bytes = 0, cudaStream_t stream = nullptr) {
    LaunchConfig config(grid, block, shared_bytes, stream);
    config.cooperative = cooperative;
    launch_pointers(name, line, config, kernel, arguments, std::index_sequence_for<Parameters...>{});
    return cudaSuccess;
}

}  // namespace emulator

inline cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    [[maybe_unused]] const ::emulator::KeptFindings kept{};
    return emulator_graph_launch(executable, stream);
}
