// Packing a tensor into one contiguous slice a rank, and back, converting on the way. Back without
// converting is not here: torch's cat is as fast.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "types.h"

namespace lightning_smp {

constexpr int32_t kMaxSlices = 64;

// The whole [rows, columns] is contiguous. Slice s, of all rows and columns ends[s - 1] to ends[s],
// is contiguous as well; the slices lie one after another.
struct SlicesParams {
  const void* source;
  void* target;
  bool pack;             // whether the source is whole; otherwise the target is
  bool convert;          // from source_type to target_type; otherwise elements are copied
  FloatType source_type;
  FloatType target_type;
  int32_t element_bytes;  // of what is copied: 1, 2, 4 or 8
  int64_t rows;
  int64_t columns;
  int32_t slices;
  int64_t ends[kMaxSlices];
};

// Whether `launch` converts between these types; float64 is not among them.
bool slices_convert(FloatType source, FloatType target);

cudaError_t launch(const SlicesParams& params, cudaStream_t stream);

}  // namespace lightning_smp
