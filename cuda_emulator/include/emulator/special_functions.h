// Norms, error functions and their inverses, Bessel functions: what <math.h> lacks of CUDA's.
#pragma once
#include <cmath>

// ---- norms; in double, and rounded once where the result is a float
inline double norm3d(double a, double b, double c) { return std::hypot(a, b, c); }
inline double norm4d(double a, double b, double c, double d) { return std::hypot(std::hypot(a, b), std::hypot(c, d)); }
inline double norm(int n, const double* p) {
    double length = 0;
    for (int i = 0; i < n; ++i) length = std::hypot(length, p[i]);
    return length;
}
inline double rhypot(double a, double b) { return 1.0 / std::hypot(a, b); }
inline double rnorm3d(double a, double b, double c) { return 1.0 / norm3d(a, b, c); }
inline double rnorm4d(double a, double b, double c, double d) { return 1.0 / norm4d(a, b, c, d); }
inline double rnorm(int n, const double* p) { return 1.0 / norm(n, p); }
inline float norm3df(float a, float b, float c) { return (float)norm3d(a, b, c); }
inline float norm4df(float a, float b, float c, float d) { return (float)norm4d(a, b, c, d); }
inline float normf(int n, const float* p) {
    double length = 0;
    for (int i = 0; i < n; ++i) length = std::hypot(length, (double)p[i]);
    return (float)length;
}
inline float rhypotf(float a, float b) { return (float)rhypot(a, b); }
inline float rnorm3df(float a, float b, float c) { return (float)rnorm3d(a, b, c); }
inline float rnorm4df(float a, float b, float c, float d) { return (float)rnorm4d(a, b, c, d); }
inline float rnormf(int n, const float* p) { return (float)(1.0 / normf(n, p)); }

// ---- the normal distribution
inline double normcdf(double x) { return 0.5 * std::erfc(-x * 0.70710678118654752440); }
inline float normcdff(float x) { return (float)normcdf(x); }

// exp(x^2) erfc(x), which for large x neither overflows nor vanishes.
inline double erfcx(double x) {
    if (x < 20) return std::exp(x * x) * std::erfc(x);
    const double r = 1 / (2 * x * x);  // of the asymptotic series
    return 0.56418958354775628695 / x * (1 - r * (1 - 3 * r * (1 - 5 * r * (1 - 7 * r * (1 - 9 * r)))));
}
inline float erfcxf(float x) { return (float)erfcx(x); }

// The x >= 0 for which erfc(x) = p, p in (0, 1]: Newton's method for log erfc, which is concave, so that it comes from above.
namespace emulator {
inline double positive_erfcinv(double p) {
    double x = p < 0.5 ? std::sqrt(-std::log(p)) : 0.0;
    for (int i = 0; i < 60; ++i) {
        const double slope = -1.12837916709551257390 / erfcx(x);  // -2 / sqrt(pi) exp(-x^2) / erfc(x)
        const double step = (std::log(erfcx(x)) - x * x - std::log(p)) / slope;
        x -= step;
        if (std::fabs(step) <= 1e-16 * std::fabs(x)) break;
    }
    return x;
}
}  // namespace emulator
inline double erfcinv(double p) {
    if (!(p >= 0 && p <= 2)) return NAN;
    if (p == 0 || p == 2) return p == 0 ? INFINITY : -INFINITY;
    return p <= 1 ? emulator::positive_erfcinv(p) : -emulator::positive_erfcinv(2 - p);
}
inline double erfinv(double y) {
    if (!(y >= -1 && y <= 1)) return NAN;
    if (std::fabs(y) == 1) return y * INFINITY;
    if (std::fabs(y) > 0.5) return std::copysign(emulator::positive_erfcinv(1 - std::fabs(y)), y);
    double x = y * 0.88622692545275801365;  // sqrt(pi) / 2
    for (int i = 0; i < 8; ++i) x -= (std::erf(x) - y) * 0.88622692545275801365 * std::exp(x * x);
    return x;
}
inline double normcdfinv(double p) { return -1.41421356237309504880 * erfcinv(2 * p); }
inline float erfcinvf(float p) { return (float)erfcinv(p); }
inline float erfinvf(float y) { return (float)erfinv(y); }
inline float normcdfinvf(float p) { return (float)normcdfinv(p); }

// ---- modified Bessel functions
inline double cyl_bessel_i0(double x) { return std::cyl_bessel_i(0.0, std::fabs(x)); }
inline double cyl_bessel_i1(double x) { return std::copysign(std::cyl_bessel_i(1.0, std::fabs(x)), x); }
inline float cyl_bessel_i0f(float x) { return (float)cyl_bessel_i0(x); }
inline float cyl_bessel_i1f(float x) { return (float)cyl_bessel_i1(x); }
