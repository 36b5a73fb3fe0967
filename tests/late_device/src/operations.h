// Every other operation: by the CPU's kernel, after a look at where its tensors are and who uses
// them. A part of device.cpp.

// Operations whose result the host needs: it waits for the stream.
const std::set<std::string> host_reads = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select", "aten::_unique2",
    "aten::unique_dim", "aten::unique_consecutive", "aten::bincount", "aten::is_nonzero", "aten::nonzero_static"};
// Operations that take an index of the host beside tensors of the device, and wait for its copy.
const std::set<std::string> host_indices = {"aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put"};
// Operations that touch no element.
const std::set<std::string> untouched = {
    "aten::resize_", "aten::resize_as_", "aten::_resize_output_", "aten::_unsafe_view", "aten::unsafe_split",
    "aten::unsafe_split_with_sizes", "aten::_reshape_alias", "aten::is_same_size", "aten::_has_compatible_shallow_copy_type"};

bool is_view(const c10::FunctionSchema& schema) {
  if (untouched.count(schema.name())) return true;
  bool aliases = false;
  for (auto& one : schema.returns())
    if (one.alias_info()) {
      if (one.alias_info()->isWrite()) return false;
      aliases = true;
    }
  return aliases;
}
bool waits_for_index(const std::string& name, const std::vector<c10::IValue>& args) {
  if (name == "aten::repeat_interleave") return args.back().isNone();
  if (!host_indices.count(name) || !args[1].isOptionalTensorList()) return false;
  for (std::optional<Tensor> x : args[1].toOptionalTensorList())
    if (x && x->defined() && (x->scalar_type() == at::kBool || x->scalar_type() == at::kByte)) return true;
  return false;
}

// Return int64 [n] of the rows that an operation touches of its first argument, by an index on the
// device or the host; undefined where it may touch all.
Tensor rows_of(const std::string& name, const std::vector<c10::IValue>& args) {
  Tensor index;
  if (host_indices.count(name) && name != "aten::index_put") {
    auto list = args[1].toOptionalTensorList();
    if (list.size() != 1) return Tensor();
    std::optional<Tensor> only = list[0];
    if (only) index = *only;
  } else if (name == "aten::index_select" || name == "aten::index_add_" || name == "aten::index_copy_") {
    if (args[1].toInt() == 0) index = args[2].toTensor();
  }
  return index.defined() && index.dim() == 1 && index.scalar_type() == at::kLong ? index : Tensor();
}

struct Seen {
  Tensor gpu, cpu;
  bool written, read;
  Tensor rows;  // int64 [n] on the CPU, where not all are touched
  void touch(uint32_t number) const {
    if (!rows.defined()) return late::touch(gpu, number, written);
    for (int64_t i = 0; i < rows.numel(); ++i) {
      const int64_t row = rows.const_data_ptr<int64_t>()[i];
      if (row >= -gpu.size(0) && row < gpu.size(0)) late::touch(gpu.select(0, row), number, written);
    }
  }
};

// The arguments of a call, given to a CPU kernel.
struct Call {
  const c10::FunctionSchema& schema;
  std::vector<Seen> seen;
  bool is_on_device = false, has_host_index = false;

  Tensor down(const Tensor& x, bool written, bool read) {
    if (!x.defined() || x.device().is_meta()) return x;
    if (x.is_cuda()) {
      is_on_device = true;
      for (auto& s : seen)
        if (s.gpu.unsafeGetTensorImpl() == x.unsafeGetTensorImpl()) {
          s.written |= written;
          s.read |= read;
          return s.cpu;
        }
      for (auto& s : seen)
        if (s.gpu.storage().unsafeGetStorageImpl() == x.storage().unsafeGetStorageImpl()) {
          auto c = shaped(s.cpu.storage(), x, c10::DispatchKey::CPU);
          seen.push_back({x, c, written, read, Tensor()});
          return c;
        }
      auto c = to_cpu(x);
      seen.push_back({x, c, written, read, Tensor()});
      return c;
    }
    if (x.dim() == 0) return x;  // a number; CUDA takes it along with the launch
    if (host_indices.count(schema.name()) && !written) {
      has_host_index = true;
      return x;
    }
    TORCH_CHECK(false, "late_device: wrong device: ", schema.name(), " has a tensor on ", x.device(), " ", x.sizes(), " beside those on cuda");
  }
  c10::IValue down(const c10::IValue& a, const c10::Argument& argument) {
    const auto* alias = argument.alias_info();
    const bool written = alias && alias->isWrite(), read = !argument.is_out();
    if (a.isTensor()) return down(a.toTensor(), written, read);
    if (a.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& x : a.toTensorVector()) list.push_back(down(x, written, read));
      return list;
    }
    if (a.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (std::optional<Tensor> x : a.toOptionalTensorList())
        list.push_back(x ? std::optional<Tensor>(down(*x, written, read)) : std::nullopt);
      return list;
    }
    if (a.isGenerator() && a.toGenerator().device().is_cuda()) return on_cpu(a.toGenerator());
    if (a.isNone() && argument.name() == "generator") return on_cpu(default_generator());
    if (a.isDevice() && a.toDevice().is_cuda()) {
      is_on_device = true;
      return c10::Device(c10::kCPU);
    }
    return a;
  }
};

void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto n = schema.arguments().size();
  std::vector<c10::IValue> args = torch::jit::pop(*stack, n);
  const bool waits = host_reads.count(schema.name()) || waits_for_index(schema.name(), args);
  const Tensor rows = rows_of(schema.name(), args);
  const Tensor first = args.size() && args[0].isTensor() ? args[0].toTensor() : Tensor();
  Call call{schema};
  for (size_t i = 0; i < n; ++i) args[i] = call.down(args[i], schema.arguments()[i]);

  // 1. who uses what
  const bool touches = !is_view(schema);
  uint32_t number = 0;
  {
    Locked locked(streams().lock);
    find_hits();
    raise_findings();
    if (touches) {
      count("operations");
      number = streams().launch(current_stream, shape(schema.name(), call.seen.empty() ? nullptr : &call.seen[0].gpu));
      for (auto& s : call.seen) {
        if (rows.defined() && s.gpu.is_same(first)) s.rows = (rows.is_cuda() ? to_cpu(rows) : rows).contiguous();
        s.touch(number);
      }
      raise_findings();
    }
    if (waits) wait_for_stream(schema.name());
    if (call.has_host_index) wait_for_stream("an index of the host");
  }

  // 2. the CPU's kernel
  for (auto& a : args) torch::jit::push(*stack, a);
  op.callBoxed(stack);

  // 3. tensors of the device over what it has written and made
  for (auto& s : call.seen)
    if (s.written) {
      auto* gpu = s.gpu.unsafeGetTensorImpl();
      if (s.cpu.storage().data() != s.gpu.storage().data()) {
        gpu->set_storage_keep_dtype(over(s.cpu.storage(), true));
      }
      if (!s.cpu.sizes().equals(s.gpu.sizes()) || !s.cpu.strides().equals(s.gpu.strides()) || s.cpu.storage_offset() != s.gpu.storage_offset())
        gpu->set_sizes_and_strides(s.cpu.sizes(), s.cpu.strides(), s.cpu.storage_offset());
    }
  std::map<void*, c10::Storage> made;
  auto up = [&](const Tensor& x) -> Tensor {
    if (!x.defined() || !x.is_cpu()) return x;
    for (auto& s : call.seen)
      if (s.cpu.unsafeGetTensorImpl() == x.unsafeGetTensorImpl()) return s.gpu;
    for (auto& s : call.seen)
      if (s.cpu.storage().unsafeGetStorageImpl() == x.storage().unsafeGetStorageImpl()) return shaped(s.gpu.storage(), x, c10::DispatchKey::CUDA);
    auto key = static_cast<void*>(x.storage().unsafeGetStorageImpl());
    if (!made.count(key)) made.emplace(key, over(x.storage(), true));
    auto result = shaped(made.at(key), x, c10::DispatchKey::CUDA);
    Locked locked(streams().lock);
    if (touches) touch(result, number, true);
    return result;
  };
  auto results = torch::jit::pop(*stack, schema.returns().size());
  for (auto& r : results) {
    if (r.isTensor()) {
      r = up(r.toTensor());
    } else if (r.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& x : r.toTensorVector()) list.push_back(up(x));
      r = list;
    }
    torch::jit::push(*stack, r);
  }
  Locked locked(streams().lock);
  raise_findings();
}

// ---- operations that the CPU has no kernel for, or that are about storages

Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool> pin, std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  auto made = at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
  Locked locked(streams().lock);
  raise_findings();
  return made;
}
Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  auto made = at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
  Locked locked(streams().lock);
  raise_findings();
  return made;
}
Tensor& set_at(Tensor& self, c10::Storage s, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  TORCH_CHECK(s.device_type() == c10::kCUDA, "late_device: wrong device: set_ to a storage on ", s.device());
  auto* x = self.unsafeGetTensorImpl();
  x->set_storage_keep_dtype(s);
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (stride.size() == size.size() && size.size()) {
    x->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  } else {
    x->set_sizes_contiguous(sizes);
    x->set_storage_offset(offset.expect_int());
  }
  return self;
}
Tensor& set_whole(Tensor& self, c10::Storage s) {
  std::vector<c10::SymInt> size{static_cast<int64_t>(s.nbytes() / self.itemsize())};
  return set_at(self, s, 0, size, {});
}
// Give the storage of a tensor another size, with memory of its own; 0 frees it.
void resize_storage(const Tensor& x, int64_t bytes) {
  auto* storage = x.storage().unsafeGetStorageImpl();
  c10::DataPtr data = bytes ? allocator.allocate(bytes) : c10::DataPtr(nullptr, GPU);
  if (bytes && storage->nbytes())
    std::memcpy(data.get(), storage->data(), std::min<size_t>(bytes, storage->nbytes()));
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(static_cast<size_t>(bytes));
  Locked locked(streams().lock);
  raise_findings();
}
void record_stream(Tensor& self, c10::Stream s) { Guard().recordDataPtrOnStream(self.storage().data_ptr(), s); }

// Note a launch that Python carries out on the host's views of tensors.
void touch_all(const std::string& name, at::TensorList reads, at::TensorList writes) {
  Locked locked(streams().lock);
  find_hits();
  raise_findings();
  count("operations");
  for (auto* list : {&reads, &writes})
    for (const Tensor& x : *list)
      TORCH_CHECK(x.is_cuda(), "late_device: wrong device: ", name, " has a tensor on ", x.device(), " ", x.sizes());
  const Tensor* first = reads.empty() ? (writes.empty() ? nullptr : &writes[0]) : &reads[0];
  const uint32_t number = streams().launch(current_stream, shape(name, first));
  for (const Tensor& x : reads) touch(x, number, false);
  for (const Tensor& x : writes) touch(x, number, true);
  raise_findings();
}
int64_t launch(const std::string& name) {
  Locked locked(streams().lock);
  find_hits();
  raise_findings();
  count("operations");
  return streams().launch(current_stream, name);
}
// Note that a launch touches these addresses. addresses: int64 [n] and mask: bool [n], on the CPU.
void touch_addresses(int64_t number, const Tensor& addresses, const Tensor& mask, int64_t bytes, bool writes) {
  Locked locked(streams().lock);
  const int64_t* at = addresses.const_data_ptr<int64_t>();
  const bool* is_on = mask.const_data_ptr<bool>();
  Block* block = nullptr;
  for (int64_t i = 0; i < addresses.numel();) {
    if (!is_on[i]) { ++i; continue; }
    int64_t end = i + 1;  // addresses in a row at once
    while (end < addresses.numel() && is_on[end] && at[end] == at[end - 1] + bytes) ++end;
    const char* address = reinterpret_cast<const char*>(at[i]);
    if (!block || address < block->base || address >= block->base + block->bytes) block = block_of(address);
    TORCH_CHECK(block && block->pages < 0, "late_device: wrong device: ", streams().text(number), " is given memory that is not the device's");
    touch(*block, address - block->base, (end - i) * bytes, static_cast<uint32_t>(number), writes);
    i = end;
  }
  raise_findings();
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("record_stream", record_stream);
  m.impl("set_.source_Storage_storage_offset", set_at);
  m.impl("set_.source_Storage", set_whole);
}
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }
TORCH_LIBRARY(late_device, m) {
  m.def("cpu(Tensor x) -> Tensor", [](const Tensor& x) { return x.is_cuda() ? to_cpu(x) : x; });
  m.def("cuda(Tensor x) -> Tensor", [](const Tensor& x) { return x.is_cpu() ? to_gpu(x) : x; });
  m.def("touch(str name, Tensor[] reads, Tensor[] writes) -> ()", touch_all);
  m.def("launch(str name) -> int", launch);
  m.def("touch_addresses(int number, Tensor addresses, Tensor mask, int bytes, bool writes) -> ()", touch_addresses);
  m.def("resize_storage(Tensor x, int bytes) -> ()", resize_storage);
  m.def("set_stream(int id) -> ()", [](int64_t id) { current_stream = static_cast<int>(id); });
  m.def("current_stream() -> int", []() -> int64_t { return current_stream; });
  m.def("synchronize() -> ()", []() { count("host waits"); count("host waits: synchronize"); wait_for_device(); });
  m.def("counts() -> Dict(str, int)", []() {
    Locked locked(streams().lock);
    c10::Dict<std::string, int64_t> all;
    for (auto& [name, number] : counts) all.insert(name, number);
    return all;
  });
  m.def("reset_counts() -> ()", []() { Locked locked(streams().lock); counts.clear(); });
  m.def("findings() -> str[]", []() { Locked locked(streams().lock); find_hits(); return memory().findings; });
  m.def("forget_findings() -> ()", []() { Locked locked(streams().lock); find_hits(); memory().findings.clear(); memory().raised = 0; memory().freed.clear(); });
  m.def("set_sync_debug_mode(int mode) -> ()", [](int64_t mode) { sync_debug_mode = static_cast<int>(mode); });
  m.def("get_sync_debug_mode() -> int", []() -> int64_t { return sync_debug_mode; });
  m.def("memory() -> int[]", []() { Locked locked(streams().lock); return std::vector<int64_t>{static_cast<int64_t>(memory().allocated), static_cast<int64_t>(memory().peak)}; });
  m.def("reset_peak() -> ()", []() { Locked locked(streams().lock); memory().peak = memory().allocated; });
  m.def("elapsed_ms(int first, int last) -> float", [](int64_t first, int64_t last) {
    return Guard().elapsedTime(reinterpret_cast<void*>(first), reinterpret_cast<void*>(last), 0);
  });
  m.def("seed(int seed) -> ()", [](int64_t seed) { default_generator().set_current_seed(seed); });
  m.def("get_rng_state() -> Tensor", []() { return Tensor::wrap_tensor_impl(on_cpu(default_generator()).unsafeGetGeneratorImpl()->get_state()); });
  m.def("set_rng_state(Tensor state) -> ()", [](const Tensor& state) { on_cpu(default_generator()).unsafeGetGeneratorImpl()->set_state(*state.unsafeGetTensorImpl()); });
}
