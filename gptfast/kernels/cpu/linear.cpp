// Products with packed matrices: `linear`, and `embedding`, which looks up rows of one.
#include <ATen/Parallel.h>  // get_num_threads
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <exception>
#include <mutex>
#include <optional>
#include <vector>

#include "inputs.h"
#include "ops.h"
#include "product.h"
#include "team.h"

namespace gptfast {

using StripProduct = void (*)(const Layout&, const uint8_t*, const Reading&, const Inputs&, float*);

// Beyond this many rows of inputs, weights are expanded a slice at a time for the library's product, which is faster
// there; rounded inputs have no such limit.
constexpr int64_t MOST_EXACT_ROWS = 32;
constexpr int64_t EXPANDED_BYTES = 1 << 20;
constexpr int64_t LEAST_EXPANDED_STRIPS = 4;
constexpr int64_t MOST_EXPANDED_STRIPS = 32;
// Blocks of inputs that one thread prepares alone, and that a piece has where several do: 10 to 30 ns each.
constexpr int64_t ALONE_BLOCKS = 128;
constexpr int64_t BLOCKS_AT_ONCE = 16;
constexpr int64_t LEAST_PIECE_BYTES = 24 << 10;

Layout read_layout(const at::Tensor& packed) {
  TORCH_CHECK_VALUE(packed.scalar_type() == at::kByte && packed.dim() == 1 && packed.is_contiguous() &&
                        packed.numel() >= HEADER_BYTES,
                    "a packed matrix is a vector of bytes, as gptfast.kernels.packing makes it");
  Header header;
  std::memcpy(&header, packed.const_data_ptr(), sizeof(header));
  TORCH_CHECK_VALUE(header.magic == MAGIC && header.rows > 0 && header.columns > 0 && header.group_size > 0,
                    "the packed matrix is damaged or was packed by another version");
  const Layout layout(header);
  TORCH_CHECK_VALUE(layout.total_bytes() == packed.numel(), "the packed matrix is damaged: it has ", packed.numel(),
                    " bytes and not ", layout.total_bytes());
  return layout;
}

template <Codes CODES, int M>
StripProduct choose_quantized_product(const Layout& layout, bool rounds_inputs) {
  if (!rounds_inputs) return multiply_exact<CODES, M>;
  if constexpr (CODES == Codes::INT6) {
    return multiply_rounded_blocks<CODES, M>;
  } else {
    return layout.groups == layout.blocks ? multiply_rounded_blocks<CODES, M> : multiply_rounded_groups<CODES, M>;
  }
}

template <int M>
StripProduct choose_product(const Layout& layout, bool rounds_inputs) {
  switch (layout.codes) {
    case Codes::FLOAT32: return multiply_dense<Codes::FLOAT32, M>;
    case Codes::FLOAT16: return multiply_dense<Codes::FLOAT16, M>;
    case Codes::BFLOAT16: return multiply_dense<Codes::BFLOAT16, M>;
    case Codes::INT4: return choose_quantized_product<Codes::INT4, M>(layout, rounds_inputs);
    case Codes::INT6: return choose_quantized_product<Codes::INT6, M>(layout, rounds_inputs);
    case Codes::INT8: return choose_quantized_product<Codes::INT8, M>(layout, rounds_inputs);
  }
  return nullptr;
}

// The product for so many rows of inputs, `Tile::width`.
StripProduct choose_product(const Layout& layout, bool rounds_inputs, int64_t rows) {
  switch (rows) {
    case 1: return choose_product<1>(layout, rounds_inputs);
    case 2: return choose_product<2>(layout, rounds_inputs);
    case 3: return choose_product<3>(layout, rounds_inputs);
    case 4: return choose_product<4>(layout, rounds_inputs);
    case 5: return choose_product<5>(layout, rounds_inputs);
    case 6: return choose_product<6>(layout, rounds_inputs);
    default: return choose_product<8>(layout, rounds_inputs);
  }
}

template <class T, class Sum>
void write_row(T* y, const Sum* sums, const float* bias, int64_t count) {
  for (int64_t n = 0; n < count; ++n) y[n] = T(bias ? float(sums[n]) + bias[n] : float(sums[n]));
}

// x (rows, columns) times the transposed matrix.
template <class T>
void multiply_strips(const Layout& layout, const uint8_t* packed, const T* x, int64_t rows, const float* bias, T* y,
                     bool rounds_inputs) {
  const int64_t strips = layout.strips;
  const int64_t tile_count = (rows + MOST_ROWS - 1) / MOST_ROWS;
  Scratch scratch(tile_count * Tile<T>::count_bytes(layout));
  std::vector<Tile<T>> tiles;
  for (int64_t row = 0; row < rows; row += MOST_ROWS) {
    tiles.emplace_back(scratch, layout, x + row * layout.columns, std::min<int64_t>(MOST_ROWS, rows - row));
  }
  const int threads = at::get_num_threads();
  Team& team = Team::get();
  // One row is prepared sooner than another thread has heard of it.
  const int64_t blocks = layout.blocks, blocks_at_once = rows * blocks <= ALONE_BLOCKS ? blocks : BLOCKS_AT_ONCE;
  const int64_t pieces_per_tile = (blocks + blocks_at_once - 1) / blocks_at_once;
  team.run(tile_count * pieces_per_tile, threads, [&](int64_t piece) {
    const int64_t start = piece % pieces_per_tile * blocks_at_once;
    for (int64_t block = start; block < std::min(start + blocks_at_once, blocks); ++block) {
      tiles[piece / pieces_per_tile].prepare(layout, block, rounds_inputs);
    }
  });
  // Enough pieces that a thread which lost its core holds the others up for a small part only, but none so small that
  // taking it, 0.1 us, is felt.
  const int64_t least = (LEAST_PIECE_BYTES + layout.strip_bytes - 1) / layout.strip_bytes;
  const int64_t strips_at_once = std::clamp<int64_t>(strips / (threads * 8), std::min<int64_t>(least, 16), 16);
  team.run((strips + strips_at_once - 1) / strips_at_once, threads, [&](int64_t piece) {
    const int64_t start = piece * strips_at_once, end = std::min(start + strips_at_once, strips);
    const uint8_t* data = packed + HEADER_BYTES;
    const Reading reading{data + end * layout.strip_bytes, (threads - 1) * strips_at_once * layout.strip_bytes};
    float sums[MOST_ROWS * STRIP];
    T* rows_of_y = y;
    for (const Tile<T>& tile : tiles) {
      const StripProduct product = choose_product(layout, rounds_inputs, tile.width);
      for (int64_t strip = start; strip < end; ++strip) {
        product(layout, data + strip * layout.strip_bytes, reading, tile.inputs, sums);
        const int64_t n = strip * STRIP, count = std::min<int64_t>(STRIP, layout.rows - n);
        for (int64_t m = 0; m < tile.rows; ++m) {
          write_row(rows_of_y + m * layout.rows + n, sums + m * STRIP, bias ? bias + n : nullptr, count);
        }
      }
      rows_of_y += tile.rows * layout.rows;
    }
  }, packed + layout.total_bytes());
}

template <class T>
GPTFAST_INLINE void store_as(T* target, vfloat value) {
  if constexpr (std::is_same_v<T, float>) {
    store(target, value);
  } else {
    for (int lane = 0; lane < W; ++lane) target[lane] = T(value[lane]);
  }
}

// The strip's matrix, transposed: element (k, row) goes to target[k * stride + row].
template <Codes CODES, class T>
void expand_strip(const Layout& layout, const uint8_t* strip, T* target, int64_t stride) {
  const uint8_t* block = strip + layout.codes_at;
  if constexpr (CODES <= Codes::BFLOAT16) {
    for (int64_t b = 0; b < layout.blocks; ++b, block += get_block_bytes(CODES)) {
      const int64_t count = std::min<int64_t>(BLOCK, layout.columns - b * BLOCK);
      for (int64_t k = 0; k < count; ++k) {
        if constexpr (CODES == Codes::BFLOAT16 && std::is_same_v<T, at::BFloat16>) {
          std::memcpy(target + (b * BLOCK + k) * stride, block + k * STRIP * 2, STRIP * 2);
          continue;
        }
        for (int part = 0; part < PARTS; ++part) {
          store_as(target + (b * BLOCK + k) * stride + part * W, load_weights<CODES>(block, k, part));
        }
      }
    }
  } else {
    const ScaleReader scales = ScaleReader::of_scales(layout, strip), mins = ScaleReader::of_mins(layout, strip);
    const vfloat offset = broadcast(float(layout.offset));
    for (int64_t b = 0; b < layout.blocks; ++b, block += get_block_bytes(CODES)) {
      for (int part = 0; part < PARTS; ++part) {
        for (int j = 0; j < 8; ++j) {
          const vuint codes = unpack<CODES>(block, j, part);
          const int64_t k = b * BLOCK + 4 * j, group = std::min(k / layout.group_size, layout.groups - 1);
          const vfloat scale = scales.read(group, part);
          for (int byte = 0; byte < 4 && k + byte < layout.columns; ++byte) {
            vfloat value = (extract<CODES>(codes, byte) - offset) * scale;
            if (layout.has_mins) value += mins.read(group, part);
            store_as(target + (k + byte) * stride + part * W, value);
          }
        }
      }
    }
  }
}

template <class T>
void expand_strip(const Layout& layout, const uint8_t* strip, T* target, int64_t stride) {
  switch (layout.codes) {
    case Codes::FLOAT32: return expand_strip<Codes::FLOAT32>(layout, strip, target, stride);
    case Codes::FLOAT16: return expand_strip<Codes::FLOAT16>(layout, strip, target, stride);
    case Codes::BFLOAT16: return expand_strip<Codes::BFLOAT16>(layout, strip, target, stride);
    case Codes::INT4: return expand_strip<Codes::INT4>(layout, strip, target, stride);
    case Codes::INT6: return expand_strip<Codes::INT6>(layout, strip, target, stride);
    case Codes::INT8: return expand_strip<Codes::INT8>(layout, strip, target, stride);
  }
}

// The same product for many rows: every thread expands a slice of the matrix at a time and gives it to the library.
template <class T>
void multiply_expanded(const Layout& layout, const uint8_t* packed, const at::Tensor& x, const float* bias, T* y) {
  const int threads = at::get_num_threads();
  const int64_t strip_elements = layout.columns * STRIP;
  const int64_t strips_at_once = std::clamp<int64_t>(EXPANDED_BYTES / (strip_elements * int64_t(sizeof(T))),
                                                     LEAST_EXPANDED_STRIPS, MOST_EXPANDED_STRIPS);
  const auto multiply_slice = [&](int64_t piece) {
    at::AutoDispatchBelowAutograd guard;
    const int64_t start = piece * strips_at_once, end = std::min(start + strips_at_once, layout.strips);
    const int64_t n = start * STRIP, count = std::min(end * STRIP, layout.rows) - n, width = (end - start) * STRIP;
    at::Tensor slice = at::empty({layout.columns, width}, x.options());
    for (int64_t strip = start; strip < end; ++strip) {
      const uint8_t* source = packed + HEADER_BYTES + strip * layout.strip_bytes;
      expand_strip(layout, source, slice.mutable_data_ptr<T>() + (strip - start) * STRIP, width);
    }
    const at::Tensor product = at::mm(x, slice);
    const T* sums = product.const_data_ptr<T>();
    for (int64_t m = 0; m < x.size(0); ++m) {
      write_row(y + m * layout.rows + n, sums + m * width, bias ? bias + n : nullptr, count);
    }
  };
  // Nobody catches what a thread of the team throws, as where memory runs out.
  std::exception_ptr failure;
  std::mutex failing;
  // A product within a thread of ours is not to be shared with the library's own.
  at::set_num_threads(1);
  Team::get().run((layout.strips + strips_at_once - 1) / strips_at_once, threads, [&](int64_t piece) {
    try {
      multiply_slice(piece);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(failing);
      failure = std::current_exception();
    }
  });
  at::set_num_threads(threads);
  if (failure) std::rethrow_exception(failure);
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                  int64_t out_features, bool rounds_inputs) {
  const Layout layout = read_layout(packed);
  TORCH_CHECK_VALUE(x.dim() > 0 && x.size(-1) == layout.columns && out_features == layout.rows, "inputs of shape ",
                    x.sizes(), " cannot be multiplied with a matrix of ", layout.rows, " x ", layout.columns);
  TORCH_CHECK_VALUE(x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16,
                    "inputs must be float32 or bfloat16, not ", x.scalar_type());
  TORCH_CHECK_VALUE(!bias || (bias->dim() == 1 && bias->size(0) == layout.rows), "a bias for ", layout.rows,
                    " outputs is needed");
  const at::Tensor input = x.contiguous();
  const int64_t rows = input.numel() / layout.columns;
  auto shape = x.sizes().vec();
  shape.back() = layout.rows;
  at::Tensor y = at::empty(shape, x.options());
  const at::Tensor bias_values = bias ? bias->to(at::kFloat).contiguous() : at::Tensor();
  const float* bias_data = bias ? bias_values.const_data_ptr<float>() : nullptr;
  const uint8_t* data = packed.const_data_ptr<uint8_t>();
  rounds_inputs = rounds_inputs && layout.is_quantized;
  const bool is_float = x.scalar_type() == at::kFloat;
  if (rows > MOST_EXACT_ROWS && !rounds_inputs) {
    const at::Tensor matrix = input.view({rows, layout.columns});
    // The library multiplies bfloat16 with sums in float32, so of such weights nothing is lost.
    if (is_float) {
      multiply_expanded(layout, data, matrix, bias_data, y.mutable_data_ptr<float>());
    } else if (layout.codes == Codes::BFLOAT16) {
      multiply_expanded(layout, data, matrix, bias_data, y.mutable_data_ptr<at::BFloat16>());
    } else {
      at::Tensor exact = at::empty({rows, layout.rows}, matrix.options().dtype(at::kFloat));
      multiply_expanded(layout, data, matrix.to(at::kFloat), bias_data, exact.mutable_data_ptr<float>());
      return exact.to(at::kBFloat16).view(shape);
    }
  } else if (is_float) {
    multiply_strips(layout, data, input.const_data_ptr<float>(), rows, bias_data, y.mutable_data_ptr<float>(),
                    rounds_inputs);
  } else {
    multiply_strips(layout, data, input.const_data_ptr<at::BFloat16>(), rows, bias_data,
                    y.mutable_data_ptr<at::BFloat16>(), rounds_inputs);
  }
  return y;
}

at::Tensor embedding(const at::Tensor& tokens, const at::Tensor& packed, int64_t dim, at::ScalarType dtype) {
  const Layout layout = read_layout(packed);
  TORCH_CHECK_VALUE(dim == layout.columns, "the packed embedding has rows of ", layout.columns, ", not of ", dim);
  const at::Tensor indices = tokens.contiguous();
  auto shape = tokens.sizes().vec();
  shape.push_back(dim);
  at::Tensor y = at::empty(shape, packed.options().dtype(at::kFloat));
  std::vector<float> strip(layout.columns * STRIP);
  for (int64_t i = 0; i < indices.numel(); ++i) {
    const int64_t token = indices.const_data_ptr<int64_t>()[i];
    TORCH_CHECK_INDEX(token >= 0 && token < layout.rows, "token ", token, " is not in the vocabulary of ", layout.rows);
    const uint8_t* data = packed.const_data_ptr<uint8_t>() + HEADER_BYTES + token / STRIP * layout.strip_bytes;
    expand_strip(layout, data, strip.data(), STRIP);
    float* row = y.mutable_data_ptr<float>() + i * dim;
    for (int64_t k = 0; k < dim; ++k) row[k] = strip[k * STRIP + token % STRIP];
  }
  return y.to(dtype);
}

}  // namespace gptfast
