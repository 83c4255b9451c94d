// The codes of DP.sync: exact, and short.
//
// A code writes each value as some ones that a zero ends, and low bits behind them. A message consists
// of 32-bit words. Its blocks may lie in any order, since a table says where each begins. A block's
// zeros say where the ones of each value end, and then all lengths in its second part are known: so
// all its values are decoded at once. Where no value of a block has ones, the words of ones are left
// out.
//
//     words needed │ table: first word, base and words of ones │ block: ones, low bits │ block ..
//
// A code has a base for each block: a mean of what it measures of a sample, of values that count. There
// are three, of 16 bits each: changes of parameters, gradients in bf16 or the upper halves of those in
// fp32, and their lower halves. A block of values in fp32 is a block of each of the last two.
#pragma once

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
constexpr int kHeader = 1;                               // words before the table
constexpr int kOnesWords = kBlock * (kEscape + 1) / 32;  // of a block, at most
constexpr int kLowWords = kBlock * 16 / 32;              // of a block, at most
constexpr int kBaseAt = 16;                              // in a block's words of ones, which stay below
constexpr int kSampled = 8;                              // one of so many values is measured for the base

// The exponent of a float, as a number that is not below -127; compilers vectorize it.
FOLD3D_BOTH int exponent_of(float value) {
  uint32_t word;
  memcpy(&word, &value, 4);
  return static_cast<int>(word >> 23) - 127;
}

// What one value adds to a block.
struct Code {
  uint16_t ones;      // before their zero
  uint16_t low_bits;  // how many
  uint16_t low;
};

// A new parameter as its difference from the old one, which every replica holds. The bits of a
// floating-point number, ordered as the numbers are, are an integer, which a step of an optimizer moves
// by little. The difference is folded to z: 0, -1, 1, -2 .. become 0, 1, 2, 3 .. It is written in
// Rice's code: z >> k as ones, then the low k bits of z. Steps are about as large for all parameters,
// so in units of a value's last place they are large where the value is small: k is the base less the
// exponent of the old value. The base is the mean of this exponent and of the bits of z, where z = 0
// counts as `kUnmoved` bits fewer than none. After kEscape ones the new value follows whole, so no value
// is too far, and the code is exact for any optimizer.
struct Change {
  static constexpr int kUnmoved = 3;
  int mantissa;  // its bits: 7 in bf16 and 10 in fp16

  // Bits, ordered as the numbers are; its own inverse.
  static FOLD3D_BOTH uint16_t ordered(uint16_t bits) { return bits & 0x8000 ? bits ^ 0x7FFF : bits; }

  static FOLD3D_BOTH uint16_t folded(uint16_t now, uint16_t old) {
    const auto difference = static_cast<int16_t>(static_cast<uint16_t>(ordered(now) - ordered(old)));
    return static_cast<uint16_t>((difference << 1) ^ (difference >> 15));
  }

  static FOLD3D_BOTH uint16_t unfolded(uint16_t z, uint16_t old) {
    const auto difference = static_cast<uint16_t>((z >> 1) ^ -(z & 1));
    return ordered(static_cast<uint16_t>(ordered(old) + difference));
  }

  FOLD3D_BOTH int exponent(uint16_t old) const { return (old & 0x7FFF) >> mantissa; }

  FOLD3D_BOTH uint16_t k_of(uint16_t old, int base) const {
    const int k = base - exponent(old);
    return static_cast<uint16_t>(k < 0 ? 0 : k > 15 ? 15 : k);
  }

  FOLD3D_BOTH uint32_t measured(uint16_t now, uint16_t old) const {
    const float z = folded(now, old);
    return static_cast<uint32_t>(exponent(old) + exponent_of(z + 1.f / (2 << kUnmoved)) + kUnmoved + 1);
  }
  FOLD3D_BOTH bool counts(uint32_t) const { return true; }
  FOLD3D_BOTH int base_of(uint32_t sum, uint32_t num) const {
    const int mean = static_cast<int>((sum + 3 * num / 4) / num);
    return mean < kUnmoved ? 0 : mean - kUnmoved;
  }

  FOLD3D_BOTH Code code_of(uint16_t now, uint16_t old, int base) const {
    const uint16_t k = k_of(old, base), z = folded(now, old);
    const auto ones = static_cast<uint16_t>(z >> k);
    const bool is_far = ones >= kEscape;
    return {is_far ? static_cast<uint16_t>(kEscape) : ones, is_far ? static_cast<uint16_t>(16) : k,
            is_far ? now : static_cast<uint16_t>(z & ((1u << k) - 1))};
  }

  FOLD3D_BOTH uint16_t low_bits_of(uint16_t ones, uint16_t old, int base) const {
    return ones == kEscape ? 16 : k_of(old, base);
  }

  FOLD3D_BOTH uint16_t value_of(Code code, uint16_t old, int) const {
    if (code.ones == kEscape) return code.low;
    return unfolded(static_cast<uint16_t>((code.ones << code.low_bits) | code.low), old);
  }
};

// A gradient in bf16, or the upper half of one in fp32. It is turned, so that the exponent is at the
// top. The base is the mean of exponents that are not zero. An exponent's distance from the base is
// folded to z, and written with k = 1: z >> 1 as ones, then z & 1, sign and mantissa as low bits.
// After kEscape ones the gradient follows whole.
struct Upper {
  static constexpr int kSignAndMantissa = 8;

  FOLD3D_BOTH uint32_t measured(uint16_t half, uint16_t) const { return (half & 0x7FFFu) >> 7; }
  FOLD3D_BOTH bool counts(uint32_t exponent) const { return exponent != 0; }
  FOLD3D_BOTH int base_of(uint32_t sum, uint32_t num) const {
    return num ? static_cast<int>((sum + num / 2) / num) : 0;
  }

  FOLD3D_BOTH Code code_of(uint16_t half, uint16_t, int base) const {
    const auto bits = static_cast<uint16_t>(half << 1 | half >> 15);
    const int above = (bits >> kSignAndMantissa) - base;
    const int z = above > 0 ? 2 * above - 1 : -2 * above;
    if (z >= 2 * kEscape) return {kEscape, 16, bits};
    const int low = (z & 1) << kSignAndMantissa | (bits & 0xFF);
    return {static_cast<uint16_t>(z >> 1), kSignAndMantissa + 1, static_cast<uint16_t>(low)};
  }

  FOLD3D_BOTH uint16_t low_bits_of(uint16_t ones, uint16_t, int) const {
    return ones == kEscape ? 16 : kSignAndMantissa + 1;
  }

  FOLD3D_BOTH uint16_t value_of(Code code, uint16_t, int base) const {
    const bool is_above = code.low >> kSignAndMantissa;
    const int exponent = is_above ? base + code.ones + 1 : base - code.ones;
    const int bits = code.ones == kEscape ? code.low : exponent << kSignAndMantissa | (code.low & 0xFF);
    return static_cast<uint16_t>(bits >> 1 | bits << 15);
  }
};

// The lower half of a gradient in fp32. Where bf16 gradients of micro-batches are added up in fp32, most
// end in zeros. The base is a little more than their mean number, or 0 where they are as few as in
// random bits. As many zeros as the base says are left out, but two fewer for each of the ones.
struct Lower {
  static constexpr uint32_t kFew = 3;

  FOLD3D_BOTH uint32_t measured(uint16_t half, uint16_t) const {  // how many zeros end it
    const int bits = half | 0x10000;
    return static_cast<uint32_t>(exponent_of(static_cast<float>(bits & -bits)));
  }
  FOLD3D_BOTH bool counts(uint32_t) const { return true; }
  FOLD3D_BOTH int base_of(uint32_t sum, uint32_t num) const {
    const uint32_t mean = sum / num;
    return static_cast<int>(mean < kFew ? 0 : mean < 16 ? mean + 1 : 16);
  }

  FOLD3D_BOTH Code code_of(uint16_t half, uint16_t, int base) const {
    const int fewer = base - static_cast<int>(measured(half, 0));
    const auto ones = static_cast<uint16_t>(fewer > 0 ? (fewer + 1) / 2 : 0);
    const uint16_t low_bits = low_bits_of(ones, 0, base);
    return {ones, low_bits, static_cast<uint16_t>(half >> (16 - low_bits))};
  }

  FOLD3D_BOTH uint16_t low_bits_of(uint16_t ones, uint16_t, int base) const {
    const int zeros = base - 2 * ones;
    return static_cast<uint16_t>(zeros > 0 ? 16 - zeros : 16);
  }

  FOLD3D_BOTH uint16_t value_of(Code code, uint16_t, int) const {
    return static_cast<uint16_t>(code.low << (16 - code.low_bits));
  }
};

FOLD3D_BOTH int64_t num_blocks(int64_t count) { return (count + kBlock - 1) / kBlock; }

FOLD3D_BOTH int size_of(int64_t block, int64_t count) {
  const int64_t left = count - block * kBlock;
  return static_cast<int>(left < kBlock ? left : kBlock);
}

// Position-dependent, so that neither a flipped bit nor values in other places go unseen.
FOLD3D_BOTH uint64_t hashed(uint16_t value, uint32_t place) {
  return static_cast<uint64_t>(value) * (((2 * place + 1) * 0x9E3779B1u) | 1u);
}

}  // namespace fold3d::delta
