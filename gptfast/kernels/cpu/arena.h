// Where packed matrices live: one after the other, in the order in which they are packed, on huge pages.
//
// With pages of 4 kB two cores of a Zen 5 read 61 GB/s, with those of 2 MB 73 (2026-11-30). And as the matrices follow
// each other in the order of their use, a thread that waits can fetch what comes next without being told what it is.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace gptfast {

// Uninitialized bytes that are freed with their tensor, once those around them are freed too.
at::Tensor allocate_packed(int64_t bytes);

}  // namespace gptfast
