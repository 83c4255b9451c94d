// Streams and events of the tests' device for CPU tensors, in C++ code that asks c10 for them.
//
// c10 keeps one DeviceGuardImplInterface per type of device. This one, in the place of the CPU's,
// passes what it is asked to functions of Python's, which `late_streams.py` gives it.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdint>

namespace {

struct Calls {
  std::int64_t (*current)();
  std::int64_t (*exchange)(std::int64_t stream);
  std::int64_t (*from_pool)(int is_first);
  std::int64_t (*record)(std::int64_t event, std::int64_t stream);  // 0 is a new event
  int (*query)(std::int64_t event);
  void (*block)(std::int64_t event, std::int64_t stream);
  void (*destroy)(std::int64_t event);
};

Calls calls;
const c10::Device cpu(c10::DeviceType::CPU, -1);

c10::Stream stream(std::int64_t number) {
  return c10::Stream(c10::Stream::UNSAFE, cpu, number);
}

std::int64_t number(void* event) { return reinterpret_cast<std::int64_t>(event); }

// Not derived from the CPU's own, which is final in torch 2.8.
struct LateGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CPU; }
  c10::Device exchangeDevice(c10::Device) const override { return cpu; }
  c10::Device getDevice() const override { return cpu; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(calls.current()); }
  c10::Stream exchangeStream(c10::Stream next) const noexcept override {
    return stream(calls.exchange(next.id()));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool is_first) const override {
    return stream(calls.from_pool(is_first));
  }
  void record(void** event, const c10::Stream& on, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(calls.record(number(*event), on.id()));
  }
  bool queryEvent(void* event) const override { return calls.query(number(event)) != 0; }
  void block(void* event, const c10::Stream& on) const override {
    calls.block(number(event), on.id());
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event != nullptr) calls.destroy(number(event));
  }
};

}  // namespace

extern "C" void give_streams(const Calls* given) {
  static const LateGuard late;
  static const c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CPU> none;
  if (given != nullptr) calls = *given;
  const c10::impl::DeviceGuardImplInterface* guard = &none;
  if (given != nullptr) guard = &late;
  c10::impl::device_guard_impl_registry[static_cast<std::size_t>(c10::DeviceType::CPU)].store(guard);
}
