// The C face of pinned memory and batched copies, for ctypes: no logic here.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <exception>

#include "batched_copy.h"
#include "pinned_pool.h"

namespace {

int pin(void* memory, std::size_t num_bytes) {
  // Mapped, for the kernel that reads and writes it.
  constexpr unsigned kFlags = cudaHostRegisterPortable | cudaHostRegisterMapped;
  return static_cast<int>(cudaHostRegister(memory, num_bytes, kFlags));
}

int unpin(void* memory) { return static_cast<int>(cudaHostUnregister(memory)); }

}  // namespace

extern "C" {

// Returns null and writes the reason to `error` where there is no such memory.
fold3d::PinnedMemory* fold3d_pinned_open(std::size_t num_bytes, int numa_node, unsigned num_threads,
                                         char* error, std::size_t error_bytes) {
  try {
    return new fold3d::PinnedMemory(num_bytes, numa_node, num_threads, {pin, unpin});
  } catch (const std::exception& reason) {
    std::snprintf(error, error_bytes, "%s", reason.what());
    return nullptr;
  }
}

void* fold3d_pinned_data(const fold3d::PinnedMemory* memory) { return memory->data(); }

int fold3d_batched_copy(void* const* targets, const void* const* sources, const std::size_t* bytes,
                        std::size_t count, cudaStream_t stream) {
  return fold3d::batched_copy(targets, sources, bytes, count, stream);
}

int fold3d_kernel_copy(void* const* targets, const void* const* sources, const std::size_t* bytes,
                       std::size_t count, unsigned num_blocks, cudaStream_t stream) {
  return fold3d::kernel_copy(targets, sources, bytes, count, num_blocks, stream);
}

const char* fold3d_cuda_error(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

}  // extern "C"
