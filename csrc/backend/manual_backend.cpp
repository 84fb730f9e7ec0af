#include "backend/manual_backend.h"

#include <algorithm>

namespace lightning_smp {

namespace {

// A tensor's first element names the operation in `issued`.
std::string label(const std::string& name, const std::vector<at::Tensor>& tensors) {
  return tensors.empty() ? name : name + ":" + std::to_string(tensors[0].flatten()[0].item<int>());
}

}  // namespace

ManualWork::ManualWork(c10d::OpType type, Completion completion)
    : Work(-1, type), completion_(completion) {}

bool ManualWork::isCompleted() {
  const std::lock_guard<std::mutex> lock(state_);
  return ended_ && completion_ == Completion::kPoll;
}

bool ManualWork::wait(std::chrono::milliseconds timeout) {
  std::unique_lock<std::mutex> lock(state_);
  ++waits_;
  const auto is_over = [&] { return ended_ || completion_ == Completion::kPoll; };
  if (timeout == kNoTimeout) {
    changed_.wait(lock, is_over);
  } else {
    TORCH_CHECK(changed_.wait_for(lock, timeout, is_over), "manual work: the wait timed out");
  }
  if (error_) {
    std::rethrow_exception(error_);
  }
  return true;
}

std::exception_ptr ManualWork::exception() const {
  const std::lock_guard<std::mutex> lock(state_);
  return error_;
}

void ManualWork::end(const std::string& error) {
  const std::lock_guard<std::mutex> lock(state_);
  ended_ = true;
  if (!error.empty()) {
    error_ = std::make_exception_ptr(std::runtime_error(error));
  }
  changed_.notify_all();
}

ManualBackend::ManualBackend(int rank, int size, Completion completion)
    : Backend(rank, size), completion_(completion) {}

void ManualBackend::complete(size_t count, const std::string& error) {
  const std::lock_guard<std::mutex> lock(state_);
  TORCH_CHECK(count <= collectives_.size(), "only ", collectives_.size(), " are in flight");
  for (; count > 0; --count) {
    collectives_.front()->end(error);
    collectives_.pop_front();
  }
}

std::vector<std::string> ManualBackend::issued() const {
  const std::lock_guard<std::mutex> lock(state_);
  return issued_;
}

size_t ManualBackend::in_flight() const {
  const std::lock_guard<std::mutex> lock(state_);
  return collectives_.size();
}

size_t ManualBackend::max_in_flight() const {
  const std::lock_guard<std::mutex> lock(state_);
  return max_in_flight_;
}

int ManualBackend::waits() const {
  const std::lock_guard<std::mutex> lock(state_);
  int sum = 0;
  for (const auto& work : all_) {
    sum += work->waits();
  }
  return sum;
}

WorkPtr ManualBackend::start(const std::string& name, c10d::OpType type, bool is_collective) {
  const std::lock_guard<std::mutex> lock(state_);
  issued_.push_back(name);
  auto work = c10::make_intrusive<ManualWork>(type, completion_);
  if (is_collective && !is_coalescing_) {
    collectives_.push_back(work);
    max_in_flight_ = std::max(max_in_flight_, collectives_.size());
  }
  all_.push_back(work);
  return work;
}

WorkPtr ManualBackend::broadcast(
    std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions&) {
  return start(label("broadcast", tensors), c10d::OpType::BROADCAST, true);
}

WorkPtr ManualBackend::allreduce(
    std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions&) {
  return start(label("allreduce", tensors), c10d::OpType::ALLREDUCE, true);
}

WorkPtr ManualBackend::barrier(const c10d::BarrierOptions&) {
  return start("barrier", c10d::OpType::BARRIER, true);
}

WorkPtr ManualBackend::send(std::vector<at::Tensor>& tensors, int, int) {
  return start(label("send", tensors), c10d::OpType::SEND, false);
}

WorkPtr ManualBackend::recv(std::vector<at::Tensor>& tensors, int, int) {
  return start(label("recv", tensors), c10d::OpType::RECV, false);
}

void ManualBackend::startCoalescing() {
  const std::lock_guard<std::mutex> lock(state_);
  is_coalescing_ = true;
}

WorkPtr ManualBackend::endCoalescing() {
  {
    const std::lock_guard<std::mutex> lock(state_);
    is_coalescing_ = false;
  }
  return start("group", c10d::OpType::COALESCED, true);
}

void ManualBackend::abort() {
  aborted_ = true;
  const std::lock_guard<std::mutex> lock(state_);
  for (const auto& work : collectives_) {
    work->end("aborted");
  }
  collectives_.clear();
}

}  // namespace lightning_smp
