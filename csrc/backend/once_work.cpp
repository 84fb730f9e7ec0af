#include "backend/once_work.h"

#include <utility>

namespace lightning_smp {

OnceWork::OnceWork(WorkPtr inner, std::weak_ptr<Gate> gate)
    : Work(-1, inner->retrieveOpType()), inner_(std::move(inner)), gate_(std::move(gate)) {}

bool OnceWork::isCompleted() { return done_ || inner_->isCompleted(); }

bool OnceWork::isSuccess() const { return done_ || inner_->isSuccess(); }

std::exception_ptr OnceWork::exception() const { return inner_->exception(); }

int OnceWork::sourceRank() const { return inner_->sourceRank(); }

std::vector<at::Tensor> OnceWork::result() { return inner_->result(); }

void OnceWork::synchronize() {
  const std::lock_guard<std::mutex> lock(once_);
  if (!done_) {
    inner_->synchronize();
  }
}

bool OnceWork::wait(std::chrono::milliseconds timeout) {
  const std::lock_guard<std::mutex> lock(once_);
  if (done_) {
    return true;
  }
  try {
    if (!inner_->wait(timeout)) {
      return false;
    }
  } catch (...) {
    if (inner_->exception()) {  // it failed; otherwise only this wait was too short
      leave_gate();
    }
    throw;
  }
  done_ = true;
  leave_gate();
  return true;
}

void OnceWork::blockCurrentStream() { inner_->blockCurrentStream(); }

void OnceWork::abort() { inner_->abort(); }

c10::intrusive_ptr<c10::ivalue::Future> OnceWork::getFuture() { return inner_->getFuture(); }

c10::intrusive_ptr<c10::ivalue::Future> OnceWork::getFutureResult() {
  return inner_->getFutureResult();
}

float OnceWork::getDuration() const { return inner_->getDuration(); }

uint64_t OnceWork::getSequencenumber() const { return inner_->getSequencenumber(); }

void OnceWork::leave_gate() {
  if (const auto gate = gate_.lock()) {
    gate->forget(this);
  }
}

}  // namespace lightning_smp
