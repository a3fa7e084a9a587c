// Vectors of sixteen numbers, and the two types that models are served in.

#pragma once

#include <cstdint>
#include <cstring>

namespace {

// Sixteen numbers at once: the compiler makes of it what the processor has.
constexpr int WIDE = 16;
// What stands for minus infinity: beside any other number its exponential is 0.
constexpr float NEVER = -1e30f;
typedef float Floats __attribute__((vector_size(4 * WIDE)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDE)));
typedef uint32_t Words __attribute__((vector_size(4 * WIDE)));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDE)));

struct bfloat16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bfloat16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

inline void store(float x, float* out) { *out = x; }
inline void store(float x, bfloat16* out) {  // to the nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  out->bits = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline Floats load(const float* from) {
  Floats out;
  std::memcpy(&out, from, sizeof out);
  return out;
}
inline Floats load(const bfloat16* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  return Floats(__builtin_convertvector(halves, Words) << 16);
}

// e^x for x <= 0, to 1e-7 of it, and 0 below -87: 2^n e^r with |r| <= ln 2 / 2, and e^r by its series.
inline Floats exponential(Floats x) {
  const Floats zero = {}, least = zero - 87.f, magic = zero + 12582912.f;  // adding 1.5 * 2^23 rounds to a whole number
  const Floats y = x < least ? least : x;  // what is not a number stays so
  const Floats n = (y * 1.44269504f + magic) - magic;
  const Floats r = (y - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats series = zero + 1.f / 720;
  for (const float term : {1.f / 120, 1.f / 24, 1.f / 6, 1.f / 2, 1.f, 1.f}) series = series * r + term;
  const Floats power = series * Floats((__builtin_convertvector(n, Ints) + 127) << 23);
  return x < least ? zero : power;
}

inline float reduce(Floats x, float start, float (*f)(float, float)) {
  for (int i = 0; i < WIDE; ++i) start = f(start, x[i]);
  return start;
}

}  // namespace
