// The bound on the collectives of one group that are in flight.
//
// Note: two ways to see the end. NCCL work completes by itself and is polled: wait() would only order
// the current stream, not block the host. Work of gloo is waited for: some of it (reduce_scatter)
// never reports completion by itself.
//
// Note: order. `issue` holds one mutex from the wait for room until the collective is issued, so that
// threads pass one by one. It is called without Python's interpreter lock, as c10d does.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>

namespace lightning_smp {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

enum class Completion { kPoll, kWait };

struct Counters {
  uint64_t issued = 0;
  uint64_t waited = 0;         // collectives that had to wait for room
  double waited_s = 0.0;       // seconds in all of these waits
  uint64_t in_flight = 0;      // not yet seen to be complete; with the bound off always 0
  uint64_t max_in_flight = 0;  // the most of them at one time
};

class Gate : public std::enable_shared_from_this<Gate> {
 public:
  // limit: the most collectives in flight, at least 1; -1 for no bound.
  // timeout: for how long a polled collective may take while another waits for its place.
  Gate(int64_t limit, Completion completion, std::chrono::milliseconds timeout)
      : limit_(limit), completion_(completion), timeout_(timeout.count()) {}

  // Issues a collective as soon as there is room; returns what the caller is to wait on.
  template <class Issue>
  WorkPtr issue(Issue&& call) {
    issued_.fetch_add(1, std::memory_order_relaxed);
    if (limit_ < 0 || stopped_.load(std::memory_order_relaxed)) {
      return call();
    }
    const std::lock_guard<std::mutex> order(order_);
    make_room();
    return admit(call());
  }

  // Counts a collective that was issued without waiting for room (a coalesced group).
  WorkPtr admit_unbounded(WorkPtr work);

  // Ends every wait for room: after an abort nothing is bounded any more.
  void stop();

  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout.count(); }
  std::chrono::milliseconds timeout() const { return std::chrono::milliseconds(timeout_); }
  int64_t limit() const { return limit_; }
  Completion completion() const { return completion_; }
  Counters counters() const;

  // Takes a work that the user has waited for out of the count, and drops the reference to it.
  void forget(const c10d::Work* work);

 private:
  void make_room();
  WorkPtr admit(WorkPtr work);
  void retire_completed();
  void retire(const WorkPtr& work, bool release);
  void wait_for(const WorkPtr& work);
  void poll(const WorkPtr& work) const;
  WorkPtr oldest() const;
  size_t in_flight() const;

  const int64_t limit_;
  const Completion completion_;
  std::atomic<int64_t> timeout_;  // milliseconds
  std::atomic<bool> stopped_{false};
  std::atomic<uint64_t> issued_{0};

  std::mutex order_;
  mutable std::mutex state_;  // guards what follows; never held while waiting or destroying work
  std::deque<WorkPtr> works_;
  uint64_t waited_ = 0;
  double waited_s_ = 0.0;
  uint64_t max_in_flight_ = 0;
};

}  // namespace lightning_smp
