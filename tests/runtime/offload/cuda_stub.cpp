// The calls of the CUDA runtime that offloading makes, on host memory, for tests without a driver.
#include <cuda_runtime_api.h>

#include <cstring>

#include "batched_copy.h"

namespace {
int singles = 0, batches = 0, pinned = 0;
bool is_old = false;
}  // namespace

namespace fold3d {

// Only a GPU runs the kernel.
cudaError_t kernel_copy(void* const*, const void* const*, const std::size_t*, std::size_t, unsigned,
                        cudaStream_t) {
  return cudaErrorNoDevice;
}

}  // namespace fold3d

extern "C" {

// For the test: from now on the driver is one before CUDA 12.8.
void stub_gets_an_old_driver() { is_old = true; }
int stub_singles() { return singles; }
int stub_batches() { return batches; }
int stub_pinned() { return pinned; }

cudaError_t cudaHostRegister(void*, std::size_t, unsigned) {
  ++pinned;
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void*) {
  --pinned;
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* target, const void* source, std::size_t bytes, cudaMemcpyKind,
                            cudaStream_t) {
  ++singles;
  std::memcpy(target, source, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpyBatchAsync(void* const* targets, const void* const* sources,
                                 const std::size_t* bytes, std::size_t count,
                                 cudaMemcpyAttributes*, std::size_t* firsts,
                                 std::size_t num_attributes, cudaStream_t stream) {
  if (is_old) return cudaErrorCallRequiresNewerDriver;
  if (stream == nullptr || num_attributes != 1 || firsts[0] != 0) return cudaErrorInvalidValue;
  ++batches;
  for (std::size_t i = 0; i < count; ++i) std::memcpy(targets[i], sources[i], bytes[i]);
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return cudaSuccess; }

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorNoDevice ? "no CUDA-capable device is detected" : "other";
}
}
