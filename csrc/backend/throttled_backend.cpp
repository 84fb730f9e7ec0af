#include "backend/throttled_backend.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <utility>

namespace lightning_smp {

namespace {

// Not every supported torch has these in the base class: the second of each pair serves the others.
template <class B>
auto suspend_of(B& backend, int) -> decltype(backend.suspend()) {
  backend.suspend();
}
template <class B>
void suspend_of(B&, long) {
  TORCH_CHECK(false, "this torch has no suspend() of a backend");
}
template <class B>
auto resume_of(B& backend, int) -> decltype(backend.resume()) {
  backend.resume();
}
template <class B>
void resume_of(B&, long) {
  TORCH_CHECK(false, "this torch has no resume() of a backend");
}
template <class B>
auto memory_stats_of(B& backend, int) -> decltype(backend.getMemoryStats()) {
  return backend.getMemoryStats();
}
template <class B>
std::unordered_map<std::string, uint64_t> memory_stats_of(B&, long) {
  TORCH_CHECK(false, "this torch has no getMemoryStats() of a backend");
}

// cudaStreamIsCapturing without CUDA's headers or libraries; null where CUDA is not loaded.
using IsCapturing = int (*)(void* stream, int* status);

IsCapturing find_is_capturing() {
  static const auto found =
      reinterpret_cast<IsCapturing>(dlsym(RTLD_DEFAULT, "cudaStreamIsCapturing"));
  return found;
}

}  // namespace

ThrottledBackend::ThrottledBackend(
    BackendPtr inner, int64_t limit, Completion completion, std::chrono::milliseconds timeout)
    : Backend(inner->getRank(), inner->getSize()),
      inner_(std::move(inner)),
      gate_(std::make_shared<Gate>(limit, completion, timeout)) {}

ThrottledBackend::~ThrottledBackend() = default;

template <class Issue>
WorkPtr ThrottledBackend::collective(Issue&& issue) {
  introduce();
  if (is_coalescing_) {
    group_has_collective_ = true;
    return issue();
  }
  if (is_capturing()) {  // the host does not issue what a graph replays, and may not query in it
    return issue();
  }
  return gate_->issue(std::forward<Issue>(issue));
}

void ThrottledBackend::introduce() {
  // Description and device are set on this object, by functions that are not virtual.
  if (!introduced_.exchange(true)) {
    inner_->setGroupDesc(getGroupDesc());
    inner_->setBoundDeviceId(getBoundDeviceId());
  }
}

bool ThrottledBackend::is_capturing() const {
  const auto is_capturing = find_is_capturing();
  if (gate_->completion() != Completion::kPoll || gate_->limit() < 0 || is_capturing == nullptr) {
    return false;
  }
  const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
  const auto stream = guard.getStream(guard.getDevice());
  int status = 0;
  return is_capturing(guard.getStreamNativeHandle(stream), &status) != 0 || status != 0;
}

WorkPtr ThrottledBackend::broadcast(
    std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) {
  return collective([&] { return inner_->broadcast(tensors, options); });
}

WorkPtr ThrottledBackend::allreduce(
    std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) {
  return collective([&] { return inner_->allreduce(tensors, options); });
}

WorkPtr ThrottledBackend::allreduce_sparse(
    std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) {
  return collective([&] { return inner_->allreduce_sparse(tensors, options); });
}

WorkPtr ThrottledBackend::allreduce_coalesced(
    std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return collective([&] { return inner_->allreduce_coalesced(tensors, options); });
}

WorkPtr ThrottledBackend::reduce(
    std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& options) {
  return collective([&] { return inner_->reduce(tensors, options); });
}

WorkPtr ThrottledBackend::allgather(
    std::vector<std::vector<at::Tensor>>& outputs,
    std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& options) {
  return collective([&] { return inner_->allgather(outputs, inputs, options); });
}

WorkPtr ThrottledBackend::_allgather_base(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  return collective([&] { return inner_->_allgather_base(output, input, options); });
}

WorkPtr ThrottledBackend::allgather_coalesced(
    std::vector<std::vector<at::Tensor>>& outputs,
    std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& options) {
  return collective([&] { return inner_->allgather_coalesced(outputs, inputs, options); });
}

WorkPtr ThrottledBackend::allgather_into_tensor_coalesced(
    std::vector<at::Tensor>& outputs,
    std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& options) {
  return collective(
      [&] { return inner_->allgather_into_tensor_coalesced(outputs, inputs, options); });
}

WorkPtr ThrottledBackend::gather(
    std::vector<std::vector<at::Tensor>>& outputs,
    std::vector<at::Tensor>& inputs,
    const c10d::GatherOptions& options) {
  return collective([&] { return inner_->gather(outputs, inputs, options); });
}

WorkPtr ThrottledBackend::scatter(
    std::vector<at::Tensor>& outputs,
    std::vector<std::vector<at::Tensor>>& inputs,
    const c10d::ScatterOptions& options) {
  return collective([&] { return inner_->scatter(outputs, inputs, options); });
}

WorkPtr ThrottledBackend::reduce_scatter(
    std::vector<at::Tensor>& outputs,
    std::vector<std::vector<at::Tensor>>& inputs,
    const c10d::ReduceScatterOptions& options) {
  return collective([&] { return inner_->reduce_scatter(outputs, inputs, options); });
}

WorkPtr ThrottledBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  return collective([&] { return inner_->_reduce_scatter_base(output, input, options); });
}

WorkPtr ThrottledBackend::reduce_scatter_tensor_coalesced(
    std::vector<at::Tensor>& outputs,
    std::vector<at::Tensor>& inputs,
    const c10d::ReduceScatterOptions& options) {
  return collective(
      [&] { return inner_->reduce_scatter_tensor_coalesced(outputs, inputs, options); });
}

WorkPtr ThrottledBackend::alltoall_base(
    at::Tensor& output,
    at::Tensor& input,
    std::vector<int64_t>& output_splits,
    std::vector<int64_t>& input_splits,
    const c10d::AllToAllOptions& options) {
  return collective([&] {
    return inner_->alltoall_base(output, input, output_splits, input_splits, options);
  });
}

WorkPtr ThrottledBackend::alltoall(
    std::vector<at::Tensor>& outputs,
    std::vector<at::Tensor>& inputs,
    const c10d::AllToAllOptions& options) {
  return collective([&] { return inner_->alltoall(outputs, inputs, options); });
}

WorkPtr ThrottledBackend::barrier(const c10d::BarrierOptions& options) {
  return collective([&] { return inner_->barrier(options); });
}

void ThrottledBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  introduce();
  inner_->monitoredBarrier(options, wait_all_ranks);
}

WorkPtr ThrottledBackend::send(std::vector<at::Tensor>& tensors, int dst, int tag) {
  introduce();
  return inner_->send(tensors, dst, tag);
}

WorkPtr ThrottledBackend::recv(std::vector<at::Tensor>& tensors, int src, int tag) {
  introduce();
  return inner_->recv(tensors, src, tag);
}

WorkPtr ThrottledBackend::recvAnysource(std::vector<at::Tensor>& tensors, int tag) {
  introduce();
  return inner_->recvAnysource(tensors, tag);
}

void ThrottledBackend::startCoalescing() {
  introduce();
  inner_->startCoalescing();
  is_coalescing_ = true;
  group_has_collective_ = false;
}

WorkPtr ThrottledBackend::endCoalescing() {
  is_coalescing_ = false;  // also where the next line throws
  auto work = inner_->endCoalescing();
  if (!group_has_collective_ || is_capturing()) {
    return work;
  }
  return gate_->admit_unbounded(std::move(work));
}

void ThrottledBackend::setTimeout(std::chrono::milliseconds timeout) {
  inner_->setTimeout(timeout);
  gate_->set_timeout(timeout);
}

void ThrottledBackend::setGroupUid(const std::string& uid) {
  Backend::setGroupUid(uid);
  inner_->setGroupUid(uid);
}

void ThrottledBackend::eagerConnectSingleDevice(at::Device device) {
  introduce();
  inner_->eagerConnectSingleDevice(device);
}

void ThrottledBackend::registerOnCompletionHook(
    std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  inner_->registerOnCompletionHook(std::move(hook));
}

void ThrottledBackend::abort() {
  gate_->stop();
  inner_->abort();
}

void ThrottledBackend::shutdown() {
  gate_->stop();
  inner_->shutdown();
}

BackendPtr ThrottledBackend::wrap(BackendPtr made) const {
  if (!made) {
    return made;
  }
  return c10::make_intrusive<ThrottledBackend>(
      std::move(made), gate_->limit(), gate_->completion(), gate_->timeout());
}

BackendPtr ThrottledBackend::split(
    const c10::intrusive_ptr<c10d::Store>& store,
    const std::vector<int>& ranks,
    const c10::intrusive_ptr<Options>& options) {
  introduce();
  return wrap(inner_->split(store, ranks, options));
}

BackendPtr ThrottledBackend::merge(
    const c10::intrusive_ptr<c10d::Store>& store,
    const c10::intrusive_ptr<Options>& options,
    const int& rank,
    const int& size) {
  return wrap(inner_->merge(store, options, rank, size));
}

BackendPtr ThrottledBackend::shrink(
    const std::vector<int64_t>& ranks_to_exclude,
    int flags,
    const c10::intrusive_ptr<Options>& options) {
  return wrap(inner_->shrink(ranks_to_exclude, flags, options));
}

void ThrottledBackend::suspend() { suspend_of(*inner_, 0); }

void ThrottledBackend::resume() { resume_of(*inner_, 0); }

std::unordered_map<std::string, uint64_t> ThrottledBackend::getMemoryStats() {
  return memory_stats_of(*inner_, 0);
}

}  // namespace lightning_smp
