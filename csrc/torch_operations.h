// Transfers and slices as operations of a c10d process group of any backend.
#pragma once

#include <c10/core/Event.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>

#include "scheduler.h"

namespace fold3d {

/// Whether tensors on a CPU have streams: only those of the tests' device have.
inline std::atomic<bool> cpu_has_streams = false;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

/// One thread that waits for works in the order in which they were started. gloo's transfers can
/// only be waited for, and the end of an NCCL kernel can only be polled.
class Waiter : public std::enable_shared_from_this<Waiter> {
 public:
  void watch(c10::intrusive_ptr<c10d::Work> work, c10::Device device, Done done);

 private:
  struct Watched {
    c10::intrusive_ptr<c10d::Work> work;
    c10::Device device;  // whose works are polled, unless it is the CPU
    Done done;
  };
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Watched> watched_;
  bool running_ = false;
};

class TorchOperation : public Operation {
 public:
  /// Records an event on the current stream: once it has passed, the tensor is complete (or free to
  /// be written).
  TorchOperation(Group group, at::Tensor tensor, std::shared_ptr<Waiter> waiter);

  std::size_t num_bytes() const override { return tensors_[0].nbytes(); }
  bool ready() override;
  void start(Done done) override;
  void join() override;
  void abort() override;

 protected:
  virtual c10::intrusive_ptr<c10d::Work> launch() = 0;

  Group group_;
  std::vector<at::Tensor> tensors_;

 private:
  std::shared_ptr<Waiter> waiter_;
  std::optional<c10::Event> complete_;  // on a device that runs asynchronously to the host
  std::mutex mutex_;
  c10::intrusive_ptr<c10d::Work> work_;
};

class Send : public TorchOperation {
 public:
  Send(Group group, at::Tensor tensor, std::shared_ptr<Waiter> waiter, int peer, int tag);

 private:
  c10::intrusive_ptr<c10d::Work> launch() override;
  const int peer_, tag_;
};

class Receive : public TorchOperation {
 public:
  Receive(Group group, at::Tensor tensor, std::shared_ptr<Waiter> waiter, int peer, int tag);

 private:
  c10::intrusive_ptr<c10d::Work> launch() override;
  const int peer_, tag_;
};

class AllReduce : public TorchOperation {
 public:
  AllReduce(Group group, at::Tensor tensor, std::shared_ptr<Waiter> waiter, c10d::ReduceOp op);

 private:
  c10::intrusive_ptr<c10d::Work> launch() override;
  const c10d::ReduceOp op_;
};

/// Sums `parts`, 1-D pieces of the ranks' shards in the order of ranks, each into its rank's `sum`.
/// They are not contiguous: the library copies them into one buffer.
class ReduceScatter : public TorchOperation {
 public:
  ReduceScatter(Group group, at::Tensor sum, std::vector<at::Tensor> parts,
                std::shared_ptr<Waiter> waiter, c10d::ReduceOp op);

 private:
  c10::intrusive_ptr<c10d::Work> launch() override;
  std::vector<std::vector<at::Tensor>> parts_;
  const c10d::ReduceOp op_;
};

/// Gathers each rank's `part`, a 1-D piece of its shard, into `parts` on all ranks.
class AllGather : public TorchOperation {
 public:
  AllGather(Group group, at::Tensor part, std::vector<at::Tensor> parts,
            std::shared_ptr<Waiter> waiter);

 private:
  c10::intrusive_ptr<c10d::Work> launch() override;
  std::vector<std::vector<at::Tensor>> parts_;
};

/// A future that completes when the task does, also after a failure.
c10::intrusive_ptr<c10::ivalue::Future> future_of(Task& task);

}  // namespace fold3d
