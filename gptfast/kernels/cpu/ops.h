// The operators; what each does stands in gptfast/kernels/ops.py.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace gptfast {

at::Tensor linear(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                  int64_t out_features, bool rounds_inputs);
at::Tensor embedding(const at::Tensor& tokens, const at::Tensor& packed, int64_t dim, at::ScalarType dtype);
at::Tensor pack_dense(const at::Tensor& weight);
at::Tensor pack_quantized(const at::Tensor& codes, const at::Tensor& scales, const std::optional<at::Tensor>& mins,
                          const std::optional<at::Tensor>& super_scales,
                          const std::optional<at::Tensor>& super_mins, int64_t bits);
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const std::optional<at::Tensor>& k_scales, const std::optional<at::Tensor>& v_scales,
                     const at::Tensor& input_pos, std::optional<int64_t> sliding_window);

}  // namespace gptfast
