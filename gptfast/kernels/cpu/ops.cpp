// Registers the operators. The library's name is set by the build, so that two builds can be loaded side by side.
#include "ops.h"

#include <torch/library.h>

TORCH_LIBRARY(GPTFAST_LIBRARY, library) {
  library.def("linear(Tensor x, Tensor packed, Tensor? bias, int out_features, bool rounds_inputs) -> Tensor");
  library.def("embedding(Tensor tokens, Tensor packed, int dim, ScalarType dtype) -> Tensor");
  library.def("pack_dense(Tensor weight) -> Tensor");
  library.def(
      "pack_quantized(Tensor codes, Tensor scales, Tensor? mins, Tensor? super_scales, Tensor? super_mins, int bits) "
      "-> Tensor");
  library.def(
      "attention(Tensor q, Tensor k, Tensor v, Tensor? k_scales, Tensor? v_scales, Tensor input_pos, "
      "int? sliding_window) -> Tensor");
}

TORCH_LIBRARY_IMPL(GPTFAST_LIBRARY, CPU, library) {
  library.impl("linear", gptfast::linear);
  library.impl("embedding", gptfast::embedding);
  library.impl("pack_dense", gptfast::pack_dense);
  library.impl("pack_quantized", gptfast::pack_quantized);
  library.impl("attention", gptfast::attention);
}
