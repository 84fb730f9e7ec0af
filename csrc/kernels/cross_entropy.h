// Cross entropy over a part of the vocabulary; the formulas are in the Python module of this name.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "types.h"

namespace lightning_smp {

// "Number" is float, and double for double logits.
struct CrossEntropyStatistics {
  FloatType type;
  const void* logits;  // [rows, columns], row_stride elements from row to row
  int64_t rows;
  int64_t columns;
  int64_t row_stride;
  const int64_t* targets;  // [rows]
  int64_t vocab_start;
  int64_t vocab_size;
  int64_t ignore_index;
  bool with_sum;
  void* packed;    // [3 or 4, rows] Number: maximum, sum of exponentials, target's logit, sum
  int32_t parts;   // from cross_entropy_parts
  void* partials;  // [parts, 3, rows] Number; unused where parts is 1
};

struct CrossEntropyBackward {
  FloatType type;
  void* logits;  // as above; becomes the gradient
  int64_t rows;
  int64_t columns;
  int64_t row_stride;
  const int64_t* targets;  // [rows]
  int64_t vocab_start;
  int64_t vocab_size;
  int64_t ignore_index;
  double label_smoothing;
  const void* lse;   // [rows] Number
  const void* grad;  // [rows] Number
};

// Into how many parts each row is cut so that all multiprocessors have work.
int32_t cross_entropy_parts(int64_t rows, int64_t columns, int device);

cudaError_t launch(const CrossEntropyStatistics& params, cudaStream_t stream);
cudaError_t launch(const CrossEntropyBackward& params, cudaStream_t stream);

}  // namespace lightning_smp
