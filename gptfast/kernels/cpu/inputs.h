// What a product needs of its inputs: in float or rounded, in the order in which the kernels read them.
#pragma once

#include <algorithm>
#include <vector>

#include "product.h"

namespace gptfast {

// Memory for one call, kept by its thread for the next one. Every piece starts a cache line.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) {
    thread_local std::vector<uint8_t> memory;
    if (int64_t(memory.size()) < bytes + 64) memory.resize(bytes + 64);
    next_ = (uint8_t*)((uintptr_t(memory.data()) + 63) / 64 * 64);
  }
  template <class T>
  T* take(int64_t count) {
    T* piece = (T*)next_;
    next_ += round_up(count * int64_t(sizeof(T)));
    return piece;
  }
  static int64_t round_up(int64_t bytes) { return (bytes + 63) / 64 * 64; }

 private:
  uint8_t* next_;
};

// Up to 8 rows of inputs and the memory for what the kernels need of them.
template <class T>
struct Tile {
  const T* x;
  int64_t rows;   // that there are
  int64_t width;  // that the kernel computes, M in `Inputs`; what it makes of the others is never looked at
  Inputs inputs;

  Tile(Scratch& scratch, const Header& header, const T* x, int64_t rows)
      : x(x), rows(rows), width(rows == 7 ? 8 : rows) {
    const int64_t columns = header.padded_columns(), blocks = header.blocks();
    inputs.values = scratch.take<float>(columns * width);
    inputs.sums = scratch.take<float>(blocks * width);
    inputs.codes = scratch.take<int32_t>(columns / 4 * width);
    inputs.scales = scratch.take<float>(blocks * width);
    inputs.corrections = scratch.take<int32_t>(2 * blocks * width);
  }

  static int64_t count_bytes(const Header& header) {
    return MOST_ROWS * (header.padded_columns() * 5 + header.blocks() * 16) + 5 * 64;
  }

  void prepare(const Header& header, int64_t block, bool rounds_inputs) {
    for (int64_t row = 0; row < rows; ++row) {
      float values[BLOCK];
      float sum = load_block(header, row, block, values);
      if (rounds_inputs) {
        sum = round_block(header, row, block, values);
      } else {
        for (int k = 0; k < BLOCK; ++k) inputs.values[(block * BLOCK + k) * width + row] = values[k];
      }
      inputs.sums[block * width + row] = sum;
    }
  }

 private:
  // A block of a row in float, padded with zeros; returns its sum.
  float load_block(const Header& header, int64_t row, int64_t block, float* values) const {
    const T* source = x + row * header.columns + block * BLOCK;
    const int64_t count = std::min<int64_t>(BLOCK, header.columns - block * BLOCK);
    float sum = 0;
    for (int k = 0; k < BLOCK; ++k) {
      values[k] = k < count ? float(source[k]) : 0.0f;
      sum += values[k];
    }
    return sum;
  }

  // Round a block to -127 .. 127 by its largest magnitude, as llama.cpp's Q8_0 does; returns the rounded values' sum.
  // A NaN makes the scale NaN.
  float round_block(const Header& header, int64_t row, int64_t block, const float* values) {
    vint most = {};
    for (int k = 0; k < BLOCK; k += W) {
      // As integers, magnitudes are in the order of the floats, with infinity and NaN above all.
      vint magnitude = load<vint>(values + k) & 0x7fffffff;
      most = magnitude > most ? magnitude : most;
    }
    int32_t largest_bits = 0;
    for (int lane = 0; lane < W; ++lane) largest_bits = std::max(largest_bits, most[lane]);
    float largest;
    std::memcpy(&largest, &largest_bits, 4);
    const float inverse = largest > 0 ? 127.0f / largest : 0.0f;
    int32_t codes[BLOCK], code_sums[2] = {};
    for (int k = 0; k < BLOCK; k += W) {
      // Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
      store(codes + k, (vint)(load<vfloat>(values + k) * inverse + 12582912.0f) - 0x4b400000);
    }
    for (int k = 0; k < BLOCK; ++k) code_sums[k >= BLOCK / 2] += codes[k];
    for (int j = 0; j < BLOCK / 4; ++j) {
      const int32_t* four = codes + 4 * j;
      inputs.codes[(block * 8 + j) * width + row] = (four[0] & 255) | (four[1] & 255) << 8 | (four[2] & 255) << 16 |
                                                    int32_t(uint32_t(four[3]) << 24);
    }
    const int32_t offset = header.codes == Codes::INT8 ? DotProduct<8>::OFFSET : get_offset(header);
    const int32_t sum = code_sums[0] + code_sums[1];
    inputs.corrections[2 * block * width + row] = -offset * (header.codes == Codes::INT6 ? code_sums[0] : sum);
    inputs.corrections[(2 * block + 1) * width + row] = -offset * code_sums[1];
    const float scale = largest / 127.0f;
    inputs.scales[block * width + row] = scale;
    return scale * float(sum);
  }
};

}  // namespace gptfast
