// A work that waits for another at most once: gloo's reduce_scatter copies its result out at every
// wait(), and would overwrite what the user has put there since.
#pragma once

#include "backend/gate.h"

namespace lightning_smp {

class OnceWork : public c10d::Work {
 public:
  OnceWork(WorkPtr inner, std::weak_ptr<Gate> gate);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void blockCurrentStream() override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  float getDuration() const override;
  uint64_t getSequencenumber() const override;

 private:
  void leave_gate();

  const WorkPtr inner_;
  const std::weak_ptr<Gate> gate_;
  std::mutex once_;
  std::atomic<bool> done_{false};
};

}  // namespace lightning_smp
