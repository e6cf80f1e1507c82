// Attention of new tokens over the filled part of a cache; what is computed stands in gptfast/kernels/ops.py.
//
// The slots are cut into chunks. Within a chunk weights are relative to the largest score there, and the chunks' sums
// are added up from the first to the last, each time relative to the largest score so far (Milakov and Gimelshein
// 2018). So a result depends neither on the tokens in a call nor on which threads computed it.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <array>
#include <cmath>
#include <optional>
#include <vector>

#include "attention.h"
#include "ops.h"
#include "scratch.h"
#include "team.h"

namespace gptfast {
namespace {

// Rows for which a thread reads a chunk once: enough to hide the transposing of its keys.
constexpr int64_t TILE_ROWS = 64;

// The arguments of one call; the shapes are those of gptfast/kernels/ops.py.
struct Call {
  const void *q, *k, *v;
  const float *k_scales, *v_scales;
  const int64_t* positions;
  void* y;
  int64_t batch, tokens, heads, kv_heads, slots, dim, window;

  int64_t group() const { return heads / kv_heads; }
  int64_t tokens_at_once() const { return std::clamp<int64_t>(TILE_ROWS / group(), 1, tokens); }
  int64_t tiles_per_head() const { return (tokens + tokens_at_once() - 1) / tokens_at_once(); }
  int64_t tiles() const { return batch * kv_heads * tiles_per_head(); }
  int64_t rows_per_tile() const { return tokens_at_once() * group(); }
  int64_t padded_dim() const { return (dim + W - 1) / W * W; }
  // A query, and zeros up to a whole piece of keys.
  int64_t query_floats() const { return (dim + 15) / 16 * 16; }
  // Sums of a row's values, then its largest score and the sum of its weights; whole cache lines.
  int64_t row_floats() const { return (padded_dim() + 2 + 15) / 16 * 16; }

  // The slots that tokens from `first` to `last` see between them.
  Range get_visible(int64_t first, int64_t last) const {
    return {std::max<int64_t>(positions[first] - window + 1, 0), positions[last] + 1};
  }
};

// Query heads that share a key/value head, of a few tokens that follow each other.
struct Tile {
  int64_t sample, kv_head, token, tokens, rows;

  Tile(const Call& call, int64_t index) {
    const int64_t head = index / call.tiles_per_head();
    sample = head / call.kv_heads;
    kv_head = head % call.kv_heads;
    token = index % call.tiles_per_head() * call.tokens_at_once();
    tokens = std::min(call.tokens_at_once(), call.tokens - token);
    rows = tokens * call.group();
  }
  // Where the row's head starts in q and y.
  int64_t find_row(const Call& call, int64_t row) const {
    const int64_t head = kv_head * call.group() + row % call.group();
    return ((sample * call.tokens + token + row / call.group()) * call.heads + head) * call.dim;
  }
  Range get_visible(const Call& call) const { return call.get_visible(token, token + tokens - 1); }
  Range get_visible(const Call& call, int64_t first_row, int64_t last_row) const {
    return call.get_visible(token + first_row / call.group(), token + last_row / call.group());
  }
};

// What a thread works with.
struct Memory {
  float* queries;
  uint32_t* keys;
  float *scores, *chunk, *total;

  explicit Memory(const Call& call) {
    const int64_t rows = call.rows_per_tile(), query_floats = rows * call.query_floats();
    const int64_t key_lanes = call.query_floats() * KEY_SLOTS, row_floats = rows * call.row_floats();
    Scratch scratch((query_floats + key_lanes + rows * CHUNK + 2 * row_floats) * 4);  // all of them whole cache lines
    queries = scratch.take<float>(query_floats);
    keys = scratch.take<uint32_t>(key_lanes);
    scores = scratch.take<float>(rows * CHUNK);
    chunk = scratch.take<float>(row_floats);
    total = scratch.take<float>(row_floats);
  }
};

// Queries in float32, times what makes their products with keys logarithms to base 2 of the weights.
template <class Q>
void read_queries(const Call& call, const Tile& tile, float* queries) {
  const float scale = float(M_LOG2E / std::sqrt(double(call.dim)));
  for (int64_t row = 0; row < tile.rows; ++row) {
    const Q* source = (const Q*)call.q + tile.find_row(call, row);
    for (int64_t d = 0; d < call.dim; ++d) queries[d] = float(source[d]) * scale;
    std::fill(queries + call.dim, queries + call.query_floats(), 0.0f);
    queries += call.query_floats();
  }
}

// The scales of a chunk's slots, ones if there are none; those beyond the cache are zeros.
void read_scales(const float* scales, int64_t count, float* target) {
  if (scales == nullptr) {
    std::fill_n(target, CHUNK, 1.0f);
  } else {
    std::fill(std::copy_n(scales, count, target), target + CHUNK, 0.0f);
  }
}

template <class T, int... M>
auto get_key_product(int64_t rows, std::integer_sequence<int, M...>) {
  static constexpr std::array products{multiply_keys<T, M + 1>...};
  return products[rows - 1];
}

template <class T, int... M>
auto get_value_product(int64_t rows, std::integer_sequence<int, M...>) {
  static constexpr std::array products{multiply_values<T, M + 1>...};
  return products[rows - 1];
}

using RowCounts = std::make_integer_sequence<int, ROWS_AT_ONCE>;

// The part of a range that lies within a chunk, counted from the chunk's first slot.
Range cut(Range range, int64_t chunk) {
  const int64_t first = chunk * CHUNK;
  return {std::clamp<int64_t>(range.start - first, 0, CHUNK), std::clamp<int64_t>(range.end - first, 0, CHUNK)};
}

GPTFAST_INLINE void prefetch(const void* source, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch((const uint8_t*)source + line);
}

// One chunk's sums for all rows of a tile.
template <class T>
void attend_chunk(const Call& call, const Tile& tile, int64_t chunk, const Memory& memory, float* results) {
  const int64_t first_slot = chunk * CHUNK, held = std::min<int64_t>(call.slots - first_slot, CHUNK);
  const int64_t slot_index = (tile.sample * call.kv_heads + tile.kv_head) * call.slots + first_slot;
  const T* keys = (const T*)call.k + slot_index * call.dim;
  const T* values = (const T*)call.v + slot_index * call.dim;
  float key_scales[CHUNK], value_scales[CHUNK];
  read_scales(call.k_scales ? call.k_scales + slot_index : nullptr, held, key_scales);
  read_scales(call.v_scales ? call.v_scales + slot_index : nullptr, held, value_scales);

  const int64_t block_bytes = KEY_SLOTS * call.dim * int64_t(sizeof(T));
  const Range all = cut(tile.get_visible(call), chunk);
  for (int64_t slot = all.start / KEY_SLOTS * KEY_SLOTS; slot < all.end; slot += KEY_SLOTS) {
    prefetch(keys + (slot + KEY_SLOTS) * call.dim, block_bytes);
    prefetch(values + slot * call.dim, block_bytes);
    transpose_keys(keys + slot * call.dim, held - slot, call.dim, memory.keys);
    for (int64_t row = 0; row < tile.rows; row += ROWS_AT_ONCE) {
      const int64_t rows = std::min<int64_t>(ROWS_AT_ONCE, tile.rows - row);
      const Range some = cut(tile.get_visible(call, row, row + rows - 1), chunk);
      if (slot >= some.end || slot + KEY_SLOTS <= some.start) continue;
      get_key_product<T>(rows, RowCounts{})(memory.queries + row * call.query_floats(), call.query_floats(), memory.keys,
                                            call.dim, key_scales + slot, memory.scores + row * CHUNK + slot);
    }
  }
  for (int64_t row = 0; row < tile.rows; row += ROWS_AT_ONCE) {
    const int64_t rows = std::min<int64_t>(ROWS_AT_ONCE, tile.rows - row);
    const Range some = cut(tile.get_visible(call, row, row + rows - 1), chunk);
    float* scores = memory.scores + row * CHUNK;
    float* sums = results + row * call.row_floats();
    for (int64_t i = 0; i < rows; ++i) {
      const Range visible = cut(tile.get_visible(call, row + i, row + i), chunk);
      float* summary = sums + i * call.row_floats() + call.padded_dim();
      compute_weights(scores + i * CHUNK, {some.start / W * W, some.end}, visible, value_scales, summary, summary + 1);
    }
    get_value_product<T>(rows, RowCounts{})(scores, values, call.dim, some, sums, call.row_floats());
  }
}

// Add a chunk's sums of one row to those of the chunks before.
void add_chunk(const Call& call, const float* chunk, float* total) {
  const int64_t dim = call.padded_dim();
  if (chunk[dim + 1] == 0.0f) return;  // the row sees no slot of it
  const float largest = std::max(chunk[dim], total[dim]);
  const float old_share = compute_exp2(total[dim] - largest), new_share = compute_exp2(chunk[dim] - largest);
  for (int64_t d = 0; d < dim; d += W) {
    const vfloat added = load<vfloat>(chunk + d) * new_share;
    store(total + d, multiply_add(load<vfloat>(total + d), broadcast(old_share), added));
  }
  total[dim] = largest;
  total[dim + 1] = total[dim + 1] * old_share + chunk[dim + 1] * new_share;
}

void clear_total(const Call& call, float* total) {
  const int64_t dim = call.padded_dim();
  std::fill_n(total, dim, 0.0f);
  total[dim] = LOWEST;
  total[dim + 1] = 0.0f;
}

template <class Q>
void write_total(const Call& call, const float* total, Q* y) {
  const float inverse = 1.0f / total[call.padded_dim() + 1];
  for (int64_t d = 0; d < call.dim; ++d) y[d] = Q(total[d] * inverse);
}

// All chunks of one tile in their order.
template <class Q, class T>
void attend_tile(const Call& call, const Tile& tile, const Memory& memory) {
  const int64_t row_floats = call.row_floats();
  read_queries<Q>(call, tile, memory.queries);
  for (int64_t row = 0; row < tile.rows; ++row) clear_total(call, memory.total + row * row_floats);
  const Range visible = tile.get_visible(call);
  for (int64_t chunk = visible.start / CHUNK; chunk * CHUNK < visible.end; ++chunk) {
    attend_chunk<T>(call, tile, chunk, memory, memory.chunk);
    for (int64_t row = 0; row < tile.rows; ++row) {
      add_chunk(call, memory.chunk + row * row_floats, memory.total + row * row_floats);
    }
  }
  for (int64_t row = 0; row < tile.rows; ++row) {
    write_total(call, memory.total + row * row_floats, (Q*)call.y + tile.find_row(call, row));
  }
}

// One row of a tile whose chunks were computed apart.
template <class Q>
void add_chunks(const Call& call, const Tile& tile, int64_t row, const float* results, int64_t chunks, float* total) {
  clear_total(call, total);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    add_chunk(call, results + (chunk * call.rows_per_tile() + row) * call.row_floats(), total);
  }
  write_total(call, total, (Q*)call.y + tile.find_row(call, row));
}

template <class Q, class T>
void attend(const Call& call) {
  const int threads = at::get_num_threads();
  const Range visible = call.get_visible(0, call.tokens - 1);
  const int64_t first_chunk = visible.start / CHUNK, chunks = (visible.end - 1) / CHUNK + 1 - first_chunk;
  Team& team = Team::get();
  // Few tiles are shared out by chunk, so that no thread is left without work.
  if (chunks == 1 || call.tiles() >= 4 * threads) {
    team.run(call.tiles(), threads, [&](int64_t tile) { attend_tile<Q, T>(call, Tile(call, tile), Memory(call)); });
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
    const Tile tile(call, piece / pieces);
    const Memory memory(call);
    read_queries<Q>(call, tile, memory.queries);
    const int64_t start = piece % pieces * chunks_at_once;
    for (int64_t chunk = start; chunk < std::min(start + chunks_at_once, chunks); ++chunk) {
      float* result = results + (piece / pieces * chunks + chunk) * result_floats;
      attend_chunk<T>(call, tile, first_chunk + chunk, memory, result);
    }
  });
  team.run(call.tiles(), threads, [&](int64_t index) {
    const Tile tile(call, index);
    const Memory memory(call);
    for (int64_t row = 0; row < tile.rows; ++row) {
      add_chunks<Q>(call, tile, row, results + index * chunks * result_floats, chunks, memory.total);
    }
  });
}

template <class Q>
void attend(const Call& call, at::ScalarType cache_type) {
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
  const Call call{q.const_data_ptr(),
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
