#include "batched_copy.h"

namespace fold3d {

#if CUDART_VERSION >= 12080

cudaError_t batched_copy(void* const* targets, const void* const* sources, const std::size_t* bytes,
                         std::size_t count, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
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

#else

cudaError_t batched_copy(void* const* targets, const void* const* sources, const std::size_t* bytes,
                         std::size_t count, cudaStream_t stream) {
  for (std::size_t i = 0; i < count; ++i) {
    const cudaError_t error =
        cudaMemcpyAsync(targets[i], sources[i], bytes[i], cudaMemcpyDefault, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

#endif

}  // namespace fold3d
