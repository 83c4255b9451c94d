// Decides when a slice of DP.sync may start: not while a transfer of PP.sync is under way or near.
//
// Keeps one invariant: the gate opens by itself. Every closure ends at a time that is set when it
// begins, and closures together hold slices back for no more than a share of a sliding window.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <tuple>

#include "clock.h"

namespace fold3d {

/// One transfer, as its two ends know it.
struct Transfer {
  int sender = 0;     // rank in the job
  int receiver = 0;   // likewise
  int direction = 0;  // of the two links between two ranks: forward 0, backward 1
  std::uint64_t sequence = 0;

  auto key() const { return std::tie(sender, receiver, direction, sequence); }
  bool operator<(const Transfer& other) const { return key() < other.key(); }
};

class Gate {
 public:
  /// Hold slices back for at most `pause_share` of the time, looked at over `window_s`.
  Gate(double pause_share, double window_s);

  /// Close for a transfer from one time to another; replaces its earlier closure.
  void close(const Transfer& transfer, Time from, Time until);
  void open(const Transfer& transfer);
  /// Open for a transfer and for all before it on its link.
  void open_until(const Transfer& transfer);

  /// Whether slices must wait now. `has_slice`: one is ready to start; only then does the time that
  /// passes count as a pause.
  bool holds(Time now, bool has_slice);
  /// When slices may start again without another call; empty if none waits.
  std::optional<Time> next_change(Time now) const;

  double paused_s() const { return paused_s_; }
  int times_exhausted() const { return times_exhausted_; }

 private:
  struct Closure {
    Time from, until;
  };

  bool closed(Time now);
  void account(Time now);

  const double share_, capacity_s_;
  std::map<Transfer, Closure> closures_;
  double allowance_s_;  // what may still be paused; refills with time
  bool exhausted_ = false, pausing_ = false;
  Time last_{};
  double paused_s_ = 0;
  int times_exhausted_ = 0;
};

}  // namespace fold3d
