// The clock of everything here: monotonic, and in plain seconds wherever a length is meant.
#pragma once

#include <chrono>

namespace fold3d {

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;

inline Clock::duration seconds(double s) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(s));
}

inline double in_seconds(Clock::duration d) { return std::chrono::duration<double>(d).count(); }

}  // namespace fold3d
