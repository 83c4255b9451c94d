// What the scheduler promises: order, preemption, leases, budget, and one error for everybody.
#include <sys/wait.h>
#include <unistd.h>

#include <future>

#include "../control.h"
#include "check.h"
#include "network.h"

using namespace fold3d;

namespace {

using Ranks = std::vector<std::shared_ptr<Scheduler>>;

std::string failure_of(Task& task, double timeout_s = 20) {
  try {
    task.wait(timeout_s);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return {};
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

const Transfer kSomeTransfer{0, 1, 0, 0};

void a_closure_ends_by_itself() {
  Gate gate(1.0, 1.0);
  const Time start = Clock::now();
  gate.close(kSomeTransfer, start + seconds(1), start + seconds(3));
  CHECK(!gate.holds(start, true));
  CHECK(gate.holds(start + seconds(2), true));
  CHECK(*gate.next_change(start + seconds(2)) <= start + seconds(3));
  CHECK(!gate.holds(start + seconds(3), true));
}

void an_end_opens_for_all_transfers_before_it() {
  Gate gate(1.0, 1.0);
  const Time start = Clock::now();
  for (std::uint64_t i = 0; i < 3; ++i)
    gate.close({0, 1, 0, i}, start, start + seconds(10));
  gate.open_until({0, 1, 0, 1});
  CHECK(gate.holds(start, true));
  gate.open_until({0, 1, 1, 5});  // another link's
  CHECK(gate.holds(start, true));
  gate.open_until({0, 1, 0, 2});
  CHECK(!gate.holds(start, true));
}

void pauses_stay_within_their_share() {
  Gate gate(0.25, 1.0);
  const Time start = Clock::now();
  gate.close(kSomeTransfer, start, start + seconds(1000));
  int held = 0;
  for (int i = 0; i < 10000; ++i) held += gate.holds(start + seconds(i * 0.01), true);
  CHECK(held > 2300 && held < 2700);
  CHECK(gate.times_exhausted() > 10);
}

void a_gate_that_holds_nothing_back_spends_nothing() {
  Gate gate(0.25, 1.0);
  const Time start = Clock::now();
  gate.close(kSomeTransfer, start, start + seconds(1000));
  for (int i = 0; i < 1000; ++i) gate.holds(start + seconds(i * 0.01), false);
  CHECK(gate.paused_s() == 0);
  CHECK(gate.holds(start + seconds(10), true));
}

void slices_wait_for_a_transfer_and_go_on_after_it() {
  Policy policy;
  policy.lease_s = 5;
  auto scheduler = Scheduler::make(policy);
  Done end_transfer;
  std::mutex mutex;
  std::vector<std::string> started;
  auto send = scheduler->send(1, 0, "send", fake([&](Done done) {
                                std::lock_guard lock(mutex);
                                started.push_back("send");
                                end_transfer = std::move(done);
                              }));
  while (scheduler->statistics().transfers == 0) std::this_thread::yield();
  auto reduce = scheduler->reduce(0, "reduce", {fake([&](Done done) {
                                    {
                                      std::lock_guard lock(mutex);
                                      started.push_back("slice");
                                    }
                                    done("");
                                  })});
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  {
    std::lock_guard lock(mutex);
    CHECK(started == std::vector<std::string>{"send"});
    CHECK(!reduce->is_completed());
  }
  end_transfer("");
  reduce->wait(20);
  send->wait(20);
  CHECK(scheduler->shutdown(20));
}

// As on a GPU, where an operation that has started may be far from its end.
void a_wait_ends_with_the_transfer_and_not_with_its_start() {
  auto scheduler = Scheduler::make({});
  std::promise<Done> started;
  auto receive = scheduler->receive(
      1, 0, "receive", fake([&](Done done) { started.set_value(std::move(done)); }));
  Done end = started.get_future().get();
  CHECK(contains(failure_of(*receive, 0.05), "not over within"));
  CHECK(!receive->is_completed());
  end("");
  receive->wait(20);
  CHECK(receive->is_completed());
  CHECK(scheduler->shutdown(20));
}

// The first slice takes 20 ms; the second ends when the third has started.
void the_next_slice_starts_a_little_before_one_ends() {
  auto scheduler = Scheduler::make({});
  Timeline link;
  std::vector<Time> starts;
  Done end_second;
  std::vector<std::shared_ptr<Operation>> slices{
      fake([&](Done done) {
        starts.push_back(Clock::now());
        link.after(0.02, [done = std::move(done)] { done(""); });
      }),
      fake([&](Done done) {
        starts.push_back(Clock::now());
        end_second = std::move(done);
      }),
      fake([&](Done done) {
        starts.push_back(Clock::now());
        end_second("");
        done("");
      })};
  scheduler->reduce(0, "reduce", std::move(slices))->wait(20);
  CHECK(in_seconds(starts[1] - starts[0]) >= 0.02);  // how long one takes is not known yet
  CHECK(in_seconds(starts[2] - starts[0]) >= 0.02 + 0.8 * 0.02);
  CHECK(scheduler->shutdown(20));
}

void an_announced_transfer_holds_slices_until_its_lease_is_over() {
  auto scheduler = Scheduler::make({});
  scheduler->announce(1, 0, 0.0);
  const Time start = Clock::now();
  auto reduce = scheduler->reduce(0, "reduce", {fake([](Done done) { done(""); })});
  reduce->wait(20);
  CHECK(in_seconds(Clock::now() - start) > 0.03);
  CHECK(scheduler->shutdown(20));
}

void the_first_error_is_everybodys() {
  auto scheduler = Scheduler::make({});
  auto stuck = scheduler->reduce(0, "reduce of bucket 3", {fake([](Done) {})});
  auto behind = scheduler->reduce(0, "reduce of bucket 4", {fake([](Done) {})});
  auto bad = scheduler->send(1, 0, "send 2F3", fake([](Done) { throw std::runtime_error("no"); }));
  CHECK(contains(failure_of(*bad), "rank 0: send 2F3: no"));
  CHECK(contains(failure_of(*stuck), "reduce of bucket 3: rank 0: send 2F3: no"));
  CHECK(contains(failure_of(*behind), "reduce of bucket 4"));
  CHECK(contains(failure_of(*scheduler->send(1, 0, "later", fake([](Done) {}))), "send 2F3"));
  CHECK(scheduler->shutdown(20));
}

void a_task_tells_when_it_is_over_well_or_not() {
  auto scheduler = Scheduler::make({});
  Timeline link;
  const Time start = Clock::now();
  auto slow = scheduler->reduce(0, "reduce", {fake([&](Done done) {
                                  link.after(0.02, [done = std::move(done)] { done(""); });
                                })});
  std::promise<Time> well, not_well;
  slow->add_done_callback([&] { well.set_value(Clock::now()); });
  CHECK(in_seconds(well.get_future().get() - start) >= 0.02);
  bool told = false;
  slow->add_done_callback([&] { told = true; });
  CHECK(told);
  auto stuck = scheduler->reduce(0, "reduce", {fake([](Done) {})});
  stuck->add_done_callback([&] { not_well.set_value(Clock::now()); });
  scheduler->fail("no");
  not_well.get_future().get();
  CHECK(scheduler->shutdown(20));
}

void a_slice_that_does_not_end_in_time_is_named() {
  Policy policy;
  policy.timeout_s = 0.05;
  auto scheduler = Scheduler::make(policy);
  auto reduce = scheduler->reduce(
      0, "bucket 1", {fake([](Done done) { done(""); }), fake([](Done) {})});
  CHECK(contains(failure_of(*reduce), "bucket 1, slice 2 of 2: no end within"));
  CHECK(scheduler->shutdown(20));
}

void a_shutdown_in_mid_slice_fails_what_is_left() {
  auto scheduler = Scheduler::make({});
  Done late;
  auto stuck = scheduler->reduce(0, "reduce", {fake([&](Done done) { late = std::move(done); })});
  while (scheduler->statistics().slices == 0) std::this_thread::yield();
  CHECK(!scheduler->shutdown(0.01));
  CHECK(contains(failure_of(*stuck), "shut down before it was over"));
  late("");  // the library may still come back to it
}

void a_forked_process_is_told_that_it_is_one() {
  auto scheduler = Scheduler::make({});
  // A thread that allocates just now would leave the sanitizer's lock shut in the child.
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const pid_t child = fork();
  if (child == 0) {
    try {
      scheduler->announce(1, 0, 0);
    } catch (const std::runtime_error& error) {
      _exit(contains(error.what(), "forked") ? 0 : 1);
    }
    _exit(2);
  }
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(scheduler->shutdown(20));
}

// Like a process group: a thread that calls back, and that dies with the last of its operations.
class Library {
 public:
  Library() : thread_([this] { run(); }) {}
  ~Library() {
    CHECK(std::this_thread::get_id() != thread_.get_id());
    call({});
    thread_.join();
    ++num_died;
  }
  void call(std::function<void()> function) {
    std::lock_guard lock(mutex_);
    calls_.push_back(std::move(function));
    changed_.notify_all();
  }
  inline static std::atomic<int> num_died = 0;

 private:
  void run() {
    while (true) {
      std::function<void()> first;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return !calls_.empty(); });
        first = std::move(calls_.front());
        calls_.pop_front();
      }
      if (!first) return;
      first();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> calls_;
  std::thread thread_;
};

bool soon(const std::function<bool()>& claim) {
  for (int i = 0; i < 10000 && !claim(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return claim();
}

// One operation of a library that nobody else has. It says `how` it has ended on the library's own
// thread, when `then` has been called there: by then its caller has forgotten it.
void forget(std::shared_ptr<Scheduler> scheduler, const std::string& how,
            const std::function<void(std::shared_ptr<Scheduler>&)>& before,
            const std::function<void(std::shared_ptr<Scheduler>&)>& then) {
  const int num_died = Library::num_died;
  std::promise<void> forgotten;
  std::atomic<bool> begun = false;
  auto library = std::make_shared<Library>();
  Library* const known = library.get();
  auto operation = fake([&, known, library = std::move(library)](Done done) {
    known->call([&, done = std::move(done)] {
      begun = true;
      forgotten.get_future().wait();
      then(scheduler);
      done(how);
    });
  });
  auto task = scheduler->reduce(0, "reduce", {std::move(operation)});
  CHECK(soon([&] { return begun.load(); }));
  before(scheduler);
  task.reset();
  forgotten.set_value();
  CHECK(soon([&] { return Library::num_died > num_died; }));
}

void nothing(std::shared_ptr<Scheduler>&) {}

void no_operation_dies_on_the_thread_that_calls_back() {
  auto cut_short = [](auto& scheduler) { CHECK(!scheduler->shutdown(0.01)); };
  auto fail = [](auto& scheduler) { scheduler->fail("no"); };
  for (const char* how : {"", "connection closed by peer"}) {
    forget(Scheduler::make({}), how, nothing, nothing);
    forget(Scheduler::make({}), how, fail, nothing);
    forget(Scheduler::make({}), how, nothing, fail);
    forget(Scheduler::make({}), how, cut_short, nothing);
  }
}

void a_scheduler_may_be_dropped_on_any_thread() {
  auto drop = [](auto& scheduler) { scheduler.reset(); };
  forget(Scheduler::make({}), "", drop, nothing);  // with something under way
  forget(Scheduler::make({}), "", nothing, drop);  // on a thread that calls back
  auto scheduler = Scheduler::make({});
  std::promise<void> given;
  std::atomic<bool> dropped = false;
  auto task = scheduler->reduce(0, "reduce", {fake([&](Done done) {
                                  given.get_future().wait();
                                  scheduler.reset();  // on its own
                                  dropped = true;
                                  done("");
                                })});
  given.set_value();
  task->wait(20);
  CHECK(dropped);
}

// Every rank reduces over the ring and passes a tensor on to the next, at random times. A message
// between ranks is lost, doubled or late; the order in every lane must be the same on all ranks,
// which the network checks, and all must end.
void ring(int num_ranks, int num_steps, double lost) {
  // The network's thread reads it until the network is gone.
  std::vector<std::weak_ptr<Scheduler>> weak(static_cast<std::size_t>(num_ranks));
  Network network(num_ranks, 1e-4, static_cast<unsigned>(num_ranks));
  Ranks ranks;
  for (int rank = 0; rank < num_ranks; ++rank) {
    Policy policy;
    policy.rank = rank;
    policy.slices_in_flight = 1 + rank % 2;
    policy.lease_s = 1e-3;
    policy.window_s = 0.05;
    ranks.push_back(Scheduler::make(policy));
    weak[static_cast<std::size_t>(rank)] = ranks.back();
  }
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const int next = (rank + 1) % num_ranks, last = (rank + num_ranks - 1) % num_ranks;
    auto& mine = *ranks[static_cast<std::size_t>(rank)];
    mine.set_peers(std::make_shared<UnreliablePeers>(network, weak, std::vector{next, last}, lost,
                                                     lost / 2));
    threads.emplace_back([&, rank, next, last] {
      for (int step = 0; step < num_steps; ++step) {
        std::vector<std::shared_ptr<Task>> tasks;
        for (int lane = 0; lane < 2; ++lane) {
          std::vector<std::shared_ptr<Operation>> slices;
          for (int slice = 0; slice < 3; ++slice) {
            auto name = std::to_string(step) + "." + std::to_string(slice);
            slices.push_back(fake([&network, rank, lane, name](Done done) {
              network.join(lane, rank, name, std::move(done));
            }));
          }
          tasks.push_back(mine.reduce(lane, "step " + std::to_string(step), std::move(slices)));
        }
        auto name = [&](int from) { return std::to_string(from) + " " + std::to_string(step); };
        if (step % 3) mine.announce(next, 0, network.dice.roll(2e-4));
        tasks.push_back(mine.receive(last, 0, "receive", fake([&network, n = name(last)](Done done) {
          network.meet(n, std::move(done));
        })));
        std::this_thread::sleep_for(seconds(network.dice.roll(2e-4)));
        tasks.push_back(mine.send(next, 0, "send", fake([&network, n = name(rank)](Done done) {
          network.meet(n, std::move(done));
        })));
        for (auto& task : tasks) task->wait(60);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (auto& scheduler : ranks) CHECK(scheduler->shutdown(20));
}

void rings_end_whatever_the_timing() {
  ring(2, 1000, 0);
  ring(4, 400, 0);
  ring(8, 150, 0);
}

void rings_end_when_half_of_the_messages_are_lost() {
  ring(2, 400, 0.5);
  ring(4, 200, 0.5);
}

void a_failure_reaches_ranks_that_are_no_neighbours() {
  std::vector<std::weak_ptr<Scheduler>> weak(6);  // longer than the network, as above
  Network network(6, 1e-4, 1);
  Ranks ranks;
  for (int rank = 0; rank < 6; ++rank) {
    Policy policy;
    policy.rank = rank;
    ranks.push_back(Scheduler::make(policy));
    weak[static_cast<std::size_t>(rank)] = ranks.back();
  }
  std::vector<std::shared_ptr<Task>> stuck;
  for (int rank = 0; rank < 6; ++rank) {
    auto& mine = *ranks[static_cast<std::size_t>(rank)];
    mine.set_peers(std::make_shared<UnreliablePeers>(
        network, weak, std::vector{(rank + 1) % 6, (rank + 5) % 6}, 0, 0));
    stuck.push_back(mine.reduce(0, "reduce", {fake([](Done) {})}));
  }
  ranks[0]->fail("rank 0 failed: out of memory");
  for (auto& task : stuck) CHECK(contains(failure_of(*task), "out of memory"));
  for (auto& scheduler : ranks) CHECK(scheduler->shutdown(20));
}

}  // namespace

int main() {
  RUN(a_forked_process_is_told_that_it_is_one);  // first: a sanitizer forks best without threads
  RUN(a_closure_ends_by_itself);
  RUN(an_end_opens_for_all_transfers_before_it);
  RUN(pauses_stay_within_their_share);
  RUN(a_gate_that_holds_nothing_back_spends_nothing);
  RUN(slices_wait_for_a_transfer_and_go_on_after_it);
  RUN(a_wait_ends_with_the_transfer_and_not_with_its_start);
  RUN(the_next_slice_starts_a_little_before_one_ends);
  RUN(an_announced_transfer_holds_slices_until_its_lease_is_over);
  RUN(the_first_error_is_everybodys);
  RUN(a_task_tells_when_it_is_over_well_or_not);
  RUN(a_slice_that_does_not_end_in_time_is_named);
  RUN(a_shutdown_in_mid_slice_fails_what_is_left);
  RUN(no_operation_dies_on_the_thread_that_calls_back);
  RUN(a_scheduler_may_be_dropped_on_any_thread);
  RUN(rings_end_whatever_the_timing);
  RUN(rings_end_when_half_of_the_messages_are_lost);
  RUN(a_failure_reaches_ranks_that_are_no_neighbours);
}
