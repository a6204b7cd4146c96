// Memory and streams, as torch has them.
#pragma once

#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>

#include <initializer_list>

#include "tensors.h"

namespace mok::sm90 {

// Not enough memory for so many bytes. The exception that torch had for it does not come through its stable interface:
// Python asks for as many again, see `_made` in mok_compile/engines/sm90.py.
struct NoRoom {
  int64_t bytes;
};
inline int64_t& bytes_missing() {
  thread_local int64_t bytes = 0;
  return bytes;
}
// What `make` gives, or no tensors and bytes_missing().
template <class Make>
Tensors if_there_is_room(const Make& make) {
  bytes_missing() = 0;
  try {
    return make();
  } catch (const NoRoom& missing) {
    bytes_missing() = missing.bytes;
    return {};
  }
}

// An uninitialised tensor of at most three dimensions on the device of `on`, without gaps; if `transposed`, the last
// two lie in memory the other way round.
inline Tensor empty(std::initializer_list<int64_t> shape, ScalarType dtype, const Tensor& on, bool transposed = false) {
  int64_t sizes[3], strides[3], dims = 0, step = 1;
  for (const int64_t size : shape) sizes[dims++] = size;
  for (int64_t i = dims - 1; i >= 0; step *= sizes[i--]) strides[i] = step;
  if (transposed) strides[dims - 2] = 1, strides[dims - 1] = sizes[dims - 2];
  AtenTensorHandle made = nullptr;
  const auto number = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  if (aoti_torch_empty_strided(dims, sizes, strides, number, aoti_torch_device_type_cuda(), on.get_device_index(),
                               &made) != AOTI_TORCH_SUCCESS)
    throw NoRoom{step * (dtype == ScalarType::Long                                ? 8
                         : dtype == ScalarType::Float || dtype == ScalarType::Int ? 4
                                                                                  : 2)};
  return Tensor(made);
}

inline Tensor empty_ints(int64_t size, const Tensor& on) { return empty({size}, ScalarType::Int, on); }

// The current stream of a device. It lives in the part of libtorch that a torch without CUDA does not have, so this
// library is not linked with it; see can_ask_for_streams().
using CurrentStream = AOTITorchError (*)(int32_t, void**);
inline CurrentStream current_stream_function() {
  static const CurrentStream found = [] {
    void* const library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return reinterpret_cast<CurrentStream>(library ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr);
  }();
  return found;
}
inline bool can_ask_for_streams() { return current_stream_function() != nullptr; }
inline int64_t current_stream(int32_t device) {
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(current_stream_function()(device, &stream));
  return reinterpret_cast<int64_t>(stream);
}

}  // namespace mok::sm90
