// Host memory that copies to and from a GPU run at full speed from.
//
// Anonymous memory of this process, near one NUMA node, written once by many threads, and
// page-locked once as a whole. However the process ends, nothing of it stays behind.
#pragma once

#include <cstddef>

namespace fold3d {

// How memory is page-locked: cudaHostRegister and cudaHostUnregister where there is a GPU. Both
// return 0 or an error number; neither is called when null.
struct Pinning {
  int (*pin)(void* memory, std::size_t num_bytes) = nullptr;
  int (*unpin)(void* memory) = nullptr;
};

class PinnedMemory {
 public:
  // `numa_node` is where the memory should be; -1 leaves it to the system.
  // Throws std::runtime_error: the host has no such memory, or it cannot be page-locked.
  PinnedMemory(std::size_t num_bytes, int numa_node, unsigned num_threads, Pinning pinning);
  ~PinnedMemory();

  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  std::byte* data() const { return data_; }
  std::size_t num_bytes() const { return num_bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t num_bytes_;  // whole pages
  Pinning pinning_;
};

}  // namespace fold3d
