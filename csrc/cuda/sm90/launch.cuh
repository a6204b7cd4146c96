// Host side: tensor maps and launches. Functions return null or an error message.
#pragma once

#include <cuda_runtime.h>

#include "persistent.cuh"

namespace mok::sm90 {

inline const char* check(cudaError_t error) { return error == cudaSuccess ? nullptr : cudaGetErrorString(error); }

inline int multiprocessors() {
  int device = 0, count = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

// A map of a weight [experts, rows, columns] (16-bit, contiguous) for boxes of 64 columns. Made anew for every launch
// (it costs less than looking one up), so it can never be stale.
inline const char* weight_map(CUtensorMap* map, Dtype dtype, const void* data, int64_t experts, int64_t rows,
                              int64_t columns, int box_rows) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    return reinterpret_cast<Encode>(result == cudaDriverEntryPointSuccess ? found : nullptr);
  }();
  if (!encode) return "the driver has no cuTensorMapEncodeTiled";
  const cuuint64_t sizes[3] = {cuuint64_t(columns), cuuint64_t(rows), cuuint64_t(experts)};
  const cuuint64_t strides[2] = {cuuint64_t(columns) * 2, cuuint64_t(rows) * cuuint64_t(columns) * 2};
  const cuuint32_t box[3] = {64, cuuint32_t(box_rows), 1}, steps[3] = {1, 1, 1};
  const CUresult result =
      encode(map, dtype == Dtype::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 3,
             const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? nullptr : "cuTensorMapEncodeTiled refused a weight";
}

template <class Op>
const char* launch(const typename Op::Params& params, void* stream) {
  // Every time, because it holds for the current device only.
  const cudaError_t allowed =
      cudaFuncSetAttribute(persistent<Op>, cudaFuncAttributeMaxDynamicSharedMemorySize, int(kSharedBytes));
  if (allowed != cudaSuccess) return cudaGetErrorString(allowed);
  persistent<Op><<<multiprocessors(), kThreads, kSharedBytes, static_cast<cudaStream_t>(stream)>>>(params);
  return check(cudaGetLastError());
}

}  // namespace mok::sm90
