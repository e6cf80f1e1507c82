// Products of one strip with a few rows of inputs: the loops that decoding spends its time in.
//
// A row's sum is taken in the same order whatever the number of rows beside it: within a block, over the blocks of a
// group, over the groups.
#pragma once

#include "layout.h"
#include "simd.h"

namespace gptfast {

constexpr int PARTS = STRIP / W;  // vectors that make up a strip
constexpr int MOST_ROWS = 8;      // of inputs at once

// Rows of inputs, as the kernels want them; each array has the row stride that stands beside it.
struct Inputs {
  const float* values;   // (M, columns padded to 32)
  int64_t columns;
  const float* sums;     // (M, blocks): of the values of a block
  const int8_t* codes;   // (M, columns): of the rounded inputs
  const float* scales;   // (M, blocks)
  const int32_t* code_sums;  // (M, 2 * blocks): of the codes of half a block
  int64_t blocks;

  Inputs at_row(int64_t row) const {
    return {values + row * columns, columns, sums + row * blocks, codes + row * columns,
            scales + row * blocks, code_sums + 2 * row * blocks, blocks};
  }
};

// Four codes of W rows: inputs 4 * j to 4 * j + 3 of a block.
template <Codes CODES>
GPTFAST_INLINE vuint unpack(const uint8_t* block, int j, int part) {
  const int lane_offset = part * W * 4;
  if constexpr (CODES == Codes::INT8) return load<vuint>(block + 64 * j + lane_offset);
  vuint low = load<vuint>(block + 64 * (j & 3) + lane_offset);
  if (j >= 4) low >>= 4;
  low &= 0x0f0f0f0fu;
  if constexpr (CODES == Codes::INT6) {
    vuint high = load<vuint>(block + 256 + 64 * (j & 1) + lane_offset) >> (2 * (j >> 1));
    low |= (high & 0x03030303u) << 4;
  }
  return low;
}

template <Codes CODES>
constexpr int BITS = CODES == Codes::INT8 ? 8 : CODES == Codes::INT6 ? 6 : 4;

// What to subtract from a stored code of `unpack`.
template <Codes CODES>
GPTFAST_INLINE int32_t get_offset(const Header& header) {
  if constexpr (CODES == Codes::INT6) return 32;
  if constexpr (CODES == Codes::INT8) return 0;
  return header.has_mins ? 0 : 8;
}

// One of the four codes of each lane, as a float.
template <Codes CODES>
GPTFAST_INLINE vfloat extract(vuint codes, int byte) {
  if constexpr (CODES == Codes::INT8) return to_float((vint)(codes << (24 - 8 * byte)) >> 24);
  return to_float((vint)((codes >> (8 * byte)) & 63u));
}

// The scales or mins of W rows in a group.
struct ScaleReader {
  const uint8_t* scales;
  const uint8_t* super_scales;
  ScaleType type;
  bool is_signed;
  int64_t groups_per_super_block;

  static ScaleReader of_scales(const Header& header, const uint8_t* strip) {
    return {strip + header.scales_at(), strip + header.super_scales_at(), header.scale_type,
            header.codes == Codes::INT6, SUPER_BLOCK / header.group_size};
  }
  static ScaleReader of_mins(const Header& header, const uint8_t* strip) {
    return {strip + header.mins_at(), strip + header.super_mins_at(), header.scale_type, false,
            SUPER_BLOCK / header.group_size};
  }

  GPTFAST_INLINE vfloat read(int64_t group, int part) const {
    const int64_t index = group * STRIP + part * W;
    if (type == ScaleType::HALF) return load_half((const uint16_t*)scales + index);
    if (type == ScaleType::SINGLE) return load<vfloat>((const float*)scales + index);
    vfloat value = is_signed ? load_bytes<int8_t>(scales + index) : load_bytes<uint8_t>(scales + index);
    int64_t super_index = group / groups_per_super_block * STRIP + part * W;
    return value * load_half((const uint16_t*)super_scales + super_index);
  }
};

// Quantized weights with rounded inputs: integers within a block, floats beyond. `sums` is (M, 16).
template <Codes CODES, int M>
void multiply_rounded(const Header& header, const uint8_t* strip, const Inputs& inputs, float* sums) {
  constexpr int SECTIONS = CODES == Codes::INT6 ? 2 : 1;  // of a block, with a scale each
  constexpr int STEPS = 8 / SECTIONS;
  const int32_t offset = get_offset<CODES>(header);
  const int64_t groups = header.groups() / SECTIONS;
  const int64_t blocks_per_group = inputs.blocks / groups;
  const ScaleReader scales = ScaleReader::of_scales(header, strip), mins = ScaleReader::of_mins(header, strip);
  const uint8_t* block = strip;
  vfloat total[PARTS][M] = {};
  for (int64_t group = 0, b = 0; group < groups; ++group) {
    vfloat sum[SECTIONS][PARTS][M] = {};
    float input_sum[M] = {};
    for (int64_t end = b + blocks_per_group; b < end; ++b, block += get_block_bytes(CODES)) {
      __builtin_prefetch(block + 2048);
      for (int section = 0; section < SECTIONS; ++section) {
        for (int part = 0; part < PARTS; ++part) {
          DotProduct<BITS<CODES>> dot[M];
          for (int m = 0; m < M; ++m) {
            const int32_t* code_sums = inputs.code_sums + 2 * (m * inputs.blocks + b);
            dot[m].start(SECTIONS == 2 ? code_sums[section] : code_sums[0] + code_sums[1], offset);
          }
          for (int step = 0; step < STEPS; ++step) {
            const int j = section * STEPS + step;
            const vuint codes = unpack<CODES>(block, j, part);
            for (int m = 0; m < M; ++m) {
              dot[m].add(codes, load<int32_t>(inputs.codes + m * inputs.columns + b * BLOCK + 4 * j));
            }
          }
          for (int m = 0; m < M; ++m) {
            const float scale = inputs.scales[m * inputs.blocks + b];
            sum[section][part][m] = multiply_add(to_float(dot[m].finish()), broadcast(scale), sum[section][part][m]);
          }
        }
      }
      if (header.has_mins) {
        for (int m = 0; m < M; ++m) {
          const int32_t* code_sums = inputs.code_sums + 2 * (m * inputs.blocks + b);
          input_sum[m] += inputs.scales[m * inputs.blocks + b] * float(code_sums[0] + code_sums[1]);
        }
      }
    }
    for (int section = 0; section < SECTIONS; ++section) {
      for (int part = 0; part < PARTS; ++part) {
        const vfloat scale = scales.read(group * SECTIONS + section, part);
        for (int m = 0; m < M; ++m) total[part][m] = multiply_add(sum[section][part][m], scale, total[part][m]);
      }
    }
    if (header.has_mins) {
      for (int part = 0; part < PARTS; ++part) {
        const vfloat min = mins.read(group, part);
        for (int m = 0; m < M; ++m) total[part][m] = multiply_add(min, broadcast(input_sum[m]), total[part][m]);
      }
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int part = 0; part < PARTS; ++part) store(sums + m * STRIP + part * W, total[part][m]);
  }
}

// Quantized weights with inputs as they are. `sums` is (M, 16).
template <Codes CODES, int M>
void multiply_exact(const Header& header, const uint8_t* strip, const Inputs& inputs, float* sums) {
  constexpr int SECTIONS = CODES == Codes::INT6 ? 2 : 1;
  constexpr int STEPS = 8 / SECTIONS;
  const vfloat offset = broadcast(float(get_offset<CODES>(header)));
  const int64_t groups = header.groups() / SECTIONS;
  const int64_t blocks_per_group = inputs.blocks / groups;
  const ScaleReader scales = ScaleReader::of_scales(header, strip), mins = ScaleReader::of_mins(header, strip);
  const uint8_t* block = strip;
  vfloat total[PARTS][M] = {};
  for (int64_t group = 0, b = 0; group < groups; ++group) {
    vfloat sum[SECTIONS][PARTS][M] = {};
    float input_sum[M] = {};
    for (int64_t end = b + blocks_per_group; b < end; ++b, block += get_block_bytes(CODES)) {
      __builtin_prefetch(block + 2048);
      for (int section = 0; section < SECTIONS; ++section) {
        for (int part = 0; part < PARTS; ++part) {
          vfloat even[M] = {}, odd[M] = {};
          for (int step = 0; step < STEPS; ++step) {
            const int j = section * STEPS + step;
            const vuint codes = unpack<CODES>(block, j, part);
            const float* values = inputs.values + b * BLOCK + 4 * j;
            for (int byte = 0; byte < 4; ++byte) {
              vfloat weight = extract<CODES>(codes, byte);
              if constexpr (CODES != Codes::INT8) weight -= offset;
              vfloat* side = byte % 2 ? odd : even;
              for (int m = 0; m < M; ++m) {
                side[m] = multiply_add(weight, broadcast(values[m * inputs.columns + byte]), side[m]);
              }
            }
          }
          for (int m = 0; m < M; ++m) sum[section][part][m] += even[m] + odd[m];
        }
      }
      for (int m = 0; m < M; ++m) input_sum[m] += inputs.sums[m * inputs.blocks + b];
    }
    for (int section = 0; section < SECTIONS; ++section) {
      for (int part = 0; part < PARTS; ++part) {
        const vfloat scale = scales.read(group * SECTIONS + section, part);
        for (int m = 0; m < M; ++m) total[part][m] = multiply_add(sum[section][part][m], scale, total[part][m]);
      }
    }
    if (header.has_mins) {
      for (int part = 0; part < PARTS; ++part) {
        const vfloat min = mins.read(group, part);
        for (int m = 0; m < M; ++m) total[part][m] = multiply_add(min, broadcast(input_sum[m]), total[part][m]);
      }
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int part = 0; part < PARTS; ++part) store(sums + m * STRIP + part * W, total[part][m]);
  }
}

// W rows of one input, of weights that are floats.
template <Codes CODES>
GPTFAST_INLINE vfloat load_weights(const uint8_t* block, int k, int part) {
  const int64_t index = k * STRIP + part * W;
  if constexpr (CODES == Codes::FLOAT32) return load<vfloat>((const float*)block + index);
  if constexpr (CODES == Codes::FLOAT16) return load_half((const uint16_t*)block + index);
  return load_bfloat16((const uint16_t*)block + index);
}

// Weights that are floats, with inputs as they are. `sums` is (M, 16).
template <Codes CODES, int M>
void multiply_dense(const Header&, const uint8_t* strip, const Inputs& inputs, float* sums) {
  const uint8_t* block = strip;
  vfloat total[PARTS][M] = {};
  for (int64_t b = 0; b < inputs.blocks; ++b, block += get_block_bytes(CODES)) {
    for (int line = 0; line < get_block_bytes(CODES); line += 256) __builtin_prefetch(block + 4096 + line);
    for (int part = 0; part < PARTS; ++part) {
      vfloat even[M] = {}, odd[M] = {};
      for (int k = 0; k < BLOCK; ++k) {
        const vfloat weight = load_weights<CODES>(block, k, part);
        vfloat* side = k % 2 ? odd : even;
        for (int m = 0; m < M; ++m) {
          side[m] = multiply_add(weight, broadcast(inputs.values[m * inputs.columns + b * BLOCK + k]), side[m]);
        }
      }
      for (int m = 0; m < M; ++m) total[part][m] += even[m] + odd[m];
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int part = 0; part < PARTS; ++part) store(sums + m * STRIP + part * W, total[part][m]);
  }
}

}  // namespace gptfast
