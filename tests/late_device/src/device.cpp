// The device type "cuda" in torch's CPU build: memory of the host behind tensors that say `cuda`,
// operations by the CPU's kernels at once, and CUDA's rules about where tensors may be, in which
// order work is done, and what makes the host wait. ../__init__.py says what it finds.
#include <ATen/EmptyTensor.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>
#include "pinned.h"

namespace late {
using at::Tensor;
const c10::Device GPU(c10::DeviceType::CUDA, 0);
std::map<std::string, int64_t> counts;
int sync_debug_mode = 0;  // 1: a host that waits is warned of; 2: it is an error

void count(const std::string& what) { counts[what]++; }
std::string shape(const std::string& name, const Tensor* x) {
  if (!x || !x->defined()) return name;
  std::string text = name + " [";
  for (int64_t d = 0; d < x->dim(); ++d) text += (d ? ", " : "") + std::to_string(x->size(d));
  return text + "]";
}
// The host waits for the current stream because of an operation.
void wait_for_stream(const std::string& why) {
  count("host waits");
  count("host waits: " + why);
  TORCH_CHECK(sync_debug_mode < 2, "late_device: host wait: called a synchronizing CUDA operation, ", why);
  if (sync_debug_mode == 1) TORCH_WARN("late_device: host wait: called a synchronizing CUDA operation, ", why);
  join(streams().host, streams().clocks[current_stream]);
  arrive();
}
void wait_for_device() {
  Locked locked(streams().lock);
  for (const Clock& clock : streams().clocks) join(streams().host, clock);
  arrive();
  raise_findings();
}

// ---- streams and events, as autograd and torch.Stream use them

c10::Stream stream_of(int id) { return c10::Stream(c10::Stream::UNSAFE, GPU, id); }

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return GPU; }
  c10::Device getDevice() const override { return GPU; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return stream_of(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
  c10::Stream getNewStream(c10::Device, int) const override {
    Locked locked(streams().lock);
    return stream_of(streams().add());
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    int former = current_stream;
    current_stream = static_cast<int>(s.id());
    return stream_of(former);
  }
  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    Locked locked(streams().lock);
    if (!*event) *event = new Event;
    auto* e = static_cast<Event*>(*event);
    e->clock = streams().clocks[s.id()];
    join(e->clock, streams().host);
    e->seconds = now();
    e->is_recorded = true;
    e->was_asked = false;
  }
  void block(void* event, const c10::Stream& s) const override {
    Locked locked(streams().lock);
    if (event) join(streams().clocks[s.id()], static_cast<Event*>(event)->clock);
  }
  // What is asked for is late: the first answer is no.
  bool queryEvent(void* event) const override {
    Locked locked(streams().lock);
    auto* e = static_cast<Event*>(event);
    if (!e || streams().host_has(e->clock)) return true;
    if (e->was_asked) join(streams().host, e->clock), arrive();
    e->was_asked = true;
    return streams().host_has(e->clock);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  bool queryStream(const c10::Stream& s) const override {
    Locked locked(streams().lock);
    return streams().host_has(streams().clocks[s.id()]);
  }
  void synchronizeStream(const c10::Stream& s) const override {
    Locked locked(streams().lock);
    count("host waits");
    count("host waits: Stream.synchronize");
    join(streams().host, streams().clocks[s.id()]);
    arrive();
    raise_findings();
  }
  void synchronizeEvent(void* event) const override {
    Locked locked(streams().lock);
    count("host waits");
    count("host waits: Event.synchronize");
    if (event) join(streams().host, static_cast<Event*>(event)->clock);
    arrive();
    raise_findings();
  }
  void synchronizeDevice(const c10::DeviceIndex) const override { wait_for_device(); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override {
    Locked locked(streams().lock);
    if (Block* block = block_of(data.get())) block->recorded.insert(static_cast<int>(s.id()));
  }
  double elapsedTime(void* a, void* b, const c10::DeviceIndex) const override {
    Locked locked(streams().lock);
    auto *first = static_cast<Event*>(a), *last = static_cast<Event*>(b);
    TORCH_CHECK(first && last && first->is_recorded && last->is_recorded, "late_device: an event was not recorded");
    TORCH_CHECK(streams().host_has(first->clock) && streams().host_has(last->clock),
                "late_device: host read before sync: elapsed_time of an event that the host has not waited for");
    return (last->seconds - first->seconds) * 1e3;
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// ---- random numbers and memory

struct Generator final : public c10::GeneratorImpl {
  at::Generator cpu;
  explicit Generator(at::Generator g) : c10::GeneratorImpl(GPU, c10::DispatchKeySet(c10::DispatchKey::CUDA)), cpu(std::move(g)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { return new Generator(cpu.clone()); }
  static c10::DeviceType device_type() { return c10::kCUDA; }
};
at::Generator new_generator() { return at::make_generator<Generator>(at::detail::createCPUGenerator()); }
at::Generator& default_generator() {
  static auto* made = new at::Generator(new_generator());
  return *made;
}
at::Generator& on_cpu(const at::Generator& g) { return static_cast<Generator*>(g.unsafeGetGeneratorImpl())->cpu; }

struct DeviceAllocator final : public c10::Allocator {
  static void free_(void* base) {
    { Locked locked(streams().lock); remove_block(base); }
    std::free(base);
  }
  c10::DataPtr allocate(size_t n) override {
    const size_t bytes = rounded(n + 1);
    void* base = std::aligned_alloc(512, bytes);
    std::memset(base, 0xff, bytes);  // NaN: what was not written shows
    Locked locked(streams().lock);
    add_block(base, n);
    return {base, base, &free_, GPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
} allocator;

struct CUDAHooks final : public at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return new_generator(); }
  c10::Device getDeviceFromPtr(void*) const override { return GPU; }
  void deviceSynchronize(c10::DeviceIndex) const override { wait_for_device(); }
};
using at::CUDAHooksRegistry;
using at::CUDAHooksArgs;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)  // the name that torch looks up

// ---- tensors of both sides over the same bytes

c10::Storage over(const c10::Storage& s, bool on_device) {
  void* base = s.mutable_data();
  c10::DataPtr data;
  if (on_device) {
    Locked locked(streams().lock);
    add_block(base, s.nbytes());
    data = {base, new c10::Storage(s), [](void* held) {
      auto* storage = static_cast<c10::Storage*>(held);
      { Locked locked(streams().lock); remove_block(storage->mutable_data()); }
      delete storage;
    }, GPU};
  } else {
    data = {base, new c10::Storage(s), [](void* held) { delete static_cast<c10::Storage*>(held); }, c10::Device(c10::kCPU)};
  }
  return c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), s.nbytes(), std::move(data),
      on_device ? static_cast<c10::Allocator*>(&allocator) : c10::GetAllocator(c10::kCPU), true);
}
Tensor shaped(c10::Storage s, const Tensor& like, c10::DispatchKey key) {
  auto x = at::detail::make_tensor<c10::TensorImpl>(std::move(s), c10::DispatchKeySet(key), like.dtype());
  x.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) x._set_conj(true);
  if (like.is_neg()) x._set_neg(true);
  return x;
}
Tensor to_cpu(const Tensor& x) { return shaped(over(x.storage(), false), x, c10::DispatchKey::CPU); }
Tensor to_gpu(const Tensor& x) { return shaped(over(x.storage(), true), x, c10::DispatchKey::CUDA); }

// ---- copies

Tensor& copy_(Tensor& self, const Tensor& src, bool non_blocking) {
  const bool to_host = self.is_cpu(), to_device = src.is_cpu();
  TORCH_CHECK(self.is_cuda() || src.is_cuda(), "late_device: wrong device: a copy between ", src.device(), " and ", self.device());
  if (self.numel() == 0) return self;
  const Tensor& host = to_host ? self : src;
  std::unique_lock<std::recursive_mutex> locked(streams().lock);
  raise_findings();
  const bool pinned = (to_host || to_device) && is_pinned(host.storage().data());
  const char* name = to_host ? "a copy to the host" : to_device ? "a copy to the device" : "aten::copy_";
  const uint32_t number = streams().launch(current_stream, shape(name, &self));
  touch(src, number, false);
  touch(self, number, true);
  raise_findings();
  if (!to_host && !to_device) {
    count("operations");
    locked.unlock();
    to_cpu(self).copy_(to_cpu(src));
    return self;
  }
  if (non_blocking && pinned) {
    count(to_host ? "copies to the host" : "copies to the device");
    bring_in_order(pages_of(host.storage().data()));
    if (to_host) {
      copies().push_back({number, pages_of(self.storage().data()), true, self, to_cpu(src).clone()});
      std::memset(block_of(self.storage().data())->base + self.storage_offset() * self.itemsize(), 0xff, self.is_contiguous() ? self.nbytes() : 0);
    } else {
      to_cpu(self).copy_(src);
      copies().push_back({number, pages_of(src.storage().data()), false, src, Tensor()});
    }
    protect(copies().back().pages);
    return self;
  }
  wait_for_stream(name);
  if (to_host) self.copy_(to_cpu(src)); else to_cpu(self).copy_(src);
  raise_findings();
  return self;
}

// DDP's timer of its own work: by the host's clock.
struct Timer final : public c10d::Timer {
  explicit Timer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    auto first = getTimestamp(start), last = getTimestamp(end);
    if (!first || !last || *last < *first) return std::nullopt;
    return *last - *first;
  }
};

#include "operations.h"
}  // namespace late

namespace c10d {
using LateTimer = late::Timer;
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, LateTimer)
}  // namespace c10d
