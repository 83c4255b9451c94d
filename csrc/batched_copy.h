// Many copies between device and pinned host memory in one launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace fold3d {

// What a launch takes at most; more are split over launches.
constexpr int kMostPieces = 64;

// Copies `bytes[i]` bytes from `sources[i]` to `targets[i]`, through the copy engine: several in one
// call where the runtime has cudaMemcpyBatchAsync (12.8 and later), and in `count` calls before. The
// stream must not be the default one.
cudaError_t batched_copy(void* const* targets, const void* const* sources, const std::size_t* bytes,
                         std::size_t count, cudaStream_t stream);

// The same by a kernel that reads or writes the host's memory: it needs no copy engine but takes
// `num_blocks` blocks of the device's multiprocessors.
cudaError_t kernel_copy(void* const* targets, const void* const* sources, const std::size_t* bytes,
                        std::size_t count, unsigned num_blocks, cudaStream_t stream);

}  // namespace fold3d
