// From a matrix in its neutral form to the layout of the kernels.
#include <ATen/Parallel.h>  // get_num_threads
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>

#include "arena.h"
#include "layout.h"
#include "ops.h"
#include "team.h"

namespace gptfast {

namespace {

at::Tensor allocate(const Layout& layout) {
  at::Tensor packed = allocate_packed(layout.total_bytes());
  uint8_t* data = packed.mutable_data_ptr<uint8_t>();
  std::memset(data, 0, HEADER_BYTES);
  std::memcpy(data, static_cast<const Header*>(&layout), sizeof(Header));
  return packed;
}

template <class Function>
void for_each_strip(const Layout& layout, const at::Tensor& packed, const Function& function) {
  uint8_t* first = packed.mutable_data_ptr<uint8_t>() + HEADER_BYTES;
  Team::get().run(layout.strips, at::get_num_threads(), [&](int64_t strip) {
    uint8_t* target = first + strip * layout.strip_bytes;
    std::memset(target, 0, layout.strip_bytes);
    function(strip * STRIP, std::min<int64_t>(STRIP, layout.rows - strip * STRIP), target);
  });
}

// One byte-wide code of each of `count` rows into its place: see `unpack` in product.h.
void pack_codes(const Layout& layout, const int8_t* codes, int64_t count, int offset, uint8_t* target) {
  const int64_t block_bytes = get_block_bytes(layout.codes);
  for (int64_t row = 0; row < STRIP; ++row) {
    for (int64_t k = 0; k < layout.blocks * BLOCK; ++k) {
      // Rows and inputs of the padding hold the code of zero.
      const int code = row < count && k < layout.columns ? codes[row * layout.columns + k] : 0;
      const uint8_t stored = uint8_t(code + offset);
      uint8_t* block = target + k / BLOCK * block_bytes;
      const int64_t j = k % BLOCK / 4, byte = row * 4 + k % 4;
      if (layout.codes == Codes::INT8) {
        block[64 * j + byte] = stored;
        continue;
      }
      block[64 * (j & 3) + byte] |= uint8_t((stored & 15) << (j >= 4 ? 4 : 0));
      if (layout.codes == Codes::INT6) block[256 + 64 * (j & 1) + byte] |= uint8_t((stored >> 4) << (2 * (j >> 1)));
    }
  }
}

// A (rows, count of groups) tensor to a vector of 16 for each group.
template <class T>
void pack_columns(const at::Tensor& source, int64_t row, int64_t count, uint8_t* target) {
  const int64_t columns = source.size(1);
  const T* values = (const T*)source.const_data_ptr() + row * columns;
  for (int64_t lane = 0; lane < count; ++lane) {
    for (int64_t column = 0; column < columns; ++column) {
      ((T*)target)[column * STRIP + lane] = values[lane * columns + column];
    }
  }
}

void pack_columns(const at::Tensor& source, int64_t row, int64_t count, uint8_t* target) {
  if (source.element_size() == 4) return pack_columns<uint32_t>(source, row, count, target);
  if (source.element_size() == 2) return pack_columns<uint16_t>(source, row, count, target);
  pack_columns<uint8_t>(source, row, count, target);
}

}  // namespace

at::Tensor pack_dense(const at::Tensor& weight) {
  TORCH_CHECK_VALUE(weight.dim() == 2 && weight.numel() > 0 && weight.is_contiguous(), "a matrix that lies row by row is needed");
  Codes codes;
  switch (weight.scalar_type()) {
    case at::kFloat: codes = Codes::FLOAT32; break;
    case at::kHalf: codes = Codes::FLOAT16; break;
    case at::kBFloat16: codes = Codes::BFLOAT16; break;
    default: TORCH_CHECK_VALUE(false, "weights of ", weight.scalar_type(), " cannot be packed");
  }
  const Layout layout(Header{MAGIC, codes, ScaleType::NONE, 0, weight.size(0), weight.size(1), weight.size(1)});
  at::Tensor packed = allocate(layout);
  const int64_t size = weight.element_size(), columns = layout.columns;
  const uint8_t* source = (const uint8_t*)weight.const_data_ptr();
  for_each_strip(layout, packed, [&](int64_t row, int64_t count, uint8_t* target) {
    for (int64_t lane = 0; lane < count; ++lane) {
      for (int64_t k = 0; k < columns; ++k) {
        std::memcpy(target + (k * STRIP + lane) * size, source + ((row + lane) * columns + k) * size, size);
      }
    }
  });
  return packed;
}

at::Tensor pack_quantized(const at::Tensor& codes, const at::Tensor& scales, const std::optional<at::Tensor>& mins,
                          const std::optional<at::Tensor>& super_scales,
                          const std::optional<at::Tensor>& super_mins, int64_t bits) {
  TORCH_CHECK_VALUE(codes.dim() == 2 && codes.numel() > 0 && codes.scalar_type() == at::kChar && codes.is_contiguous(),
                    "codes must be an int8 matrix that lies row by row");
  const int64_t rows = codes.size(0), columns = codes.size(1);
  const auto check = [&](const at::Tensor& values, at::ScalarType dtype, const char* name) {
    TORCH_CHECK_VALUE(values.dim() == 2 && values.size(0) == rows && values.scalar_type() == dtype &&
                          values.is_contiguous() && values.size(1) > 0 && columns % values.size(1) == 0,
                      name, " of shape ", values.sizes(), " and ", values.scalar_type(), " do not fit a matrix of ",
                      rows, " x ", columns);
  };
  check(scales, scales.scalar_type(), "scales");
  const int64_t groups = scales.size(1), group_size = columns / groups;
  const Codes kind = bits == 4 ? Codes::INT4 : bits == 6 ? Codes::INT6 : Codes::INT8;
  const bool is_super = super_scales.has_value();
  ScaleType scale_type = ScaleType::SUPER;
  if (!is_super) {
    TORCH_CHECK_VALUE(scales.scalar_type() == at::kHalf || scales.scalar_type() == at::kFloat,
                      "scales must be float16 or float32");
    scale_type = scales.scalar_type() == at::kHalf ? ScaleType::HALF : ScaleType::SINGLE;
  }
  TORCH_CHECK_VALUE(bits == 4 || bits == 6 || bits == 8, "codes of ", bits, " bits are not supported");
  TORCH_CHECK_VALUE(is_super ? scales.element_size() == 1 && columns % SUPER_BLOCK == 0
                             : groups == 1 || group_size % BLOCK == 0,
                    "groups of ", group_size, " are not supported");
  TORCH_CHECK_VALUE(is_super ? group_size == (bits == 6 ? 16 : BLOCK) : bits != 6,
                    "codes of ", bits, " bits in groups of ", group_size, " are not supported");
  if (mins) check(*mins, scales.scalar_type(), "mins");
  if (is_super) check(*super_scales, at::kHalf, "super scales");
  if (is_super && mins) {
    TORCH_CHECK_VALUE(super_mins.has_value(), "mins of super blocks need super mins");
    check(*super_mins, at::kHalf, "super mins");
  }
  const Layout layout(Header{MAGIC, kind, scale_type, mins.has_value(), rows, columns, group_size});
  at::Tensor packed = allocate(layout);
  for_each_strip(layout, packed, [&](int64_t row, int64_t count, uint8_t* target) {
    pack_codes(layout, codes.const_data_ptr<int8_t>() + row * columns, count, layout.offset, target + layout.codes_at);
    pack_columns(scales, row, count, target);
    if (mins) pack_columns(*mins, row, count, target + layout.mins_at);
    if (is_super) pack_columns(*super_scales, row, count, target + layout.super_scales_at);
    if (is_super && mins) pack_columns(*super_mins, row, count, target + layout.super_mins_at);
  });
  return packed;
}

}  // namespace gptfast
