// Note: who does what. A thread owns a column (a vector of kSize elements) in some rows, so that it
// looks up its slice once and has independent loads in flight. A block is kBlockThreads threads, a
// power of two of them side by side and the rest in the next rows. Vectors are 16 bytes of what is
// written: writes with gaps between threads cost a third of the bandwidth, such reads nothing.
#include "slices.h"

#include "vector.cuh"

namespace lightning_smp {
namespace {

constexpr int kBlockThreads = 256;

template <typename From, typename To, int kSize, bool kPack>
__global__ void __launch_bounds__(kBlockThreads)
    move_slices(const __grid_constant__ SlicesParams params, int32_t threads_across,
                int32_t blocks_across) {
  constexpr int kRows = kLoads<From, kSize>;
  const int64_t block_column = blockIdx.x % blocks_across;
  const int64_t block_row = blockIdx.x / blocks_across;
  const int threads_down = kBlockThreads / threads_across;
  const int64_t column =
      (block_column * threads_across + threadIdx.x % threads_across) * int64_t(kSize);
  if (column >= params.columns) return;

  int slice = 0;
  while (column >= params.ends[slice]) ++slice;
  const int64_t begin = slice == 0 ? 0 : params.ends[slice - 1];
  const int64_t length = params.ends[slice] - begin;
  const int64_t slice_base = begin * params.rows + (column - begin);
  const int64_t source_base = kPack ? column : slice_base;
  const int64_t target_base = kPack ? slice_base : column;
  const int64_t source_stride = kPack ? params.columns : length;
  const int64_t target_stride = kPack ? length : params.columns;

  const auto* source = static_cast<const From*>(params.source) + source_base;
  auto* target = static_cast<To*>(params.target) + target_base;
  const int64_t first = block_row * threads_down * kRows + threadIdx.x / threads_across;
  Vector<From, kSize> values[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int64_t row = first + int64_t(i) * threads_down;
    if (row < params.rows) values[i] = load<kSize>(source + row * source_stride);
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int64_t row = first + int64_t(i) * threads_down;
    if (row < params.rows) store(target + row * target_stride, convert_all<To>(values[i]));
  }
}

template <typename From, typename To, int kSize, bool kPack>
cudaError_t launch_sized(const SlicesParams& params, cudaStream_t stream) {
  const int64_t vectors = params.columns / kSize;
  int32_t across = 1;
  while (across < kBlockThreads && across < vectors) across *= 2;
  const int64_t blocks_across = (vectors + across - 1) / across;
  const int64_t rows_of_block = int64_t(kBlockThreads) / across * kLoads<From, kSize>;
  const int64_t blocks = blocks_across * ((params.rows + rows_of_block - 1) / rows_of_block);
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  move_slices<From, To, kSize, kPack><<<static_cast<unsigned>(blocks), kBlockThreads, 0, stream>>>(
      params, across, static_cast<int32_t>(blocks_across));
  return cudaGetLastError();
}

bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// Vectors may not straddle slices, and each row of each slice must begin at 16 bytes.
bool fits_vectors(const SlicesParams& params, int size) {
  for (int i = 0; i < params.slices; ++i) {
    if (params.ends[i] % size != 0) return false;
  }
  return is_aligned(params.source) && is_aligned(params.target);
}

template <typename From, typename To, bool kPack>
cudaError_t launch_one_way(const SlicesParams& params, cudaStream_t stream) {
  constexpr int kWide = kVectorSize<To>;
  return fits_vectors(params, kWide) ? launch_sized<From, To, kWide, kPack>(params, stream)
                                     : launch_sized<From, To, 1, kPack>(params, stream);
}

template <typename From, typename To>
cudaError_t launch_typed(const SlicesParams& params, cudaStream_t stream) {
  return params.pack ? launch_one_way<From, To, true>(params, stream)
                     : launch_one_way<From, To, false>(params, stream);
}

cudaError_t launch_copy(const SlicesParams& params, cudaStream_t stream) {
  if (!params.pack) return cudaErrorInvalidValue;
  switch (params.element_bytes) {
    case 1:
      return launch_one_way<uint8_t, uint8_t, true>(params, stream);
    case 2:
      return launch_one_way<uint16_t, uint16_t, true>(params, stream);
    case 4:
      return launch_one_way<uint32_t, uint32_t, true>(params, stream);
    case 8:
      return launch_one_way<uint64_t, uint64_t, true>(params, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

constexpr int pair(FloatType source, FloatType target) {
  return static_cast<int>(source) * 4 + static_cast<int>(target);
}

}  // namespace

bool slices_convert(FloatType source, FloatType target) {
  return source != target && source != FloatType::kFloat64 && target != FloatType::kFloat64;
}

cudaError_t launch(const SlicesParams& params, cudaStream_t stream) {
  if (params.rows == 0 || params.columns == 0) return cudaSuccess;
  if (!params.convert) return launch_copy(params, stream);
  switch (pair(params.source_type, params.target_type)) {
    case pair(FloatType::kFloat32, FloatType::kBFloat16):
      return launch_typed<float, __nv_bfloat16>(params, stream);
    case pair(FloatType::kFloat32, FloatType::kFloat16):
      return launch_typed<float, __half>(params, stream);
    case pair(FloatType::kBFloat16, FloatType::kFloat32):
      return launch_typed<__nv_bfloat16, float>(params, stream);
    case pair(FloatType::kBFloat16, FloatType::kFloat16):
      return launch_typed<__nv_bfloat16, __half>(params, stream);
    case pair(FloatType::kFloat16, FloatType::kFloat32):
      return launch_typed<__half, float>(params, stream);
    case pair(FloatType::kFloat16, FloatType::kBFloat16):
      return launch_typed<__half, __nv_bfloat16>(params, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace lightning_smp
