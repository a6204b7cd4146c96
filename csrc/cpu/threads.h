// Work spread over torch's intra-op threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>

#include "block.h"

namespace mok {

// The threads of one call and their buffers, which last as long as the call.
class Team {
 public:
  Team() : threads_(std::max<int64_t>(1, torch::stable::get_num_threads())) {
    scratch_.reset(static_cast<Scratch*>(std::aligned_alloc(alignof(Scratch), sizeof(Scratch) * threads_)));
    if (!scratch_) throw std::bad_alloc();
    for (int64_t i = 0; i < threads_; i++) scratch_.get()[i].packed = {};
  }

  int64_t threads() const { return threads_; }

  // Calls work(scratch, i) once for each i < n. Which thread does what is left to chance: results must not depend on
  // it.
  template <class Work>
  void run(const Kernels& kernels, int64_t n, const Work& work) {
    std::atomic<int64_t> next{0};
    torch::stable::parallel_for(0, std::min(n, threads_), 1, [&](int64_t begin, int64_t end) {
      for (int64_t thread = begin; thread < end; thread++) {
        kernels.enter();
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) work(scratch_.get()[thread], i);
        kernels.leave();
      }
    });
  }

 private:
  struct Free {
    void operator()(Scratch* p) const { std::free(p); }
  };

  int64_t threads_;
  std::unique_ptr<Scratch, Free> scratch_;
};

}  // namespace mok
