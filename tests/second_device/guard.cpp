// What PyTorch asks about a device: how many there are, and which one is current. Here there are
// two, and each thread remembers its current one, which is 0 in a new thread, as with CUDA.
// device.py builds this and loads it before torch, so that torch finds `getAccelerator` here.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using c10::Device, c10::DeviceIndex, c10::DeviceType, c10::Stream;

static const DeviceIndex devices = 2;
static thread_local DeviceIndex current = 0;

static Device complete(Device device) {
  return Device(DeviceType::CUDA, device.has_index() ? device.index() : current);
}

struct Guard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const override { return Device(DeviceType::CUDA, current); }
  void setDevice(Device device) const override { current = complete(device).index(); }
  void uncheckedSetDevice(Device device) const noexcept override { setDevice(device); }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  Stream getStream(Device device) const noexcept override {
    return Stream(Stream::DEFAULT, complete(device));
  }
  Stream getDefaultStream(Device device) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return devices; }
};

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return devices; }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex current_device() const override { return current; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
};

// preferred to those of a torch that was built with CUDA
static const auto registered = [] {
  auto make = [](at::CUDAHooksArgs) -> std::unique_ptr<at::CUDAHooksInterface> {
    return std::make_unique<Hooks>();
  };
  at::CUDAHooksRegistry()->Register("CUDAHooks", make, c10::REGISTRY_PREFERRED);
  return true;
}();

namespace at::accelerator {
__attribute__((visibility("default"))) std::optional<DeviceType> getAccelerator(bool) {
  return DeviceType::CUDA;
}
}  // namespace at::accelerator

extern "C" {
int count_devices() { return devices; }
int current_device() { return current; }
void set_device(int index) { current = index; }
void register_devices() {
  static c10::impl::DeviceGuardImplRegistrar registrar(DeviceType::CUDA, new Guard());
}
}
