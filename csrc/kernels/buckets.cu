// Note: even work. A block owns kChunk elements of the flat buffer, however many tensors they come
// from: it finds the first by bisection and goes on from one to the next. So one launch serves
// tensors of any sizes, and no block waits for a large one.
#include "buckets.h"

#include "vector.cuh"

namespace lightning_smp {
namespace {

constexpr int kBlockThreads = 256;
constexpr int64_t kChunk = 8192;  // elements

template <typename To, typename From, int kSize, typename Number>
__device__ __forceinline__ Vector<To, kSize> scaled(const Vector<From, kSize>& from, Number scale) {
  Vector<To, kSize> result;
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    result.values[i] = convert<To>(convert<Number>(from.values[i]) * scale);
  }
  return result;
}

// Copies kLoads vectors from `first` on; kAll says that none of them lies past `count`.
template <bool kAll, int kSize, typename From, typename To, typename Number>
__device__ __forceinline__ void copy_some(const From* from, To* to, int64_t first, int64_t count,
                                          Number scale) {
  constexpr int kUnroll = kLoads<From, kSize>;
  Vector<From, kSize> raw[kUnroll];
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    const int64_t at = first + i * kBlockThreads;
    if (kAll || at < count) raw[i] = load<kSize>(from + at * kSize);
  }
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    const int64_t at = first + i * kBlockThreads;
    if (kAll || at < count) store(to + at * kSize, scaled<To>(raw[i], scale));
  }
}

template <int kSize, typename From, typename To, typename Number>
__device__ __forceinline__ void copy_vectors(const From* from, To* to, int64_t count,
                                             Number scale) {
  constexpr int kStep = kLoads<From, kSize> * kBlockThreads;
  int64_t first = threadIdx.x;
  for (; first + kStep - kBlockThreads < count; first += kStep) {
    copy_some<true, kSize>(from, to, first, count, scale);
  }
  if (first < count) copy_some<false, kSize>(from, to, first, count, scale);
}

// Whole vectors (16 bytes of what is written) where both sides are aligned alike, and what is
// before and after them element by element; everything so where they are not.
template <typename From, typename To, typename Number>
__device__ __forceinline__ void copy_scaled(const From* from, To* to, int64_t count, Number scale) {
  constexpr int kSize = kVectorSize<To>;
  const auto from_place = reinterpret_cast<uintptr_t>(from) / sizeof(From);
  const auto to_place = reinterpret_cast<uintptr_t>(to) / sizeof(To);
  if (from_place % kSize != to_place % kSize) {
    copy_vectors<1>(from, to, count, scale);
    return;
  }
  const int64_t head = min(count, static_cast<int64_t>((kSize - to_place % kSize) % kSize));
  const int64_t vectors = (count - head) / kSize;
  const int64_t tail = head + vectors * kSize;
  const int64_t edge = threadIdx.x < kSize ? threadIdx.x : tail + threadIdx.x - kSize;
  if (threadIdx.x < kSize ? edge < head : edge < count) {
    store(to + edge, scaled<To>(load<1>(from + edge), scale));
  }
  copy_vectors<kSize>(from + head, to + head, vectors, scale);
}

// Calls visit(tensor, place in it, place in flat, count) for each stretch of the block's chunk.
template <typename Tensors, typename Visit>
__device__ __forceinline__ void for_each_stretch(const Tensors& tensors, const Visit& visit) {
  const int64_t total = tensors.ends[tensors.count - 1];
  int64_t at = int64_t(blockIdx.x) * kChunk;
  const int64_t end = min(total, at + kChunk);
  int low = 0;  // the first tensor that ends after `at`
  for (int high = tensors.count - 1; low < high;) {
    const int middle = (low + high) / 2;
    if (tensors.ends[middle] > at) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  for (int tensor = low; at < end; ++tensor) {
    const int64_t begin = tensor == 0 ? 0 : tensors.ends[tensor - 1];
    const int64_t stop = min(end, tensors.ends[tensor]);
    if (stop > at) visit(tensors.tensors[tensor], at - begin, at, stop - at);
    at = max(at, stop);
  }
}

template <typename Flat, typename T, bool kGather, typename Tensors>
__global__ void __launch_bounds__(kBlockThreads)
    move_bucket(Flat* flat, const __grid_constant__ Tensors tensors, double scale) {
  using Number = std::conditional_t<std::is_same_v<T, double>, double, float>;
  for_each_stretch(tensors, [&](void* tensor, int64_t begin, int64_t at, int64_t count) {
    T* values = static_cast<T*>(tensor) + begin;
    if constexpr (kGather) {
      copy_scaled(values, flat + at, count, static_cast<Number>(scale));
    } else {
      copy_scaled(flat + at, values, count, static_cast<Number>(scale));
    }
  });
}

// 0 times infinity would be NaN, so nothing is read.
template <typename Flat, typename T, bool kGather, typename Tensors>
__global__ void __launch_bounds__(kBlockThreads)
    clear_bucket(Flat* flat, const __grid_constant__ Tensors tensors) {
  for_each_stretch(tensors, [&](void* tensor, int64_t begin, int64_t at, int64_t count) {
    for (int64_t i = threadIdx.x; i < count; i += kBlockThreads) {
      if constexpr (kGather) {
        flat[at + i] = convert<Flat>(0.0f);
      } else {
        static_cast<T*>(tensor)[begin + i] = convert<T>(0.0f);
      }
    }
  });
}

template <typename Flat, typename T, bool kGather, typename Tensors>
cudaError_t launch_typed(const BucketParams& params, const Tensors& tensors, cudaStream_t stream) {
  const int64_t blocks = (tensors.ends[tensors.count - 1] + kChunk - 1) / kChunk;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  auto* flat = static_cast<Flat*>(params.flat);
  const auto grid = static_cast<unsigned>(blocks);
  if (params.scale == 0.0) {
    clear_bucket<Flat, T, kGather><<<grid, kBlockThreads, 0, stream>>>(flat, tensors);
  } else {
    move_bucket<Flat, T, kGather>
        <<<grid, kBlockThreads, 0, stream>>>(flat, tensors, params.scale);
  }
  return cudaGetLastError();
}

template <typename Flat, typename T, typename Tensors>
cudaError_t launch_pair(const BucketParams& params, const Tensors& tensors, cudaStream_t stream) {
  return params.gather ? launch_typed<Flat, T, true>(params, tensors, stream)
                       : launch_typed<Flat, T, false>(params, tensors, stream);
}

template <typename Flat, typename Tensors>
cudaError_t launch_flat(const BucketParams& params, const Tensors& tensors, cudaStream_t stream) {
  switch (params.tensor_type) {
    case FloatType::kFloat32:
      return launch_pair<Flat, float>(params, tensors, stream);
    case FloatType::kBFloat16:
      return launch_pair<Flat, __nv_bfloat16>(params, tensors, stream);
    case FloatType::kFloat16:
      return launch_pair<Flat, __half>(params, tensors, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

template <typename Tensors>
cudaError_t launch_any(const BucketParams& params, const Tensors& tensors, cudaStream_t stream) {
  if (tensors.count == 0 || tensors.ends[tensors.count - 1] == 0) return cudaSuccess;
  if (!bucket_converts(params.flat_type, params.tensor_type)) return cudaErrorInvalidValue;
  switch (params.flat_type) {
    case FloatType::kFloat32:
      return launch_flat<float>(params, tensors, stream);
    case FloatType::kBFloat16:
      return launch_flat<__nv_bfloat16>(params, tensors, stream);
    case FloatType::kFloat16:
      return launch_flat<__half>(params, tensors, stream);
    case FloatType::kFloat64:
      return launch_pair<double, double>(params, tensors, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

bool bucket_converts(FloatType flat, FloatType tensors) {
  return flat == tensors || (flat != FloatType::kFloat64 && tensors != FloatType::kFloat64);
}

cudaError_t launch(const BucketParams& params, const FewTensors& tensors, cudaStream_t stream) {
  return launch_any(params, tensors, stream);
}

cudaError_t launch(const BucketParams& params, const ManyTensors& tensors, cudaStream_t stream) {
  return launch_any(params, tensors, stream);
}

}  // namespace lightning_smp
