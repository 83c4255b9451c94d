#include "scheduler.h"

#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace fold3d {
namespace {

constexpr auto kDevicePoll = std::chrono::microseconds(20);
constexpr double kNextSliceAt = 0.8;   // of a slice's time: when the next one starts
constexpr double kLeaseFactor = 3;     // how long a transfer may close the gate, in its own times
constexpr int kMostUnanswered = 2;     // sends without an answer; then no answer is waited for

}  // namespace

void Task::wait(std::optional<double> timeout_s) {
  if (on_wait_ && !is_completed()) on_wait_();
  {
    std::unique_lock lock(mutex_);
    auto is_done = [this] { return num_running_ == 0 || !error_.empty(); };
    if (!timeout_s) {
      changed_.wait(lock, is_done);
    } else if (!changed_.wait_for(lock, seconds(*timeout_s), is_done)) {
      throw std::runtime_error(name_ + ": not over within " + std::to_string(*timeout_s) + " s");
    }
    if (!error_.empty()) throw std::runtime_error(name_ + ": " + error_);
  }
  for (auto& operation : operations_) operation->join();
}

bool Task::is_completed() const {
  std::lock_guard lock(mutex_);
  return num_running_ == 0 || !error_.empty();
}

void Task::add_done_callback(std::function<void()> call) {
  {
    std::lock_guard lock(mutex_);
    if (num_running_ && error_.empty()) {
      done_callbacks_.push_back(std::move(call));
      return;
    }
  }
  call();
}

void Task::end_operation() {
  std::vector<std::function<void()>> calls;
  {
    std::lock_guard lock(mutex_);
    if (--num_running_ == 0) {
      calls.swap(done_callbacks_);
      changed_.notify_all();
    }
  }
  for (auto& call : calls) call();
}

void Task::fail(const std::string& error) {
  std::vector<std::function<void()>> calls;
  {
    std::lock_guard lock(mutex_);
    if (num_running_ == 0 || !error_.empty()) return;
    calls.swap(done_callbacks_);
    error_ = error;
    changed_.notify_all();
  }
  for (auto& call : calls) call();
}

std::shared_ptr<Scheduler> Scheduler::make(const Policy& policy) {
  std::shared_ptr<Scheduler> scheduler(new Scheduler(policy));
  scheduler->self_ = scheduler;
  std::thread([scheduler] { scheduler->run(); }).detach();
  return owner_of(std::move(scheduler));
}

Scheduler::Scheduler(const Policy& policy)
    : policy_(policy), process_(getpid()), gate_(policy.pause_share, policy.window_s) {}

void Scheduler::set_peers(std::shared_ptr<Peers> peers) {
  std::lock_guard lock(mutex_);
  peers_ = std::move(peers);
}

std::shared_ptr<Task> Scheduler::send(int peer, int direction, std::string name,
                                      std::shared_ptr<Operation> operation) {
  check_process();
  auto task = std::make_shared<Task>(name, 1);
  task->operations_ = {operation};
  std::lock_guard lock(mutex_);
  Transfer transfer{policy_.rank, peer, direction, 0};
  transfer.sequence = link_of(transfer).submitted++;
  if (!error_.empty() || stopping_) {
    task->fail(error_.empty() ? "communication has been shut down" : error_);
    return task;
  }
  transfers_.push_back({task, operation, std::move(name), transfer, true, 0});
  changed_.notify_all();
  return task;
}

std::shared_ptr<Task> Scheduler::receive(int peer, int direction, std::string name,
                                         std::shared_ptr<Operation> operation) {
  check_process();
  auto task = std::make_shared<Task>(name, 1);
  task->operations_ = {operation};
  std::lock_guard lock(mutex_);
  Transfer transfer{peer, policy_.rank, direction, 0};
  transfer.sequence = link_of(transfer).posted++;
  task->on_wait_ = [scheduler = self_, transfer] {
    auto self = scheduler.lock();
    if (!self) return;
    std::lock_guard lock(self->mutex_);
    self->receiver_waiting(transfer);
    self->send_message(transfer.sender, Message::kReceiverWaiting, transfer, 0, 0);
  };
  if (!error_.empty() || stopping_) {
    task->fail(error_.empty() ? "communication has been shut down" : error_);
    return task;
  }
  transfers_.push_back({task, operation, std::move(name), transfer, false, 0});
  changed_.notify_all();
  return task;
}

std::shared_ptr<Task> Scheduler::reduce(int lane, std::string name,
                                        std::vector<std::shared_ptr<Operation>> slices) {
  check_process();
  auto task = std::make_shared<Task>(name, slices.size());
  task->operations_ = slices;
  std::lock_guard lock(mutex_);
  if (!error_.empty() || stopping_) {
    task->fail(error_.empty() ? "communication has been shut down" : error_);
    return task;
  }
  for (std::size_t i = 0; i < slices.size(); ++i) {
    auto slice = name + ", slice " + std::to_string(i + 1) + " of " + std::to_string(slices.size());
    lanes_[lane].queue.push_back({task, slices[i], std::move(slice), {}, false, lane});
  }
  changed_.notify_all();
  return task;
}

void Scheduler::announce(int peer, int direction, double eta_s) {
  check_process();
  std::lock_guard lock(mutex_);
  if (!error_.empty() || stopping_) return;
  Transfer transfer{policy_.rank, peer, direction, 0};
  transfer.sequence = link_of(transfer).submitted;
  const Link& link = link_of(transfer);
  const double lease = lease_s(link, link.num_bytes);
  const Time now = Clock::now();
  expect_transfer(transfer, now + seconds(eta_s - lead_s(lease)), now + seconds(eta_s + lease));
  send_message(peer, Message::kTransfer, transfer, eta_s, lease);
  ++statistics_.announced;
  changed_.notify_all();
}

void Scheduler::on_message(const Message& message) {
  std::unique_lock lock(mutex_);
  const Time now = Clock::now();
  if (message.kind == Message::kFailure) {
    fail_locked(message.text, lock);
  } else if (message.kind == Message::kTransfer) {
    if (message.transfer.sequence < link_of(message.transfer).received) return;  // it is over
    expect_transfer(message.transfer, now + seconds(message.eta_s - lead_s(message.lease_s)),
           now + seconds(message.eta_s + message.lease_s));
  } else if (message.kind == Message::kReceiverWaiting) {
    receiver_waiting(message.transfer);
  } else if (message.kind == Message::kTransferDone) {
    Link& link = link_of(message.transfer);
    link.num_unanswered = 0;
    auto& unconfirmed = link.unconfirmed;
    const auto sequence = message.transfer.sequence;
    if (auto found = unconfirmed.find(sequence); found != unconfirmed.end()) {
      const auto [began, num_bytes] = found->second;
      if (num_bytes) {
        const double measured = in_seconds(now - began) / static_cast<double>(num_bytes);
        link.s_per_byte = link.s_per_byte ? 0.7 * link.s_per_byte + 0.3 * measured : measured;
      }
    }
    unconfirmed.erase(unconfirmed.begin(), unconfirmed.upper_bound(sequence));
    transfer_done(message.transfer);
  }
  changed_.notify_all();
}

void Scheduler::fail(const std::string& error) {
  std::unique_lock lock(mutex_);
  fail_locked(error, lock);
}

std::string Scheduler::failure() const {
  std::lock_guard lock(mutex_);
  return error_;
}

bool Scheduler::shutdown(double timeout_s) {
  check_process();
  bool drained = true;
  std::unique_lock lock(mutex_);
  if (error_.empty())
    drained = changed_.wait_for(lock, seconds(timeout_s), [this] { return idle(); });
  if (!drained) fail_locked("shut down before it was over", lock);
  stopping_ = true;
  changed_.notify_all();
  changed_.wait(lock, [this] { return stopped_ || std::this_thread::get_id() == thread_; });
  return drained;
}

void Scheduler::leave() {
  if (getpid() != process_) return;  // a fork's copy, without a thread
  std::lock_guard lock(mutex_);
  left_ = true;
  changed_.notify_all();
}

Statistics Scheduler::statistics() const {
  std::lock_guard lock(mutex_);
  Statistics result = statistics_;
  result.paused_s = gate_.paused_s();
  result.exhausted = gate_.times_exhausted();
  result.slice_s = slice_s_;
  return result;
}

void Scheduler::check_process() const {
  if (getpid() != process_)
    throw std::runtime_error(
        "communication of another process: this one was forked from it, and a thread does not "
        "survive a fork; make a communicator of its own");
}

void Scheduler::run() {
  std::unique_lock lock(mutex_);
  thread_ = std::this_thread::get_id();
  while (!stopping_ && !(left_ && idle())) {
    const Time now = Clock::now();
    if (start_next(now, lock)) continue;  // the lock was released: look again
    if (release_ended(lock)) continue;
    fail_timed_out(now, lock);
    changed_.wait_until(lock, next_wake(now));
  }
  stopping_ = stopped_ = true;
  changed_.notify_all();
  // A library may come back to what it was given when nobody waits for it any more.
  while (release_ended(lock) || !flights_.empty())
    if (ended_.empty()) changed_.wait(lock);
}

// Releases what has ended, without the lock: a process group that is destroyed joins threads which
// may wait for the lock. Returns true if there was something to release.
bool Scheduler::release_ended(std::unique_lock<std::mutex>& lock) {
  if (ended_.empty()) return false;
  auto ended = std::exchange(ended_, {});
  lock.unlock();
  ended.clear();
  lock.lock();
  return true;
}

// Starts a transfer, whether or not the gate is open, or else a slice. Returns true if it did.
bool Scheduler::start_next(Time now, std::unique_lock<std::mutex>& lock) {
  awaits_device_ = false;
  // Receives need no input, and sends of one link must keep their order: the first unready send
  // holds the later ones of its link.
  std::vector<LinkKey> blocked;
  for (auto item = transfers_.begin(); item != transfers_.end(); ++item) {
    const LinkKey key{item->transfer->sender, item->transfer->receiver, item->transfer->direction};
    if (std::find(blocked.begin(), blocked.end(), key) != blocked.end()) continue;
    if (!item->operation->ready()) {
      awaits_device_ = true;
      blocked.push_back(key);
      continue;
    }
    Pending next = std::move(*item);
    transfers_.erase(item);
    start(std::move(next), lock);
    return true;
  }
  Lane* waiting = nullptr;
  for (auto& [_, lane] : lanes_) {
    if (lane.queue.empty() || next_start(lane) > now) continue;
    if (!lane.queue.front().operation->ready()) {
      awaits_device_ = true;
    } else if (!waiting || lane.in_flight < waiting->in_flight) {
      waiting = &lane;
    }
  }
  if (gate_.holds(now, waiting != nullptr) || !waiting) return false;
  Pending next = std::move(waiting->queue.front());
  waiting->queue.pop_front();
  if (++waiting->in_flight == 1) waiting->since = now;
  start(std::move(next), lock);
  return true;
}

// When a lane may start its next slice. A little before one ends: the threads that notice its end
// and start another may have to wait for a CPU, and the link would idle meanwhile.
Time Scheduler::next_start(const Lane& lane) const {
  if (lane.in_flight < policy_.slices_in_flight) return Time::min();
  if (lane.in_flight > policy_.slices_in_flight || slice_s_ == 0) return Time::max();
  return lane.since + seconds(kNextSliceAt * slice_s_);
}

void Scheduler::start(Pending item, std::unique_lock<std::mutex>& lock) {
  const Time now = Clock::now();
  if (item.is_send) close_gate_for(item, now);
  ++(item.transfer ? statistics_.transfers : statistics_.slices);
  const std::uint64_t flight = next_flight_++;
  auto operation = item.operation;
  flights_[flight] = {std::move(item), now};
  lock.unlock();
  std::string error;
  try {
    operation->start([self = self_.lock(), flight](const std::string& how) {
      self->finish(flight, how);
    });
  } catch (const std::exception& exception) {
    error = exception.what();
    if (error.empty()) error = "failed without a message";
  }
  if (!error.empty()) finish(flight, error);
  lock.lock();
}

void Scheduler::close_gate_for(const Pending& item, Time now) {
  Link& link = link_of(*item.transfer);
  if (!link.unconfirmed.empty()) {
    const auto& [began, num_bytes] = link.unconfirmed.rbegin()->second;
    if (now > began + seconds(lease_s(link, num_bytes))) {
      ++link.num_unanswered;
      ++statistics_.unanswered;
      link.unconfirmed.clear();
    }
  }
  link.num_bytes = item.operation->num_bytes();
  const double lease = lease_s(link, link.num_bytes);
  expect_transfer(*item.transfer, now, now + seconds(lease));
  link.unconfirmed[item.transfer->sequence] = {now, link.num_bytes};
  send_message(item.transfer->receiver, Message::kTransfer, *item.transfer, 0, lease);
}

// A transfer closes the gate only if its receiver waits: otherwise it may share the link.
void Scheduler::expect_transfer(const Transfer& transfer, Time from, Time until) {
  Link& link = link_of(transfer);
  if (!peers_ || transfer.sequence < link.waited_for) {
    gate_.close(transfer, from, until);
  } else {
    link.expected[transfer.sequence] = {from, until};
  }
}

void Scheduler::receiver_waiting(const Transfer& transfer) {
  Link& link = link_of(transfer);
  link.waited_for = std::max(link.waited_for, transfer.sequence + 1);
  while (!link.expected.empty() && link.expected.begin()->first < link.waited_for) {
    const auto [sequence, times] = *link.expected.begin();
    link.expected.erase(link.expected.begin());
    Transfer next = transfer;
    next.sequence = sequence;
    gate_.close(next, times.first, times.second);
  }
}

void Scheduler::transfer_done(const Transfer& transfer) {
  Link& link = link_of(transfer);
  link.expected.erase(link.expected.begin(), link.expected.upper_bound(transfer.sequence));
  gate_.open_until(transfer);
}

void Scheduler::finish(std::uint64_t number, const std::string& error) {
  std::unique_lock lock(mutex_);
  auto found = flights_.find(number);
  if (found == flights_.end() || found->second.ended) return;
  Flight& flight = found->second;  // stays where it is until it is erased below
  flight.ended = true;
  if (!error.empty()) {
    fail_locked("rank " + std::to_string(policy_.rank) + ": " + flight.item.name + ": " + error,
                lock);
    const std::string first = error_;
    lock.unlock();
    flight.item.task->fail(first);
    retire(number, lock);
    return;
  }
  const Time now = Clock::now();
  if (flight.item.transfer) {
    finish_transfer(flight);
  } else {
    Lane& lane = lanes_[flight.item.lane];
    --lane.in_flight;
    // The time of a slice that no peer's gate and no transfer stretches: a low quantile.
    const double took_s = in_seconds(now - std::exchange(lane.since, now));
    const double step = took_s < slice_s_ ? 0.3 : 0.02;
    slice_s_ = slice_s_ ? slice_s_ + step * (took_s - slice_s_) : took_s;
  }
  changed_.notify_all();
  lock.unlock();
  flight.item.task->end_operation();
  retire(number, lock);
}

// Hands what has ended to the scheduler's thread: here it might be destroyed on its own thread.
void Scheduler::retire(std::uint64_t number, std::unique_lock<std::mutex>& lock) {
  lock.lock();
  auto flight = flights_.extract(number);
  ended_.push_back(std::move(flight.mapped().item.task));
  ended_.push_back(std::move(flight.mapped().item.operation));
  changed_.notify_all();
}

// A send ends when its bytes are in a socket's buffer. The receiver's kTransferDone comes later.
void Scheduler::finish_transfer(const Flight& flight) {
  const Transfer& transfer = *flight.item.transfer;
  Link& link = link_of(transfer);
  if (!flight.item.is_send) {
    link.received = std::max(link.received, transfer.sequence + 1);
    transfer_done(transfer);
    send_message(transfer.sender, Message::kTransferDone, transfer, 0, 0);
  } else if (!peers_ || link.num_unanswered >= kMostUnanswered) {
    transfer_done(transfer);
    if (!peers_) link.unconfirmed.erase(transfer.sequence);
  }
}

void Scheduler::fail_locked(const std::string& error, std::unique_lock<std::mutex>& lock) {
  if (!error_.empty()) return;
  error_ = error;
  std::vector<std::shared_ptr<Task>> failed;
  std::vector<std::shared_ptr<Operation>> queued, given_up;
  const auto drop = [&](Pending& item) {
    failed.push_back(std::move(item.task));
    queued.push_back(std::move(item.operation));
  };
  for (auto& item : transfers_) drop(item);
  for (auto& [_, lane] : lanes_)
    for (auto& item : lane.queue) drop(item);
  for (auto& [_, flight] : flights_) {
    failed.push_back(flight.item.task);
    given_up.push_back(flight.item.operation);
  }
  transfers_.clear();
  lanes_.clear();
  changed_.notify_all();
  auto peers = peers_;
  lock.unlock();
  for (auto& task : failed) task->fail(error);
  if (peers) {
    Message message;
    message.kind = Message::kFailure;
    message.text = error;
    peers->broadcast(message);
  }
  for (auto& operation : given_up) operation->abort();
  lock.lock();
  for (auto* operations : {&queued, &given_up})
    ended_.insert(ended_.end(), operations->begin(), operations->end());
  ended_.insert(ended_.end(), failed.begin(), failed.end());
  ended_.push_back(std::move(peers));
  changed_.notify_all();
}

void Scheduler::fail_timed_out(Time now, std::unique_lock<std::mutex>& lock) {
  for (auto& [_, flight] : flights_) {
    if (flight.reported || flight.ended) continue;
    if (now < flight.started + seconds(policy_.timeout_s)) continue;
    if (flight.item.transfer && !flight.item.is_send) continue;  // posted early, it waits by right
    flight.reported = true;
    fail_locked("rank " + std::to_string(policy_.rank) + ": " + flight.item.name +
                    ": no end within " + std::to_string(policy_.timeout_s) + " s of its start",
                lock);
    return;
  }
}

Time Scheduler::next_wake(Time now) const {
  Time wake = now + std::chrono::seconds(1);
  if (awaits_device_) wake = now + kDevicePoll;
  for (const auto& [_, lane] : lanes_)
    if (!lane.queue.empty() && next_start(lane) > now) wake = std::min(wake, next_start(lane));
  if (auto change = gate_.next_change(now)) wake = std::min(wake, *change);
  for (const auto& [_, flight] : flights_)
    if (!flight.reported && !flight.ended)
      wake = std::min(wake, flight.started + seconds(policy_.timeout_s));
  return std::max(wake, now + std::chrono::microseconds(1));
}

bool Scheduler::idle() const {
  const bool queued = std::any_of(lanes_.begin(), lanes_.end(),
                                  [](const auto& lane) { return !lane.second.queue.empty(); });
  return !error_.empty() || (transfers_.empty() && !queued && flights_.empty());
}

// What is in flight when the gate closes still goes first: the gate closes that much earlier, but
// by no more than half of the time that the transfer itself takes.
double Scheduler::lead_s(double lease_s) const {
  return std::min(slice_s_ * (policy_.slices_in_flight + 1), lease_s / kLeaseFactor / 2);
}

double Scheduler::lease_s(const Link& link, std::size_t num_bytes) const {
  if (!link.s_per_byte) return policy_.lease_s;
  return std::max(kLeaseFactor * link.s_per_byte * static_cast<double>(num_bytes), 1e-3);
}

void Scheduler::send_message(int rank, Message::Kind kind, const Transfer& transfer, double eta_s,
                     double lease_s) {
  if (peers_) peers_->send_message(rank, {kind, transfer, eta_s, lease_s, {}});
}

Scheduler::Link& Scheduler::link_of(const Transfer& transfer) {
  return links_[{transfer.sender, transfer.receiver, transfer.direction}];
}

}  // namespace fold3d
