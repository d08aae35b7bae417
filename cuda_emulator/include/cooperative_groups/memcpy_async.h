// Copies by a group, and the wait for them.
#pragma once
#include <cooperative_groups.h>
#include <emulator/group_copy.h>

namespace cooperative_groups {

template <class Group, class T, class Size>
EMULATOR_INLINE void memcpy_async(const Group& group, T* to, const T* from, Size bytes) {
    ::emulator::group_copy(to, from, bytes, unsigned(group.thread_rank()), unsigned(group.size()));
    ::emulator::async_commit();
}
// Sizes in elements.
template <class Group, class T, class ToSize, class FromSize>
EMULATOR_INLINE void memcpy_async(const Group& group, T* to, ToSize to_elements, const T* from, FromSize from_elements) {
    const size_t elements = size_t(to_elements) < size_t(from_elements) ? size_t(to_elements) : size_t(from_elements);
    memcpy_async(group, to, from, elements * sizeof(T));
}
template <unsigned PRIOR, class Group>
inline void wait_prior(const Group& group, int line = __builtin_LINE()) {
    ::emulator::async_wait(PRIOR);
    group.sync(line);
}
template <class Group>
inline void wait(const Group& group, int line = __builtin_LINE()) {
    wait_prior<0>(group, line);
}

}  // namespace cooperative_groups
