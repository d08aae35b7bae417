// Loads and stores with a cache hint, which is ignored.
#pragma once
#include <emulator/runtime_api.h>

template <class T>
EMULATOR_INLINE T __ldg(const T* p) {
    return *p;
}
template <class T>
EMULATOR_INLINE T __ldca(const T* p) {
    return *p;
}
template <class T>
EMULATOR_INLINE T __ldcg(const T* p) {
    return *p;
}
template <class T>
EMULATOR_INLINE T __ldcs(const T* p) {
    return *p;
}
template <class T>
EMULATOR_INLINE T __ldlu(const T* p) {
    return *p;
}
template <class T>
EMULATOR_INLINE T __ldcv(const T* p) {
    return *(const volatile T*)p;
}
template <class T>
EMULATOR_INLINE void __stwb(T* p, T value) {
    *p = value;
}
template <class T>
EMULATOR_INLINE void __stcg(T* p, T value) {
    *p = value;
}
template <class T>
EMULATOR_INLINE void __stcs(T* p, T value) {
    *p = value;
}
template <class T>
EMULATOR_INLINE void __stwt(T* p, T value) {
    *p = value;
}
