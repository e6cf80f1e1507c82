// Products of one strip with a few rows of inputs: the loops that decoding spends its time in.
//
// A row's sum is taken in the same order whatever the number of rows beside it: within a block, over the blocks of a
// group, over the groups.
#pragma once

#include "layout.h"
#include "simd.h"

namespace gptfast {

// Loops over arrays of vectors have to be unrolled, or the arrays live in memory and not in registers.
#define GPTFAST_UNROLL _Pragma("GCC unroll 16")

constexpr int PARTS = STRIP / W;  // vectors that make up a strip
constexpr int MOST_ROWS = 8;      // of inputs at once

// Up to 8 rows of inputs, as the kernels want them: of every array the rows' elements lie side by side.
struct Inputs {
  float* values;         // (columns, M), columns padded to 32; not needed where inputs are rounded
  float* sums;           // (blocks, M): of the values, or of the rounded ones
  int32_t* codes;        // (columns / 4, M): the inputs rounded, four to an element
  float* scales;         // (blocks, M): of the codes
  int32_t* corrections;  // (2 * blocks, M): what `DotProduct` starts with in each section of a block
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

// Parts of a block with a scale each.
template <Codes CODES>
constexpr int SECTIONS = CODES == Codes::INT6 ? 2 : 1;

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

  static ScaleReader of_scales(const Layout& layout, const uint8_t* strip) {
    return {strip, strip + layout.super_scales_at, layout.scale_type, layout.codes == Codes::INT6,
            layout.groups_per_super_block};
  }
  static ScaleReader of_mins(const Layout& layout, const uint8_t* strip) {
    return {strip + layout.mins_at, strip + layout.super_mins_at, layout.scale_type, false,
            layout.groups_per_super_block};
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

// What a thread will most likely read next: the rest of its piece of the matrix, then the piece after those that the
// other threads have.
struct Reading {
  const uint8_t* piece_end;
  int64_t skipped;  // bytes from there to the next piece
};

// Have the memory send what this thread will read soon: of the next strip first the scales, which are all needed beside
// its first codes. The processor foresees none of this. 8 kB ahead took 27 us for a matrix of 1.1 MB where 2 kB took 40
// and nothing 76 (one core of a Zen 5, 2026-11-30).
GPTFAST_INLINE void fetch_ahead(const Layout& layout, const Reading& reading, const uint8_t* strip, int64_t block) {
  constexpr int64_t DISTANCE = 8192;
  const uint8_t* next = strip + layout.codes_at + block * layout.bytes_per_block + DISTANCE;
  if (next >= reading.piece_end) next += reading.skipped;
  prefetch(next, layout.bytes_per_block);
}

// The sums (M, 16) of a product. For many rows they stay in memory between groups: GCC 12 runs out of registers for
// what is used in every step of the inner loop if these are to be kept too (8 rows took 1.4 times as long).
template <int M>
class Totals {
 public:
  explicit Totals(float* sums) : sums_(sums) {
    GPTFAST_UNROLL
    for (int part = 0; part < PARTS; ++part) {
      GPTFAST_UNROLL
      for (int m = 0; m < M; ++m) set(part, m, vfloat{});
    }
  }

  GPTFAST_INLINE void add(int part, int m, vfloat a, vfloat b) { set(part, m, multiply_add(a, b, get(part, m))); }

  GPTFAST_INLINE void finish() const {
    if constexpr (!IN_REGISTERS) return;
    GPTFAST_UNROLL
    for (int part = 0; part < PARTS; ++part) {
      GPTFAST_UNROLL
      for (int m = 0; m < M; ++m) store(sums_ + m * STRIP + part * W, held_[part][IN_REGISTERS ? m : 0]);
    }
  }

 private:
  static constexpr bool IN_REGISTERS = M * PARTS <= 6;

  GPTFAST_INLINE vfloat get(int part, int m) const {
    if constexpr (IN_REGISTERS) return held_[part][m];
    return load<vfloat>(sums_ + m * STRIP + part * W);
  }
  GPTFAST_INLINE void set(int part, int m, vfloat value) {
    if constexpr (IN_REGISTERS) {
      held_[part][m] = value;
    } else {
      store(sums_ + m * STRIP + part * W, value);
    }
  }

  float* sums_;
  vfloat held_[PARTS][IN_REGISTERS ? M : 1];
};

// Add a group's sums, times its scales, and its inputs' sums, times its mins, to the totals.
template <Codes CODES, int M>
GPTFAST_INLINE void add_group(const Layout& layout, const ScaleReader& scales, const ScaleReader& mins, int64_t group,
                              const vfloat (&sum)[SECTIONS<CODES>][PARTS][M], const float (&input_sum)[M],
                              Totals<M>& totals) {
  GPTFAST_UNROLL
  for (int section = 0; section < SECTIONS<CODES>; ++section) {
    GPTFAST_UNROLL
    for (int part = 0; part < PARTS; ++part) {
      const vfloat scale = scales.read(group * SECTIONS<CODES> + section, part);
      GPTFAST_UNROLL
      for (int m = 0; m < M; ++m) totals.add(part, m, sum[section][part][m], scale);
    }
  }
  if (layout.has_mins) {
    GPTFAST_UNROLL
    for (int part = 0; part < PARTS; ++part) {
      const vfloat min = mins.read(group, part);
      GPTFAST_UNROLL
      for (int m = 0; m < M; ++m) totals.add(part, m, min, broadcast(input_sum[m]));
    }
  }
}

// Sums of a block, or a section of it, and M rows of rounded inputs: exact, as they are of integers.
template <Codes CODES, int M>
GPTFAST_INLINE void multiply_section(const Inputs& inputs, const uint8_t* block, int64_t b, int section, int part,
                                     vfloat (&sum)[M]) {
  constexpr int STEPS = 8 / SECTIONS<CODES>;
  DotProduct<BITS<CODES>> dot[M];
  GPTFAST_UNROLL
  for (int m = 0; m < M; ++m) dot[m].start(inputs.corrections[(2 * b + section) * M + m]);
  GPTFAST_UNROLL
  for (int step = 0; step < STEPS; ++step) {
    const int j = section * STEPS + step;
    const vuint codes = unpack<CODES>(block, j, part);
    GPTFAST_UNROLL
    for (int m = 0; m < M; ++m) dot[m].add(codes, inputs.codes[(b * 8 + j) * M + m]);
  }
  GPTFAST_UNROLL
  for (int m = 0; m < M; ++m) sum[m] = to_float(dot[m].finish());
}

// Quantized weights with rounded inputs, where no group is longer than a block. `sums` is (M, 16).
template <Codes CODES, int M>
void multiply_rounded_blocks(const Layout& layout, const uint8_t* strip, const Reading& reading, const Inputs& inputs,
                             float* sums) {
  const ScaleReader scales = ScaleReader::of_scales(layout, strip), mins = ScaleReader::of_mins(layout, strip);
  const uint8_t* block = strip + layout.codes_at;
  Totals<M> totals(sums);
  for (int64_t b = 0; b < layout.blocks; ++b, block += get_block_bytes(CODES)) {
    fetch_ahead(layout, reading, strip, b);
    GPTFAST_UNROLL
    for (int section = 0; section < SECTIONS<CODES>; ++section) {
      GPTFAST_UNROLL
      for (int part = 0; part < PARTS; ++part) {
        vfloat sum[M];
        multiply_section<CODES, M>(inputs, block, b, section, part, sum);
        const vfloat scale = scales.read(b * SECTIONS<CODES> + section, part);
        GPTFAST_UNROLL
        for (int m = 0; m < M; ++m) totals.add(part, m, sum[m] * inputs.scales[b * M + m], scale);
      }
    }
    if (layout.has_mins) {
      GPTFAST_UNROLL
      for (int part = 0; part < PARTS; ++part) {
        const vfloat min = mins.read(b, part);
        GPTFAST_UNROLL
        for (int m = 0; m < M; ++m) totals.add(part, m, min, broadcast(inputs.sums[b * M + m]));
      }
    }
  }
  totals.finish();
}

// The same with groups of several blocks.
template <Codes CODES, int M>
void multiply_rounded_groups(const Layout& layout, const uint8_t* strip, const Reading& reading, const Inputs& inputs,
                             float* sums) {
  const int64_t blocks_per_group = layout.blocks / layout.groups;
  const ScaleReader scales = ScaleReader::of_scales(layout, strip), mins = ScaleReader::of_mins(layout, strip);
  const uint8_t* block = strip + layout.codes_at;
  Totals<M> totals(sums);
  for (int64_t group = 0, b = 0; group < layout.groups; ++group) {
    vfloat sum[SECTIONS<CODES>][PARTS][M] = {};
    float input_sum[M] = {};
    for (const int64_t end = b + blocks_per_group; b < end; ++b, block += get_block_bytes(CODES)) {
      fetch_ahead(layout, reading, strip, b);
      GPTFAST_UNROLL
      for (int part = 0; part < PARTS; ++part) {
        vfloat block_sum[M];
        multiply_section<CODES, M>(inputs, block, b, 0, part, block_sum);
        GPTFAST_UNROLL
        for (int m = 0; m < M; ++m) {
          sum[0][part][m] = multiply_add(block_sum[m], broadcast(inputs.scales[b * M + m]), sum[0][part][m]);
        }
      }
      GPTFAST_UNROLL
      for (int m = 0; m < M; ++m) input_sum[m] += inputs.sums[b * M + m];
    }
    add_group<CODES, M>(layout, scales, mins, group, sum, input_sum, totals);
  }
  totals.finish();
}

// Quantized weights with inputs as they are. `sums` is (M, 16).
template <Codes CODES, int M>
void multiply_exact(const Layout& layout, const uint8_t* strip, const Reading& reading, const Inputs& inputs,
                    float* sums) {
  constexpr int STEPS = 8 / SECTIONS<CODES>;
  const vfloat offset = broadcast(float(layout.offset));
  const int64_t groups = layout.groups / SECTIONS<CODES>, blocks_per_group = layout.blocks / groups;
  const ScaleReader scales = ScaleReader::of_scales(layout, strip), mins = ScaleReader::of_mins(layout, strip);
  const uint8_t* block = strip + layout.codes_at;
  Totals<M> totals(sums);
  for (int64_t group = 0, b = 0; group < groups; ++group) {
    vfloat sum[SECTIONS<CODES>][PARTS][M] = {};
    float input_sum[M] = {};
    for (const int64_t end = b + blocks_per_group; b < end; ++b, block += get_block_bytes(CODES)) {
      fetch_ahead(layout, reading, strip, b);
      GPTFAST_UNROLL
      for (int section = 0; section < SECTIONS<CODES>; ++section) {
        GPTFAST_UNROLL
        for (int part = 0; part < PARTS; ++part) {
          vfloat even[M] = {}, odd[M] = {};
          GPTFAST_UNROLL
          for (int step = 0; step < STEPS; ++step) {
            const int j = section * STEPS + step;
            const vuint codes = unpack<CODES>(block, j, part);
            const float* values = inputs.values + (b * BLOCK + 4 * j) * M;
            GPTFAST_UNROLL
            for (int byte = 0; byte < 4; ++byte) {
              vfloat weight = extract<CODES>(codes, byte);
              if constexpr (CODES != Codes::INT8) weight -= offset;
              vfloat* side = byte % 2 ? odd : even;
              GPTFAST_UNROLL
              for (int m = 0; m < M; ++m) {
                side[m] = multiply_add(weight, broadcast(values[byte * M + m]), side[m]);
              }
            }
          }
          GPTFAST_UNROLL
          for (int m = 0; m < M; ++m) sum[section][part][m] += even[m] + odd[m];
        }
      }
      GPTFAST_UNROLL
      for (int m = 0; m < M; ++m) input_sum[m] += inputs.sums[b * M + m];
    }
    add_group<CODES, M>(layout, scales, mins, group, sum, input_sum, totals);
  }
  totals.finish();
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
void multiply_dense(const Layout& layout, const uint8_t* strip, const Reading& reading, const Inputs& inputs,
                    float* sums) {
  const uint8_t* block = strip + layout.codes_at;
  Totals<M> totals(sums);
  for (int64_t b = 0; b < layout.blocks; ++b, block += get_block_bytes(CODES)) {
    fetch_ahead(layout, reading, strip, b);
    GPTFAST_UNROLL
    for (int part = 0; part < PARTS; ++part) {
      vfloat even[M] = {}, odd[M] = {};
      GPTFAST_UNROLL
      for (int k = 0; k < BLOCK; k += 2) {
        const vfloat first = load_weights<CODES>(block, k, part), second = load_weights<CODES>(block, k + 1, part);
        const float* values = inputs.values + (b * BLOCK + k) * M;
        GPTFAST_UNROLL
        for (int m = 0; m < M; ++m) {
          even[m] = multiply_add(first, broadcast(values[m]), even[m]);
          odd[m] = multiply_add(second, broadcast(values[M + m]), odd[m]);
        }
      }
      GPTFAST_UNROLL
      for (int m = 0; m < M; ++m) totals.add(part, m, even[m] + odd[m], broadcast(1.0f));
    }
  }
  totals.finish();
}

}  // namespace gptfast
