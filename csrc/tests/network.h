// A network in one process: collectives that end when all ranks have started them, transfers that
// take their time, and control messages that are late, lost or duplicated.
#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <queue>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../scheduler.h"
#include "check.h"

namespace fold3d {

/// Runs functions at their time, on one thread.
class Timeline {
 public:
  Timeline() : thread_([this] { run(); }) {}
  ~Timeline() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  void after(double delay_s, std::function<void()> function) {
    std::lock_guard lock(mutex_);
    due_.emplace(Clock::now() + seconds(delay_s), std::move(function));
    changed_.notify_all();
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (!stopping_) {
      if (due_.empty()) {
        changed_.wait(lock);
      } else if (due_.begin()->first > Clock::now()) {
        changed_.wait_until(lock, due_.begin()->first);
      } else {
        auto function = std::move(due_.begin()->second);
        due_.erase(due_.begin());
        lock.unlock();
        function();
        lock.lock();
      }
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::multimap<Time, std::function<void()>> due_;
  bool stopping_ = false;
  std::thread thread_;
};

class Dice {
 public:
  explicit Dice(unsigned seed) : engine_(seed) {}
  double roll(double most) {
    std::lock_guard lock(mutex_);
    return std::uniform_real_distribution<double>(0, most)(engine_);
  }

 private:
  std::mutex mutex_;
  std::mt19937 engine_;
};

class Network {
 public:
  Network(int num_ranks, double longest_s, unsigned seed)
      : num_ranks_(num_ranks), longest_s_(longest_s), dice(seed) {}

  /// A rank's next collective of a lane. As in NCCL, the n-th of one rank meets the n-th of all.
  void join(int lane, int rank, const std::string& name, Done done) {
    std::lock_guard lock(mutex_);
    auto& mine = next_[{lane, rank}];
    auto& meeting = meetings_[{lane, mine++}];
    if (meeting.waiting.empty()) meeting.name = name;
    CHECK(meeting.name == name);  // the order is the same everywhere
    meeting.waiting.push_back(std::move(done));
    if (static_cast<int>(meeting.waiting.size()) < num_ranks_) return;
    auto all = std::move(meeting.waiting);
    meetings_.erase({lane, mine - 1});
    timeline_.after(dice.roll(longest_s_), [all = std::move(all)] {
      for (auto& one : all) one("");
    });
  }

  /// One end of a transfer; it takes its time from when both are there.
  void meet(const std::string& name, Done done) {
    std::lock_guard lock(mutex_);
    auto found = ends_.find(name);
    if (found == ends_.end()) {
      ends_[name] = std::move(done);
      return;
    }
    auto other = std::move(found->second);
    ends_.erase(found);
    timeline_.after(dice.roll(longest_s_), [other = std::move(other), done = std::move(done)] {
      other("");
      done("");
    });
  }

  void after(double delay_s, std::function<void()> function) {
    timeline_.after(delay_s, std::move(function));
  }

 private:
  struct Meeting {
    std::string name;
    std::vector<Done> waiting;
  };
  const int num_ranks_;
  const double longest_s_;
  std::mutex mutex_;
  std::map<std::pair<int, int>, std::uint64_t> next_;
  std::map<std::pair<int, std::uint64_t>, Meeting> meetings_;
  std::map<std::string, Done> ends_;

 public:
  Dice dice;

 private:
  Timeline timeline_;  // ends first
};

/// An operation made of a function.
class Fake : public Operation {
 public:
  explicit Fake(std::function<void(Done)> start) : start_(std::move(start)) {}
  std::size_t num_bytes() const override { return 1000; }
  void start(Done done) override { start_(std::move(done)); }

 private:
  std::function<void(Done)> start_;
};

inline std::shared_ptr<Operation> fake(std::function<void(Done)> start) {
  return std::make_shared<Fake>(std::move(start));
}

/// Control messages between schedulers: delayed at random, and lost or duplicated with the given
/// probabilities.
class UnreliablePeers : public Peers {
 public:
  UnreliablePeers(Network& network, std::vector<std::weak_ptr<Scheduler>>& ranks,
                  std::vector<int> neighbours, double lost, double doubled)
      : network_(network), ranks_(ranks), neighbours_(std::move(neighbours)), lost_(lost),
        doubled_(doubled) {}
  void send_message(int rank, const Message& message) override {
    if (network_.dice.roll(1) < lost_) return;
    deliver(rank, message);
    if (network_.dice.roll(1) < doubled_) deliver(rank, message);
  }
  void broadcast(const Message& message) override {
    for (int rank : neighbours_) deliver(rank, message);
  }

 private:
  void deliver(int rank, const Message& message) {
    const auto& to = ranks_.at(static_cast<std::size_t>(rank));
    network_.after(network_.dice.roll(2e-4), [to, message] {
      if (auto scheduler = to.lock()) scheduler->on_message(message);
    });
  }
  Network& network_;
  std::vector<std::weak_ptr<Scheduler>>& ranks_;
  const std::vector<int> neighbours_;
  const double lost_, doubled_;
};

}  // namespace fold3d
