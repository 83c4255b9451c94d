// delta_code.cpp, and the kernels of delta_code.cu run by threads of a CPU: each decodes what the
// other writes.
#include <atomic>
#include <barrier>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "check.h"

// What CUDA has: a block of threads after the other, each thread a thread of the CPU.
struct Place {
  unsigned x;
};
using cudaStream_t = void*;
thread_local Place threadIdx, blockIdx;
Place gridDim;
std::barrier<>* all_threads;
void __syncthreads() { all_threads->arrive_and_wait(); }
int __popc(unsigned bits) { return std::popcount(bits); }
int __ffs(int bits) { return bits ? std::countr_zero(static_cast<unsigned>(bits)) + 1 : 0; }
int cudaGetLastError() { return 0; }
template <class T>
T atomicAdd(T* to, T more) { return std::atomic_ref(*to).fetch_add(more); }
void atomicOr(uint32_t* to, uint32_t bits) { std::atomic_ref(*to).fetch_or(bits); }
void atomicAnd(uint32_t* to, uint32_t bits) { std::atomic_ref(*to).fetch_and(bits); }

#define THREADS 64u
template <class Kernel>
auto launched(Kernel kernel, unsigned grid) {
  return [=](auto... arguments) {
    std::barrier<> barrier(THREADS);
    all_threads = &barrier;
    gridDim = {grid};
    std::vector<std::jthread> threads;
    for (unsigned thread = 0; thread < THREADS; ++thread)
      threads.emplace_back([=] {
        threadIdx = {thread};
        for (unsigned block = 0; block < grid; ++block) {
          blockIdx = {block};
          kernel(arguments...);
          __syncthreads();
        }
      });
  };
}

#define __global__
#define __device__
#define __shared__ static
#define LAUNCH(kernel, grid, stream) launched(kernel, (static_cast<void>(stream), grid))
#define fold3d_delta_encode gpu_encode
#define fold3d_delta_decode gpu_decode
#define fold3d_delta_hash gpu_hash
#define fold3d_gradient_encode gpu_encode_gradients
#define fold3d_gradient_decode gpu_decode_gradients
#include "../delta_code.cu"
#undef fold3d_delta_encode
#undef fold3d_delta_decode
#undef fold3d_delta_hash
#undef fold3d_gradient_encode
#undef fold3d_gradient_decode

using Values = std::vector<uint16_t>;
extern "C" {
void fold3d_delta_encode(const uint16_t*, const uint16_t*, int, int64_t, uint32_t*, int64_t);
void fold3d_delta_decode(const uint32_t*, uint16_t*, int, int64_t);
void fold3d_delta_hash(const uint16_t*, int64_t, uint64_t*);
void fold3d_gradient_encode(const uint16_t*, int, int64_t, uint32_t*, int64_t);
void fold3d_gradient_decode(const uint32_t*, uint16_t*, int, int64_t);
}

namespace {

uint16_t rounded(float value) {
  return static_cast<uint16_t>((std::bit_cast<uint32_t>(value) + 0x8000u) >> 16);
}

/// Old and new values: those of a training, with some of every kind between them.
std::pair<Values, Values> stepped(size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> weight(0, 0.02f), step(0, 1e-4f);
  Values old(count), now(count);
  for (size_t i = 0; i < count; ++i) {
    const float value = weight(random);
    old[i] = rounded(value);
    now[i] = random() % 50 ? rounded(value + step(random)) : static_cast<uint16_t>(random());
    if (random() % 50 == 0) old[i] = static_cast<uint16_t>(random());
  }
  return {old, now};
}

/// Decodes by each what the other encodes; returns the bits of a value.
double coded(const Values& now, const Values& old, int mantissa) {
  const auto n = static_cast<int64_t>(now.size()), capacity = n + 64;
  std::vector<uint32_t> ours(capacity + 4), gpus(capacity + 4);
  fold3d_delta_encode(now.data(), old.data(), mantissa, n, ours.data(), capacity);
  gpu_encode(now.data(), old.data(), mantissa, n, gpus.data(), capacity, nullptr);
  CHECK(ours[0] == gpus[0]);
  CHECK(ours[0] <= capacity);
  Values by_cpu = old, by_gpu = old;
  fold3d_delta_decode(gpus.data(), by_cpu.data(), mantissa, n);
  gpu_decode(ours.data(), by_gpu.data(), mantissa, n, nullptr);
  CHECK(by_cpu == now);
  CHECK(by_gpu == now);
  return 32. * ours[0] / n;
}

/// The same of gradients with so many halves.
double coded_gradients(const Values& values, int halves) {
  const auto n = static_cast<int64_t>(values.size()) / halves;
  std::vector<uint32_t> ours(values.size() + 64), gpus(values.size() + 64);
  fold3d_gradient_encode(values.data(), halves, n, ours.data(), ours.size());
  gpu_encode_gradients(values.data(), halves, n, gpus.data(), gpus.size(), nullptr);
  CHECK(ours[0] == gpus[0]);
  Values by_cpu(values.size(), 1), by_gpu = by_cpu;
  fold3d_gradient_decode(gpus.data(), by_cpu.data(), halves, n);
  gpu_decode_gradients(ours.data(), by_gpu.data(), halves, n, nullptr);
  CHECK(by_cpu == values);
  CHECK(by_gpu == values);
  return 32. * ours[0] / n;
}

void each_decodes_what_the_other_writes() {
  for (const size_t count : {1, 7, 4096, 4097, 3 * 4096 + 123}) {
    const auto [old, now] = stepped(count, static_cast<unsigned>(count));
    for (const int mantissa : {7, 10}) coded(now, old, mantissa);
    uint64_t hash = 0;
    unsigned long long gpus_hash = 0;
    fold3d_delta_hash(now.data(), count, &hash);
    gpu_hash(now.data(), count, &gpus_hash, nullptr);
    CHECK(hash == gpus_hash);
  }
}

void parameters_are_decoded_from_fewer_bits() {
  std::mt19937 random(6);
  std::normal_distribution<float> weight(0, 0.02f), normal(0, 1);
  for (const auto& [step, most] : {std::pair{0.f, 1.1}, {1e-5f, 1.7}, {3e-5f, 2.7}, {1e-4f, 4.2}, {3e-3f, 8.9}}) {
    Values old(50000), now(50000);
    for (size_t i = 0; i < old.size(); ++i) {
      const float value = weight(random);
      old[i] = rounded(value);
      now[i] = rounded(value + step * normal(random));
    }
    CHECK(coded(now, old, 7) < most);
  }
}

void every_old_value_leads_to_every_kind_of_new_one() {
  Values old(1 << 16);
  for (size_t i = 0; i < old.size(); ++i) old[i] = static_cast<uint16_t>(i);
  for (const unsigned step : {0u, 1u, 5u, 0x100u, 0x7FFFu, 0x8000u, 0xFFFFu}) {
    Values now(old.size()), decoded = old;
    for (size_t i = 0; i < old.size(); ++i) now[i] = static_cast<uint16_t>(old[i] + step);
    const auto n = static_cast<int64_t>(old.size());
    std::vector<uint32_t> message(n + 4);
    fold3d_delta_encode(now.data(), old.data(), 7, n, message.data(), n);
    fold3d_delta_decode(message.data(), decoded.data(), 7, n);
    CHECK(decoded == now);
  }
}

/// The halves of values in fp32, each the sum of `num` of bf16; 0: of more bits than a sum has.
Values sums(size_t count, float scale, int num, std::mt19937& random) {
  std::normal_distribution<float> gradient(0, scale);
  Values values(2 * count);
  for (size_t i = 0; i < count; ++i) {
    float sum = num ? 0 : gradient(random);
    for (int j = 0; j < num; ++j) sum += std::bit_cast<float>(uint32_t{rounded(gradient(random))} << 16);
    std::memcpy(&values[2 * i], &sum, 4);
  }
  return values;
}

void gradients_are_decoded_from_fewer_bits() {
  std::mt19937 random(5);
  for (const size_t count : {2, 4096, 4098, 3 * 4096 + 124}) {
    for (const float scale : {1e-30f, 1e-4f, 1.f, 3e4f}) {
      std::normal_distribution<float> gradient(0, scale);
      Values values(count);
      for (uint16_t& value : values) value = rounded(gradient(random));
      const double bits = coded_gradients(values, 1);
      if (count > 4096) CHECK(bits < 11.2);
      for (const auto& [num, most] : {std::pair{0, 27.2}, {1, 11.2}, {2, 14.4}, {8, 17.2}, {64, 21.8}}) {
        const double bits = coded_gradients(sums(count, scale, num, random), 2);
        if (count > 4098) CHECK(bits < most);
      }
    }
  }
}

void every_gradient_is_decoded() {
  Values values(1 << 16);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<uint16_t>(i * 40503);
  coded_gradients(values, 1);
  coded_gradients(values, 2);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<uint16_t>(i % 3 ? 0 : i);
  coded_gradients(values, 2);
  CHECK(coded_gradients(Values(50000, 0), 2) < 9.1);
  coded_gradients(Values(5000, 0x7FC0), 2);
}

void a_message_that_does_not_fit_tells_its_size_and_writes_nothing_behind() {
  const auto [old, now] = stepped(9000, 3);
  std::vector<uint32_t> whole(9000), cut(100, 0xABCDABCD);
  fold3d_delta_encode(now.data(), old.data(), 7, 9000, whole.data(), 9000);
  fold3d_delta_encode(now.data(), old.data(), 7, 9000, cut.data(), 50);
  CHECK(cut[0] == whole[0]);
  for (size_t i = 50; i < cut.size(); ++i) CHECK(cut[i] == 0xABCDABCD);
}

void a_flipped_bit_and_exchanged_values_change_the_checksum() {
  auto [old, now] = stepped(5000, 4);
  uint64_t before, after;
  fold3d_delta_hash(old.data(), 5000, &before);
  for (const int bit : {0, 7, 15}) {
    old[4321] ^= 1 << bit;
    fold3d_delta_hash(old.data(), 5000, &after);
    CHECK(before != after);
    old[4321] ^= 1 << bit;
  }
  std::swap(old[10], old[4000]);
  fold3d_delta_hash(old.data(), 5000, &after);
  CHECK(before != after);
}

}  // namespace

int main() {
  RUN(each_decodes_what_the_other_writes);
  RUN(parameters_are_decoded_from_fewer_bits);
  RUN(every_old_value_leads_to_every_kind_of_new_one);
  RUN(gradients_are_decoded_from_fewer_bits);
  RUN(every_gradient_is_decoded);
  RUN(a_message_that_does_not_fit_tells_its_size_and_writes_nothing_behind);
  RUN(a_flipped_bit_and_exchanged_values_change_the_checksum);
}
