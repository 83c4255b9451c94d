// Transfers and slices as operations of a c10d process group, whatever its backend is.
#pragma once

#include <c10/core/Event.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>

#include "scheduler.h"

namespace fold3d {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

/// One thread that waits for works in the order in which they were started. gloo's transfers can
/// only be waited for, and nothing but a look tells that a kernel of NCCL's has ended.
class Waiter : public std::enable_shared_from_this<Waiter> {
 public:
  void watch(c10::intrusive_ptr<c10d::Work> work, bool polled, Done done);

 private:
  struct Watched {
    c10::intrusive_ptr<c10d::Work> work;
    bool polled;
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
  /// Takes note of where the current stream is now: the tensor is complete there, or free to be
  /// written.
  TorchOperation(Group group, at::Tensor tensor, std::shared_ptr<Waiter> waiter);

  std::size_t num_bytes() const override { return tensors_[0].nbytes(); }
  bool ready() override;
  void start(Done done) override;
  bool host_waits() const override { return !complete_; }
  void join() override;
  void abort() override;

 protected:
  virtual c10::intrusive_ptr<c10d::Work> launch() = 0;

  Group group_;
  std::vector<at::Tensor> tensors_;

 private:
  std::shared_ptr<Waiter> waiter_;
  std::optional<c10::Event> complete_;  // on a device that computes behind the host's back
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

/// Some elements of each rank's shard, summed into `sum`; `parts` are theirs in the order of ranks.
/// The library gathers them in one place: they do not lie side by side.
class ReduceScatter : public TorchOperation {
 public:
  ReduceScatter(Group group, at::Tensor sum, std::vector<at::Tensor> parts,
                std::shared_ptr<Waiter> waiter, c10d::ReduceOp op);

 private:
  c10::intrusive_ptr<c10d::Work> launch() override;
  std::vector<std::vector<at::Tensor>> parts_;
  const c10d::ReduceOp op_;
};

/// `part`, some elements of this rank's shard, to all; `parts` are where they and the others' go.
class AllGather : public TorchOperation {
 public:
  AllGather(Group group, at::Tensor part, std::vector<at::Tensor> parts,
            std::shared_ptr<Waiter> waiter);

 private:
  c10::intrusive_ptr<c10d::Work> launch() override;
  std::vector<std::vector<at::Tensor>> parts_;
};

/// Complete when the task is over, well or not.
c10::intrusive_ptr<c10::ivalue::Future> future_of(Task& task);

}  // namespace fold3d
