// 16-byte accesses and conversions that all kernels use. Device code only.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace lightning_smp {

// Elements that are loaded and stored together, in pieces of at most 16 bytes.
template <typename T, int kSize>
struct alignas(sizeof(T) * kSize < 16 ? sizeof(T) * kSize : 16) Vector {
  T values[kSize];
};

template <typename T>
inline constexpr int kVectorSize = 16 / static_cast<int>(sizeof(T));

// How many loads of kSize elements a thread has in flight: 64 bytes, but 4 to 16 loads.
template <typename T, int kSize>
inline constexpr int kLoads = [] {
  constexpr int loads = 64 / (kSize * static_cast<int>(sizeof(T)));
  return loads < 4 ? 4 : loads > 16 ? 16 : loads;
}();

template <int kSize, typename T>
__device__ __forceinline__ Vector<T, kSize> load(const T* from) {
  return *reinterpret_cast<const Vector<T, kSize>*>(from);
}

template <typename T, int kSize>
__device__ __forceinline__ void store(T* to, const Vector<T, kSize>& vector) {
  *reinterpret_cast<Vector<T, kSize>*>(to) = vector;
}

template <typename To, typename From>
__device__ __forceinline__ To convert(From value) {
  if constexpr (std::is_same_v<To, From>) {
    return value;
  } else if constexpr (std::is_same_v<From, __nv_bfloat16>) {
    return convert<To>(__bfloat162float(value));
  } else if constexpr (std::is_same_v<From, __half>) {
    return convert<To>(__half2float(value));
  } else if constexpr (std::is_same_v<To, __nv_bfloat16>) {
    return __float2bfloat16_rn(static_cast<float>(value));
  } else if constexpr (std::is_same_v<To, __half>) {
    return __float2half_rn(static_cast<float>(value));
  } else {
    return static_cast<To>(value);
  }
}

template <typename To, typename From, int kSize>
__device__ __forceinline__ Vector<To, kSize> convert_all(const Vector<From, kSize>& from) {
  Vector<To, kSize> result;
#pragma unroll
  for (int i = 0; i < kSize; ++i) result.values[i] = convert<To>(from.values[i]);
  return result;
}

// Elements before the first one whose address is a multiple of kBytes.
template <int kBytes, typename T>
__device__ __forceinline__ int64_t elements_to_alignment(const T* pointer) {
  const auto past = reinterpret_cast<uintptr_t>(pointer) % kBytes;
  return past == 0 ? 0 : static_cast<int64_t>((kBytes - past) / sizeof(T));
}

}  // namespace lightning_smp
