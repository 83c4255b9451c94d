#include "torch_operations.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <thread>

namespace fold3d {
namespace {

constexpr auto kPoll = std::chrono::microseconds(20);
constexpr auto kIdle = std::chrono::seconds(1);  // after which a waiter's thread ends

std::string reason(const std::exception_ptr& error) {
  if (!error) return {};
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& exception) {
    const std::string what = exception.what();
    return what.empty() ? "failed without a message" : what.substr(0, what.find('\n'));
  } catch (...) {
    return "failed without a message";
  }
}

// Makes the device the calling thread's, for good: a thread that asks a GPU anything without it
// would open a context on the first GPU, half a gigabyte for each rank of the node.
void belong_to(c10::Device device) {
  thread_local std::optional<c10::Device> current;
  if (device.is_cpu() || current == device) return;
  c10::impl::VirtualGuardImpl(device.type()).setDevice(device);
  current = device;
}

std::string outcome(c10d::Work& work, c10::Device device) {
  try {
    belong_to(device);
    if (device.is_cpu()) {
      work.wait();
      return {};
    }
    while (!work.isCompleted()) std::this_thread::sleep_for(kPoll);
    return reason(work.exception());
  } catch (...) {
    return reason(std::current_exception());
  }
}

// A library lets what it starts wait for the current stream. What is started here is ready: behind
// the computations that are queued already it could stand behind one that waits for it.
c10::Stream empty_stream(c10::Device device) {
  thread_local const c10::Stream stream =
      c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
  return stream;
}

}  // namespace

void Waiter::watch(c10::intrusive_ptr<c10d::Work> work, c10::Device device, Done done) {
  std::lock_guard lock(mutex_);
  watched_.push_back({std::move(work), device, std::move(done)});
  if (!running_) {
    running_ = true;
    std::thread([self = shared_from_this()] { self->run(); }).detach();
  }
  changed_.notify_one();
}

void Waiter::run() {
  std::unique_lock lock(mutex_);
  while (changed_.wait_for(lock, kIdle, [this] { return !watched_.empty(); })) {
    {
      Watched first = std::move(watched_.front());
      watched_.pop_front();
      lock.unlock();
      first.done(outcome(*first.work, first.device));
    }
    lock.lock();
  }
  running_ = false;
}

TorchOperation::TorchOperation(Group group, at::Tensor tensor, std::shared_ptr<Waiter> waiter)
    : group_(std::move(group)), tensors_{std::move(tensor)}, waiter_(std::move(waiter)) {
  const c10::Device device = tensors_[0].device();
  if (device.is_cpu() && !cpu_has_streams) return;
  complete_.emplace(device.type());
  complete_->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

bool TorchOperation::ready() {
  belong_to(tensors_[0].device());
  return !complete_ || complete_->query();
}

void TorchOperation::start(Done done) {
  const c10::Device device = tensors_[0].device();
  belong_to(device);
  std::optional<c10::StreamGuard> guard;
  if (complete_) guard.emplace(empty_stream(device));
  auto work = launch();
  TORCH_CHECK(work, "a process group without this rank was asked to communicate");
  {
    std::lock_guard lock(mutex_);
    work_ = work;
  }
  if (complete_) {
    // The callback may record an event on the current stream.
    auto on_end = [done = std::move(done), stream = guard->current_stream()](const std::string& e) {
      c10::StreamGuard guard(stream);
      done(e);
    };
    waiter_->watch(std::move(work), device, std::move(on_end));
    return;
  }
  c10::intrusive_ptr<c10::ivalue::Future> future;
  try {
    future = work->getFuture();
  } catch (const c10::Error&) {  // gloo's transfers and reduce-scatters have none
    waiter_->watch(std::move(work), device, std::move(done));
    return;
  }
  // No work in the closure: the future belongs to it.
  future->addCallback([done = std::move(done)](c10::ivalue::Future& ended) {
    done(ended.hasError() ? reason(ended.exception_ptr()) : std::string());
  });
}

void TorchOperation::join() {
  std::lock_guard lock(mutex_);
  if (complete_ && work_) work_->wait();  // a work of Python's has no `synchronize`
}

void TorchOperation::abort() {
  c10::intrusive_ptr<c10d::Work> work;
  {
    std::lock_guard lock(mutex_);
    work = work_;
  }
  try {
    if (work) work->abort();
  } catch (const std::exception&) {  // not every work can be
  }
}

Send::Send(Group group, at::Tensor tensor, std::shared_ptr<Waiter> waiter, int peer, int tag)
    : TorchOperation(std::move(group), std::move(tensor), std::move(waiter)),
      peer_(peer),
      tag_(tag) {}

c10::intrusive_ptr<c10d::Work> Send::launch() { return group_->send(tensors_, peer_, tag_); }

Receive::Receive(Group group, at::Tensor tensor, std::shared_ptr<Waiter> waiter, int peer, int tag)
    : TorchOperation(std::move(group), std::move(tensor), std::move(waiter)),
      peer_(peer),
      tag_(tag) {}

c10::intrusive_ptr<c10d::Work> Receive::launch() { return group_->recv(tensors_, peer_, tag_); }

AllReduce::AllReduce(Group group, at::Tensor tensor, std::shared_ptr<Waiter> waiter,
                     c10d::ReduceOp op)
    : TorchOperation(std::move(group), std::move(tensor), std::move(waiter)), op_(std::move(op)) {}

c10::intrusive_ptr<c10d::Work> AllReduce::launch() {
  c10d::AllreduceOptions options;
  options.reduceOp = op_;
  return group_->allreduce(tensors_, options);
}

ReduceScatter::ReduceScatter(Group group, at::Tensor sum, std::vector<at::Tensor> parts,
                             std::shared_ptr<Waiter> waiter, c10d::ReduceOp op)
    : TorchOperation(std::move(group), std::move(sum), std::move(waiter)),
      parts_{std::move(parts)},
      op_(std::move(op)) {}

c10::intrusive_ptr<c10d::Work> ReduceScatter::launch() {
  c10d::ReduceScatterOptions options;
  options.reduceOp = op_;
  return group_->reduce_scatter(tensors_, parts_, options);
}

AllGather::AllGather(Group group, at::Tensor part, std::vector<at::Tensor> parts,
                     std::shared_ptr<Waiter> waiter)
    : TorchOperation(std::move(group), std::move(part), std::move(waiter)),
      parts_{std::move(parts)} {}

c10::intrusive_ptr<c10d::Work> AllGather::launch() { return group_->allgather(parts_, tensors_); }

c10::intrusive_ptr<c10::ivalue::Future> future_of(Task& task) {
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::NoneType::get());
  task.add_done_callback([future] { future->markCompleted(c10::IValue()); });
  return future;
}

}  // namespace fold3d
