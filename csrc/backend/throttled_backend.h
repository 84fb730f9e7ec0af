// A c10d backend that hands everything to another one and bounds its collectives in flight.
//
// Held back are collectives. Never point-to-point operations, where a rank that waits for its send
// would never post the receive that the peer needs first; nor what is between startCoalescing and
// endCoalescing: such a group is counted as one collective, if it has any.
#pragma once

#include "backend/gate.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace lightning_smp {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

class ThrottledBackend : public c10d::Backend {
 public:
  ThrottledBackend(
      BackendPtr inner, int64_t limit, Completion completion, std::chrono::milliseconds timeout);
  ~ThrottledBackend() override;

  const BackendPtr& inner() const { return inner_; }
  const Gate& gate() const { return *gate_; }

  const std::string getBackendName() const override { return "smp"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return inner_->getBackendOptions(); }

  bool supportsSplitting() const override { return inner_->supportsSplitting(); }
  bool supportsCoalescing() const override { return inner_->supportsCoalescing(); }
  bool supportsTimeEstimation() const override { return inner_->supportsTimeEstimation(); }
  bool supportsShrinking() const override { return inner_->supportsShrinking(); }

  WorkPtr broadcast(std::vector<at::Tensor>&, const c10d::BroadcastOptions&) override;
  WorkPtr allreduce(std::vector<at::Tensor>&, const c10d::AllreduceOptions&) override;
  WorkPtr allreduce_sparse(std::vector<at::Tensor>&, const c10d::AllreduceOptions&) override;
  WorkPtr allreduce_coalesced(
      std::vector<at::Tensor>&, const c10d::AllreduceCoalescedOptions&) override;
  WorkPtr reduce(std::vector<at::Tensor>&, const c10d::ReduceOptions&) override;
  WorkPtr allgather(
      std::vector<std::vector<at::Tensor>>&,
      std::vector<at::Tensor>&,
      const c10d::AllgatherOptions&) override;
  WorkPtr _allgather_base(at::Tensor&, at::Tensor&, const c10d::AllgatherOptions&) override;
  WorkPtr allgather_coalesced(
      std::vector<std::vector<at::Tensor>>&,
      std::vector<at::Tensor>&,
      const c10d::AllgatherOptions&) override;
  WorkPtr allgather_into_tensor_coalesced(
      std::vector<at::Tensor>&, std::vector<at::Tensor>&, const c10d::AllgatherOptions&) override;
  WorkPtr gather(
      std::vector<std::vector<at::Tensor>>&,
      std::vector<at::Tensor>&,
      const c10d::GatherOptions&) override;
  WorkPtr scatter(
      std::vector<at::Tensor>&,
      std::vector<std::vector<at::Tensor>>&,
      const c10d::ScatterOptions&) override;
  WorkPtr reduce_scatter(
      std::vector<at::Tensor>&,
      std::vector<std::vector<at::Tensor>>&,
      const c10d::ReduceScatterOptions&) override;
  WorkPtr _reduce_scatter_base(
      at::Tensor&, at::Tensor&, const c10d::ReduceScatterOptions&) override;
  WorkPtr reduce_scatter_tensor_coalesced(
      std::vector<at::Tensor>&,
      std::vector<at::Tensor>&,
      const c10d::ReduceScatterOptions&) override;
  WorkPtr alltoall_base(
      at::Tensor&,
      at::Tensor&,
      std::vector<int64_t>&,
      std::vector<int64_t>&,
      const c10d::AllToAllOptions&) override;
  WorkPtr alltoall(
      std::vector<at::Tensor>&, std::vector<at::Tensor>&, const c10d::AllToAllOptions&) override;
  WorkPtr barrier(const c10d::BarrierOptions&) override;
  void monitoredBarrier(const c10d::BarrierOptions&, bool wait_all_ranks) override;

  WorkPtr send(std::vector<at::Tensor>&, int dst, int tag) override;
  WorkPtr recv(std::vector<at::Tensor>&, int src, int tag) override;
  WorkPtr recvAnysource(std::vector<at::Tensor>&, int tag) override;
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override { inner_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return inner_->getSequenceNumberForGroup(); }
  void setGroupUid(const std::string& uid) override;
  void eagerConnectSingleDevice(at::Device device) override;
  void registerOnCompletionHook(
      std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override { inner_->waitForPendingWorks(); }
  void enableCollectivesTiming() override { inner_->enableCollectivesTiming(); }
  c10d::ErrorType getError() override { return inner_->getError(); }
  void abort() override;
  void shutdown() override;

  BackendPtr split(
      const c10::intrusive_ptr<c10d::Store>& store,
      const std::vector<int>& ranks,
      const c10::intrusive_ptr<Options>& options) override;
  BackendPtr merge(
      const c10::intrusive_ptr<c10d::Store>& store,
      const c10::intrusive_ptr<Options>& options,
      const int& rank,
      const int& size) override;
  BackendPtr shrink(
      const std::vector<int64_t>& ranks_to_exclude,
      int flags,
      const c10::intrusive_ptr<Options>& options) override;

  std::shared_ptr<c10::Allocator> getMemAllocator() override { return inner_->getMemAllocator(); }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    return inner_->allocateTensor(size, options);
  }
  bool supportsTensorAlloc(c10::DeviceIndex device) override {
    return inner_->supportsTensorAlloc(device);
  }

  // Virtual functions of newer torch only: these override where the base has them.
  virtual void suspend();
  virtual void resume();
  virtual std::unordered_map<std::string, uint64_t> getMemoryStats();

 private:
  template <class Issue>
  WorkPtr collective(Issue&& issue);
  void introduce();
  bool is_capturing() const;
  BackendPtr wrap(BackendPtr made) const;

  const BackendPtr inner_;
  const std::shared_ptr<Gate> gate_;
  std::atomic<bool> introduced_{false};
  bool is_coalescing_ = false;
  bool group_has_collective_ = false;
};

}  // namespace lightning_smp
