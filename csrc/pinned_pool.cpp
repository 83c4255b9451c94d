#include "pinned_pool.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace fold3d {
namespace {

constexpr int kPreferred = 1;  // MPOL_PREFERRED of <numaif.h>, which libnuma brings

std::size_t whole_pages(std::size_t num_bytes) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return (num_bytes + page - 1) / page * page;
}

// A wish: a full node, or a container that may not say, falls back to any other.
void prefer(std::byte* memory, std::size_t num_bytes, int numa_node) {
  if (numa_node < 0 || numa_node >= 63) return;
  const std::uint64_t nodes = std::uint64_t{1} << numa_node;
  (void)syscall(SYS_mbind, memory, num_bytes, kPreferred, &nodes, 64UL, 0U);
}

// Give every page its memory. One thread faults in about 1 GB/s, which is minutes for a pool.
void populate(std::byte* memory, std::size_t num_bytes, unsigned num_threads) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t pages = num_bytes / page;
  const std::size_t share = (pages + num_threads - 1) / num_threads * page;
  std::vector<std::thread> threads;
  for (std::size_t begin = 0; begin < num_bytes; begin += share) {
    const std::size_t end = std::min(begin + share, num_bytes);
    threads.emplace_back([=] {
      for (std::size_t at = begin; at < end; at += page) {
        *static_cast<volatile std::byte*>(memory + at) = std::byte{0};
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

PinnedMemory::PinnedMemory(std::size_t num_bytes, int numa_node, unsigned num_threads,
                           Pinning pinning)
    : num_bytes_(whole_pages(num_bytes)), pinning_(pinning) {
  void* mapped = num_bytes == 0 ? MAP_FAILED
                                : mmap(nullptr, num_bytes_, PROT_READ | PROT_WRITE,
                                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) {
    const int error = num_bytes == 0 ? EINVAL : errno;
    throw std::runtime_error(std::to_string(num_bytes) + " bytes of host memory: " +
                             std::strerror(error));
  }
  data_ = static_cast<std::byte*>(mapped);
  (void)madvise(data_, num_bytes_, MADV_HUGEPAGE);  // fewer pages to lock, where there are any
  (void)madvise(data_, num_bytes_, MADV_DONTFORK);  // a forked data loader has no use for it
  prefer(data_, num_bytes_, numa_node);
  populate(data_, num_bytes_, std::max(1U, num_threads));
  if (pinning_.pin != nullptr) {
    if (const int error = pinning_.pin(data_, num_bytes_); error != 0) {
      munmap(data_, num_bytes_);
      throw std::runtime_error(std::to_string(num_bytes_) +
                               " bytes of host memory cannot be page-locked: CUDA error " +
                               std::to_string(error));
    }
  }
}

PinnedMemory::~PinnedMemory() {
  if (pinning_.unpin != nullptr) (void)pinning_.unpin(data_);
  munmap(data_, num_bytes_);
}

}  // namespace fold3d
