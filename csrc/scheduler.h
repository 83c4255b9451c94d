// Starts all communication of one rank from one thread: PP.sync at once, DP.sync in slices that
// wait while the gate is closed (paper Algorithm 2, Sec. V-A).
//
// Keeps two invariants: what is started in a lane is started in the order in which it was given, and
// the gate only delays it; and what was given is let go of by its caller or by the scheduler's own
// thread, never on the thread that a library calls back on. Such a thread may belong to what dies
// with an operation, a process group say, and would then wait for its own end. Nothing of torch is
// known here.
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

/// Empty if all went well, else what went wrong.
using Done = std::function<void(const std::string& error)>;

/// What the scheduler starts: a transfer, or one slice of a collective.
class Operation {
 public:
  virtual ~Operation() = default;
  virtual std::size_t num_bytes() const = 0;
  /// Whether its input is complete, on a device that computes behind the host's back.
  virtual bool ready() { return true; }
  /// Hand it to the library, which calls `done` once, from any thread; may throw instead.
  virtual void start(Done done) = 0;
  /// Whether the host must wait for its end; else its start is enough, and `join` does the rest.
  virtual bool host_waits() const { return true; }
  /// Order the calling thread's stream after it.
  virtual void join() {}
  /// Give up after a failure, so that whoever is blocked in it returns.
  virtual void abort() {}
};

/// What a caller waits for: a transfer, or a collective with all its slices.
class Task {
 public:
  Task(std::string name, std::size_t num_operations)
      : name_(std::move(name)), unsettled_(num_operations), running_(num_operations) {}

  /// Block until it is over. Throws the first failure of the job, with this task's name, or says
  /// that the time is up.
  void wait(std::optional<double> timeout_s = {});
  bool completed() const;
  /// Have `call` called once all operations have ended, or the job has failed: at once if that is
  /// so, else on a thread that may not be kept waiting.
  void when_over(std::function<void()> call);
  const std::string& name() const { return name_; }

 private:
  friend class Scheduler;

  // None of these may be called under the scheduler's mutex: they call whoever asked to be.
  void settle();
  void end();
  void fail(const std::string& error);

  const std::string name_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t unsettled_;  // operations that somebody would have to wait for
  std::size_t running_;    // operations that have not ended
  std::string error_;
  std::vector<std::shared_ptr<Operation>> operations_;
  std::function<void()> waited_for_;  // called when somebody begins to wait
  std::vector<std::function<void()>> calls_;
};

/// What ranks tell each other beside their data.
struct Message {
  enum Kind : std::uint8_t { kTransfer = 1, kEnd, kFailure, kBye, kWanted };
  Kind kind = kTransfer;
  Transfer transfer;
  double eta_s = 0;    // until the transfer starts
  double lease_s = 0;  // from then on, how long it may take
  std::string text;    // of a failure
};

/// The way to other ranks; without one, ranks know only of their own transfers.
class Peers {
 public:
  virtual ~Peers() = default;
  /// Send without blocking; may lose a message.
  virtual void tell(int rank, const Message& message) = 0;
  /// Send to all neighbours, as surely as can be.
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
  /// Starts the thread. It runs until `shutdown` is called or nobody has the scheduler any more, and
  /// then until the last operation that it started has ended.
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
  /// Say that the next send to `peer` will come in `eta_s`: both ends keep the way clear for it if
  /// the receiver waits.
  void announce(int peer, int direction, double eta_s);

  /// What another rank said.
  void hear(const Message& message);
  /// End everything with an error; the first one counts. It is told to all ranks.
  void fail(const std::string& error);
  /// The first failure; empty if there is none.
  std::string failure() const;
  /// Let what was submitted end, for at most `timeout_s`, and start nothing from then on. False if
  /// something was left, which then has failed.
  bool shutdown(double timeout_s);
  /// Nobody has the scheduler any more: end when all that was submitted has ended.
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
    bool reported = false;  // as late
    bool ended = false;     // its end is being told
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
    int silent = 0;               // sends in a row whose end was not told
    std::map<std::uint64_t, std::pair<Time, std::size_t>> begun;
    std::uint64_t wanted = 0;  // receives up to this one, not included, have been waited for
    std::map<std::uint64_t, std::pair<Time, Time>> expected;  // not wanted yet: when, until when
  };
  using LinkKey = std::tuple<int, int, int>;  // sender, receiver, direction

  explicit Scheduler(const Policy& policy);

  void check_process() const;
  void run();
  void start(Pending item, std::unique_lock<std::mutex>& lock);
  void finish(std::uint64_t flight, const std::string& error);
  void land(std::uint64_t flight, std::unique_lock<std::mutex>& lock);
  void finish_transfer(const Flight& flight);
  void close_for(const Pending& item, Time now);
  void expect(const Transfer& transfer, Time from, Time until);
  void want(const Transfer& transfer);
  void over(const Transfer& transfer);
  void fail_locked(const std::string& error, std::unique_lock<std::mutex>& lock);
  bool let_go(std::unique_lock<std::mutex>& lock);
  bool start_what_may(Time now, std::unique_lock<std::mutex>& lock);
  Time room(const Lane& lane) const;
  Time next_wake(Time now) const;
  void look_for_late(Time now, std::unique_lock<std::mutex>& lock);
  bool idle() const;
  double lead_s(double lease_s) const;
  double lease_s(const Link& link, std::size_t num_bytes) const;
  void tell(int rank, Message::Kind kind, const Transfer& transfer, double eta_s, double lease_s);
  Link& link(const Transfer& transfer);

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
  std::vector<std::shared_ptr<void>> ended_;  // for the thread to let go of
  std::string error_;
  Statistics statistics_;
  double slice_s_ = 0;
};

}  // namespace fold3d
