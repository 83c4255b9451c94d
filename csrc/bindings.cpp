// The scheduler's Python bindings; no logic. Every call that may block releases the GIL.
#include <pybind11/stl.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include "control.h"
#include "scheduler.h"
#include "torch_operations.h"

namespace py = pybind11;
using namespace fold3d;

namespace {

constexpr auto kNoGil = py::call_guard<py::gil_scoped_release>();

std::shared_ptr<Task> submit_send(Scheduler& scheduler, const Group& group, at::Tensor tensor,
                                  std::shared_ptr<Waiter> waiter, int group_peer, int tag, int peer,
                                  int direction, std::string name) {
  return scheduler.send(
      peer, direction, std::move(name),
      std::make_shared<Send>(group, std::move(tensor), std::move(waiter), group_peer, tag));
}

std::shared_ptr<Task> submit_receive(Scheduler& scheduler, const Group& group, at::Tensor tensor,
                                     std::shared_ptr<Waiter> waiter, int group_peer, int tag,
                                     int peer, int direction, std::string name) {
  return scheduler.receive(
      peer, direction, std::move(name),
      std::make_shared<Receive>(group, std::move(tensor), std::move(waiter), group_peer, tag));
}

/// Submit a collective to a lane; `make` turns each slice into an operation.
template <class Slice, class Make>
std::shared_ptr<Task> submit_slices(Scheduler& scheduler, int lane, std::string name,
                                    std::vector<Slice>& slices, Make make) {
  std::vector<std::shared_ptr<Operation>> operations;
  operations.reserve(slices.size());
  for (auto& slice : slices) operations.push_back(make(slice));
  return scheduler.reduce(lane, std::move(name), std::move(operations));
}

std::shared_ptr<Task> submit_all_reduce(Scheduler& scheduler, const Group& group,
                                        std::vector<at::Tensor> slices,
                                        std::shared_ptr<Waiter> waiter, c10d::ReduceOp op, int lane,
                                        std::string name) {
  return submit_slices(scheduler, lane, std::move(name), slices, [&](at::Tensor& slice) {
    return std::make_shared<AllReduce>(group, std::move(slice), waiter, op);
  });
}

/// For each slice: this rank's own tensor, and one tensor per rank.
using Sharded = std::vector<std::pair<at::Tensor, std::vector<at::Tensor>>>;

std::shared_ptr<Task> submit_reduce_scatter(Scheduler& scheduler, const Group& group,
                                            Sharded slices, std::shared_ptr<Waiter> waiter,
                                            c10d::ReduceOp op, int lane, std::string name) {
  return submit_slices(scheduler, lane, std::move(name), slices, [&](auto& slice) {
    auto& [sum, parts] = slice;
    return std::make_shared<ReduceScatter>(group, std::move(sum), std::move(parts), waiter, op);
  });
}

std::shared_ptr<Task> submit_all_gather(Scheduler& scheduler, const Group& group, Sharded slices,
                                        std::shared_ptr<Waiter> waiter, int lane,
                                        std::string name) {
  return submit_slices(scheduler, lane, std::move(name), slices, [&](auto& slice) {
    auto& [part, parts] = slice;
    return std::make_shared<AllGather>(group, std::move(part), std::move(parts), waiter);
  });
}

std::shared_ptr<torch::jit::PythonFutureWrapper> future_in_python(Task& task) {
  return std::make_shared<torch::jit::PythonFutureWrapper>(future_of(task));
}

std::shared_ptr<ControlLinks> open_links(
    const std::shared_ptr<Scheduler>& scheduler,
    const std::vector<std::tuple<int, int, std::string, int>>& connections) {
  std::vector<Connection> given;
  given.reserve(connections.size());
  for (const auto& [rank, socket, address, port] : connections)
    given.push_back({rank, socket, address, port});
  auto links = ControlLinks::make(given);
  scheduler->set_peers(links);
  // The scheduler owns the links, so the links hold a weak pointer to it.
  links->start(
      [known = std::weak_ptr(scheduler)](const Message& message) {
        if (auto scheduler = known.lock()) scheduler->on_message(message);
      },
      [known = std::weak_ptr(scheduler)](const std::string& error) {
        if (auto scheduler = known.lock()) scheduler->fail(error);
      });
  return links;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("give_cpu_streams", [](bool has) { cpu_has_streams = has; });
  py::class_<Task, std::shared_ptr<Task>>(module, "Task")
      .def("wait", &Task::wait, py::arg("timeout_s") = py::none(), kNoGil)
      .def("is_completed", &Task::is_completed)
      .def("get_future", &future_in_python, kNoGil)
      .def_property_readonly("name", &Task::name);
  py::class_<Waiter, std::shared_ptr<Waiter>>(module, "Waiter").def(py::init<>());
  py::class_<Policy>(module, "Policy")
      .def(py::init<>())
      .def_readwrite("rank", &Policy::rank)
      .def_readwrite("slices_in_flight", &Policy::slices_in_flight)
      .def_readwrite("lease_s", &Policy::lease_s)
      .def_readwrite("pause_share", &Policy::pause_share)
      .def_readwrite("window_s", &Policy::window_s)
      .def_readwrite("timeout_s", &Policy::timeout_s);
  py::class_<Statistics>(module, "Statistics")
      .def_readonly("transfers", &Statistics::transfers)
      .def_readonly("slices", &Statistics::slices)
      .def_readonly("announced", &Statistics::announced)
      .def_readonly("unanswered", &Statistics::unanswered)
      .def_readonly("paused_s", &Statistics::paused_s)
      .def_readonly("exhausted", &Statistics::exhausted)
      .def_readonly("slice_s", &Statistics::slice_s);
  py::class_<Scheduler, std::shared_ptr<Scheduler>>(module, "Scheduler")
      .def(py::init(&Scheduler::make), kNoGil)
      .def("send", &submit_send, kNoGil)
      .def("receive", &submit_receive, kNoGil)
      .def("all_reduce", &submit_all_reduce, kNoGil)
      .def("reduce_scatter", &submit_reduce_scatter, kNoGil)
      .def("all_gather", &submit_all_gather, kNoGil)
      .def("announce", &Scheduler::announce, kNoGil)
      .def("fail", &Scheduler::fail, kNoGil)
      .def("failure", &Scheduler::failure, kNoGil)
      .def("shutdown", &Scheduler::shutdown, kNoGil)
      .def("statistics", &Scheduler::statistics, kNoGil);
  py::class_<ControlLinks, std::shared_ptr<ControlLinks>>(module, "ControlLinks")
      .def(py::init(&open_links), kNoGil)
      .def("warnings", &ControlLinks::warnings, kNoGil)
      .def("close", &ControlLinks::close, kNoGil);
}
