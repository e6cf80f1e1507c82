// Scores, weights and weighted sums of a few queries over one chunk of slots: the loops of attention.
//
// A row is one query head of one token. What is computed for a row does not depend on the rows beside it: every sum is
// taken in the same order, and a slot that the row does not see adds a zero.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>
#include <utility>

#include "simd.h"

namespace gptfast {

constexpr int CHUNK = 128;         // slots; chunks start at multiples of it
constexpr int KEY_SLOTS = 2 * W;  // whose keys are transposed at once
// Rows that share what is loaded, as many as the registers hold the sums of.
constexpr int ROWS_AT_ONCE = REGISTERS == 32 ? 8 : 6;
constexpr float LOWEST = std::numeric_limits<float>::lowest();

// The elements of a cache: float, the bits of a bfloat16, or a code.
template <class T>
constexpr int PER_LANE = 4 / sizeof(T);

GPTFAST_INLINE vfloat load_values(const float* source) { return load<vfloat>(source); }
GPTFAST_INLINE vfloat load_values(const uint16_t* source) { return load_bfloat16(source); }
GPTFAST_INLINE vfloat load_values(const int8_t* source) { return load_bytes<int8_t>(source); }

// One of the elements that every lane holds, in the order of memory.
template <class T>
GPTFAST_INLINE vfloat get_element(vuint lanes, int index) {
  if constexpr (std::is_same_v<T, float>) return (vfloat)lanes;
  if constexpr (std::is_same_v<T, uint16_t>) return (vfloat)(index == 0 ? lanes << 16 : lanes & 0xffff0000u);
  return to_float((vint)(lanes << (24 - 8 * index)) >> 24);
}

constexpr int find_interleaved(int lane, int size, bool is_second) {
  const int place = lane % 4, offset = place / (2 * size) * size + place % size;
  return lane / 4 * 4 + (is_second ? 2 : 0) + offset + (place / size % 2 ? W : 0);
}

// Of every four lanes, the first or the second half of a and of b, in turn SIZE lanes from a and from b.
template <int SIZE, bool IS_SECOND, int... LANE>
GPTFAST_INLINE vuint interleave(vuint a, vuint b, std::integer_sequence<int, LANE...>) {
  return shuffle(a, b, std::integer_sequence<int, find_interleaved(LANE, SIZE, IS_SECOND)...>{});
}

template <int SIZE>
GPTFAST_INLINE void interleave(vuint& a, vuint& b) {
  constexpr auto LANES = std::make_integer_sequence<int, W>{};
  const vuint first = interleave<SIZE, false>(a, b, LANES), second = interleave<SIZE, true>(a, b, LANES);
  a = first;
  b = second;
}

// The transpose of W rows of four lanes, which lie `stride` bytes apart.
GPTFAST_INLINE void load_transposed(const void* source, int64_t stride, vuint (&columns)[4]) {
  vuint a = load_pieces(source, 4 * stride), b = load_pieces((const uint8_t*)source + stride, 4 * stride);
  vuint c = load_pieces((const uint8_t*)source + 2 * stride, 4 * stride);
  vuint d = load_pieces((const uint8_t*)source + 3 * stride, 4 * stride);
  interleave<1>(a, b);
  interleave<1>(c, d);
  interleave<2>(a, c);
  interleave<2>(b, d);
  columns[0] = a;
  columns[1] = c;
  columns[2] = b;
  columns[3] = d;
}

// 2^x for x <= 0, within 1 ulp; below 2^-126 it is 0.
//
// x is split into the nearest integer, which becomes the exponent, and a rest in -0.5 .. 0.5, for which 2^x is a
// polynomial that was fitted for the least relative error (2e-9), with the constant term kept at 1.
GPTFAST_INLINE vfloat compute_exp2(vfloat x) {
  // Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
  const vfloat shifted = x + 12582912.0f;
  const vfloat rest = x - (shifted - 12582912.0f);
  vfloat power = multiply_add(rest, broadcast(0x1.41fbbcp-13f), broadcast(0x1.5f3e54p-10f));
  power = multiply_add(power, rest, broadcast(0x1.3b2d4cp-7f));
  power = multiply_add(power, rest, broadcast(0x1.c6aee8p-5f));
  power = multiply_add(power, rest, broadcast(0x1.ebfbdcp-3f));
  power = multiply_add(power, rest, broadcast(0x1.62e430p-1f));
  power = multiply_add(power, rest, broadcast(1.0f));
  const vfloat scale = (vfloat)(((vint)shifted - 0x4b400000 + 127) << 23);
  return x < -126.0f ? broadcast(0.0f) : power * scale;
}

GPTFAST_INLINE float compute_exp2(float x) { return compute_exp2(broadcast(x))[0]; }

// Keys of `slots` slots (slots, dim), transposed: target (lanes that make up dim, KEY_SLOTS). A lane holds elements
// that follow each other; slots and elements that are not there are zeros.
template <class T>
void transpose_keys(const T* keys, int64_t slots, int64_t dim, uint32_t* target) {
  constexpr int COLUMNS = 4 * PER_LANE<T>;
  for (int64_t first = 0; first < KEY_SLOTS; first += W) {
    const int64_t rows = std::clamp<int64_t>(slots - first, 0, W);
    for (int64_t column = 0; column < dim; column += COLUMNS) {
      const T* source = keys + first * dim + column;
      const int64_t columns = std::min<int64_t>(dim - column, COLUMNS);
      vuint lanes[4];
      if (rows == W && columns == COLUMNS) {
        load_transposed(source, dim * sizeof(T), lanes);
      } else {
        T padded[W][COLUMNS] = {};
        for (int64_t row = 0; row < rows; ++row) std::memcpy(padded[row], source + row * dim, columns * sizeof(T));
        load_transposed(padded, sizeof(padded[0]), lanes);
      }
      uint32_t* place = target + column / PER_LANE<T> * KEY_SLOTS + first;
      for (int lane = 0; lane < 4; ++lane) store(place + lane * KEY_SLOTS, lanes[lane]);
    }
  }
}

// Scores of M queries with KEY_SLOTS transposed keys, times the keys' scales. Queries have rows of `stride`, in which
// zeros follow the last element; scores have rows of CHUNK.
template <class T, int M>
void multiply_keys(const float* queries, int64_t stride, const uint32_t* keys, int64_t dim, const float* scales,
                   float* scores) {
  vfloat low[M] = {}, high[M] = {};
  for (int64_t d = 0; d < dim; d += PER_LANE<T>, keys += KEY_SLOTS) {
    const vuint low_lanes = load<vuint>(keys), high_lanes = load<vuint>(keys + W);
    for (int index = 0; index < PER_LANE<T>; ++index) {
      const vfloat low_keys = get_element<T>(low_lanes, index), high_keys = get_element<T>(high_lanes, index);
      for (int m = 0; m < M; ++m) {
        const vfloat query = broadcast(queries[m * stride + d + index]);
        low[m] = multiply_add(low_keys, query, low[m]);
        high[m] = multiply_add(high_keys, query, high[m]);
      }
    }
  }
  const vfloat low_scales = load<vfloat>(scales), high_scales = load<vfloat>(scales + W);
  for (int m = 0; m < M; ++m) {
    store(scores + m * CHUNK, low[m] * low_scales);
    store(scores + m * CHUNK + W, high[m] * high_scales);
  }
}

// Slots of a chunk.
struct Range {
  int64_t start, end;
};

// Turn a row's scores, which are logarithms to base 2, into weights relative to the largest, in place: for the slots
// `computed`, which start at a multiple of W, zeros where they are not `visible`, and times the values' scales.
GPTFAST_INLINE void compute_weights(float* scores, Range computed, Range visible, const float* scales, float* largest,
                                    float* sum) {
  vint lane;
  for (int i = 0; i < W; ++i) lane[i] = i;
  vfloat most = broadcast(LOWEST);
  for (int64_t slot = computed.start; slot < computed.end; slot += W) {
    const vint slots = lane + int32_t(slot);
    const vint is_visible = (slots >= int32_t(visible.start)) & (slots < int32_t(visible.end));
    vfloat score = load<vfloat>(scores + slot);
    score = is_visible ? score : broadcast(-std::numeric_limits<float>::infinity());
    most = score > most ? score : most;
    store(scores + slot, score);
  }
  const float reference = find_largest_lane(most);
  vfloat total = {};
  for (int64_t slot = computed.start; slot < computed.end; slot += W) {
    const vfloat weight = compute_exp2(load<vfloat>(scores + slot) - reference);
    total += weight;
    store(scores + slot, weight * load<vfloat>(scales + slot));
  }
  *largest = reference;
  *sum = add_lanes(total);
}

// Sums over slots of weights times values, of M rows and PARTS vectors of elements. What lies `ahead`, in the same
// shape as the values, is fetched meanwhile.
template <class T, int M, int PARTS>
GPTFAST_INLINE void add_values(const float* weights, const T* values, const T* ahead, int64_t stride, Range slots,
                               float* sums, int64_t sum_stride) {
  vfloat sum[M][PARTS] = {};
  for (int64_t slot = slots.start; slot < slots.end; ++slot) {
    prefetch(ahead + slot * stride, PARTS * W * sizeof(T));
    vfloat value[PARTS];
    for (int part = 0; part < PARTS; ++part) value[part] = load_values(values + slot * stride + part * W);
    for (int m = 0; m < M; ++m) {
      const vfloat weight = broadcast(weights[m * CHUNK + slot]);
      for (int part = 0; part < PARTS; ++part) sum[m][part] = multiply_add(value[part], weight, sum[m][part]);
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int part = 0; part < PARTS; ++part) store(sums + m * sum_stride + part * W, sum[m][part]);
  }
}

// The same for all elements: values (CHUNK, dim), sums (M, dim rounded up to W) with rows of `sum_stride`.
template <class T, int M>
void multiply_values(const float* weights, const T* values, const T* ahead, int64_t dim, Range slots, float* sums,
                     int64_t sum_stride) {
  constexpr int PARTS = M <= ROWS_AT_ONCE / 2 ? 4 : 2;
  int64_t d = 0;
  for (; d + PARTS * W <= dim; d += PARTS * W) {
    add_values<T, M, PARTS>(weights, values + d, ahead + d, dim, slots, sums + d, sum_stride);
  }
  for (; d + W <= dim; d += W) add_values<T, M, 1>(weights, values + d, ahead + d, dim, slots, sums + d, sum_stride);
  if (d == dim) return;
  T padded[CHUNK * W] = {};
  for (int64_t slot = slots.start; slot < slots.end; ++slot) {
    std::memcpy(padded + slot * W, values + slot * dim + d, (dim - d) * sizeof(T));
  }
  add_values<T, M, 1>(weights, padded, padded, W, slots, sums + d, sum_stride);
}

}  // namespace gptfast
