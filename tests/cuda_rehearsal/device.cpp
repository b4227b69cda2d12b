// A "cuda" device in the memory of the host. Every operation on its tensors runs as the CPU's operation
// on the same memory. clocks.h records the stream on which a GPU would run the operation. This library
// is loaded before torch.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <unordered_map>
#include "clocks.h"
#include "generators.h"

using namespace c10;
using namespace rehearsal;
using Stack = torch::jit::Stack;
using Lock = std::lock_guard<std::mutex>;

namespace {

int index_of(Device device) { return device.has_index() ? device.index() : current_device; }

void use_device(int index) {
  TORCH_CHECK(index >= 0 && index < board().devices, "CUDA error: invalid device ordinal ", index, " of ", board().devices);
  current_device = index;
}

struct OnDevice {  // while this object exists, its device is the current device
  int before = current_device;
  explicit OnDevice(int index) { use_device(index); }
  ~OnDevice() { current_device = before; }
};

void check_own(int device) {
  TORCH_CHECK(board().own < 0 || board().own == device, "cuda rehearsal: this rank's device is cuda:", board().own,
              ", and it uses cuda:", device);
}

int active_stream(int device) { return current_streams[device]; }

// ---- memory -------------------------------------------------------------------------------------

struct Block {  // a block of device memory, owned by the data pointer of a storage
  Storage host;
  int device, stream;
  size_t size;
  std::vector<Access> accesses;
  std::set<int> recorded;  // the streams that record_stream named
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  {
    Lock lock(board().mutex);
    board().allocated[block->device] -= long(block->size);
    std::vector<Access> open;
    for (auto& a : block->accesses)
      if (a.stream != block->stream && !block->recorded.count(a.stream) && !covers(board().host, a)) open.push_back(a);
    if (!open.empty()) board().freed[block->stream].push_back({block->size, open});
  }
  delete block;
}

Block* block_of(const StorageImpl* storage) {
  auto& data = storage->data_ptr();
  TORCH_INTERNAL_ASSERT(data.get_deleter() == &release, "a CUDA tensor without a block");
  return static_cast<Block*>(data.get_context());
}
Block* block_of(const at::Tensor& tensor) { return block_of(tensor.storage().unsafeGetStorageImpl()); }

DataPtr own(Storage host, int device) {
  check_own(device);
  auto* block = new Block{std::move(host), device, active_stream(device), 0, {}, {}};
  block->size = block->host.nbytes();
  std::string problem;
  {
    Lock lock(board().mutex);
    auto& used = board().allocated[device];
    used += long(block->size);
    board().peak[device] = std::max(board().peak[device], used);
    problem = reuse(block->stream, block->size);
  }
  DataPtr data(block->host.mutable_data(), block, &release, cuda_device(device));
  TORCH_CHECK(problem.empty(), problem);
  return data;
}

struct DeviceAllocator final : public at::Allocator {
  DataPtr allocate(size_t bytes) override {
    Storage host(Storage::use_byte_size_t(), bytes, GetCPUAllocator(), true);
    if (bytes) memset(host.mutable_data(), 0xFF, bytes);  // NaN or -1, so that no code can rely on zeros
    return own(std::move(host), current_device);
  }
  DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { memcpy(to, from, bytes); }
} device_allocator;

void unpin(void* base) {
  Lock lock(board().mutex);
  auto& memory = board().pinned.at(static_cast<char*>(base));
  memory.freed = true;  // the memory is kept until copies from and to it are done, as in torch
  if (board().busy.count(memory.base)) return;
  munmap(memory.base, memory.size);
  board().pinned.erase(memory.base);
}

struct PinnedAllocator final : public at::Allocator {
  DataPtr allocate(size_t bytes) override {
    size_t size = (std::max<size_t>(bytes, 1) + 4095) / 4096 * 4096;
    auto* base = static_cast<char*>(mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    TORCH_CHECK(base != MAP_FAILED, "no pinned memory");
    Lock lock(board().mutex);
    board().pinned[base] = Pinned{base, size, {}};
    return DataPtr(base, base, &unpin, Device(DeviceType::CPU));
  }
  DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { memcpy(to, from, bytes); }
} pinned_allocator;

// ---- one operation ------------------------------------------------------------------------------

struct Kind {  // the properties of an operator
  std::string name;
  bool is_view = false, takes_scalars = false, waits = false;
  std::vector<bool> writes, is_generator;
};

bool contains(std::initializer_list<const char*> names, const std::string& name) {
  return std::any_of(names.begin(), names.end(), [&](auto* n) { return name == n; });
}

Kind make_kind(const OperatorHandle& op) {
  auto& schema = op.schema();
  Kind kind{schema.name()};
  for (auto& a : schema.arguments()) {
    kind.writes.push_back(a.alias_info() && a.alias_info()->isWrite());
    auto type = a.type();
    if (auto optional = type->cast<OptionalType>()) type = optional->getElementType();
    kind.is_generator.push_back(type->kind() == TypeKind::GeneratorType);
  }
  for (auto& r : schema.returns()) kind.is_view |= r.alias_info() && !r.alias_info()->isWrite();
  kind.is_view |= contains({"aten::_unsafe_view", "aten::_reshape_alias", "aten::_version"}, kind.name);
  // operators that accept a tensor on the host as a scalar, if it holds a single number
  bool listed = contains({"aten::masked_fill", "aten::masked_fill_", "aten::fill_", "aten::index_put_", "aten::_index_put_impl_",
                          "aten::index_fill_", "aten::index_fill", "aten::index", "aten::where", "aten::floor_divide"}, kind.name);
  kind.takes_scalars = listed || kind.name.rfind("aten::_foreach_", 0) == 0 || kind.name.rfind("aten::_fused_", 0) == 0;
  for (auto tag : op.getTags()) kind.takes_scalars |= tag == at::Tag::pointwise;
  // operators whose result, or its size, the host must know
  kind.waits = contains({"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2",
                         "aten::unique_dim", "aten::unique_consecutive", "aten::equal", "aten::bincount", "aten::histc"}, kind.name);
  return kind;
}

const Kind& kind_of(const OperatorHandle& op) {
  static thread_local std::unordered_map<const FunctionSchema*, Kind> known;
  auto it = known.find(&op.schema());
  return it != known.end() ? it->second : known.emplace(&op.schema(), make_kind(op)).first->second;
}

bool on_device(const at::Tensor& t) { return t.defined() && t.device().is_cuda(); }

at::Tensor with_storage(Storage storage, DispatchKey key, const at::Tensor& like) {
  DispatchKeySet keys(key);
  auto backend = keys.highestBackendKey();
  keys = keys | getAutocastRelatedKeySetFromBackend(backend);
  if (!like.is_inference()) keys = keys | getAutogradRelatedKeySetFromBackend(backend);
  // a view is an inference tensor if `like` is one, whatever mode is active
  auto t = at::detail::make_tensor<TensorImpl>(TensorImpl::VIEW, std::move(storage), keys, like.dtype());
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  impl->_set_conj(like.is_conj());
  impl->_set_neg(like.is_neg());
  return t;
}

at::Tensor on_host(const at::Tensor& t) { return on_device(t) ? with_storage(block_of(t)->host, DispatchKey::CPU, t) : t; }

std::pair<size_t, size_t> bytes_of(const at::Tensor& t) {
  size_t last = 0;
  for (int64_t i = 0; i < t.dim(); i++) last += size_t(t.size(i) - 1) * size_t(t.stride(i));
  size_t begin = size_t(t.storage_offset()) * t.itemsize();
  return {begin, begin + (last + 1) * t.itemsize()};
}

// Records an access of the current stream. The mutex must be held, and `launch` called before.
std::string access(const at::Tensor& t, int stream, uint64_t time, bool writes, const std::string& work) {
  if (!t.numel()) return "";
  auto [begin, end] = bytes_of(t);
  return touch(block_of(t)->accesses, {begin, end, stream, time, writes, work});
}

struct Call {
  const Kind& kind;
  int device = -1;
  std::vector<std::pair<at::Tensor, bool>> tensors;  // (tensor of the device, whether it is written)
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;  // (tensor of the device, the same memory on the host)
  bool has_mask = false;

  void see(const at::Tensor& t, bool writes) {
    if (!t.defined()) return;
    if (!t.device().is_cuda()) return;
    TORCH_CHECK(device < 0 || device == t.device().index(), "Expected all tensors to be on the same device, but found at "
                "least two devices, cuda:", device, " and ", t.device(), "! (", kind.name, ")");
    device = t.device().index();
    tensors.emplace_back(t, writes);
  }
  void check_host(const at::Tensor& t, bool writes, bool is_index) const {
    if (!t.defined() || !t.device().is_cpu() || (is_index && !writes)) return;
    bool fits = t.dim() == 0 && (kind.takes_scalars || t.unsafeGetTensorImpl()->is_wrapped_number()) && !writes;
    TORCH_CHECK(fits, "Expected all tensors to be on the same device, but found at least two devices, cuda:", device,
                " and cpu! (", kind.name, ")");
  }
  at::Tensor host(const at::Tensor& t) {
    if (!on_device(t)) return t;
    for (auto& [original, alias] : pairs)
      if (original.is_same(t)) return alias;
    pairs.emplace_back(t, on_host(t));
    return pairs.back().second;
  }
  at::Tensor back(const at::Tensor& t) {
    if (!t.defined() || !t.device().is_cpu()) return t;
    for (auto& [original, alias] : pairs)
      if (alias.is_same(t)) return original;
    auto* storage = t.storage().unsafeGetStorageImpl();
    for (auto& [original, alias] : pairs)
      if (alias.storage().unsafeGetStorageImpl() == storage) return with_storage(original.storage(), DispatchKey::CUDA, t);
    Storage made(Storage::use_byte_size_t(), t.storage().nbytes(), own(t.storage(), device), &device_allocator, true);
    auto result = with_storage(made, DispatchKey::CUDA, t);
    Lock lock(board().mutex);
    int stream = active_stream(device);
    access(result, stream, board().streams[stream][stream], true, kind.name);
    if (t.scalar_type() == at::kDouble) board().doubles += t.numel();
    return result;
  }
  void follow_resizing() {
    for (auto& [original, alias] : pairs) {
      auto* block = block_of(original);
      auto* storage = original.storage().unsafeGetStorageImpl();
      if (storage->nbytes() != alias.storage().nbytes() || storage->data() != alias.storage().data()) {
        storage->set_data_ptr_noswap(own(alias.storage(), block->device));
        storage->set_nbytes(alias.storage().nbytes());
      }
      if (original.sizes() != alias.sizes() || original.strides() != alias.strides())
        original.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
    }
  }
};

template <class Visit>
void each_tensor(const IValue& v, Visit visit) {
  if (v.isTensor()) visit(v.toTensor());
  else if (v.isTensorList()) for (const at::Tensor& t : v.toTensorVector()) visit(t);
  else if (v.isOptionalTensorList()) { for (std::optional<at::Tensor> t : v.toOptionalTensorList()) if (t) visit(*t); }
  else if (v.isList()) for (const IValue& e : v.toListRef()) each_tensor(e, visit);
}

template <class Change>
IValue changed(const IValue& v, Change change) {
  if (v.isTensor()) return change(v.toTensor());
  if (v.isTensorList()) {
    auto list = v.toTensorVector();
    for (auto& t : list) t = change(t);
    return List<at::Tensor>(list);
  }
  if (v.isOptionalTensorList()) {
    List<std::optional<at::Tensor>> list;
    for (std::optional<at::Tensor> t : v.toOptionalTensorList()) list.push_back(t ? std::optional<at::Tensor>(change(*t)) : t);
    return list;
  }
  if (v.isList() && !v.toListRef().empty() && v.toListRef()[0].isTensorList()) {
    List<List<at::Tensor>> lists;
    for (const IValue& e : v.toListRef()) lists.push_back(changed(e, change).toTensorList());
    return lists;
  }
  return v;
}

// Records that the stream uses the tensors. Raises an error if another stream may use them at that time.
void start(Call& call) {
  std::string problem;
  {
    Lock lock(board().mutex);
    int stream = active_stream(call.device);
    auto time = launch(stream);
    if (call.kind.is_view) return;
    for (auto& [t, writes] : call.tensors) {
      auto found = access(t, stream, time, writes, call.kind.name);
      if (problem.empty()) problem = found;
    }
  }
  TORCH_CHECK(problem.empty(), problem);
}

void operate(const OperatorHandle& op, DispatchKeySet, Stack* stack) {
  const Kind& kind = kind_of(op);
  Call call{kind};
  const size_t count = op.schema().arguments().size(), first = stack->size() - count;
  for (size_t i = 0; i < count; i++) each_tensor((*stack)[first + i], [&](const at::Tensor& t) { call.see(t, kind.writes[i]); });
  for (size_t i = 0; i < count; i++) {
    const IValue& v = (*stack)[first + i];
    if (call.tensors.empty()) break;
    bool is_index = v.isOptionalTensorList();  // the indices of a[i, j]: the device copies indices from the host
    each_tensor(v, [&](const at::Tensor& t) {
      call.check_host(t, kind.writes[i], is_index);
      if (!is_index || !t.defined()) return;
      // The host must wait for the positions that a mask selects. `index` has called `nonzero` before.
      bool is_mask = kind.name != "aten::index" && (t.scalar_type() == at::kBool || t.scalar_type() == at::kByte);
      call.has_mask |= is_mask || t.device().is_cpu();
    });
  }
  for (size_t i = 0; i < count; i++)
    if ((*stack)[first + i].isDevice() && call.device < 0) call.device = index_of((*stack)[first + i].toDevice());
  if (call.device < 0) call.device = current_device;
  start(call);
  for (size_t i = 0; i < count; i++) {
    IValue& v = (*stack)[first + i];
    if (v.isDevice()) v = v.toDevice().is_cuda() ? Device(DeviceType::CPU) : v.toDevice();
    else if (kind.is_generator[i]) v = inner_generator(v.isNone() ? default_generator(call.device) : v.toGenerator());
    else v = changed(v, [&](const at::Tensor& t) { return call.host(t); });
  }
  bool in_bf16 = call.tensors.empty() || call.tensors[0].first.scalar_type() == at::kBFloat16;
  bool waits = kind.waits || call.has_mask || (kind.name == "aten::_grouped_mm" && !in_bf16) || (kind.name == "aten::repeat_interleave" && stack->back().isNone());
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  call.follow_resizing();
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); i++)
    (*stack)[i] = changed((*stack)[i], [&](const at::Tensor& t) { return call.back(t); });
  if (waits) host_waits_for(active_stream(call.device), kind.name.c_str() + 6);
}

// ---- operations with a kernel of their own ------------------------------------------------------

const at::Tensor& counted(const at::Tensor& made) {
  if (made.scalar_type() == at::kDouble) board().doubles += made.numel();
  return made;
}

at::Tensor empty(IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device> device,
                 std::optional<bool>, std::optional<MemoryFormat> format) {
  OnDevice inside(device ? index_of(*device) : current_device);
  at::Tensor made = at::detail::empty_generic(size, &device_allocator, DispatchKeySet(DispatchKey::CUDA),
                                   dtype.value_or(at::get_default_dtype_as_scalartype()), format);
  return counted(made);
}

at::Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype, std::optional<Layout>,
                         std::optional<Device> device, std::optional<bool>) {
  OnDevice inside(device ? index_of(*device) : current_device);
  at::Tensor made = at::detail::empty_strided_generic(size, stride, &device_allocator, DispatchKeySet(DispatchKey::CUDA),
                                           dtype.value_or(at::get_default_dtype_as_scalartype()));
  return counted(made);
}

// While it exists, the device may touch pinned memory that a copy in progress uses.
struct Open {
  Pinned* memory;
  explicit Open(Pinned* m) : memory(m) { if (memory) mprotect(memory->base, memory->size, PROT_READ | PROT_WRITE); }
  ~Open() { if (memory) protect(*memory); }
};

at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  bool from = on_device(source), to = on_device(self);
  if (!self.numel()) return self;
  const at::Tensor& away = from && to ? self : (from ? source : self);
  int stream = active_stream(away.device().index());
  std::string problem;
  bool waits = false;
  {
    Lock lock(board().mutex);
    auto time = launch(stream);
    if (from) problem = access(source, stream, time, false, "copy_");
    if (to && problem.empty()) problem = access(self, stream, time, true, "copy_");
    Pinned* memory = nullptr;
    if (!(from && to)) {
      const at::Tensor& near = from ? self : source;
      memory = pinned_at(near.const_data_ptr());
      // a copy between dtypes or strides runs on the device, with a temporary tensor
      if (memory && problem.empty() && non_blocking) {
        size_t begin = (char*)near.const_data_ptr() - memory->base;
        auto [low, high] = bytes_of(near);
        problem = touch(memory->accesses, {begin, begin + high - low, stream, time, from, "copy_"});
        board().busy.insert(memory->base);
      }
      if (!memory && from && non_blocking && problem.empty())
        problem = "cuda rehearsal: copy_ with non_blocking=True from the device to host memory that is not pinned: the host may read it too early";
      waits = !non_blocking;
    }
    if (problem.empty()) {
      Open open(memory);
      on_host(self).copy_(on_host(source));
    }
  }
  TORCH_CHECK(problem.empty(), problem);
  if (waits) host_waits_for(stream, from ? "copy to the host" : "copy from the host");
  return self;
}

at::Tensor mm_dtype(const at::Tensor& a, const at::Tensor& b, ScalarType dtype) { return at::mm(a.to(dtype), b.to(dtype)); }
at::Tensor& mm_dtype_out(const at::Tensor& a, const at::Tensor& b, ScalarType dtype, at::Tensor& out) {
  return out.copy_(at::mm(a.to(dtype), b.to(dtype)));
}
at::Tensor& addmm_dtype_out(const at::Tensor& sum, const at::Tensor& a, const at::Tensor& b, ScalarType dtype,
                            const at::Scalar& beta, const at::Scalar& alpha, at::Tensor& out) {
  return at::addmm_out(out, sum, a.to(dtype), b.to(dtype), beta, alpha);
}
at::Tensor bmm_dtype(const at::Tensor& a, const at::Tensor& b, ScalarType dtype) { return at::bmm(a.to(dtype), b.to(dtype)); }

void record_stream(at::Tensor& self, Stream stream) {
  Lock lock(board().mutex);
  block_of(self)->recorded.insert(number_of(stream));
}

at::Tensor& set_storage(at::Tensor& self, Storage source, SymInt offset, SymIntArrayRef size, SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return self;
}
at::Tensor& set_whole_storage(at::Tensor& self, Storage source) {
  auto length = int64_t(source.nbytes() / self.itemsize());
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(IntArrayRef{length}, IntArrayRef{int64_t(1)}, 0);
  return self;
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source.storage());
  self.unsafeGetTensorImpl()->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return self;
}

// For collectives in Python: an alias of a tensor on the host, and an access by the current stream.
at::Tensor host_alias(const at::Tensor& t) { return on_host(t); }
void use(const at::Tensor& t, bool writes, std::string work) {
  std::string problem;
  {
    Lock lock(board().mutex);
    int stream = active_stream(t.device().index());
    problem = access(t, stream, launch(stream), writes, work);
  }
  TORCH_CHECK(problem.empty(), problem);
}
at::Generator generator_of(int64_t device) { return default_generator(int(device)); }

}  // namespace

// ---- the functions that torch needs of a CUDA device --------------------------------------------

namespace c10::impl {
struct RehearsalGuard final : public DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device d) const override { auto before = getDevice(); use_device(d.index()); return before; }
  Device getDevice() const override { return cuda_device(current_device); }
  void setDevice(Device d) const override { use_device(d.index()); }
  void uncheckedSetDevice(Device d) const noexcept override { current_device = d.index(); }
  Stream getStream(Device d) const override { return stream_of(active_stream(index_of(d)), index_of(d)); }
  Stream getDefaultStream(Device d) const override { return stream_of(index_of(d), index_of(d)); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return stream_of(new_stream(), index_of(d)); }
  Stream getNewStream(Device d, int) const override { check_own(index_of(d)); return stream_of(new_stream(), index_of(d)); }
  Stream exchangeStream(Stream s) const override {
    auto before = getStream(s.device());
    current_streams[s.device_index()] = number_of(s);
    return before;
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Mark*>(event); }
  void record(void** event, const Stream& s, const DeviceIndex, const EventFlag) const override {
    if (!*event) *event = new Mark;
    auto* e = static_cast<Mark*>(*event);
    Lock lock(board().mutex);
    launch(number_of(s));
    e->clock = board().streams[number_of(s)];
    e->moment = std::chrono::steady_clock::now();
  }
  void block(void* event, const Stream& s) const override {
    if (!event) return;  // the event was never recorded, so there is nothing to wait for
    Lock lock(board().mutex);
    join(board().streams[number_of(s)], static_cast<Mark*>(event)->clock);
  }
  bool queryEvent(void* event) const override {
    if (event) { Lock lock(board().mutex); host_knows(static_cast<Mark*>(event)->clock); }
    return true;
  }
  DeviceIndex deviceCount() const noexcept override { return DeviceIndex(board().devices); }
  bool queryStream(const Stream& s) const override {
    Lock lock(board().mutex);
    host_knows(Clock(board().streams[number_of(s)]));
    return true;
  }
  void synchronizeStream(const Stream& s) const override { check_own(s.device_index()); host_waits_for(number_of(s), "stream.synchronize"); }
  void synchronizeEvent(void* event) const override {
    if (event) { Lock lock(board().mutex); host_knows(static_cast<Mark*>(event)->clock); }
    waited("event.synchronize");
  }
  void synchronizeDevice(const DeviceIndex) const override {
    {
      Lock lock(board().mutex);
      Clock all;
      for (auto& clock : board().streams) join(all, clock);
      host_knows(all);
    }
    waited("device synchronize");
  }
  void recordDataPtrOnStream(const DataPtr& data, const Stream& s) const override {
    if (data.get_deleter() != &release) return;
    Lock lock(board().mutex);
    static_cast<Block*>(data.get_context())->recorded.insert(number_of(s));
  }
  double elapsedTime(void* a, void* b, const DeviceIndex) const override {
    auto passed = static_cast<Mark*>(b)->moment - static_cast<Mark*>(a)->moment;
    return std::chrono::duration<double, std::milli>(passed).count();
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, RehearsalGuard)
}  // namespace c10::impl

namespace at {
struct CUDAHooks : public CUDAHooksInterface {  // torch looks for a class of this name
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return DeviceIndex(board().devices); }
  int getNumGPUs() const override { return board().devices; }
  DeviceIndex current_device() const override { return DeviceIndex(rehearsal::current_device); }
  DeviceIndex getCurrentDevice() const override { return DeviceIndex(rehearsal::current_device); }
  void setCurrentDevice(DeviceIndex index) const override { use_device(index); }
  bool isPinnedPtr(const void* data) const override { Lock lock(board().mutex); return pinned_at(data) != nullptr; }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  const Generator& getDefaultGenerator(DeviceIndex index) const override {
    return default_generator(index < 0 ? rehearsal::current_device : index);
  }
  Generator getNewGenerator(DeviceIndex index) const override { return new_generator(index < 0 ? rehearsal::current_device : index); }
  void deviceSynchronize(DeviceIndex index) const override { c10::impl::RehearsalGuard().synchronizeDevice(index); }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&operate>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy);
  // GPUs have a kernel for bf16. For other types, torch loops over the groups on the host, as on the CPU.
  m.impl("_grouped_mm", torch::CppFunction::makeFromBoxedFunction<&operate>());
  m.impl("mm.dtype", mm_dtype);
  m.impl("mm.dtype_out", mm_dtype_out);
  m.impl("addmm.dtype_out", addmm_dtype_out);
  m.impl("bmm.dtype", bmm_dtype);
  m.impl("record_stream", record_stream);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
}
TORCH_LIBRARY(rehearsal, m) {
  m.def("host_alias(Tensor(a) t) -> Tensor(a)");
  m.def("use(Tensor t, bool writes, str work) -> ()");
  m.def("generator_of(int device) -> Generator?", &generator_of);
}
TORCH_LIBRARY_IMPL(rehearsal, CUDA, m) {
  m.impl("host_alias", host_alias);
  m.impl("use", use);
}

extern "C" {  // called from Python by ctypes
void rehearsal_begin(int devices, int own) {
  board().devices = std::min(devices, kMostDevices);
  board().own = own;
  watch_faults();
}
int rehearsal_device() { return current_device; }
int rehearsal_use_device(int index) {
  if (index < 0 || index >= board().devices) return -1;
  return std::exchange(current_device, index);
}
long rehearsal_stream(int device) { return stream_of(current_streams[device], device).id(); }
void rehearsal_use_stream(int device, long id) { current_streams[device] = id ? int(id) : device; }
long rehearsal_allocated(int device) { return board().allocated[device]; }
long rehearsal_peak(int device) { return board().peak[device]; }
void rehearsal_reset_peak(int device) { board().peak[device] = board().allocated[device]; }
long rehearsal_doubles() { return board().doubles; }
void rehearsal_on_wait(void (*tell)(const char*)) { board().on_wait = tell; }
void rehearsal_synchronize() { c10::impl::RehearsalGuard().synchronizeDevice(0); }
}
