// Threads that share the work of the kernels. They stay from one piece of work to the next, and wait for it awake for a
// moment, then asleep.
//
// Not OpenMP, whose threads wait awake for milliseconds. On a machine that has something else to do, that takes a core
// from the very thread that is waited for: two programs on two cores took 1130 ms for a forward of 13 ms, and take 27
// so. With OpenMP's threads asleep at once, a forward on a quiet machine took a quarter longer (docs/log.md).
#pragma once
#include <pthread.h>
#include <signal.h>
#if defined(PILOTFISH_X86)
#include <immintrin.h>
#endif

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace {

// A number that grows, and that threads wait for.
class Signal {
 public:
  uint32_t value() const { return value_.load(std::memory_order_acquire); }

  // Returns when the value is no longer `seen`. A yield lets a thread run that waits for this core; a sleep also makes
  // the system look for one that waits for another.
  void wait(uint32_t seen) {
    for (int i = 0; i < kSpins; i++) {
      if (value() != seen) return;
#if defined(PILOTFISH_X86)
      _mm_pause();
#endif
    }
    for (int i = 0; i < kYields; i++) {
      if (value() != seen) return;
      std::this_thread::yield();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1);
    changed_.wait(lock, [&] { return value_.load() != seen; });
    sleepers_.fetch_sub(1);
  }

  void advance() {
    value_.fetch_add(1);
    if (sleepers_.load() == 0) return;  // who is about to sleep will see the new value first
    const std::lock_guard<std::mutex> lock(mutex_);
    changed_.notify_all();
  }

 private:
  // Some 25 microseconds, longer than most waits within a forward, and some 150 more, longer than what Python does
  // between two calls. With two, four and twenty times the spins two programs take 32, 40 and 116 ms for the forward
  // mentioned.
  static constexpr int kSpins = 1000, kYields = 300;

  alignas(64) std::atomic<uint32_t> value_{0};
  std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
};

class Team;

// One thread's part in a piece of work.
struct Worker {
  int index, count;
  Team* team;

  // Returns when all threads of the team are here.
  void barrier() const;
};

class Team {
 public:
  // Calls work(Worker) in `count` threads at once, the caller's among them, and returns when all are through. What it
  // throws ends the process. Callers take turns.
  template <class Work>
  void run(int count, const Work& work) {
    if (count <= 1) return work(Worker{0, 1, nullptr});
    const std::lock_guard<std::mutex> turn(turn_);
    while (static_cast<int>(threads_.size()) < count - 1) add_thread();
    call_ = [](const void* context, Worker worker) noexcept { (*static_cast<const Work*>(context))(worker); };
    context_ = &work;
    count_ = count;
    working_.store(count - 1);
    const uint32_t seen = done_.value();
    for (int i = 0; i < count - 1; i++) threads_[i]->advance();
    call_(&work, Worker{0, count, this});
    done_.wait(seen);
  }

  void barrier() {
    const uint32_t seen = passed_.value();
    if (arrived_.fetch_add(1) + 1 < count_) return passed_.wait(seen);
    arrived_.store(0);
    passed_.advance();
  }

 private:
  void add_thread() {
    threads_.push_back(std::make_unique<Signal>());
    Signal& start = *threads_.back();
    const int index = static_cast<int>(threads_.size());
    // A thread inherits the mask: signals such as Ctrl-C are for the caller's threads.
    sigset_t all, before;
    sigfillset(&all);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigdelset(&all, fault);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      std::thread([this, &start, index] { serve(start, index); }).detach();
    } catch (...) {
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      threads_.pop_back();
      throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void serve(Signal& start, int index) {
    for (uint32_t seen = 0;; seen++) {
      start.wait(seen);
      call_(context_, Worker{index, count_, this});
      if (working_.fetch_sub(1) == 1) done_.advance();
    }
  }

  std::mutex turn_;
  std::vector<std::unique_ptr<Signal>> threads_;  // what each waits for
  void (*call_)(const void*, Worker) = nullptr;
  const void* context_ = nullptr;
  int count_ = 0;
  alignas(64) std::atomic<int> working_{0};
  alignas(64) std::atomic<int> arrived_{0};
  Signal done_, passed_;
};

void Worker::barrier() const {
  if (team != nullptr) team->barrier();
}

// The one team of the process, which is never taken apart: its threads may sleep when the process ends. A fork has none
// of its parent's threads and gets a team of its own.
Team& team() {
  static Team* current = [] {
    pthread_atfork(nullptr, nullptr, [] { current = new Team; });
    return new Team;
  }();
  return *current;
}

}  // namespace
