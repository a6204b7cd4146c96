#include "route.cuh"

#include <atomic>

#include "launch.cuh"

namespace mok::sm90 {
namespace {

// How many of the largest clusters run at once on this device; none: they are more than CUDA guarantees, and a part of
// a GPU may have no room.
template <class T>
const char* largest_at_once(int* clusters) {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices];  // one more than the number; 0: not asked yet
  int device = 0;
  if (const char* error = check(cudaGetDevice(&device))) return error;
  const auto kernel = route_kernel<T>;
  if (const char* error = check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1)))
    return error;
  *clusters = device < kDevices ? known[device].load() - 1 : -1;
  if (*clusters >= 0) return nullptr;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kMostRanks, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(kMostRanks);
  config.blockDim = dim3(kRouteThreads);
  config.attrs = &cluster;
  config.numAttrs = 1;
  if (cudaOccupancyMaxActiveClusters(clusters, kernel, &config) != cudaSuccess) {
    cudaGetLastError();
    *clusters = 0;
  }
  if (device < kDevices) known[device] = *clusters + 1;
  return nullptr;
}

template <class T>
const char* run(const RouteArguments& in, cudaStream_t stream) {
  RouteParams<T> p{};
  p.x = static_cast<const T*>(in.x);
  p.weight = static_cast<const T*>(in.weight);
  p.bias = static_cast<const T*>(in.bias);
  p.logits = static_cast<T*>(in.logits);
  p.correction = {const_cast<void*>(in.correction), in.correction_dtype};
  p.scale = {const_cast<void*>(in.scale), in.scale_dtype};
  p.values = {in.values, in.values_dtype};
  p.weights = {in.weights, in.weights_dtype};
  p.ids = in.ids;
  p.tokens = int(in.tokens);
  p.depth = int(in.depth);
  p.experts = int(in.experts);
  p.program = in.program;
  p.program.dtype = in.dtype;
  p.program.tiles = (p.experts + kRouteRows - 1) / kRouteRows;
  // Large clusters are faster, but two waves of them are slower than one of small ones.
  const int clusters = (p.tokens + kRouteTokens - 1) / kRouteTokens;
  int large = 0, ranks = 1;
  if (const char* error = largest_at_once<T>(&large)) return error;
  const int most = clusters <= large ? kMostRanks : kFewestRanks;
  while (ranks < most && ranks < p.program.tiles) ranks *= 2;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {unsigned(ranks), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(clusters * ranks));
  config.blockDim = dim3(kRouteThreads);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return check(cudaLaunchKernelEx(&config, route_kernel<T>, p));
}

}  // namespace

const char* route(const RouteArguments& in, void* stream) {
  const RouteProgram& program = in.program;
  if (in.tokens < 0 || in.tokens > kMaxRoutedTokens || in.experts < 1 || in.experts > kMaxRouted || in.depth % 8 ||
      program.top_k < 1 || program.top_k > kMaxChosen || program.top_k > in.experts || program.groups > kMaxChosen)
    return "sizes that the router kernel does not take";
  if (in.dtype == Dtype::kFloat32) return "the router kernel of few tokens multiplies in 16 bits only";
  if (in.tokens == 0) return nullptr;
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  return in.dtype == Dtype::kBFloat16 ? run<__nv_bfloat16>(in, s) : run<__half>(in, s);
}

}  // namespace mok::sm90
