// Types that host and device code of the kernels share. No torch headers here or in any kernel:
// what a kernel needs is in one plain struct, and it returns the error of its launch.
#pragma once

#include <cstdint>

namespace lightning_smp {

enum class FloatType : int32_t { kFloat32, kBFloat16, kFloat16, kFloat64 };

}  // namespace lightning_smp
