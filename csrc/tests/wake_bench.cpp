// How long a slice that the gate holds back waits for its start once a peer says that the transfer
// is over: make -C csrc wake
#include <algorithm>
#include <cstdio>

#include "../scheduler.h"
#include "network.h"

using namespace fold3d;

int main() {
  constexpr int kRounds = 2000;
  Policy policy;
  policy.rank = 1;
  policy.lease_s = 10;
  policy.pause_share = 1;
  auto scheduler = Scheduler::make(policy);
  std::vector<double> wakes_s;
  for (std::uint64_t round = 0; round < kRounds; ++round) {
    Message message;
    message.transfer = {0, 1, 0, round};
    message.lease_s = 10;
    scheduler->on_message(message);  // rank 0 sends
    Time started;
    auto slice = scheduler->reduce(0, "slice", {fake([&](Done done) {
                                     started = Clock::now();
                                     done("");
                                   })});
    std::this_thread::sleep_for(std::chrono::microseconds(500));  // the thread sleeps again
    CHECK(!slice->is_completed());
    message.kind = Message::kTransferDone;
    const Time over = Clock::now();
    scheduler->on_message(message);
    slice->wait(20);
    wakes_s.push_back(in_seconds(started - over));
  }
  CHECK(scheduler->shutdown(20));
  std::sort(wakes_s.begin(), wakes_s.end());
  std::printf("gate wake over %d rounds: p50 %.1f us, p99 %.1f us, most %.1f us\n", kRounds,
              1e6 * wakes_s[kRounds / 2], 1e6 * wakes_s[kRounds * 99 / 100], 1e6 * wakes_s.back());
}
