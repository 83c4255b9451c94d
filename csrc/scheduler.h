// Starts all communication of one rank from one thread: PP.sync at once, DP.sync in slices that
// wait while the gate is closed (paper Algorithm 2, Sec. V-A).
//
// Keeps two invariants. A lane's slices start in the order in which they were submitted: the gate
// only delays them. An operation is destroyed on its caller's or on the scheduler's thread, never on
// the thread that a library calls back on: that thread may belong to an object which dies with the
// operation, a process group say, and would then join itself. This file does not depend on torch.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "clock.h"
#include "gate.h"
#include "owner.h"

namespace fold3d {

/// Called with an empty string after success, else with the error.
using Done = std::function<void(const std::string& error)>;

/// What the scheduler starts: a transfer, or one slice of a collective.
class Operation {
 public:
  virtual ~Operation() = default;
  virtual std::size_t num_bytes() const = 0;
  /// Whether its input is complete, on a device that runs asynchronously to the host.
  virtual bool ready() { return true; }
  /// Start it; the library calls `done` once, from any thread. May throw instead.
  virtual void start(Done done) = 0;
  /// Order the calling thread's stream after it; it has ended.
  virtual void join() {}
  /// Cancel it after a failure, so that a thread blocked in it returns.
  virtual void abort() {}
};

/// A transfer, or a collective with all its slices, as the caller waits for it.
class Task {
 public:
  Task(std::string name, std::size_t num_operations)
      : name_(std::move(name)), num_running_(num_operations) {}

  /// Block until it is complete, on a GPU too: a host that only made its stream wait would launch
  /// what follows until CUDA's launch queue is full, and then hold the lock that the scheduler's
  /// thread needs to launch the send which all of it depends on (nccl#1766). And what a library
  /// keeps alive for an operation is free when `join` returns. Throws the first failure of the job,
  /// with this task's name, or a timeout.
  void wait(std::optional<double> timeout_s = {});
  /// True if all operations have ended, not only started, or the job has failed.
  bool is_completed() const;
  /// Call `call` when all operations have ended or the job has failed: at once if that is so, else
  /// on a thread that must not block.
  void add_done_callback(std::function<void()> call);
  const std::string& name() const { return name_; }

 private:
  friend class Scheduler;

  // Never called under the scheduler's mutex: they run the done callbacks.
  void end_operation();
  void fail(const std::string& error);

  const std::string name_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t num_running_;   // operations that have not ended
  std::string error_;
  std::vector<std::shared_ptr<Operation>> operations_;
  std::function<void()> on_wait_;  // called when a caller begins to wait
  std::vector<std::function<void()>> done_callbacks_;
};

/// A control message between two ranks.
struct Message {
  enum Kind : std::uint8_t { kTransfer = 1, kTransferDone, kFailure, kClosing, kReceiverWaiting };
  Kind kind = kTransfer;
  Transfer transfer;
  double eta_s = 0;    // until the transfer starts
  double lease_s = 0;  // from then on, how long it may take
  std::string text;    // of a failure
};

/// Control connections to other ranks. Without them a rank knows only its own transfers.
class Peers {
 public:
  virtual ~Peers() = default;
  /// Send without blocking; may lose a message.
  virtual void send_message(int rank, const Message& message) = 0;
  /// Send to all connected neighbours without blocking, however much is queued.
  virtual void broadcast(const Message& message) = 0;
};

struct Policy {
  int rank = 0;
  int slices_in_flight = 1;   // per lane, and one more shortly before one of them ends
  double lease_s = 0.05;      // of a closure, before any transfer's time is known
  double pause_share = 0.5;   // of the time that slices may be held back, at most
  double window_s = 1.0;      // over which that share is looked at
  double timeout_s = 1800.0;  // of one operation, from its start
};

struct Statistics {
  std::uint64_t transfers = 0, slices = 0, unanswered = 0, announced = 0;
  double paused_s = 0;    // slices were there and the gate held them back
  int exhausted = 0;      // how often the pause budget was
  double slice_s = 0;     // a slice that nothing disturbs
};

class Scheduler {
 public:
  /// Starts the thread. It runs until `shutdown` is called or the last owner is gone, and then
  /// until the last operation that it started has ended.
  static std::shared_ptr<Scheduler> make(const Policy& policy);
  Scheduler(const Scheduler&) = delete;

  /// Must be set before anything is submitted.
  void set_peers(std::shared_ptr<Peers> peers);

  std::shared_ptr<Task> send(int peer, int direction, std::string name,
                             std::shared_ptr<Operation> operation);
  std::shared_ptr<Task> receive(int peer, int direction, std::string name,
                                std::shared_ptr<Operation> operation);
  /// A lane is a process group: its slices start in order, on all its ranks the same.
  std::shared_ptr<Task> reduce(int lane, std::string name,
                               std::vector<std::shared_ptr<Operation>> slices);
  /// Announce that the next send to `peer` starts in `eta_s`. Both ends keep the link free for it
  /// if the receiver waits.
  void announce(int peer, int direction, double eta_s);

  /// Handle a control message of another rank.
  void on_message(const Message& message);
  /// Fail every task with `error`, unless one has failed before, and send it to all ranks.
  void fail(const std::string& error);
  /// The first failure; empty if there is none.
  std::string failure() const;
  /// Let what was submitted end, for at most `timeout_s`, and start nothing from then on. False if
  /// something was left, which then has failed.
  bool shutdown(double timeout_s);
  /// The last owner is gone: end when all that was submitted has ended.
  void leave();

  Statistics statistics() const;

 private:
  struct Pending {
    std::shared_ptr<Task> task;
    std::shared_ptr<Operation> operation;
    std::string name;
    std::optional<Transfer> transfer;
    bool is_send = false;
    int lane = 0;
  };
  struct Flight {
    Pending item;
    Time started;
    bool reported = false;  // as timed out
    bool ended = false;     // its callbacks are running
  };
  struct Lane {
    std::deque<Pending> queue;
    int in_flight = 0;
    Time since{};  // when the oldest slice in flight was the only one: its start or the end before
  };
  struct Link {
    std::uint64_t submitted = 0;  // sends given to us
    std::uint64_t received = 0;   // receives that have ended
    std::uint64_t posted = 0;     // receives given to us
    double s_per_byte = 0;        // 0: not known yet
    std::size_t num_bytes = 0;    // of the last send
    int num_unanswered = 0;       // sends in a row of which no kTransferDone came
    /// Sends without their kTransferDone: start and bytes.
    std::map<std::uint64_t, std::pair<Time, std::size_t>> unconfirmed;
    std::uint64_t waited_for = 0;  // receives up to this one, not included, have been waited for
    /// Transfers that no receiver waits for yet: from when to when they would close the gate.
    std::map<std::uint64_t, std::pair<Time, Time>> expected;
  };
  using LinkKey = std::tuple<int, int, int>;  // sender, receiver, direction

  explicit Scheduler(const Policy& policy);

  void check_process() const;
  void run();
  void start(Pending item, std::unique_lock<std::mutex>& lock);
  void finish(std::uint64_t flight, const std::string& error);
  void retire(std::uint64_t flight, std::unique_lock<std::mutex>& lock);
  void finish_transfer(const Flight& flight);
  void close_gate_for(const Pending& item, Time now);
  void expect_transfer(const Transfer& transfer, Time from, Time until);
  void receiver_waiting(const Transfer& transfer);
  void transfer_done(const Transfer& transfer);
  void fail_locked(const std::string& error, std::unique_lock<std::mutex>& lock);
  bool release_ended(std::unique_lock<std::mutex>& lock);
  bool start_next(Time now, std::unique_lock<std::mutex>& lock);
  Time next_start(const Lane& lane) const;
  Time next_wake(Time now) const;
  void fail_timed_out(Time now, std::unique_lock<std::mutex>& lock);
  bool idle() const;
  double lead_s(double lease_s) const;
  double lease_s(const Link& link, std::size_t num_bytes) const;
  void send_message(int rank, Message::Kind kind, const Transfer& transfer, double eta_s,
                    double lease_s);
  Link& link_of(const Transfer& transfer);

  const Policy policy_;
  const int process_;
  std::shared_ptr<Peers> peers_;
  std::weak_ptr<Scheduler> self_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Gate gate_;
  std::deque<Pending> transfers_;
  std::map<int, Lane> lanes_;
  std::map<LinkKey, Link> links_;
  std::map<std::uint64_t, Flight> flights_;
  std::uint64_t next_flight_ = 0;
  bool awaits_device_ = false;  // something is not ready: look again soon
  bool stopping_ = false;
  std::thread::id thread_;
  bool stopped_ = false;  // the thread starts nothing any more
  bool left_ = false;
  std::vector<std::shared_ptr<void>> ended_;  // released by the thread
  std::string error_;
  Statistics statistics_;
  double slice_s_ = 0;
};

}  // namespace fold3d
