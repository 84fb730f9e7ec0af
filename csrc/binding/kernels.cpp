// Registers the CUDA kernels for the operators that lightning_smp.native.kernels declares. Their
// schemas are in Python only, where they are needed without this library too; torch compares the
// types of these functions with them when both are known, in whatever order they come.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "kernels/buckets.h"
#include "kernels/cross_entropy.h"
#include "kernels/slices.h"

namespace lightning_smp {
namespace {

using at::Tensor;

std::optional<FloatType> float_type_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return FloatType::kFloat32;
    case at::kBFloat16:
      return FloatType::kBFloat16;
    case at::kHalf:
      return FloatType::kFloat16;
    case at::kDouble:
      return FloatType::kFloat64;
    default:
      return std::nullopt;
  }
}

FloatType float_type_of(const Tensor& tensor, const char* name) {
  const auto type = float_type_of(tensor.scalar_type());
  TORCH_CHECK(type.has_value(), name, " must be float32, bfloat16, float16 or float64, not ",
              tensor.scalar_type());
  return *type;
}

void check_same_device(const Tensor& tensor, const char* name, const Tensor& other) {
  TORCH_CHECK(tensor.device() == other.device(), name, " is on ", tensor.device(),
              ", the others on ", other.device());
}

// ---- cross entropy ----------------------------------------------------------------------------

at::ScalarType statistics_type(const Tensor& logits) {
  return logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

void check_logits(const Tensor& logits, const Tensor& targets) {
  TORCH_CHECK(logits.dim() == 2, "logits must be [N, V], not of shape ", logits.sizes());
  TORCH_CHECK(logits.size(1) <= 1 || logits.stride(1) == 1,
              "the rows of logits must have no gaps; strides are ", logits.strides());
  TORCH_CHECK(targets.scalar_type() == at::kLong && targets.is_contiguous() &&
                  targets.dim() == 1 && targets.size(0) == logits.size(0),
              "targets must be contiguous int64 [", logits.size(0), "], not ",
              targets.scalar_type(), " of shape ", targets.sizes());
  check_same_device(targets, "targets", logits);
}

void check_per_row(const Tensor& tensor, const char* name, const Tensor& logits) {
  TORCH_CHECK(tensor.scalar_type() == statistics_type(logits) && tensor.is_contiguous() &&
                  tensor.dim() == 1 && tensor.size(0) == logits.size(0),
              name, " must be contiguous ", statistics_type(logits), " [", logits.size(0),
              "], not ", tensor.scalar_type(), " of shape ", tensor.sizes());
  check_same_device(tensor, name, logits);
}

Tensor cross_entropy_statistics(const Tensor& logits, const Tensor& targets, int64_t vocab_start,
                                int64_t vocab_size, int64_t ignore_index, bool with_sum) {
  check_logits(logits, targets);
  const c10::cuda::CUDAGuard guard(logits.device());
  const int64_t rows = logits.size(0);
  const auto options = logits.options().dtype(statistics_type(logits));
  Tensor packed = at::empty({with_sum ? 4 : 3, rows}, options);

  CrossEntropyStatistics params{};
  params.type = float_type_of(logits, "logits");
  params.logits = logits.const_data_ptr();
  params.rows = rows;
  params.columns = logits.size(1);
  params.row_stride = logits.stride(0);
  params.targets = targets.const_data_ptr<int64_t>();
  params.vocab_start = vocab_start;
  params.vocab_size = vocab_size;
  params.ignore_index = ignore_index;
  params.with_sum = with_sum;
  params.packed = packed.data_ptr();
  params.parts = cross_entropy_parts(rows, logits.size(1), logits.get_device());
  Tensor partials = at::empty({params.parts == 1 ? 0 : params.parts, 3, rows}, options);
  params.partials = partials.data_ptr();
  C10_CUDA_CHECK(launch(params, c10::cuda::getCurrentCUDAStream()));
  return packed;
}

void cross_entropy_backward_(const Tensor& logits, const Tensor& targets, const Tensor& lse,
                             const Tensor& grad, int64_t vocab_start, int64_t vocab_size,
                             int64_t ignore_index, double label_smoothing) {
  check_logits(logits, targets);
  check_per_row(lse, "lse", logits);
  check_per_row(grad, "grad", logits);
  const c10::cuda::CUDAGuard guard(logits.device());

  CrossEntropyBackward params{};
  params.type = float_type_of(logits, "logits");
  params.logits = logits.data_ptr();
  params.rows = logits.size(0);
  params.columns = logits.size(1);
  params.row_stride = logits.stride(0);
  params.targets = targets.const_data_ptr<int64_t>();
  params.vocab_start = vocab_start;
  params.vocab_size = vocab_size;
  params.ignore_index = ignore_index;
  params.label_smoothing = label_smoothing;
  params.lse = lse.const_data_ptr();
  params.grad = grad.const_data_ptr();
  C10_CUDA_CHECK(launch(params, c10::cuda::getCurrentCUDAStream()));
}

// ---- slices -----------------------------------------------------------------------------------

int64_t set_ends(SlicesParams& params, at::IntArrayRef sizes) {
  TORCH_CHECK(!sizes.empty() && sizes.size() <= kMaxSlices, "sizes must be 1 to ", kMaxSlices,
              " numbers, not ", sizes.size());
  int64_t end = 0;
  for (const int64_t size : sizes) {
    TORCH_CHECK(size >= 0, "sizes must not be negative, as in ", sizes);
    params.ends[params.slices++] = end += size;
  }
  return end;
}

void move_slices(SlicesParams& params, const Tensor& source, const Tensor& target) {
  params.source = source.const_data_ptr();
  params.target = target.data_ptr();
  params.convert = source.scalar_type() != target.scalar_type();
  if (params.convert) {
    params.source_type = float_type_of(source, "the source");
    params.target_type = float_type_of(target, "the target");
    TORCH_CHECK(slices_convert(params.source_type, params.target_type), "slices are not converted ",
                "from ", source.scalar_type(), " to ", target.scalar_type());
  } else {
    const auto bytes = static_cast<int32_t>(target.element_size());
    params.element_bytes = std::min(bytes, 8);
    const int64_t words = bytes / params.element_bytes;  // 2 for complex128
    params.columns *= words;
    for (int slice = 0; slice < params.slices; ++slice) params.ends[slice] *= words;
  }
  C10_CUDA_CHECK(launch(params, c10::cuda::getCurrentCUDAStream()));
}

Tensor pack_slices(const Tensor& whole, at::IntArrayRef sizes, at::ScalarType dtype) {
  SlicesParams params{};
  params.pack = true;
  params.columns = set_ends(params, sizes);
  TORCH_CHECK(whole.dim() == 2 && whole.is_contiguous() && whole.size(1) == params.columns,
              "whole must be contiguous [rows, ", params.columns, "], not of shape ",
              whole.sizes());
  params.rows = whole.size(0);
  const c10::cuda::CUDAGuard guard(whole.device());
  Tensor packed = at::empty({whole.numel()}, whole.options().dtype(dtype));
  move_slices(params, whole, packed);
  return packed;
}

Tensor unpack_slices(const Tensor& packed, int64_t rows, at::IntArrayRef sizes,
                     at::ScalarType dtype) {
  SlicesParams params{};
  params.columns = set_ends(params, sizes);
  params.rows = rows;
  TORCH_CHECK(packed.is_contiguous() && packed.dim() == 1 &&
                  packed.numel() == rows * params.columns,
              "packed must be contiguous [", rows, " x ", params.columns, "], not of shape ",
              packed.sizes());
  TORCH_CHECK(packed.scalar_type() != dtype, "unpacking without a conversion is torch.cat");
  const c10::cuda::CUDAGuard guard(packed.device());
  Tensor whole = at::empty({rows, params.columns}, packed.options().dtype(dtype));
  move_slices(params, packed, whole);
  return whole;
}

// ---- buckets ----------------------------------------------------------------------------------

// Launches for tensors from `first` on, as many as fit; returns the next one.
template <typename Tensors>
size_t launch_some(BucketParams params, at::TensorList tensors, size_t first, int64_t& place,
                   int64_t element_bytes) {
  const auto batch = std::make_unique<Tensors>();
  params.flat = static_cast<char*>(params.flat) + place * element_bytes;
  int64_t end = 0;
  size_t next = first;
  for (; next < tensors.size() && batch->count < Tensors::capacity; ++next) {
    const Tensor& tensor = tensors[next];
    if (tensor.numel() == 0) continue;
    batch->tensors[batch->count] =
        params.gather ? const_cast<void*>(tensor.const_data_ptr()) : tensor.data_ptr();
    batch->ends[batch->count++] = end += tensor.numel();
  }
  C10_CUDA_CHECK(launch(params, *batch, c10::cuda::getCurrentCUDAStream()));
  place += end;
  return next;
}

void check_bucket(const Tensor& flat, at::TensorList tensors) {
  TORCH_CHECK(flat.is_contiguous(), "flat must be contiguous; its strides are ", flat.strides());
  int64_t total = 0;
  for (const Tensor& tensor : tensors) {
    TORCH_CHECK(tensor.scalar_type() == tensors[0].scalar_type(),
                "the tensors of a bucket must be of one type, not ", tensors[0].scalar_type(),
                " and ", tensor.scalar_type());
    check_same_device(tensor, "a tensor", flat);
    total += tensor.numel();
  }
  TORCH_CHECK(total == flat.numel(), "flat has ", flat.numel(), " elements, the tensors ", total);
}

// Tensors without gaps.
void move_bucket(const Tensor& flat, void* data, at::TensorList tensors, double scale,
                 bool gather) {
  if (flat.numel() == 0) return;
  BucketParams params{};
  params.flat = data;
  params.flat_type = float_type_of(flat, "flat");
  params.tensor_type = float_type_of(tensors[0], "tensors");
  params.gather = gather;
  params.scale = scale;
  TORCH_CHECK(bucket_converts(params.flat_type, params.tensor_type), "a bucket does not convert ",
              "between ", flat.scalar_type(), " and ", tensors[0].scalar_type());
  int64_t place = 0;
  for (size_t next = 0; next < tensors.size();) {
    next = tensors.size() - next <= FewTensors::capacity
               ? launch_some<FewTensors>(params, tensors, next, place, flat.element_size())
               : launch_some<ManyTensors>(params, tensors, next, place, flat.element_size());
  }
}

bool have_no_gaps(at::TensorList tensors) {
  return std::all_of(tensors.begin(), tensors.end(),
                     [](const Tensor& tensor) { return tensor.is_contiguous(); });
}

void flatten_into_(const Tensor& flat, at::TensorList tensors, double scale) {
  check_bucket(flat, tensors);
  const c10::cuda::CUDAGuard guard(flat.device());
  if (have_no_gaps(tensors)) return move_bucket(flat, flat.data_ptr(), tensors, scale, true);
  std::vector<Tensor> dense;
  for (const Tensor& tensor : tensors) dense.push_back(tensor.contiguous());
  move_bucket(flat, flat.data_ptr(), dense, scale, true);
}

void unflatten_into_(const Tensor& flat, at::TensorList tensors, double scale) {
  check_bucket(flat, tensors);
  const c10::cuda::CUDAGuard guard(flat.device());
  void* data = const_cast<void*>(flat.const_data_ptr());
  if (have_no_gaps(tensors)) return move_bucket(flat, data, tensors, scale, false);
  std::vector<Tensor> dense;
  for (const Tensor& tensor : tensors) {
    dense.push_back(tensor.is_contiguous() ? tensor
                                           : at::empty(tensor.sizes(), tensor.options()));
  }
  move_bucket(flat, data, dense, scale, false);
  for (size_t i = 0; i < dense.size(); ++i) {
    if (!dense[i].is_same(tensors[i])) tensors[i].copy_(dense[i]);
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(lightning_smp, CUDA, library) {
  library.impl("cross_entropy_statistics", &cross_entropy_statistics);
  library.impl("cross_entropy_backward_", &cross_entropy_backward_);
  library.impl("pack_slices", &pack_slices);
  library.impl("unpack_slices", &unpack_slices);
  library.impl("flatten_into_", &flatten_into_);
  library.impl("unflatten_into_", &unflatten_into_);
}

}  // namespace lightning_smp
