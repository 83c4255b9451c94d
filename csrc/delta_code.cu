// The code of delta_code.h on a GPU: the same messages as delta_code.cpp writes, but for the order of
// blocks. A block of threads has a block of values. tests/delta_code_test.cpp runs these kernels on a
// CPU. **No GPU has run this.**
#include "delta_code.h"

#ifndef LAUNCH
#define LAUNCH(kernel, grid, stream) kernel<<<grid, kThreads, 0, stream>>>
#define THREADS 512
#endif

using namespace fold3d::delta;

namespace {

constexpr int kThreads = THREADS;
constexpr int kEach = kBlock / kThreads;  // values of a thread, one behind the other
constexpr int kMostBlocks = 65535;        // of a grid; blocks of threads take turns with those of values

unsigned grid_of(int64_t blocks) { return static_cast<unsigned>(blocks < kMostBlocks ? blocks : kMostBlocks); }

// Returns the sum of what the threads before this one give, and sets `total` for all of them.
__device__ unsigned sum_before(unsigned own, unsigned& total) {
  __shared__ unsigned sums[2][kThreads];
  const unsigned thread = threadIdx.x;
  sums[0][thread] = own;
  __syncthreads();
  int side = 0;
  for (unsigned reach = 1; reach < kThreads; reach *= 2, side ^= 1) {
    sums[side ^ 1][thread] = sums[side][thread] + (thread >= reach ? sums[side][thread - reach] : 0);
    __syncthreads();
  }
  total = sums[side][kThreads - 1];
  const unsigned before = sums[side][thread] - own;
  __syncthreads();  // the next sum overwrites them
  return before;
}

// Adds bits to zeroed words that other threads add to as well.
__device__ void add_bits(uint32_t* words, unsigned at, uint32_t bits) {
  const uint64_t placed = uint64_t{bits} << (at % 32);
  if (static_cast<uint32_t>(placed)) atomicOr(words + at / 32, static_cast<uint32_t>(placed));
  if (placed >> 32) atomicOr(words + at / 32 + 1, static_cast<uint32_t>(placed >> 32));
}

__device__ uint32_t bits_at(const uint32_t* words, unsigned at, unsigned count) {
  if (count == 0) return 0;
  const unsigned last = (at + count - 1) / 32;
  const uint64_t both = words[at / 32] | uint64_t{words[last]} << (last == at / 32 ? 0 : 32);
  return static_cast<uint32_t>(both >> (at % 32)) & ((1u << count) - 1);
}

// The threads write the codes of a block of `size` values, each those of its own ones, of which there
// are `num`.
__device__ void put_block(const Code* codes, int num, int size, int base, uint32_t* entry, uint32_t* message,
                          int64_t capacity) {
  __shared__ uint32_t words[kOnesWords + kLowWords];
  __shared__ uint32_t first_word;
  unsigned own_ones = 0, own_low = 0, ones_bits, low_bits;
  for (int i = 0; i < num; ++i) {
    own_ones += codes[i].ones + 1;
    own_low += codes[i].low_bits;
  }
  unsigned ones_at = sum_before(own_ones, ones_bits), low_at = sum_before(own_low, low_bits);
  const unsigned num_ones = ones_bits > static_cast<unsigned>(size) ? (ones_bits + 31) / 32 : 0;
  const unsigned num_words = num_ones + (low_bits + 31) / 32;
  // Zeros are written into ones, and ones into zeros.
  for (unsigned i = threadIdx.x; i < num_words; i += kThreads) words[i] = i < num_ones ? ~0u : 0;
  if (threadIdx.x == 0) first_word = atomicAdd(message, num_words);
  __syncthreads();
  for (int i = 0; i < num; ++i) {
    ones_at += codes[i].ones + 1;
    if (num_ones) atomicAnd(words + (ones_at - 1) / 32, ~(1u << ((ones_at - 1) % 32)));
    add_bits(words + num_ones, low_at, codes[i].low);
    low_at += codes[i].low_bits;
  }
  __syncthreads();
  if (first_word + num_words <= capacity) {
    for (unsigned i = threadIdx.x; i < num_words; i += kThreads) message[first_word + i] = words[i];
    if (threadIdx.x == 0) {
      entry[0] = first_word;
      entry[1] = static_cast<uint32_t>(base) << kBaseAt | num_ones;
    }
  }
  __syncthreads();  // the next block overwrites them
}

// The threads read the codes of a block, each those of its own values, of which there are `num`;
// `low_bits_of(i, ones)` tells how many low bits one has, and `take(i, code)` takes it.
template <class LowBitsOf, class Take>
__device__ void take_block(int num, const uint32_t* part, unsigned num_ones, LowBitsOf low_bits_of, Take take) {
  __shared__ uint16_t ends[kBlock];  // of each value's ones
  const unsigned of_each = (num_ones + kThreads - 1) / kThreads;
  const unsigned begin_word = threadIdx.x * of_each;
  unsigned own = 0, total;
  for (unsigned i = begin_word; i < begin_word + of_each && i < num_ones; ++i) own += __popc(~part[i]);
  unsigned value = sum_before(own, total);
  for (unsigned i = begin_word; i < begin_word + of_each && i < num_ones; ++i)
    for (uint32_t zeros = ~part[i]; zeros; zeros &= zeros - 1)
      ends[value++] = static_cast<uint16_t>(32 * i + __ffs(static_cast<int>(zeros)) - 1);
  __syncthreads();
  Code codes[kEach];
  own = 0;
  for (int i = 0; i < num; ++i) {
    const int place = threadIdx.x * kEach + i;
    codes[i].ones = static_cast<uint16_t>(num_ones ? ends[place] - (place ? ends[place - 1] + 1 : 0) : 0);
    codes[i].low_bits = low_bits_of(i, codes[i].ones);
    own += codes[i].low_bits;
  }
  unsigned at = sum_before(own, total);
  for (int i = 0; i < num; ++i) {
    codes[i].low = static_cast<uint16_t>(bits_at(part + num_ones, at, codes[i].low_bits));
    at += codes[i].low_bits;
    take(i, codes[i]);
  }
  __syncthreads();  // the next block overwrites them
}

// The place of this thread's first value of a block, and how many it has.
__device__ int64_t first_of(int64_t block) { return block * kBlock + threadIdx.x * kEach; }
__device__ int num_of(int64_t block, int64_t count) {
  const int64_t left = count - first_of(block);
  return left < 0 ? 0 : left < kEach ? static_cast<int>(left) : kEach;
}

__global__ void begin(uint32_t* message, uint32_t used) {
  if (threadIdx.x == 0) message[0] = used;
}

// One code of each value, which are `step` behind the other: `table` has its first block's entry.
template <class Kind>
__global__ void encode(Kind kind, const uint16_t* now, const uint16_t* old, int step, int64_t count, uint32_t* table,
                       uint32_t* message, int64_t capacity) {
  for (int64_t block = blockIdx.x; block * kBlock < count; block += gridDim.x) {
    const uint16_t *const own = now + first_of(block) * step, *const before = old + first_of(block);
    const int num = num_of(block, count);
    unsigned sum = 0, counted = 0, all, num_all;
    for (int i = 0; i < num; i += kSampled) {  // of which kEach is a multiple
      const uint32_t measured = kind.measured(own[i * step], before[i]);
      sum += measured;
      counted += kind.counts(measured);
    }
    sum_before(sum, all);
    sum_before(counted, num_all);
    const int base = kind.base_of(all, num_all);
    Code codes[kEach];
    for (int i = 0; i < num; ++i) codes[i] = kind.code_of(own[i * step], before[i], base);
    put_block(codes, num, size_of(block, count), base, table + 2 * step * block, message, capacity);
  }
}

template <class Kind>
__global__ void decode(Kind kind, const uint32_t* message, const uint32_t* table, uint16_t* values, int step,
                       int64_t count) {
  for (int64_t block = blockIdx.x; block * kBlock < count; block += gridDim.x) {
    const uint32_t* const entry = table + 2 * step * block;
    uint16_t* const own = values + first_of(block) * step;
    const int base = static_cast<int>(entry[1] >> kBaseAt);
    take_block(
        num_of(block, count), message + entry[0], entry[1] & ((1u << kBaseAt) - 1),
        [=](int i, uint16_t ones) { return kind.low_bits_of(ones, own[i * step], base); },
        [=](int i, Code code) { own[i * step] = kind.value_of(code, own[i * step], base); });
  }
}

__global__ void hash(const uint16_t* values, int64_t count, unsigned long long* sum) {
  unsigned long long own = 0;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < count; i += int64_t{gridDim.x} * kThreads)
    own += hashed(values[i], static_cast<uint32_t>(i));
  __shared__ unsigned long long of_block;
  if (threadIdx.x == 0) of_block = 0;
  __syncthreads();
  atomicAdd(&of_block, own);
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(sum, of_block);
}

}  // namespace

// As the functions of these names in delta_code.cpp, in order on `stream`; all memory is the GPU's.
extern "C" int fold3d_delta_encode(const uint16_t* now, const uint16_t* old, int mantissa, int64_t count,
                                   uint32_t* message, int64_t capacity, cudaStream_t stream) {
  const int64_t blocks = num_blocks(count);
  uint32_t* const table = message + kHeader;
  LAUNCH(begin, 1, stream)(message, static_cast<uint32_t>(kHeader + 2 * blocks));
  LAUNCH(encode<Change>, grid_of(blocks), stream)(Change{mantissa}, now, old, 1, count, table, message, capacity);
  return cudaGetLastError();
}

extern "C" int fold3d_delta_decode(const uint32_t* message, uint16_t* values, int mantissa, int64_t count,
                                   cudaStream_t stream) {
  const unsigned grid = grid_of(num_blocks(count));
  LAUNCH(decode<Change>, grid, stream)(Change{mantissa}, message, message + kHeader, values, 1, count);
  return cudaGetLastError();
}

extern "C" int fold3d_gradient_encode(const uint16_t* values, int halves, int64_t count, uint32_t* message,
                                      int64_t capacity, cudaStream_t stream) {
  const int64_t blocks = num_blocks(count);
  const unsigned grid = grid_of(blocks);
  const uint16_t* const upper = values + halves - 1;
  uint32_t* const table = message + kHeader;
  LAUNCH(begin, 1, stream)(message, static_cast<uint32_t>(kHeader + 2 * halves * blocks));
  LAUNCH(encode<Upper>, grid, stream)(Upper{}, upper, upper, halves, count, table, message, capacity);
  if (halves == 2) LAUNCH(encode<Lower>, grid, stream)(Lower{}, values, values, 2, count, table + 2, message, capacity);
  return cudaGetLastError();
}

extern "C" int fold3d_gradient_decode(const uint32_t* message, uint16_t* values, int halves, int64_t count,
                                      cudaStream_t stream) {
  const unsigned grid = grid_of(num_blocks(count));
  const uint32_t* const table = message + kHeader;
  LAUNCH(decode<Upper>, grid, stream)(Upper{}, message, table, values + halves - 1, halves, count);
  if (halves == 2) LAUNCH(decode<Lower>, grid, stream)(Lower{}, message, table + 2, values, 2, count);
  return cudaGetLastError();
}

// Adds to `sum`, which the caller has zeroed.
extern "C" int fold3d_delta_hash(const uint16_t* values, int64_t count, unsigned long long* sum,
                                 cudaStream_t stream) {
  LAUNCH(hash, grid_of(num_blocks(count)), stream)(values, count, sum);
  return cudaGetLastError();
}
