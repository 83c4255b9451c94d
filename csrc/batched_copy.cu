#include "batched_copy.h"

#include <algorithm>
#include <cstdint>

namespace fold3d {
namespace {

constexpr int kThreads = 512;

struct Pieces {  // travels as the kernel's argument: no table in device memory to fill first
  void* target[kMostPieces];
  const void* source[kMostPieces];
  std::size_t bytes[kMostPieces];
};

// Row y of the grid copies piece y; its blocks take turns.
__global__ void copy_pieces(const Pieces pieces) {
  const auto* source = static_cast<const unsigned char*>(pieces.source[blockIdx.y]);
  auto* target = static_cast<unsigned char*>(pieces.target[blockIdx.y]);
  const std::size_t bytes = pieces.bytes[blockIdx.y];
  const std::size_t stride = std::size_t{gridDim.x} * blockDim.x;
  const std::size_t first = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;

  const bool aligned =
      ((reinterpret_cast<std::uintptr_t>(source) | reinterpret_cast<std::uintptr_t>(target)) &
       (sizeof(uint4) - 1)) == 0;
  const std::size_t words = aligned ? bytes / sizeof(uint4) : 0;
  for (std::size_t i = first; i < words; i += stride) {
    reinterpret_cast<uint4*>(target)[i] = reinterpret_cast<const uint4*>(source)[i];
  }
  for (std::size_t i = words * sizeof(uint4) + first; i < bytes; i += stride) {
    target[i] = source[i];
  }
}

}  // namespace

cudaError_t kernel_copy(void* const* targets, const void* const* sources, const std::size_t* bytes,
                        std::size_t count, unsigned num_blocks, cudaStream_t stream) {
  for (std::size_t begin = 0; begin < count; begin += kMostPieces) {
    const auto pieces = static_cast<unsigned>(std::min<std::size_t>(count - begin, kMostPieces));
    Pieces table = {};
    std::copy_n(targets + begin, pieces, table.target);
    std::copy_n(sources + begin, pieces, table.source);
    std::copy_n(bytes + begin, pieces, table.bytes);
    const dim3 grid(std::max(1U, num_blocks / pieces), pieces);
    copy_pieces<<<grid, kThreads, 0, stream>>>(table);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace fold3d
