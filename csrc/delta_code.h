// New 16-bit parameters as differences from the old ones, which every replica holds: exact, and short.
//
// The bits of a floating-point number, ordered as the numbers are, are an integer, which a step of an
// optimizer moves by little. The difference is folded to z: 0, -1, 1, -2 .. become 0, 1, 2, 3 .. It is
// written in Rice's code: z >> k as ones that a zero ends, then the low k bits of z. Steps are about as
// large for all parameters, so in units of a value's last place they are large where the value is
// small: k is a parameter of the message less the exponent of the old value. After kEscape ones the
// new value follows whole, so no value is too far, and the code is exact for any optimizer.
//
// A message consists of 32-bit words. Its blocks may lie in any order, since a table says where each
// begins. A block's zeros say where the ones of each value end, and then all lengths in its second
// part are known: so all its values are decoded at once.
//
//     parameter │ words needed │ table: first word, words of ones │ block: ones, low bits │ block ..
//
// `mantissa` is the bits of a value's mantissa: 7 in bf16, 10 in fp16.
//
// Where no value of a block has ones, the words of ones are left out.
//
// Gradients have no old values to differ from. But most of their exponents are near each other, so a
// second code, in the same messages, writes their distances. Of fp32, the upper half of each gradient
// is coded so, and the lower half in a third code: a block of values is a block of each.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define FOLD3D_BOTH __host__ __device__ __forceinline__
#else
#define FOLD3D_BOTH inline __attribute__((always_inline))
#endif

namespace fold3d::delta {

constexpr int kBlock = 4096;  // values
constexpr int kEscape = 8;
constexpr int kHeader = 2;                                // words before the table
constexpr int kOnesWords = kBlock * (kEscape + 1) / 32;   // of a block, at most
constexpr int kLowWords = kBlock * 16 / 32;               // of a block, at most
constexpr int kSample = 2048;                             // values that choose the parameter
constexpr int kNear = 2;                                  // parameters tried to each side of a guess

// Bits, ordered as the numbers are; its own inverse.
FOLD3D_BOTH uint16_t ordered(uint16_t bits) { return bits & 0x8000 ? bits ^ 0x7FFF : bits; }

FOLD3D_BOTH int exponent_of(uint16_t value, int mantissa) { return (value & 0x7FFF) >> mantissa; }

FOLD3D_BOTH int num_low_bits(uint16_t old, int mantissa, int parameter) {
  const int k = parameter - exponent_of(old, mantissa);
  return k < 0 ? 0 : k > 15 ? 15 : k;
}

FOLD3D_BOTH uint16_t folded(uint16_t now, uint16_t old) {
  const auto difference = static_cast<int16_t>(static_cast<uint16_t>(ordered(now) - ordered(old)));
  return static_cast<uint16_t>((difference << 1) ^ (difference >> 15));
}

FOLD3D_BOTH uint16_t unfolded(uint16_t z, uint16_t old) {
  const auto difference = static_cast<uint16_t>((z >> 1) ^ -(z & 1));
  return ordered(static_cast<uint16_t>(ordered(old) + difference));
}

// What one value adds to a block.
struct Code {
  uint16_t ones;      // before their zero
  uint16_t low_bits;  // how many
  uint16_t low;
};

FOLD3D_BOTH Code code_of(uint16_t now, uint16_t old, int mantissa, int parameter) {
  const auto k = static_cast<uint16_t>(num_low_bits(old, mantissa, parameter));
  const uint16_t z = folded(now, old);
  const auto ones = static_cast<uint16_t>(z >> k);
  const bool is_far = ones >= kEscape;
  return {is_far ? static_cast<uint16_t>(kEscape) : ones, is_far ? static_cast<uint16_t>(16) : k,
          is_far ? now : static_cast<uint16_t>(z & ((1u << k) - 1))};
}

FOLD3D_BOTH uint16_t low_bits_of(uint16_t ones, uint16_t old, int mantissa, int parameter) {
  return static_cast<uint16_t>(ones == kEscape ? 16 : num_low_bits(old, mantissa, parameter));
}

FOLD3D_BOTH uint16_t value_of(Code code, uint16_t old) {
  if (code.ones == kEscape) return code.low;
  return unfolded(static_cast<uint16_t>((code.ones << code.low_bits) | code.low), old);
}

constexpr int kBaseAt = 16;  // in a block's words of ones, which stay below

// The two codes of gradients have a base for each block: a mean of what is `measured` of those halves
// that count.

// Gradients of bf16, or the upper halves of fp32. They are turned, so that the exponent is at the top.
// The base is the mean of exponents that are not zero. An exponent's distance from the base
// is folded to z, and written with k = 1: z >> 1 as ones, then z & 1, sign and mantissa as low bits.
// After kEscape ones the gradient follows whole.
struct Upper {
  static constexpr int kSignAndMantissa = 8;

  static FOLD3D_BOTH uint16_t turned(uint16_t half) { return static_cast<uint16_t>(half << 1 | half >> 15); }
  static FOLD3D_BOTH uint32_t measured(uint16_t half) { return (half & 0x7FFFu) >> 7; }
  static FOLD3D_BOTH bool counts(uint32_t exponent) { return exponent != 0; }
  static FOLD3D_BOTH int base_of(uint32_t sum, uint32_t num) {
    return num ? static_cast<int>((sum + num / 2) / num) : 0;
  }

  static FOLD3D_BOTH Code code_of(uint16_t half, int base) {
    const uint16_t bits = turned(half);
    const int above = (bits >> kSignAndMantissa) - base;
    const int z = above > 0 ? 2 * above - 1 : -2 * above;
    if (z >= 2 * kEscape) return {kEscape, 16, bits};
    const int low = (z & 1) << kSignAndMantissa | (bits & 0xFF);
    return {static_cast<uint16_t>(z >> 1), kSignAndMantissa + 1, static_cast<uint16_t>(low)};
  }

  static FOLD3D_BOTH uint16_t low_bits_of(uint16_t ones, int) {
    return ones == kEscape ? 16 : kSignAndMantissa + 1;
  }

  static FOLD3D_BOTH uint16_t half_of(Code code, int base) {
    const bool is_above = code.low >> kSignAndMantissa;
    const int exponent = is_above ? base + code.ones + 1 : base - code.ones;
    const int bits = code.ones == kEscape ? code.low : exponent << kSignAndMantissa | (code.low & 0xFF);
    return static_cast<uint16_t>(bits >> 1 | bits << 15);
  }
};

// The lower halves of fp32. Where bf16 gradients of micro-batches are added up in fp32, most end in
// zeros. The base is a little more than their mean number, or 0 where they are as few as in random
// bits. As many zeros as the base says are left out, but two fewer for each of the ones.
struct Lower {
  static constexpr uint32_t kFew = 3;

  // How many zeros end it: the exponent of its lowest bit as a float, which compilers vectorize.
  static FOLD3D_BOTH uint32_t measured(uint16_t half) {
    const int bits = half | 0x10000;
    const auto lowest = static_cast<float>(bits & -bits);
    uint32_t word;
    memcpy(&word, &lowest, 4);
    return (word >> 23) - 127;
  }
  static FOLD3D_BOTH bool counts(uint32_t) { return true; }
  static FOLD3D_BOTH int base_of(uint32_t sum, uint32_t num) {
    const uint32_t mean = sum / num;
    return static_cast<int>(mean < kFew ? 0 : mean < 16 ? mean + 1 : 16);
  }

  static FOLD3D_BOTH Code code_of(uint16_t half, int base) {
    const int fewer = base - static_cast<int>(measured(half));
    const auto ones = static_cast<uint16_t>(fewer > 0 ? (fewer + 1) / 2 : 0);
    const uint16_t low_bits = low_bits_of(ones, base);
    return {ones, low_bits, static_cast<uint16_t>(half >> (16 - low_bits))};
  }

  static FOLD3D_BOTH uint16_t low_bits_of(uint16_t ones, int base) {
    const int zeros = base - 2 * ones;
    return static_cast<uint16_t>(zeros > 0 ? 16 - zeros : 16);
  }

  static FOLD3D_BOTH uint16_t half_of(Code code, int) {
    return static_cast<uint16_t>(code.low << (16 - code.low_bits));
  }
};

FOLD3D_BOTH int64_t num_blocks(int64_t count) { return (count + kBlock - 1) / kBlock; }

FOLD3D_BOTH int size_of(int64_t block, int64_t count) {
  const int64_t left = count - block * kBlock;
  return static_cast<int>(left < kBlock ? left : kBlock);
}

// How far the values of a sample are apart.
FOLD3D_BOTH int64_t sample_stride(int64_t count) { return count < kSample ? 1 : count / kSample; }

// The parameter for a mean step, given in units of the last place of values with exponent 0.
FOLD3D_BOTH int parameter_for(double mean) {
  return mean > 0 ? static_cast<int>(lround(log2(0.7 * mean))) : 0;
}

// Position-dependent, so that neither a flipped bit nor values in other places go unseen.
FOLD3D_BOTH uint64_t hashed(uint16_t value, uint32_t place) {
  return static_cast<uint64_t>(value) * (((2 * place + 1) * 0x9E3779B1u) | 1u);
}

}  // namespace fold3d::delta
