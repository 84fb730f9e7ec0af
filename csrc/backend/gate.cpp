#include "backend/gate.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "backend/once_work.h"

namespace lightning_smp {

namespace {

using Clock = std::chrono::steady_clock;

// A query costs about a microsecond, a short collective takes some tens: first without a pause.
constexpr int kBusyPolls = 50;
constexpr std::chrono::microseconds kShortestPause{10};
constexpr std::chrono::microseconds kLongestPause{200};

// Completed works taken out of the count by each call. More than one, so that their number falls;
// not all, so that the cost of a call stays that of two queries.
constexpr int kRetiredPerIssue = 2;

}  // namespace

WorkPtr Gate::admit(WorkPtr work) {
  if (!work) {  // some backends return none for what they finish at once
    return work;
  }
  if (completion_ == Completion::kWait) {
    work = c10::make_intrusive<OnceWork>(std::move(work), weak_from_this());
  }
  const std::lock_guard<std::mutex> lock(state_);
  works_.push_back(work);
  max_in_flight_ = std::max<uint64_t>(max_in_flight_, works_.size());
  return work;
}

WorkPtr Gate::admit_unbounded(WorkPtr work) {
  issued_.fetch_add(1, std::memory_order_relaxed);
  return limit_ < 0 || stopped_ ? work : admit(std::move(work));
}

void Gate::make_room() {
  retire_completed();
  if (in_flight() < static_cast<size_t>(limit_)) {
    return;
  }
  const auto start = Clock::now();
  while (in_flight() >= static_cast<size_t>(limit_) && !stopped_) {
    if (const auto work = oldest()) {
      wait_for(work);
    }
  }
  TORCH_CHECK_WITH(
      DistBackendError, !stopped_, "the group was aborted while a collective waited for room");
  const std::lock_guard<std::mutex> lock(state_);
  ++waited_;
  waited_s_ += std::chrono::duration<double>(Clock::now() - start).count();
}

void Gate::retire_completed() {
  const bool is_device_behind = 2 * in_flight() > static_cast<size_t>(limit_);
  for (int retired = 0; retired < kRetiredPerIssue; ++retired) {
    const auto work = oldest();
    if (!work || !work->isCompleted()) {
      return;
    }
    retire(work, is_device_behind);
  }
}

void Gate::retire(const WorkPtr& work, bool release) {
  forget(work.get());
  if (const auto error = work->exception()) {
    std::rethrow_exception(error);
  }
  if (release && completion_ == Completion::kPoll) {
    // It has ended, so this orders nothing. But NCCL now lets go of tensors that nobody waits for,
    // which it otherwise keeps until its watchdog looks, every 100 ms.
    work->synchronize();
  }
}

void Gate::wait_for(const WorkPtr& work) {
  if (completion_ == Completion::kWait) {
    try {
      work->wait();  // a OnceWork: the user's own wait then returns at once
    } catch (...) {
      forget(work.get());  // reported here, not once more by every later collective
      throw;
    }
    return forget(work.get());
  }
  poll(work);
  if (!stopped_) {
    retire(work, /*release=*/true);
  }
}

void Gate::poll(const WorkPtr& work) const {
  const auto start = Clock::now();
  auto pause = kShortestPause;
  for (int polls = 0; !stopped_ && !work->isCompleted(); ++polls) {
    if (polls < kBusyPolls) {
      continue;
    }
    TORCH_CHECK_WITH(
        DistBackendError,
        Clock::now() - start < timeout(),
        "a collective waited ",
        timeout_.load(),
        " ms, the timeout of its group, for one of the ",
        limit_,
        " before it to end (SMP_NCCL_THROTTLE_LIMIT=",
        limit_,
        "). A rank has not issued that collective, or is stuck: look at the other ranks' stacks.");
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongestPause);
  }
}

void Gate::forget(const c10d::Work* work) {
  WorkPtr dropped;  // its destructor may free tensors: after the lock
  const std::lock_guard<std::mutex> lock(state_);
  const auto found =
      std::find_if(works_.begin(), works_.end(), [&](const WorkPtr& w) { return w.get() == work; });
  if (found != works_.end()) {
    dropped = std::move(*found);
    works_.erase(found);
  }
}

void Gate::stop() {
  std::deque<WorkPtr> dropped;
  stopped_ = true;
  const std::lock_guard<std::mutex> lock(state_);
  dropped.swap(works_);
}

WorkPtr Gate::oldest() const {
  const std::lock_guard<std::mutex> lock(state_);
  return works_.empty() ? WorkPtr() : works_.front();
}

size_t Gate::in_flight() const {
  const std::lock_guard<std::mutex> lock(state_);
  return works_.size();
}

Counters Gate::counters() const {
  const std::lock_guard<std::mutex> lock(state_);
  return {issued_.load(), waited_, waited_s_, works_.size(), max_in_flight_};
}

}  // namespace lightning_smp
