// One pass over the logits for the statistics, one read and one write for the gradient.
//
// Note: groups of threads. A row, or a part of a long row, belongs to a group of threads: a warp
// where rows are short, a block otherwise. The group walks over it in 16-byte vectors, kUnroll of
// them in flight a thread. What lies before the first aligned address and after the last whole
// vector are the edges, of which each thread takes one element at most; so any number of columns
// and any alignment works, and no thread waits for memory more often than it must. Blocks begin
// their vectors at a cache line, so that warps write whole lines.
//
// Note: running maximum. A thread holds the maximum m of what it has seen and the sum of
// exp(x - m); a larger maximum rescales the sum (Milakov and Gimelshein, "Online normalizer
// calculation for softmax", 2018). Exponentials are taken to base 2. Minus infinity as maximum
// (masked classes, no columns) has no finite reference point: 0 is used, and exp(-inf - 0) = 0 is
// right. NaN passes through the sum.
#include "cross_entropy.h"

#include <math_constants.h>

#include "vector.cuh"

// A target that is no class must stop the program, as it does in torch: in every build.
#undef NDEBUG
#include <cassert>

namespace lightning_smp {
namespace {

constexpr int kBlockThreads = 256;
constexpr int kWarpThreads = 32;
constexpr int kUnroll = 4;
constexpr int kBackwardSteps = 2;
constexpr int64_t kColumnsForBlock = 4096;     // from here on, a block instead of a warp
constexpr int64_t kColumnsOfPart = 16384;      // shortest part that a row is cut into
constexpr double kLog2E = 1.4426950408889634;  // log2(e)

__device__ __forceinline__ float exp2_of(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
__device__ __forceinline__ double exp2_of(double x) { return exp2(x); }

template <typename Number>
__device__ __forceinline__ Number infinity() {
  return static_cast<Number>(CUDART_INF);
}

template <typename T>
using NumberOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

// What a thread, then a group, knows of the elements it has seen.
template <typename Number, bool kWithSum>
struct Running {
  Number maximum;
  Number sum_exp;
  Number sum;

  __device__ __forceinline__ static Running of_nothing() { return {-infinity<Number>(), 0, 0}; }

  __device__ __forceinline__ static Number reference_of(Number maximum) {
    return maximum == -infinity<Number>() ? Number(0) : maximum * Number(kLog2E);
  }

  // Minus infinities change nothing but `sum`, which is the caller's to keep.
  template <int kCount>
  __device__ __forceinline__ void add(const Number (&x)[kCount]) {
    Number largest = x[0];
#pragma unroll
    for (int i = 1; i < kCount; ++i) largest = fmax(largest, x[i]);
    if (largest > maximum) {
      sum_exp *= exp2_of(maximum * Number(kLog2E) - largest * Number(kLog2E));
      maximum = largest;
    }
    const Number reference = reference_of(maximum);
    Number partial = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      partial += exp2_of(fma(x[i], Number(kLog2E), -reference));
    }
    sum_exp += partial;
  }

  __device__ __forceinline__ void join(const Running& other) {
    const Number largest = fmax(maximum, other.maximum);
    const Number reference = reference_of(largest);
    sum_exp = sum_exp * exp2_of(maximum * Number(kLog2E) - reference) +
              other.sum_exp * exp2_of(other.maximum * Number(kLog2E) - reference);
    maximum = largest;
    if constexpr (kWithSum) sum += other.sum;
  }

  __device__ __forceinline__ Running from_lane(int distance) const {
    return {__shfl_xor_sync(~0u, maximum, distance), __shfl_xor_sync(~0u, sum_exp, distance),
            kWithSum ? __shfl_xor_sync(~0u, sum, distance) : Number(0)};
  }
};

// Joins the threads of a group; thread 0 of the group has the result.
template <int kThreads, typename Number, bool kWithSum>
__device__ __forceinline__ void join_group(Running<Number, kWithSum>& running) {
#pragma unroll
  for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
    running.join(running.from_lane(distance));
  }
  if constexpr (kThreads > kWarpThreads) {
    constexpr int kWarps = kThreads / kWarpThreads;
    __shared__ Running<Number, kWithSum> of_warp[kWarps];
    if (threadIdx.x % kWarpThreads == 0) of_warp[threadIdx.x / kWarpThreads] = running;
    __syncthreads();
    if (threadIdx.x == 0) {
#pragma unroll
      for (int warp = 1; warp < kWarps; ++warp) running.join(of_warp[warp]);
    }
  }
}

struct Range {
  int64_t begin;
  int64_t end;
};

__device__ __forceinline__ Range part_of(int64_t columns, int32_t part, int32_t parts) {
  constexpr int64_t kMultiple = 128;  // whole vectors and cache lines, where rows are aligned
  int64_t length = (columns + parts - 1) / parts + kMultiple - 1;
  length -= length % kMultiple;
  const int64_t begin = min(columns, length * part);
  return {begin, min(columns, begin + length)};
}

__device__ __forceinline__ void check_target(int64_t target, int64_t vocab_size, int64_t ignored) {
  const bool target_is_a_class = target == ignored || (target >= 0 && target < vocab_size);
  assert(target_is_a_class);
}

// A range of a row as one thread of its group sees it.
template <int kThreads, typename T>
struct Share {
  static constexpr int kSize = kVectorSize<T>;
  static constexpr int kAlignment = kThreads == kWarpThreads ? 16 : 128;  // bytes
  static constexpr int kEdge = kAlignment / static_cast<int>(sizeof(T));
  static_assert(kEdge + kSize <= kThreads, "each thread takes at most one element of the edges");
  int64_t aligned;  // where vectors begin
  int64_t vectors;
  int64_t edge;  // this thread's single element, or -1

  __device__ __forceinline__ Share(const T* x, Range range) {
    const int thread = threadIdx.x % kThreads;
    aligned = min(range.end, range.begin + elements_to_alignment<kAlignment>(x + range.begin));
    vectors = (range.end - aligned) / kSize;
    const int64_t before = range.begin + thread;
    const int64_t after = aligned + vectors * kSize + thread - kEdge;
    edge = thread < kEdge ? (before < aligned ? before : -1) : (after < range.end ? after : -1);
  }
};

// Adds kUnroll vectors from `first` on; kAll says that none of them lies past `count`.
template <bool kAll, int kThreads, typename T, typename Number, bool kWithSum>
__device__ __forceinline__ void scan_vectors(const T* vectors, int64_t first, int64_t count,
                                             Running<Number, kWithSum>& running) {
  constexpr int kSize = kVectorSize<T>;
  Vector<T, kSize> raw[kUnroll];
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    const int64_t at = first + i * kThreads;
    if (kAll || at < count) {
      raw[i] = load<kSize>(vectors + at * kSize);
    } else {
#pragma unroll
      for (int j = 0; j < kSize; ++j) raw[i].values[j] = convert<T>(-infinity<float>());
    }
  }
  Number values[kUnroll * kSize];
#pragma unroll
  for (int i = 0; i < kUnroll * kSize; ++i) {
    values[i] = convert<Number>(raw[i / kSize].values[i % kSize]);
    if constexpr (kWithSum) {
      if (kAll || first + i / kSize * kThreads < count) running.sum += values[i];
    }
  }
  running.add(values);
}

// Adds x[begin, end) to what the threads of a group know.
template <int kThreads, typename T, typename Number, bool kWithSum>
__device__ __forceinline__ void scan(const T* x, Range range, Running<Number, kWithSum>& running) {
  const Share<kThreads, T> share(x, range);
  Number edge[1] = {-infinity<Number>()};
  if (share.edge >= 0) edge[0] = convert<Number>(x[share.edge]);  // first, so that nobody waits
  const T* vectors = x + share.aligned;
  int64_t first = threadIdx.x % kThreads;
  for (; first + (kUnroll - 1) * kThreads < share.vectors; first += kUnroll * kThreads) {
    scan_vectors<true, kThreads>(vectors, first, share.vectors, running);
  }
  if (first < share.vectors) scan_vectors<false, kThreads>(vectors, first, share.vectors, running);
  running.add(edge);
  if constexpr (kWithSum) running.sum += share.edge >= 0 ? edge[0] : Number(0);
}

template <typename T, typename Number>
__device__ __forceinline__ Number target_logit(const CrossEntropyStatistics& params, int64_t row,
                                               int64_t target) {
  check_target(target, params.vocab_size, params.ignore_index);
  const int64_t column = target - params.vocab_start;
  if (target == params.ignore_index || column < 0 || column >= params.columns) return Number(0);
  const T* x = static_cast<const T*>(params.logits) + row * params.row_stride;
  return convert<Number>(x[column]);
}

template <typename Number, bool kWithSum>
__device__ __forceinline__ void write(Number* packed, int64_t rows, int64_t row,
                                      const Running<Number, kWithSum>& running, Number logit) {
  packed[row] = running.maximum;
  packed[rows + row] = running.sum_exp;
  packed[2 * rows + row] = logit;
  if constexpr (kWithSum) packed[3 * rows + row] = running.sum;
}

// Groups are numbered by row, then by part.
template <int kThreads, typename T, bool kWithSum>
__global__ void __launch_bounds__(kBlockThreads) statistics(CrossEntropyStatistics params) {
  using Number = NumberOf<T>;
  constexpr int kGroups = kBlockThreads / kThreads;
  const int64_t group = int64_t(blockIdx.x) * kGroups + threadIdx.x / kThreads;
  const int64_t row = group / params.parts;
  const auto part = static_cast<int32_t>(group % params.parts);
  if (row >= params.rows) return;  // whole groups only: no barrier is missed

  const int64_t target = params.targets[row];  // early, so that nobody waits for it later
  auto running = Running<Number, kWithSum>::of_nothing();
  const T* x = static_cast<const T*>(params.logits) + row * params.row_stride;
  scan<kThreads>(x, part_of(params.columns, part, params.parts), running);
  join_group<kThreads>(running);
  if (threadIdx.x % kThreads != 0) return;
  if (params.parts == 1) {
    write(static_cast<Number*>(params.packed), params.rows, row, running,
          target_logit<T, Number>(params, row, target));
  } else {
    Number* partial = static_cast<Number*>(params.partials) + int64_t(part) * 3 * params.rows + row;
    partial[0] = running.maximum;
    partial[params.rows] = running.sum_exp;
    partial[2 * params.rows] = running.sum;
  }
}

// A thread a row; only where there are few rows.
template <typename T, bool kWithSum>
__global__ void __launch_bounds__(kBlockThreads) join_parts(CrossEntropyStatistics params) {
  using Number = NumberOf<T>;
  const int64_t row = int64_t(blockIdx.x) * kBlockThreads + threadIdx.x;
  if (row >= params.rows) return;
  auto running = Running<Number, kWithSum>::of_nothing();
  for (int32_t part = 0; part < params.parts; ++part) {
    const Number* partial =
        static_cast<const Number*>(params.partials) + int64_t(part) * 3 * params.rows + row;
    running.join({partial[0], partial[params.rows], partial[2 * params.rows]});
  }
  write(static_cast<Number*>(params.packed), params.rows, row, running,
        target_logit<T, Number>(params, row, params.targets[row]));
}

// Of a row, what one group does in the backward: whole steps of a block, so that all of its threads
// are busy; few, so that the last blocks end together.
template <typename T>
constexpr int64_t kBackwardColumns =
    int64_t(kBackwardSteps) * kUnroll * kBlockThreads * kVectorSize<T>;

// One row's gradient: scale * exp(x - lse) - everywhere, and at_target less at the target.
template <typename Number>
struct RowGradient {
  Number scale;
  Number reference;  // lse to base 2
  Number everywhere;
  Number at_target;
  int64_t column;  // of the target, maybe outside

  __device__ __forceinline__ Number operator()(Number x) const {
    return fma(scale, exp2_of(fma(x, Number(kLog2E), -reference)), -everywhere);
  }
};

template <typename T, int kSize, typename Number>
__device__ __forceinline__ Vector<T, kSize> gradient(const Vector<T, kSize>& x, int64_t begin,
                                                     const RowGradient<Number>& row) {
  Number values[kSize];
#pragma unroll
  for (int i = 0; i < kSize; ++i) values[i] = row(convert<Number>(x.values[i]));
  if (row.column >= begin && row.column < begin + kSize) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (begin + i == row.column) values[i] -= row.at_target;
    }
  }
  Vector<T, kSize> result;
#pragma unroll
  for (int i = 0; i < kSize; ++i) result.values[i] = convert<T>(values[i]);
  return result;
}

template <int kThreads, typename T>
__device__ __forceinline__ void fill_zero(T* x, Range range) {
  const Share<kThreads, T> share(x, range);
  auto* vectors = reinterpret_cast<uint4*>(x + share.aligned);
  for (int64_t at = threadIdx.x % kThreads; at < share.vectors; at += kThreads) {
    vectors[at] = uint4{0, 0, 0, 0};
  }
  if (share.edge >= 0) x[share.edge] = convert<T>(0.0f);
}

// Does kUnroll vectors from `first` on; kAll says that none of them lies past the last.
template <bool kAll, int kThreads, typename T, typename Number>
__device__ __forceinline__ void write_vectors(T* x, const Share<kThreads, T>& share, int64_t first,
                                              const RowGradient<Number>& row) {
  constexpr int kSize = kVectorSize<T>;
  Vector<T, kSize> raw[kUnroll];
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    const int64_t at = first + i * kThreads;
    if (kAll || at < share.vectors) raw[i] = load<kSize>(x + share.aligned + at * kSize);
  }
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    const int64_t at = first + i * kThreads;
    const int64_t place = share.aligned + at * kSize;
    if (kAll || at < share.vectors) store(x + place, gradient(raw[i], place, row));
  }
}

template <int kThreads, typename T, typename Number>
__device__ __forceinline__ void write_gradient(T* x, Range range, const RowGradient<Number>& row) {
  const Share<kThreads, T> share(x, range);
  Vector<T, 1> edge;
  if (share.edge >= 0) edge = load<1>(x + share.edge);
  int64_t first = threadIdx.x % kThreads;
  for (; first + (kUnroll - 1) * kThreads < share.vectors; first += kUnroll * kThreads) {
    write_vectors<true, kThreads>(x, share, first, row);
  }
  if (first < share.vectors) write_vectors<false, kThreads>(x, share, first, row);
  if (share.edge >= 0) store(x + share.edge, gradient(edge, share.edge, row));
}

// Groups are numbered by row, then by part.
template <int kThreads, typename T>
__global__ void __launch_bounds__(kBlockThreads)
    backward(CrossEntropyBackward params, int32_t parts) {
  using Number = NumberOf<T>;
  constexpr int kGroups = kBlockThreads / kThreads;
  const int64_t group = int64_t(blockIdx.x) * kGroups + threadIdx.x / kThreads;
  const int64_t row = group / parts;
  if (row >= params.rows) return;

  const int64_t begin = group % parts * kBackwardColumns<T>;
  const Range range = {begin, min(params.columns, begin + kBackwardColumns<T>)};
  T* x = static_cast<T*>(params.logits) + row * params.row_stride;
  const int64_t target = params.targets[row];
  const Number grad = static_cast<const Number*>(params.grad)[row];
  const Number lse = static_cast<const Number*>(params.lse)[row];
  check_target(target, params.vocab_size, params.ignore_index);
  if (target == params.ignore_index) {
    fill_zero<kThreads>(x, range);
    return;
  }
  RowGradient<Number> gradient;
  gradient.scale = grad;
  gradient.reference = lse * Number(kLog2E);
  gradient.everywhere = grad * Number(params.label_smoothing / double(params.vocab_size));
  gradient.at_target = grad * Number(1.0 - params.label_smoothing);
  gradient.column = target - params.vocab_start;
  write_gradient<kThreads>(x, range, gradient);
}

// Calls action(T()) for the type of the elements.
template <typename Action>
cudaError_t with_type(FloatType type, const Action& action) {
  switch (type) {
    case FloatType::kFloat32:
      return action(float());
    case FloatType::kBFloat16:
      return action(__nv_bfloat16());
    case FloatType::kFloat16:
      return action(__half());
    case FloatType::kFloat64:
      return action(double());
  }
  return cudaErrorInvalidValue;
}

int64_t blocks_for(int64_t groups, int threads) {
  const int64_t per_block = kBlockThreads / threads;
  return (groups + per_block - 1) / per_block;
}

template <typename T, bool kWithSum>
cudaError_t launch_statistics(const CrossEntropyStatistics& params, cudaStream_t stream) {
  const int64_t groups = params.rows * params.parts;
  if (params.columns < kColumnsForBlock) {
    const auto blocks = static_cast<unsigned>(blocks_for(groups, kWarpThreads));
    statistics<kWarpThreads, T, kWithSum><<<blocks, kBlockThreads, 0, stream>>>(params);
  } else {
    const auto blocks = static_cast<unsigned>(groups);
    statistics<kBlockThreads, T, kWithSum><<<blocks, kBlockThreads, 0, stream>>>(params);
  }
  if (params.parts > 1) {
    const auto blocks = static_cast<unsigned>(blocks_for(params.rows, 1));
    join_parts<T, kWithSum><<<blocks, kBlockThreads, 0, stream>>>(params);
  }
  return cudaGetLastError();
}

}  // namespace

int32_t cross_entropy_parts(int64_t rows, int64_t columns, int device) {
  int multiprocessors = 1;
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  constexpr int64_t kBlocksEach = 4;  // that many blocks fit on a multiprocessor
  const int64_t wanted = kBlocksEach * multiprocessors / (rows > 0 ? rows : 1);
  const int64_t possible = columns / kColumnsOfPart;
  const int64_t parts = wanted < possible ? wanted : possible;
  return static_cast<int32_t>(parts > 1 ? parts : 1);
}

cudaError_t launch(const CrossEntropyStatistics& params, cudaStream_t stream) {
  if (params.rows == 0) return cudaSuccess;
  return with_type(params.type, [&](auto value) {
    using T = decltype(value);
    return params.with_sum ? launch_statistics<T, true>(params, stream)
                           : launch_statistics<T, false>(params, stream);
  });
}

cudaError_t launch(const CrossEntropyBackward& params, cudaStream_t stream) {
  if (params.rows == 0 || params.columns == 0) return cudaSuccess;
  return with_type(params.type, [&](auto value) {
    using T = decltype(value);
    const auto parts =
        static_cast<int32_t>((params.columns + kBackwardColumns<T> - 1) / kBackwardColumns<T>);
    const int64_t groups = params.rows * parts;
    if (params.columns < kColumnsForBlock) {
      const auto blocks = static_cast<unsigned>(blocks_for(groups, kWarpThreads));
      backward<kWarpThreads, T><<<blocks, kBlockThreads, 0, stream>>>(params, parts);
    } else {
      backward<kBlockThreads, T>
          <<<static_cast<unsigned>(groups), kBlockThreads, 0, stream>>>(params, parts);
    }
    return cudaGetLastError();
  });
}

}  // namespace lightning_smp
