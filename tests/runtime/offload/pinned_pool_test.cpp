// PinnedMemory against its promises, with page-locking that is recorded instead of done.
#include "pinned_pool.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <new>
#include <stdexcept>
#include <string>

using fold3d::PinnedMemory;

namespace {

std::map<void*, std::size_t> locked;
int refuses = 0;

int pin(void* memory, std::size_t num_bytes) {
  if (refuses != 0) return refuses;
  locked[memory] = num_bytes;
  return 0;
}

int unpin(void* memory) { return locked.erase(memory) == 1 ? 0 : 1; }

void require(bool holds, const char* claim) {
  if (holds) return;
  std::fprintf(stderr, "not so: %s\n", claim);
  std::exit(1);
}

std::string reason(std::size_t num_bytes) {
  try {
    PinnedMemory memory(num_bytes, -1, 2, {pin, unpin});
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

std::size_t resident_bytes() {
  std::size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages >> pages;
  return pages * 4096;
}

}  // namespace

int main() {
  constexpr std::size_t kBytes = (64 << 20) + 1;
  const std::size_t before = resident_bytes();
  {
    PinnedMemory memory(kBytes, 0, 3, {pin, unpin});
    require(memory.num_bytes() >= kBytes, "there is as much as was asked for");
    require(memory.num_bytes() % 4096 == 0, "it is whole pages");
    require(locked.at(memory.data()) == memory.num_bytes(), "all of it is locked, once");
    require(resident_bytes() >= before + kBytes, "all of it is there before it is used");
    std::memset(memory.data(), 255, memory.num_bytes());
  }
  require(locked.empty(), "it is unlocked in the end");
  require(resident_bytes() < before + kBytes / 2, "it is given back in the end");

  PinnedMemory unlocked(1, -1, 0, {});
  unlocked.data()[0] = std::byte{1};  // a host without a GPU; no threads means one

  refuses = 2;
  require(reason(4096).find("4096 bytes of host memory cannot be page-locked: CUDA error 2") == 0,
          "a driver that refuses is an error with the number of bytes");
  require(locked.empty(), "and nothing stays locked");
  require(reason(std::size_t{1} << 60).find("1152921504606846976 bytes of host memory: ") == 0,
          "a host without the memory is an error with the number of bytes");
  require(reason(0).find("0 bytes of host memory: ") == 0, "nothing is no request");
  std::puts("ok");
}
