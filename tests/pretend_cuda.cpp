// A CUDA device that computes on the CPU and is as strict as one: its memory is no CPU tensor's, operations on
// tensors of both are refused as CUDA's kernels refuse them, memory runs out at a limit, and what is copied to
// pinned memory without waiting is NaN there until somebody waits. What it cannot show is another rounding, and
// time. Loaded by pretend_cuda.py into a torch that has no CUDA of its own.

#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <string>

namespace {

using at::Tensor;

std::atomic<size_t> held{0}, peak{0}, limit{SIZE_MAX};

void release(void* raw) {
  auto* start = static_cast<size_t*>(raw);
  held -= *start;
  std::free(raw);
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    TORCH_CHECK_WITH(OutOfMemoryError, held + bytes <= limit, "CUDA out of memory. Tried to allocate ", bytes,
                     " bytes");
    auto* raw = static_cast<char*>(std::aligned_alloc(64, (bytes + 127) / 64 * 64));
    *reinterpret_cast<size_t*>(raw) = bytes;
    held += bytes;
    if (held > peak) peak = held.load();
    return {raw + 64, raw, &release, c10::Device(c10::kCUDA, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Memory memory;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return {c10::kCUDA, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, getDevice()); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getNewStream(c10::Device, int) const override { return getStream(getDevice()); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// Memory of the CPU that copies need not wait for.
std::mutex guard;
std::map<const char*, size_t> pinned;

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> lock(guard);
  auto after = pinned.upper_bound(static_cast<const char*>(pointer));
  if (after == pinned.begin()) return false;
  --after;
  return static_cast<const char*>(pointer) < after->first + after->second;
}

void unpin(void* raw) {
  std::lock_guard<std::mutex> lock(guard);
  pinned.erase(static_cast<char*>(raw));
  std::free(raw);
}

struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* raw = static_cast<char*>(std::aligned_alloc(64, (bytes + 64) / 64 * 64));
    std::lock_guard<std::mutex> lock(guard);
    pinned[raw] = bytes;
    return {raw, raw, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Pinned pinned_memory;

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

// The same memory as the CPU sees it.
Tensor seen(const Tensor& it) {
  if (it.device().is_cpu()) return it;
  return at::from_blob(it.numel() ? it.data_ptr() : nullptr, it.sizes(), it.strides(),
                       it.options().device(at::kCPU));
}

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

// Copies that were begun and not waited for: where to, what.
std::vector<std::pair<Tensor, Tensor>> under_way;
std::atomic<bool> must_not_wait{false};
thread_local bool computing = false;  // by way of the CPU, which a GPU would not do

void synchronize() {
  std::vector<std::pair<Tensor, Tensor>> done;
  {
    std::lock_guard<std::mutex> lock(guard);
    done.swap(under_way);
  }
  for (auto& [to, from] : done) to.copy_(from);
}

// What a GPU's queue is emptied for.
void wait() {
  if (computing) return;
  TORCH_CHECK(!must_not_wait, "called a synchronizing CUDA operation");
  synchronize();
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  Tensor into = seen(self);
  if (self.device().is_cpu() && source.device().is_cuda()) {
    if (non_blocking && is_pinned(self.data_ptr())) {
      Tensor snapshot = at::empty(into.sizes(), into.options());
      snapshot.copy_(seen(source));
      into.is_floating_point() ? into.fill_(NAN) : into.fill_(85);
      std::lock_guard<std::mutex> lock(guard);
      under_way.emplace_back(into, snapshot);
      return self;
    }
    wait();
  } else if (source.device().is_cpu() && self.device().is_cuda() && !non_blocking) {
    wait();
  }
  into.copy_(seen(source));
  return self;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  if (dst.sizes() != self.sizes()) dst.resize_(self.sizes());
  Tensor into = seen(dst);
  into.copy_(seen(self));
  return dst;
}

const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto wanted = C10_AS_INTARRAYREF_SLOW(size);
  if (self.sizes() == wanted) return self;
  auto* it = self.unsafeGetTensorImpl();
  it->set_sizes_contiguous(wanted);
  const size_t bytes = (it->storage_offset() + it->numel()) * it->dtype().itemsize();
  if (bytes > it->storage().nbytes()) {
    c10::DataPtr fresh = memory.allocate(bytes);
    std::memcpy(fresh.get(), it->storage().data(), it->storage().nbytes());
    const_cast<c10::Storage&>(it->storage()).set_data_ptr_noswap(std::move(fresh));
    const_cast<c10::Storage&>(it->storage()).set_nbytes(bytes);
  }
  return self;
}

at::Scalar local_scalar(const Tensor& self) {
  wait();
  return seen(self).item();
}

// What tells the CPU how much there is of something.
const std::set<std::string> COUNTS = {"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
                                      "aten::unique_consecutive", "aten::bincount", "aten::equal", "aten::is_nonzero",
                                      "aten::repeat_interleave"};

// What CUDA's own kernels take from the CPU beside their tensors.
const std::set<std::string> MIXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"};

void check(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& schema = op.schema();
  bool on_device = false, beside = false;
  auto look = [&](const Tensor& it) {
    if (!it.defined()) return;
    if (it.device().is_cuda()) on_device = true;
    else if (it.device().is_cpu() && it.dim() > 0) beside = true;
  };
  const size_t count = schema.arguments().size();
  for (const auto& value : torch::jit::last(stack, count)) {
    if (value.isTensor()) look(value.toTensor());
    if (value.isTensorList())
      for (const auto& each : value.toTensorVector()) look(each);
    if (value.isOptionalTensorList())
      for (const auto& each : value.toOptionalTensorVector()) look(each.value_or(Tensor()));
  }
  TORCH_CHECK(!on_device || !beside || MIXED.count(schema.name()),
              "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (",
              schema.name(), ")");
  if (on_device && (beside || COUNTS.count(schema.name()))) wait();
  if (on_device && MIXED.count(schema.name()))
    TORCH_CHECK(stack[stack.size() - count].toTensor().device().is_cuda(),
                "indices should be either on cpu or on the same device as the indexed tensor (cpu)");
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  check(op, *stack);
  struct Computing {
    bool before = std::exchange(computing, true);
    ~Computing() { computing = before; }
  } here;
  at::native::cpu_fallback(op, stack);
}

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask, double dropout,
                 bool causal, std::optional<double> scale, bool grouped) {
  for (const Tensor* each : {&q, &k, &v}) TORCH_CHECK(each->device().is_cuda(), "Expected query, key, and value to be on one device");
  TORCH_CHECK(!mask || !mask->defined() || mask->device().is_cuda(), "Expected attn_mask to be on the device of query");
  std::optional<Tensor> added = mask;
  if (mask && mask->defined() && mask->scalar_type() == at::kBool)
    added = at::zeros_like(*mask, q.options()).masked_fill(mask->logical_not(), -INFINITY);
  return std::get<0>(at::_scaled_dot_product_attention_math(q, k, v, added, dropout, causal, {}, scale, grouped));
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, m) { m.impl("scaled_dot_product_attention", &attention); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("scaled_dot_product_attention", &attention);
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy_);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("resize_", &resize_);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("synchronize", &synchronize);
  m.def("set_must_not_wait", [](bool on) { must_not_wait = on; });
  m.def("held", [] { return held.load(); });
  m.def("peak", [] { return peak.load(); });
  m.def("reset_peak", [] { peak = held.load(); });
  m.def("set_limit", [](size_t bytes) { limit = bytes; });
}
