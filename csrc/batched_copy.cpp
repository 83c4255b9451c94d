#include "batched_copy.h"

#include <atomic>

namespace fold3d {
namespace {

cudaError_t one_by_one(void* const* targets, const void* const* sources, const std::size_t* bytes,
                       std::size_t count, cudaStream_t stream) {
  for (std::size_t i = 0; i < count; ++i) {
    const cudaError_t error =
        cudaMemcpyAsync(targets[i], sources[i], bytes[i], cudaMemcpyDefault, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

#if CUDART_VERSION >= 12080

cudaError_t in_one_launch(void* const* targets, const void* const* sources,
                          const std::size_t* bytes, std::size_t count, cudaStream_t stream) {
  cudaMemcpyAttributes attributes = {};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
  std::size_t first = 0;  // the attributes are those of every copy from the first on
#if CUDART_VERSION >= 13000
  return cudaMemcpyBatchAsync(targets, sources, bytes, count, &attributes, &first, 1, stream);
#else
  std::size_t failed = 0;
  return cudaMemcpyBatchAsync(const_cast<void**>(targets), const_cast<void**>(sources),
                              const_cast<std::size_t*>(bytes), count, &attributes, &first, 1,
                              &failed, stream);
#endif
}

// A driver before CUDA 12.8 runs what a newer toolkit has built, without this call.
bool is_missing(cudaError_t error) {
  return error == cudaErrorCallRequiresNewerDriver || error == cudaErrorNotSupported ||
         error == cudaErrorInsufficientDriver || error == cudaErrorSymbolNotFound;
}

}  // namespace

cudaError_t batched_copy(void* const* targets, const void* const* sources, const std::size_t* bytes,
                         std::size_t count, cudaStream_t stream) {
  static std::atomic<bool> has_batches{true};
  if (count == 0) return cudaSuccess;
  if (has_batches && count > 1) {  // alone, a copy of its own is as fast or faster
    const cudaError_t error = in_one_launch(targets, sources, bytes, count, stream);
    if (!is_missing(error)) return error;
    cudaGetLastError();  // it is answered here
    has_batches = false;
  }
  return one_by_one(targets, sources, bytes, count, stream);
}

#else

}  // namespace

cudaError_t batched_copy(void* const* targets, const void* const* sources, const std::size_t* bytes,
                         std::size_t count, cudaStream_t stream) {
  return one_by_one(targets, sources, bytes, count, stream);
}

#endif

}  // namespace fold3d
