#include "backward_launch.cuh"

namespace mok::sm90 {

template const char* start_backward<__nv_bfloat16>(const BackwardArguments&, BackwardPhase, BackwardPhase, void*);

int64_t score_tiles(const Sizes& sizes) { return (sizes.inner + kTileN - 1) / kTileN; }

const char* backward(const BackwardArguments& in, BackwardPhase first, BackwardPhase last, void* stream) {
  return (in.dtype == Dtype::kBFloat16 ? start_backward<__nv_bfloat16> : start_backward<__half>)(in, first, last,
                                                                                                 stream);
}

}  // namespace mok::sm90
