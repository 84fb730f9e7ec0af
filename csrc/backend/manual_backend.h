// A backend of one process whose collectives complete on command: proves what the throttle does.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "backend/gate.h"

namespace lightning_smp {

// With kPoll, isCompleted() tells the end and wait() only returns; with kWait it is the reverse.
class ManualWork : public c10d::Work {
 public:
  ManualWork(c10d::OpType type, Completion completion);

  bool isCompleted() override;
  bool wait(std::chrono::milliseconds timeout) override;
  std::exception_ptr exception() const override;
  void end(const std::string& error);  // no error: empty
  int waits() const { return waits_; }

 private:
  const Completion completion_;
  mutable std::mutex state_;
  std::condition_variable changed_;
  bool ended_ = false;
  std::exception_ptr error_;
  std::atomic<int> waits_{0};
};

class ManualBackend : public c10d::Backend {
 public:
  ManualBackend(int rank, int size, Completion completion);

  // Ends the oldest `count` works in flight.
  void complete(size_t count, const std::string& error);
  std::vector<std::string> issued() const;
  size_t in_flight() const;
  size_t max_in_flight() const;
  int waits() const;  // calls of wait() that reached any work
  bool is_aborted() const { return aborted_; }

  const std::string getBackendName() const override { return "manual"; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds) override {}
  WorkPtr broadcast(std::vector<at::Tensor>&, const c10d::BroadcastOptions&) override;
  WorkPtr allreduce(std::vector<at::Tensor>&, const c10d::AllreduceOptions&) override;
  WorkPtr barrier(const c10d::BarrierOptions&) override;
  WorkPtr send(std::vector<at::Tensor>&, int dst, int tag) override;
  WorkPtr recv(std::vector<at::Tensor>&, int src, int tag) override;
  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  void abort() override;

 private:
  WorkPtr start(const std::string& name, c10d::OpType type, bool is_collective);

  const Completion completion_;
  mutable std::mutex state_;
  std::vector<std::string> issued_;
  std::vector<c10::intrusive_ptr<ManualWork>> all_;
  std::deque<c10::intrusive_ptr<ManualWork>> collectives_;  // in flight
  size_t max_in_flight_ = 0;
  bool is_coalescing_ = false;
  std::atomic<bool> aborted_{false};
};

}  // namespace lightning_smp
