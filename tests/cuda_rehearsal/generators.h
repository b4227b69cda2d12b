// The random numbers of the rehearsed devices. Each device has a CPU generator of its own.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include "clocks.h"

namespace rehearsal {

inline c10::Device cuda_device(int index) { return c10::Device(c10::DeviceType::CUDA, c10::DeviceIndex(index)); }

struct DeviceGenerator final : public c10::GeneratorImpl {
  at::Generator inner;
  DeviceGenerator(int device, at::Generator g)
      : c10::GeneratorImpl(cuda_device(device), c10::DispatchKeySet(c10::DispatchKey::CUDA)), inner(std::move(g)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  DeviceGenerator* clone_impl() const override { return new DeviceGenerator(device_.index(), inner.clone()); }
};
inline at::Generator new_generator(int device) {
  return at::Generator(c10::make_intrusive<DeviceGenerator>(device, at::detail::createCPUGenerator()));
}
inline at::Generator& default_generator(int device) {
  static auto* all = [] {
    auto* list = new std::vector<at::Generator>;
    for (int i = 0; i < kMostDevices; i++) list->push_back(new_generator(i));
    return list;
  }();
  return (*all)[device];
}
inline at::Generator inner_generator(const at::Generator& g) { return static_cast<DeviceGenerator*>(g.unsafeGetGeneratorImpl())->inner; }

}  // namespace rehearsal
