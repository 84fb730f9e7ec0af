// Copies between many tensors and one flat buffer, scaling and converting on the way.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "types.h"

namespace lightning_smp {

// The tensors of one launch; `ends` are places in the flat buffer, counted from `flat`.
template <int kCapacity>
struct BucketTensors {
  static constexpr int32_t capacity = kCapacity;
  int32_t count;
  void* tensors[kCapacity];
  int64_t ends[kCapacity];
};
// Both fit into the parameters of a launch (32764 bytes); a small struct is sooner passed.
using FewTensors = BucketTensors<64>;
using ManyTensors = BucketTensors<1024>;

struct BucketParams {
  void* flat;
  FloatType flat_type;
  FloatType tensor_type;
  bool gather;   // whether tensors are read and `flat` is written; otherwise the other way round
  double scale;  // 0 writes zeros, whatever was there
};

// Whether `launch` copies between these types: all but float64 with another one.
bool bucket_converts(FloatType flat, FloatType tensors);

cudaError_t launch(const BucketParams& params, const FewTensors& tensors, cudaStream_t stream);
cudaError_t launch(const BucketParams& params, const ManyTensors& tensors, cudaStream_t stream);

}  // namespace lightning_smp
