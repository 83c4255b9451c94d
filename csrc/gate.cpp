#include "gate.h"

#include <algorithm>

namespace fold3d {

Gate::Gate(double pause_share, double window_s)
    : share_(pause_share), capacity_s_(pause_share * window_s), allowance_s_(capacity_s_) {}

void Gate::close(const Transfer& transfer, Time from, Time until) {
  closures_[transfer] = {from, until};
}

void Gate::open(const Transfer& transfer) { closures_.erase(transfer); }

void Gate::open_until(const Transfer& transfer) {
  Transfer first = transfer;
  first.sequence = 0;
  closures_.erase(closures_.lower_bound(first), closures_.upper_bound(transfer));
}

bool Gate::holds(Time now, bool has_slice) {
  account(now);
  pausing_ = has_slice && !exhausted_ && closed(now);
  return pausing_;
}

std::optional<Time> Gate::next_change(Time now) const {
  if (!pausing_) return {};
  Time next = now + seconds(std::max(allowance_s_, 0.0) / (1 - std::min(share_, 0.99)));
  for (const auto& [_, closure] : closures_)
    if (closure.from <= now) next = std::min(next, closure.until);
  return next;
}

bool Gate::closed(Time now) {
  std::erase_if(closures_, [&](const auto& entry) { return entry.second.until <= now; });
  return std::any_of(closures_.begin(), closures_.end(),
                     [&](const auto& entry) { return entry.second.from <= now; });
}

// A bucket of seconds: pauses take from it, time refills it. Once empty it stays shut until half
// full, so that some transfers have the link for themselves instead of all a part of it.
void Gate::account(Time now) {
  const double passed_s = last_ == Time{} ? 0 : in_seconds(now - last_);
  last_ = now;
  allowance_s_ = std::min(capacity_s_, allowance_s_ + share_ * passed_s);
  if (pausing_) {
    paused_s_ += passed_s;
    allowance_s_ -= passed_s;
  }
  if (allowance_s_ <= 0 && share_ < 1) {
    times_exhausted_ += !exhausted_;
    exhausted_ = true;
  } else if (allowance_s_ >= capacity_s_ / 2) {
    exhausted_ = false;
  }
}

}  // namespace fold3d
