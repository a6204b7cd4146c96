#include "backward_launch.cuh"

namespace mok::sm90 {

template const char* start_backward<__half>(const BackwardArguments&, BackwardPhase, BackwardPhase, void*);

}  // namespace mok::sm90
