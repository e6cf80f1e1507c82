// What a product needs of its inputs: in float or rounded, in the order in which the kernels read them.
#pragma once

#include <algorithm>

#include "product.h"
#include "scratch.h"

namespace gptfast {

// Up to 8 rows of inputs and the memory for what the kernels need of them.
template <class T>
struct Tile {
  const T* x;
  int64_t rows;   // that there are
  int64_t width;  // that the kernel computes, M in `Inputs`; what it makes of the others is never looked at
  Inputs inputs;

  Tile(Scratch& scratch, const Layout& layout, const T* x, int64_t rows)
      : x(x), rows(rows), width(rows == 7 ? 8 : rows) {
    const int64_t blocks = layout.blocks, columns = blocks * BLOCK;
    inputs.values = scratch.take<float>(columns * width);
    inputs.sums = scratch.take<float>(blocks * width);
    inputs.codes = scratch.take<int32_t>(columns / 4 * width);
    inputs.scales = scratch.take<float>(blocks * width);
    inputs.corrections = scratch.take<int32_t>(2 * blocks * width);
  }

  static int64_t count_bytes(const Layout& layout) {
    return MOST_ROWS * layout.blocks * (BLOCK * 5 + 16) + 5 * 64;
  }

  void prepare(const Layout& layout, int64_t block, bool rounds_inputs) {
    for (int64_t row = 0; row < rows; ++row) {
      Values values;
      load_block(layout, row, block, values);
      if (rounds_inputs) {
        round_block(layout, row, block, values);
      } else {
        keep_block(row, block, values);
      }
    }
  }

 private:
  static constexpr int PIECES = BLOCK / W;
  typedef vfloat Values[PIECES];

  // A block of a row in float, padded with zeros.
  void load_block(const Layout& layout, int64_t row, int64_t block, Values& values) const {
    const T* source = x + row * layout.columns + block * BLOCK;
    const int64_t count = layout.columns - block * BLOCK;
    T padded[BLOCK] = {};
    if (count < BLOCK) {
      std::copy_n(source, count, padded);
      source = padded;
    }
    for (int piece = 0; piece < PIECES; ++piece) {
      if constexpr (sizeof(T) == 4) {
        values[piece] = load<vfloat>(source + piece * W);
      } else {
        values[piece] = load_bfloat16((const uint16_t*)(source + piece * W));
      }
    }
  }

  void keep_block(int64_t row, int64_t block, const Values& values) {
    vfloat sum = {};
    for (const vfloat& piece : values) sum += piece;
    inputs.sums[block * width + row] = add_lanes(sum);
    float* target = inputs.values + block * BLOCK * width + row;
    for (int k = 0; k < BLOCK; ++k) target[k * width] = values[k / W][k % W];
  }

  // Round a block to -127 .. 127 by its largest magnitude, as llama.cpp's Q8_0 does. A NaN makes the scale NaN.
  void round_block(const Layout& layout, int64_t row, int64_t block, const Values& values) {
    vint most = {};
    for (const vfloat& piece : values) {
      // As integers, magnitudes are in the order of the floats, with infinity and NaN above all.
      const vint magnitude = (vint)piece & 0x7fffffff;
      most = magnitude > most ? magnitude : most;
    }
    const int32_t largest_bits = find_largest_lane(most);
    float largest;
    std::memcpy(&largest, &largest_bits, 4);
    const float inverse = largest > 0 ? 127.0f / largest : 0.0f;
    int8_t codes[BLOCK];
    vint code_sums[2] = {};
    for (int piece = 0; piece < PIECES; ++piece) {
      // Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
      const vint rounded = (vint)(values[piece] * inverse + 12582912.0f) - 0x4b400000;
      code_sums[piece * W >= BLOCK / 2] += rounded;
      typedef int8_t bytes __attribute__((vector_size(W)));
      store(codes + piece * W, __builtin_convertvector(rounded, bytes));
    }
    int32_t* target = inputs.codes + block * (BLOCK / 4) * width + row;
    for (int j = 0; j < BLOCK / 4; ++j) target[j * width] = load<int32_t>(codes + 4 * j);
    const int32_t first = add_lanes(code_sums[0]), second = add_lanes(code_sums[1]);
    const int32_t offset = layout.codes == Codes::INT8 ? DotProduct<8>::OFFSET : layout.offset;
    inputs.corrections[2 * block * width + row] = -offset * (layout.codes == Codes::INT6 ? first : first + second);
    inputs.corrections[(2 * block + 1) * width + row] = -offset * second;
    const float scale = largest / 127.0f;
    inputs.scales[block * width + row] = scale;
    inputs.sums[block * width + row] = scale * float(first + second);
  }
};

}  // namespace gptfast
