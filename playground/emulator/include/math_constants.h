#pragma once
#include <emulator/math.h>
#define CUDART_INF_F (__builtin_inff())
#define CUDART_NAN_F (__builtin_nanf(""))
#define CUDART_PI_F 3.141592654f
#define CUDART_INF (__builtin_inf())
#define CUDART_NAN (__builtin_nan(""))
#define CUDART_PI 3.1415926535897931
#define CUDART_MIN_DENORM_F (__int_as_float(1))
#define CUDART_MAX_NORMAL_F (__int_as_float(0x7f7fffff))
#define CUDART_ONE_F 1.0f
#define CUDART_ZERO_F 0.0f
