// Attention of a few tokens over all slots or one chunk of them, by one thread.
//
// The slots are cut into chunks. Within a chunk weights are relative to the largest score there, and the chunks' sums
// are added up from the first to the last, each time relative to the largest score so far (Milakov and Gimelshein
// 2018). So a result depends neither on the tokens in a call nor on which threads computed it.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>

#include "attention.h"
#include "scratch.h"

namespace gptfast {

// Rows for which a thread reads a chunk once: enough to hide the transposing of its keys.
constexpr int64_t TILE_ROWS = 64;

// The arguments of one call; the shapes are those of gptfast/kernels/ops.py.
struct AttentionCall {
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
struct QueryTile {
  int64_t sample, kv_head, token, tokens, rows;

  QueryTile(const AttentionCall& call, int64_t index) {
    const int64_t head = index / call.tiles_per_head();
    sample = head / call.kv_heads;
    kv_head = head % call.kv_heads;
    token = index % call.tiles_per_head() * call.tokens_at_once();
    tokens = std::min(call.tokens_at_once(), call.tokens - token);
    rows = tokens * call.group();
  }
  // Where the row's head starts in q and y.
  int64_t find_row(const AttentionCall& call, int64_t row) const {
    const int64_t head = kv_head * call.group() + row % call.group();
    return ((sample * call.tokens + token + row / call.group()) * call.heads + head) * call.dim;
  }
  Range get_visible(const AttentionCall& call) const { return call.get_visible(token, token + tokens - 1); }
  Range get_visible(const AttentionCall& call, int64_t first_row, int64_t last_row) const {
    return call.get_visible(token + first_row / call.group(), token + last_row / call.group());
  }
};

// What a thread works with.
struct TileMemory {
  float* queries;
  uint32_t* keys;
  float *scores, *chunk, *total;

  explicit TileMemory(const AttentionCall& call) {
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
void read_queries(const AttentionCall& call, const QueryTile& tile, float* queries) {
  const float scale = float(M_LOG2E / std::sqrt(double(call.dim)));
  for (int64_t row = 0; row < tile.rows; ++row) {
    const Q* source = (const Q*)call.q + tile.find_row(call, row);
    for (int64_t d = 0; d < call.dim; ++d) queries[d] = float(source[d]) * scale;
    std::fill(queries + call.dim, queries + call.query_floats(), 0.0f);
    queries += call.query_floats();
  }
}

// The scales of a chunk's slots, ones if there are none; those beyond the cache are zeros.
inline void read_scales(const float* scales, int64_t count, float* target) {
  if (scales == nullptr) {
    std::fill_n(target, CHUNK, 1.0f);
  } else {
    std::fill(std::copy_n(scales, count, target), target + CHUNK, 0.0f);
  }
}

template <class T, int... M>
auto get_key_product(int64_t rows, std::integer_sequence<int, M...>) {
  constexpr std::array products{multiply_keys<T, M + 1>...};
  return products[rows - 1];
}

template <class T, int... M>
auto get_value_product(int64_t rows, std::integer_sequence<int, M...>) {
  constexpr std::array products{multiply_values<T, M + 1>...};
  return products[rows - 1];
}

using RowCounts = std::make_integer_sequence<int, ROWS_AT_ONCE>;

// The part of a range that lies within a chunk, counted from the chunk's first slot.
inline Range cut(Range range, int64_t chunk) {
  const int64_t first = chunk * CHUNK;
  return {std::clamp<int64_t>(range.start - first, 0, CHUNK), std::clamp<int64_t>(range.end - first, 0, CHUNK)};
}

// One chunk's sums for all rows of a tile.
template <class T>
void attend_chunk(const AttentionCall& call, const QueryTile& tile, int64_t chunk, const TileMemory& memory,
                  float* results) {
  const int64_t first_slot = chunk * CHUNK, held = std::min<int64_t>(call.slots - first_slot, CHUNK);
  const int64_t slot_index = (tile.sample * call.kv_heads + tile.kv_head) * call.slots + first_slot;
  const T* keys = (const T*)call.k + slot_index * call.dim;
  const T* values = (const T*)call.v + slot_index * call.dim;
  float key_scales[CHUNK], value_scales[CHUNK];
  read_scales(call.k_scales ? call.k_scales + slot_index : nullptr, held, key_scales);
  read_scales(call.v_scales ? call.v_scales + slot_index : nullptr, held, value_scales);

  const int64_t block_bytes = KEY_SLOTS * call.dim * int64_t(sizeof(T));
  const Range all = cut(tile.get_visible(call), chunk);
  // Memory is kept busy throughout: values are fetched while the keys are multiplied, the next chunk's keys while the
  // values are. 8 heads x 4,096 slots of bfloat16 took one core 0.30 ms so, and 0.41 with both fetched beside the keys
  // (Zen 5, 2026-12-01).
  const T* next_keys = tile.get_visible(call).end > first_slot + CHUNK ? keys + CHUNK * call.dim : keys;
  for (int64_t slot = all.start / KEY_SLOTS * KEY_SLOTS; slot < all.end; slot += KEY_SLOTS) {
    prefetch(values + slot * call.dim, block_bytes);
    transpose_keys(keys + slot * call.dim, held - slot, call.dim, memory.keys);
    for (int64_t row = 0; row < tile.rows; row += ROWS_AT_ONCE) {
      const int64_t rows = std::min<int64_t>(ROWS_AT_ONCE, tile.rows - row);
      const Range some = cut(tile.get_visible(call, row, row + rows - 1), chunk);
      if (slot >= some.end || slot + KEY_SLOTS <= some.start) continue;
      const auto product = get_key_product<T>(rows, RowCounts{});
      product(memory.queries + row * call.query_floats(), call.query_floats(), memory.keys, call.dim,
              key_scales + slot, memory.scores + row * CHUNK + slot);
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
    get_value_product<T>(rows, RowCounts{})(scores, values, next_keys, call.dim, some, sums, call.row_floats());
  }
}

// Add a chunk's sums of one row to those of the chunks before.
inline void add_chunk(const AttentionCall& call, const float* chunk, float* total) {
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

inline void clear_total(const AttentionCall& call, float* total) {
  const int64_t dim = call.padded_dim();
  std::fill_n(total, dim, 0.0f);
  total[dim] = LOWEST;
  total[dim + 1] = 0.0f;
}

template <class Q>
void write_total(const AttentionCall& call, const float* total, Q* y) {
  const float inverse = 1.0f / total[call.padded_dim() + 1];
  for (int64_t d = 0; d < call.dim; ++d) y[d] = Q(total[d] * inverse);
}

// All chunks of one tile in their order.
template <class Q, class T>
void attend_tile(const AttentionCall& call, const QueryTile& tile, const TileMemory& memory) {
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

}  // namespace gptfast
