// The code of delta_code.h on a CPU, at more than 1 GB/s of parameters; a C library, read by ctypes.
//
// Values are coded and decoded in arrays of a block, which compilers vectorize; only bits are packed
// one by one. The functions are compiled for several CPUs, one of which is chosen when it is loaded.
#include "delta_code.h"

#include <bit>
#include <cstring>

using namespace fold3d::delta;

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__)
#define CLONED __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define CLONED
#endif

namespace {

constexpr int kSpare = 64;  // what loops in steps of several values may write behind a block

/// Writes bits, the lowest first; up to 8 bytes behind the last.
struct Bits {
  char* const begin;
  char* end = begin;
  uint64_t word = 0;
  unsigned filled = 0;  // of the byte at `end`

  FOLD3D_BOTH void put(uint64_t bits, unsigned count) {  // up to 57
    word |= bits << filled;
    std::memcpy(end, &word, 8);
    filled += count;
    end += filled >> 3;
    word >>= filled & ~7u;
    filled &= 7;
  }
  uint32_t num_words() const { return ((end - begin) * 8 + filled + 31) / 32; }
};

FOLD3D_BOTH uint64_t bit_if(bool is, int place) { return static_cast<uint64_t>(is) << (place & 63); }

/// Writes the codes of a block behind the first `used` words of a message, if `capacity` words hold
/// them, and the block's entry of the table; returns how many words they are.
template <class CodeOf>
FOLD3D_BOTH int64_t put_block(int size, CodeOf code_of, int base, uint32_t* entry, uint32_t* message, int64_t used,
                              int64_t capacity) {
  uint16_t lengths[kBlock + kSpare], low_bits[kBlock + kSpare], low[kBlock + kSpare];
  uint32_t ones_words[kOnesWords + kSpare], low_words[kLowWords + kSpare];
  uint16_t any_ones = 0;
  for (int i = 0; i < size; ++i) {
    const Code code = code_of(i);
    any_ones |= code.ones;
    lengths[i] = code.ones + 1;
    low_bits[i] = code.low_bits;
    low[i] = code.low;
  }
  for (int i = size; i % 4; ++i) lengths[i] = low_bits[i] = low[i] = 0;
  Bits ones{reinterpret_cast<char*>(ones_words)}, lows{reinterpret_cast<char*>(low_words)};
  for (int i = 0; any_ones && i < size; i += 4) {
    const int a = lengths[i], b = a + lengths[i + 1], c = b + lengths[i + 2];
    const int d = c + lengths[i + 3];
    const uint64_t zeros = bit_if(true, a - 1) | bit_if(b > a, b - 1) | bit_if(c > b, c - 1) |
                           bit_if(d > c, d - 1);
    ones.put(~zeros & ((uint64_t{1} << d) - 1), d);
  }
  for (int i = 0; i < size; i += 2)
    lows.put(low[i] | uint64_t{low[i + 1]} << low_bits[i], low_bits[i] + low_bits[i + 1]);
  const uint32_t num_ones = ones.num_words(), num_lows = lows.num_words();
  ones.put((uint64_t{1} << 32) - 1, 32);  // the last word has no zero behind the last value's
  lows.put(0, 32);
  if (used + num_ones + num_lows <= capacity) {
    entry[0] = static_cast<uint32_t>(used);
    entry[1] = static_cast<uint32_t>(base) << kBaseAt | num_ones;
    std::memcpy(message + used, ones_words, 4 * num_ones);
    std::memcpy(message + used + num_ones, low_words, 4 * num_lows);
  }
  return num_ones + num_lows;
}

/// Reads the codes of a block; `low_bits_of(i, ones)` tells how many low bits a value has, and
/// `take(i, code)` takes it.
template <class LowBitsOf, class Take>
FOLD3D_BOTH void take_block(int size, const uint32_t* part, uint32_t num_ones, LowBitsOf low_bits_of, Take take) {
  uint16_t ends[1 + kBlock + kSpare];  // of each value's ones, and before the first
  uint16_t ones[kBlock], low_bits[kBlock], low[kBlock];
  ends[0] = UINT16_MAX;
  int found = 1;
  for (uint32_t word = 0; word < num_ones; word += 2) {
    uint64_t zeros = 0;
    std::memcpy(&zeros, part + word, word + 1 < num_ones ? 8 : 4);
    zeros = word + 1 < num_ones ? ~zeros : static_cast<uint32_t>(~zeros);
    const int next = found + std::popcount(zeros);
    for (int i = found; i < next; i += 8) {
#pragma GCC unroll 8
      for (int j = i; j < i + 8; ++j) {  // behind the last zero, what is written does not matter
        ends[j] = 32 * word + std::countr_zero(zeros | uint64_t{1} << 63);
        zeros &= zeros - 1;
      }
    }
    found = next;
  }
  for (int i = 0; num_ones == 0 && i < size; ++i) ends[i + 1] = i;  // nobody has ones
  for (int i = 0; i < size; ++i) {
    ones[i] = ends[i + 1] - ends[i] - 1;
    low_bits[i] = low_bits_of(i, ones[i]);
  }
  const char* const lows = reinterpret_cast<const char*>(part + num_ones);
  uint64_t at = 0;
  for (int i = 0; i < size; i += 2) {
    uint64_t word;
    std::memcpy(&word, lows + (at >> 3), 8);
    word >>= at & 7;
    low[i] = word;
    if (i + 1 == size) break;
    low[i + 1] = word >> low_bits[i];
    at += low_bits[i] + low_bits[i + 1];
  }
  for (int i = 0; i < size; ++i) {
    const uint16_t mask = (1u << low_bits[i]) - 1;
    take(i, Code{ones[i], low_bits[i], static_cast<uint16_t>(low[i] & mask)});
  }
}

/// Writes one code of the values of a block, which are each `step` behind the other; returns as
/// `put_block`.
template <class Kind>
FOLD3D_BOTH int64_t put_values(Kind kind, const uint16_t* now, const uint16_t* old, int step, int size, uint32_t* entry,
                               uint32_t* message, int64_t used, int64_t capacity) {
  uint16_t copied[kBlock];
  uint32_t sum = 0, num = 0;
  for (int i = 0; step > 1 && i < size; ++i) copied[i] = now[i * step];
  const uint16_t* const own = step > 1 ? copied : now;
  for (int i = 0; i < size; i += kSampled) {
    const uint32_t measured = kind.measured(own[i], old[i]);
    sum += measured;
    num += kind.counts(measured);
  }
  const int base = kind.base_of(sum, num);
  const auto code = [=](int i) { return kind.code_of(own[i], old[i], base); };
  return put_block(size, code, base, entry, message, used, capacity);
}

/// Reads what `put_values` has written.
template <class Kind>
FOLD3D_BOTH void take_values(Kind kind, uint16_t* values, int step, int size, const uint32_t* entry,
                             const uint32_t* message) {
  const int base = entry[1] >> kBaseAt;
  take_block(
      size, message + entry[0], entry[1] & ((1 << kBaseAt) - 1),
      [=](int i, uint16_t ones) { return kind.low_bits_of(ones, values[i * step], base); },
      [=](int i, Code code) { values[i * step] = kind.value_of(code, values[i * step], base); });
}

}  // namespace

/// Writes the message that turns `old` into `now`, as far as `capacity` words hold it. Its first word is
/// the words that it needs.
extern "C" CLONED void fold3d_delta_encode(const uint16_t* now, const uint16_t* old, int mantissa, int64_t count,
                                           uint32_t* message, int64_t capacity) {
  int64_t used = kHeader + 2 * num_blocks(count);
  for (int64_t block = 0; block < num_blocks(count); ++block) {
    const int64_t first = block * kBlock;
    uint32_t* const entry = message + kHeader + 2 * block;
    used += put_values(Change{mantissa}, now + first, old + first, 1, size_of(block, count), entry, message, used,
                       capacity);
  }
  message[0] = static_cast<uint32_t>(used);
}

/// Replaces `values`, the old ones, by the new ones; reads up to 8 bytes behind the message.
extern "C" CLONED void fold3d_delta_decode(const uint32_t* message, uint16_t* values, int mantissa, int64_t count) {
  for (int64_t block = 0; block < num_blocks(count); ++block) {
    const uint32_t* const entry = message + kHeader + 2 * block;
    take_values(Change{mantissa}, values + block * kBlock, 1, size_of(block, count), entry, message);
  }
}

/// As `fold3d_delta_encode`, of gradients with one half, which are bf16, or two, which are fp32.
extern "C" CLONED void fold3d_gradient_encode(const uint16_t* values, int halves, int64_t count, uint32_t* message,
                                              int64_t capacity) {
  int64_t used = kHeader + 2 * halves * num_blocks(count);
  for (int64_t block = 0; block < num_blocks(count); ++block) {
    const uint16_t *const first = values + block * kBlock * halves, *const upper = first + halves - 1;
    uint32_t* const entry = message + kHeader + 2 * halves * block;
    const int size = size_of(block, count);
    used += put_values(Upper{}, upper, upper, halves, size, entry, message, used, capacity);
    if (halves == 2) used += put_values(Lower{}, first, first, 2, size, entry + 2, message, used, capacity);
  }
  message[0] = static_cast<uint32_t>(used);
}

/// Writes gradients; reads up to 8 bytes behind the message.
extern "C" CLONED void fold3d_gradient_decode(const uint32_t* message, uint16_t* values, int halves, int64_t count) {
  for (int64_t block = 0; block < num_blocks(count); ++block) {
    uint16_t* const first = values + block * kBlock * halves;
    const uint32_t* const entry = message + kHeader + 2 * halves * block;
    const int size = size_of(block, count);
    take_values(Upper{}, first + halves - 1, halves, size, entry, message);
    if (halves == 2) take_values(Lower{}, first, 2, size, entry + 2, message);
  }
}

/// Returns a checksum of values; replicas that hold the same ones have the same.
extern "C" CLONED void fold3d_delta_hash(const uint16_t* values, int64_t count, uint64_t* sum) {
  uint64_t hash = 0;
  for (int64_t i = 0; i < count; ++i) hash += hashed(values[i], static_cast<uint32_t>(i));
  *sum = hash;
}
