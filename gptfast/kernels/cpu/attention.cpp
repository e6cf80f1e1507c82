// Attention of new tokens over the filled part of a cache; what is computed stands in gptfast/kernels/ops.py.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <optional>
#include <vector>

#include "attention_tile.h"
#include "ops.h"
#include "team.h"

namespace gptfast {
namespace {

// One row of a tile whose chunks were computed apart.
template <class Q>
void add_chunks(const AttentionCall& call, const QueryTile& tile, int64_t row, const float* results, int64_t chunks,
                float* total) {
  clear_total(call, total);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    add_chunk(call, results + (chunk * call.rows_per_tile() + row) * call.row_floats(), total);
  }
  write_total(call, total, (Q*)call.y + tile.find_row(call, row));
}

template <class Q, class T>
void attend(const AttentionCall& call) {
  const int threads = at::get_num_threads();
  const Range visible = call.get_visible(0, call.tokens - 1);
  const int64_t first_chunk = visible.start / CHUNK, chunks = (visible.end - 1) / CHUNK + 1 - first_chunk;
  Team& team = Team::get();
  // Few tiles are shared out by chunk, so that no thread is left without work.
  if (chunks == 1 || call.tiles() >= 4 * threads) {
    team.run(call.tiles(), threads, [&](int64_t index) {
      attend_tile<Q, T>(call, QueryTile(call, index), TileMemory(call));
    });
    return;
  }
  const int64_t rows = call.rows_per_tile(), result_floats = rows * call.row_floats();
  thread_local std::vector<float> kept;  // for the next call
  if (int64_t(kept.size()) < call.tiles() * chunks * result_floats) kept.resize(call.tiles() * chunks * result_floats);
  float* results = kept.data();
  // Chunks that follow each other are best read by one thread, as memory is fetched ahead.
  const int64_t chunks_at_once = std::clamp<int64_t>(chunks * call.tiles() / (threads * 8), 1, chunks);
  const int64_t pieces = (chunks + chunks_at_once - 1) / chunks_at_once;
  team.run(call.tiles() * pieces, threads, [&](int64_t piece) {
    const QueryTile tile(call, piece / pieces);
    const TileMemory memory(call);
    read_queries<Q>(call, tile, memory.queries);
    const int64_t start = piece % pieces * chunks_at_once;
    for (int64_t chunk = start; chunk < std::min(start + chunks_at_once, chunks); ++chunk) {
      float* result = results + (piece / pieces * chunks + chunk) * result_floats;
      attend_chunk<T>(call, tile, first_chunk + chunk, memory, result);
    }
  });
  team.run(call.tiles(), threads, [&](int64_t index) {
    const QueryTile tile(call, index);
    const TileMemory memory(call);
    for (int64_t row = 0; row < tile.rows; ++row) {
      add_chunks<Q>(call, tile, row, results + index * chunks * result_floats, chunks, memory.total);
    }
  });
}

template <class Q>
void attend(const AttentionCall& call, at::ScalarType cache_type) {
  if (cache_type == at::kFloat) return attend<Q, float>(call);
  if (cache_type == at::kBFloat16) return attend<Q, uint16_t>(call);
  return attend<Q, int8_t>(call);
}

void check_cache(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  TORCH_CHECK_VALUE(q.dim() == 4 && q.is_contiguous() && q.numel() > 0 &&
                        (q.scalar_type() == at::kFloat || q.scalar_type() == at::kBFloat16),
                    "queries must be (B, S, H, D), contiguous and float32 or bfloat16, not ", q.sizes(), " ",
                    q.scalar_type());
  TORCH_CHECK_VALUE(k.dim() == 4 && k.sizes() == v.sizes() && k.scalar_type() == v.scalar_type() &&
                        k.is_contiguous() && v.is_contiguous(),
                    "keys and values must be (B, K, L, D), contiguous and alike, not ", k.sizes(), " ",
                    k.scalar_type(), " and ", v.sizes(), " ", v.scalar_type());
  TORCH_CHECK_VALUE(k.scalar_type() == at::kFloat || k.scalar_type() == at::kBFloat16 || k.scalar_type() == at::kChar,
                    "keys and values must be float32, bfloat16 or int8, not ", k.scalar_type());
  TORCH_CHECK_VALUE(k.size(0) >= q.size(0) && k.size(3) == q.size(3) && k.size(1) > 0 && q.size(2) % k.size(1) == 0,
                    "queries of shape ", q.sizes(), " do not fit a cache of ", k.sizes());
}

const float* check_scales(const at::Tensor& cache, const std::optional<at::Tensor>& scales) {
  const bool is_quantized = cache.scalar_type() == at::kChar;
  TORCH_CHECK_VALUE(is_quantized == scales.has_value(), "an int8 cache needs scales, and no other has any");
  if (!is_quantized) return nullptr;
  auto shape = cache.sizes().vec();
  shape.back() = 1;
  TORCH_CHECK_VALUE(scales->sizes() == shape && scales->scalar_type() == at::kFloat && scales->is_contiguous(),
                    "scales must be ", at::IntArrayRef(shape), ", contiguous and float32, not ", scales->sizes(), " ",
                    scales->scalar_type());
  return scales->const_data_ptr<float>();
}

const int64_t* check_positions(const at::Tensor& input_pos, int64_t tokens, int64_t slots) {
  TORCH_CHECK_VALUE(input_pos.dim() == 1 && input_pos.size(0) == tokens && input_pos.scalar_type() == at::kLong &&
                        input_pos.is_contiguous(),
                    "positions must be int64, one for each of ", tokens, " tokens, not ", input_pos.sizes(), " ",
                    input_pos.scalar_type());
  const int64_t* positions = input_pos.const_data_ptr<int64_t>();
  int64_t least = 0;
  for (int64_t i = 0; i < tokens; least = positions[i++]) {
    TORCH_CHECK_VALUE(positions[i] >= least && positions[i] < slots, "positions must ascend within a cache of ", slots,
                      " slots, but ", positions[i], " follows ", least);
  }
  return positions;
}

}  // namespace

at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const std::optional<at::Tensor>& k_scales, const std::optional<at::Tensor>& v_scales,
                     const at::Tensor& input_pos, std::optional<int64_t> sliding_window) {
  check_cache(q, k, v);
  TORCH_CHECK_VALUE(!sliding_window || *sliding_window > 0, "a sliding window has at least one slot");
  const int64_t batch = q.size(0), tokens = q.size(1), heads = q.size(2), dim = q.size(3), slots = k.size(2);
  at::Tensor y = at::empty({batch, tokens, heads * dim}, q.options());
  const AttentionCall call{q.const_data_ptr(),
                  k.const_data_ptr(),
                  v.const_data_ptr(),
                  check_scales(k, k_scales),
                  check_scales(v, v_scales),
                  check_positions(input_pos, tokens, slots),
                  y.mutable_data_ptr(),
                  batch,
                  tokens,
                  heads,
                  k.size(1),
                  slots,
                  dim,
                  std::min(sliding_window.value_or(slots), slots)};
  q.scalar_type() == at::kFloat ? attend<float>(call, k.scalar_type())
                                : attend<at::BFloat16>(call, k.scalar_type());
  return y;
}

}  // namespace gptfast
