// How a matrix lies in memory for the kernels.
//
// Rows are taken 16 at a time, a strip; a strip is one run of bytes that a thread reads from its start to its end:
//
//   scales   of every group a vector of 16
//   mins     the same, if there are any
//   super scales and super mins   of every 256 inputs a vector of 16, in llama.cpp's K-quants
//   codes    of every 32 inputs a block. Of integers a 32-bit lane belongs to a row and holds four consecutive inputs of
//            it; of floats every input is a vector of 16. So scales are vectors over rows and no sum is ever taken across
//            lanes.
//
// Rows are padded to 16 and inputs to 32 with zeros.
#pragma once

#include <cstdint>

namespace gptfast {

constexpr int STRIP = 16;        // rows
constexpr int BLOCK = 32;        // inputs
constexpr int SUPER_BLOCK = 256; // inputs
constexpr int64_t HEADER_BYTES = 64;
constexpr uint32_t MAGIC = 0x67707466;

enum class Codes : int32_t { FLOAT32, FLOAT16, BFLOAT16, INT4, INT6, INT8 };
enum class ScaleType : int32_t { NONE, HALF, SINGLE, SUPER };  // SUPER: bytes, times a half per 256 inputs

constexpr int64_t get_block_bytes(Codes codes) {
  switch (codes) {
    case Codes::FLOAT32: return BLOCK * STRIP * 4;
    case Codes::FLOAT16:
    case Codes::BFLOAT16: return BLOCK * STRIP * 2;
    case Codes::INT8: return BLOCK * STRIP;
    case Codes::INT6: return BLOCK * STRIP * 3 / 4;
    case Codes::INT4: return BLOCK * STRIP / 2;
  }
  return 0;
}

// The first bytes of a packed matrix, which say all about the rest.
struct Header {
  uint32_t magic;
  Codes codes;
  ScaleType scale_type;
  int32_t has_mins;
  int64_t rows, columns, group_size;
};

// What follows from a header.
struct Layout : Header {
  bool is_quantized;
  int64_t strips, blocks, groups, super_blocks;
  int64_t groups_per_super_block;  // 1 without super blocks
  int64_t mins_at, super_scales_at, super_mins_at, codes_at;  // bytes from the start of a strip, where its scales are
  int64_t strip_bytes;
  int64_t bytes_per_block;  // of a strip, its scales included
  int32_t offset;           // what to subtract from a stored code; those of 8 bits are signed

  explicit Layout(const Header& header) : Header(header) {
    is_quantized = scale_type != ScaleType::NONE;
    strips = (rows + STRIP - 1) / STRIP;
    blocks = (columns + BLOCK - 1) / BLOCK;
    // A group as long as a row covers its padding too.
    groups = is_quantized ? (columns + group_size - 1) / group_size : 0;
    super_blocks = scale_type == ScaleType::SUPER ? columns / SUPER_BLOCK : 0;
    groups_per_super_block = super_blocks == 0 ? 1 : groups / super_blocks;
    const int64_t scale_bytes = scale_type == ScaleType::SINGLE ? 4 : scale_type == ScaleType::HALF ? 2 : 1;
    mins_at = groups * STRIP * scale_bytes;
    super_scales_at = mins_at + (has_mins ? groups * STRIP * scale_bytes : 0);
    super_mins_at = super_scales_at + super_blocks * STRIP * 2;
    codes_at = (super_mins_at + (has_mins ? super_blocks * STRIP * 2 : 0) + 63) / 64 * 64;
    strip_bytes = codes_at + blocks * get_block_bytes(codes);
    bytes_per_block = strip_bytes / blocks;
    offset = codes == Codes::INT6 ? 32 : codes == Codes::INT4 && !has_mins ? 8 : 0;
  }

  int64_t total_bytes() const { return HEADER_BYTES + strips * strip_bytes; }
};

}  // namespace gptfast
