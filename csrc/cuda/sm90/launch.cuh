// Host side: tensor maps and launches. Functions return null or an error message.
#pragma once

#include <cuda_runtime.h>

#include "persistent.cuh"

namespace mok::sm90 {

// Takes the error back from CUDA: else the next launch, which asks for the last one, would report it as its own.
inline const char* check(cudaError_t error) {
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();
  return cudaGetErrorString(error);
}

// A function of the driver, null if it has none of that version.
template <class Function>
Function driver(const char* name, unsigned version) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &result);
  return reinterpret_cast<Function>(result == cudaDriverEntryPointSuccess ? found : nullptr);
}

// Of the thread's context: a green context has some of the device's.
inline int multiprocessors() {
  static const auto current = driver<decltype(&cuCtxGetCurrent)>("cuCtxGetCurrent", 12000);
  static const auto resource = driver<decltype(&cuCtxGetDevResource)>("cuCtxGetDevResource", 12040);
  CUcontext context = nullptr;
  CUdevResource found{};
  if (current && resource && current(&context) == CUDA_SUCCESS && context &&
      resource(context, &found, CU_DEV_RESOURCE_TYPE_SM) == CUDA_SUCCESS)
    return int(found.sm.smCount);
  int device = 0, count = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

template <int kRank>
struct MapShape {
  cuuint64_t sizes[kRank], strides[kRank - 1];  // innermost first; strides in bytes, of all but the innermost
  cuuint32_t box[kRank - 1];                    // 1 along the outermost
};

template <int kRank>
const char* encode_map(CUtensorMap* map, Dtype dtype, const void* data, const MapShape<kRank>& shape,
                       CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
  static const auto encode = driver<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled", 12000);
  if (!encode) return "the driver has no cuTensorMapEncodeTiled";
  cuuint32_t box[kRank], steps[kRank];
  for (int i = 0; i < kRank; ++i) box[i] = i < kRank - 1 ? shape.box[i] : 1, steps[i] = 1;
  const CUresult result =
      encode(map, dtype == Dtype::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, kRank,
             const_cast<void*>(data), shape.sizes, shape.strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? nullptr : "cuTensorMapEncodeTiled refused a tensor";
}

// A map of a weight's matrices [out, in], or [in, out] if `transposed`, of all experts: the third coordinate is an
// expert's place. Its boxes are 64 wide along the contiguous dimension; along the other one half a tile if the
// contiguous one is the product's K, else 64. Made anew for every launch (it costs less than looking one up), so it can
// never be stale.
template <class Op>
const char* weight_map(CUtensorMap* map, Dtype dtype, const Weight& weight, int64_t out, int64_t in, bool transposed) {
  const cuuint64_t columns = cuuint64_t(transposed ? out : in), rows = cuuint64_t(transposed ? in : out);
  return encode_map<3>(map, dtype, weight.data,
                       {{columns, rows, cuuint64_t(weight.ends)},
                        {2 * cuuint64_t(weight.pitch), cuuint64_t(weight.unit)},
                        {64, cuuint32_t(Op::kTransposeB ? 64 : Op::kTileN / 2)}});
}

// A map of panels, one under the other, for boxes that end at any row, not only at the last: the rows appear twice, as
// y and as z, with the same stride, y counted from kRagged rows before the data. A box of `n` rows from row r on is the
// one at y = kRagged - n, z = r + n: rows past the n-th lie outside along y, and become zero.
inline const char* panel_map(CUtensorMap* map, Dtype dtype, const void* data, int64_t rows, int box_rows) {
  constexpr cuuint64_t kBytes = kPanel * 2;
  return encode_map<3>(map, dtype, static_cast<const char*>(data) - kRagged * kBytes,
                       {{kPanel, kRagged, cuuint64_t(rows) + 1}, {kBytes, kBytes}, {kPanel, cuuint32_t(box_rows)}});
}

template <class Op>
const char* launch(const typename Op::Params& params, void* stream) {
  // Every time, because it holds for the current device only.
  if (const char* error = check(
          cudaFuncSetAttribute(persistent<Op>, cudaFuncAttributeMaxDynamicSharedMemorySize, int(Ring<Op>::kBytes))))
    return error;
  persistent<Op><<<multiprocessors(), kThreads, Ring<Op>::kBytes, static_cast<cudaStream_t>(stream)>>>(params);
  return check(cudaGetLastError());
}

}  // namespace mok::sm90
