// A fixed team of threads that share the loops of one computation.
#pragma once

#include <atomic>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace quaver {

// The caller of `run` is thread 0. One caller at a time. Between computations, and while they wait for
// each other for long, threads sleep: a spinning one would steal the core from whoever it waits for.
class Team {
 public:
  explicit Team(int threads) : size_(threads < 1 ? 1 : threads) {
    try {
      for (int i = 1; i < size_; ++i) threads_.emplace_back([this, i] { serve(i); });
    } catch (const std::system_error&) {  // the machine lends no more threads; a thread that is not joined ends the process
      end();
      throw;
    }
  }

  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  ~Team() { end(); }

  int size() const { return size_; }

  // Calls body(thread) once on every thread of the team; returns when all have returned.
  template <class Body>
  void run(const Body& body) {
    call_ = [](const void* on, int thread) { (*static_cast<const Body*>(on))(thread); };
    body_ = &body;
    next_.store(0, std::memory_order_relaxed);
    if (size_ > 1) release(started_);
    body(0);
    barrier();
  }

  // Inside `run`, called by every thread: task(0) … task(count − 1), each on whichever thread is free.
  // All tasks are done when it returns.
  template <class Task>
  void loop(int count, const Task& task) {
    for (int i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count;) task(i);
    barrier();
  }

  // Inside `run`: returns when every thread has called it; what they wrote before is visible then.
  void barrier() {
    if (size_ == 1) {
      next_.store(0, std::memory_order_relaxed);
      return;
    }
    const uint32_t now = passed_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      arrived_.store(0, std::memory_order_relaxed);
      next_.store(0, std::memory_order_relaxed);
      release(passed_);
    } else {
      await(passed_, now);
    }
  }

 private:
  void end() {
    stopping_ = true;
    release(started_);
    for (std::thread& thread : threads_) thread.join();
  }

  static constexpr int SPINS = 1000;  // some tens of microseconds

  void serve(int thread) {
    for (uint32_t seen = 0;; ++seen) {
      await(started_, seen);
      if (stopping_) return;
      call_(body_, thread);
      barrier();
    }
  }

  static void release(std::atomic<uint32_t>& gate) {
    gate.fetch_add(1, std::memory_order_release);
    gate.notify_all();
  }

  static void await(std::atomic<uint32_t>& gate, uint32_t old) {
    for (int i = 0; i < SPINS; ++i) {
      if (gate.load(std::memory_order_acquire) != old) return;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#elif defined(__aarch64__)
      asm volatile("yield");
#endif
    }
    gate.wait(old, std::memory_order_acquire);
  }

  const int size_;
  std::vector<std::thread> threads_;
  void (*call_)(const void*, int) = nullptr;
  const void* body_ = nullptr;
  std::atomic<bool> stopping_{false};
  alignas(64) std::atomic<uint32_t> started_{0};
  alignas(64) std::atomic<uint32_t> passed_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> next_{0};
};

}  // namespace quaver
