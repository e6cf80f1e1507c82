// Vectors of the machine's width: what the kernels need of them, on AVX-512, AVX2 and anything else.
//
// Everything but what stands in this file is written with the compiler's own vector arithmetic, so a new
// instruction set needs a section here and nothing elsewhere.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace gptfast {

// AVX-512 without VNNI is of no use here: its processors are as fast with AVX2.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VNNI__)
#define GPTFAST_AVX512 1
constexpr int W = 16, REGISTERS = 32;
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define GPTFAST_AVX2 1
constexpr int W = 8, REGISTERS = 16;
#else
constexpr int W = 4, REGISTERS = 16;
#endif

// W lanes of 32 bits, as floats, integers and four bytes each.
typedef float vfloat __attribute__((vector_size(4 * W)));
typedef int32_t vint __attribute__((vector_size(4 * W)));
typedef uint32_t vuint __attribute__((vector_size(4 * W)));

#define GPTFAST_INLINE inline __attribute__((always_inline))

GPTFAST_INLINE void prefetch(const void* source, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch((const uint8_t*)source + line);
}

template <class V>
GPTFAST_INLINE V load(const void* source) {
  V vector;
  std::memcpy(&vector, source, sizeof(V));
  return vector;
}

template <class V>
GPTFAST_INLINE void store(void* target, V vector) {
  std::memcpy(target, &vector, sizeof(V));
}

GPTFAST_INLINE vfloat broadcast(float value) {
  return value - vfloat{};
}

GPTFAST_INLINE vint broadcast(int32_t value) {
  return value - vint{};
}

GPTFAST_INLINE vfloat to_float(vint value) {
  return __builtin_convertvector(value, vfloat);
}

// a * b + c, rounded once where the machine can.
GPTFAST_INLINE vfloat multiply_add(vfloat a, vfloat b, vfloat c) {
#if defined(GPTFAST_AVX512)
  return (vfloat)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(GPTFAST_AVX2)
  return (vfloat)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// Lane i of the result is lane LANES[i] of a followed by b.
template <class V, int... LANES>
GPTFAST_INLINE V shuffle(V a, V b, std::integer_sequence<int, LANES...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, LANES...);
#else
  return __builtin_shuffle(a, b, vint{LANES...});
#endif
}

template <int DISTANCE, class V, int... LANE>
GPTFAST_INLINE V swap_lanes(V a, std::integer_sequence<int, LANE...>) {
  return shuffle(a, a, std::integer_sequence<int, (LANE ^ DISTANCE)...>{});
}

// The sum of all lanes, a float or an integer.
template <int DISTANCE = W / 2, class V>
GPTFAST_INLINE auto add_lanes(V a) {
  a += swap_lanes<DISTANCE>(a, std::make_integer_sequence<int, W>{});
  if constexpr (DISTANCE > 1) return add_lanes<DISTANCE / 2>(a);
  else return a[0];
}

template <int DISTANCE = W / 2, class V>
GPTFAST_INLINE auto find_largest_lane(V a) {
  const V swapped = swap_lanes<DISTANCE>(a, std::make_integer_sequence<int, W>{});
  a = a > swapped ? a : swapped;
  if constexpr (DISTANCE > 1) return find_largest_lane<DISTANCE / 2>(a);
  else return a[0];
}

// W numbers of IEEE half precision.
GPTFAST_INLINE vfloat load_half(const uint16_t* source) {
#if defined(GPTFAST_AVX512)
  return (vfloat)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)source));
#elif defined(GPTFAST_AVX2)
  return (vfloat)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)source));
#else
  // The exponent is rebiased by a product with 2^112, which is exact for subnormals too.
  vfloat result;
  for (int lane = 0; lane < W; ++lane) {
    uint32_t bits = (source[lane] & 0x7fffu) << 13, sign = (source[lane] & 0x8000u) << 16;
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude *= 0x1p112f;
    std::memcpy(&bits, &magnitude, 4);
    if ((source[lane] & 0x7c00u) == 0x7c00u) bits = 0x7f800000u | (source[lane] & 0x3ffu) << 13;
    bits |= sign;
    std::memcpy(&magnitude, &bits, 4);
    result[lane] = magnitude;
  }
  return result;
#endif
}

// W numbers of bfloat16.
GPTFAST_INLINE vfloat load_bfloat16(const uint16_t* source) {
#if defined(GPTFAST_AVX512)
  return (vfloat)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)source)), 16);
#elif defined(GPTFAST_AVX2)
  return (vfloat)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)source)), 16);
#else
  vuint bits;
  for (int lane = 0; lane < W; ++lane) bits[lane] = uint32_t(source[lane]) << 16;
  return (vfloat)bits;
#endif
}

// Sixteen bytes from each of W / 4 places that are `stride` bytes apart.
GPTFAST_INLINE vuint load_pieces(const void* source, int64_t stride) {
#if defined(GPTFAST_AVX512) || defined(GPTFAST_AVX2)
  const auto load_piece = [&](int piece) {
    return _mm_loadu_si128((const __m128i*)((const uint8_t*)source + piece * stride));
  };
#endif
#if defined(GPTFAST_AVX512)
  __m512i pieces = _mm512_castsi128_si512(load_piece(0));
  pieces = _mm512_inserti32x4(pieces, load_piece(1), 1);
  pieces = _mm512_inserti32x4(pieces, load_piece(2), 2);
  return (vuint)_mm512_inserti32x4(pieces, load_piece(3), 3);
#elif defined(GPTFAST_AVX2)
  return (vuint)_mm256_inserti128_si256(_mm256_castsi128_si256(load_piece(0)), load_piece(1), 1);
#else
  return load<vuint>(source);
#endif
}

// W bytes, signed or not, as floats.
template <class Byte>
GPTFAST_INLINE vfloat load_bytes(const void* source) {
  constexpr bool IS_SIGNED = std::is_signed_v<Byte>;
#if defined(GPTFAST_AVX512)
  const __m128i bytes = _mm_loadu_si128((const __m128i*)source);
  return to_float((vint)(IS_SIGNED ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes)));
#elif defined(GPTFAST_AVX2)
  const __m128i bytes = _mm_loadl_epi64((const __m128i*)source);
  return to_float((vint)(IS_SIGNED ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes)));
#else
  typedef Byte bytes __attribute__((vector_size(W)));
  return __builtin_convertvector(load<bytes>(source), vfloat);
#endif
}

// Sums of products of codes with signed bytes, four to a lane: of BITS = 4 and 6 the codes are unsigned, of 8 signed.
//
// `start` takes minus the sum of all inputs times what is to be subtracted from a code: the layout's offset if the codes
// are unsigned, else OFFSET. `add` takes the same four inputs of W rows each time, at most eight times.
template <int BITS>
struct DotProduct {
  vint sum;

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
  // The instruction takes the first factor as unsigned, so a signed one is raised by 128.
  static constexpr int32_t OFFSET = 128;
  GPTFAST_INLINE void start(int32_t correction) { sum = broadcast(correction); }
  GPTFAST_INLINE void add(vuint codes, const int32_t& x) {
    if constexpr (BITS == 8) codes ^= 0x80808080u;
#if defined(__AVX512VNNI__)
    // Of the intrinsic GCC 12 makes a broadcast into a register of its own, and runs out of registers at 8 rows.
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(x));
#else
    sum = (vint)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, _mm256_set1_epi32(x));
#endif
  }
  GPTFAST_INLINE vint finish() const { return sum; }

#elif defined(GPTFAST_AVX2)
  // Sixteen bits hold sixteen products of 4-bit codes (16 * 15 * 127 = 30,480), but only two of larger ones.
  static constexpr int32_t OFFSET = 0;
  __m256i pairs;
  GPTFAST_INLINE void start(int32_t correction) {
    sum = broadcast(correction);
    pairs = _mm256_setzero_si256();
  }
  GPTFAST_INLINE void add(vuint codes, const int32_t& x) {
    __m256i weights = (__m256i)codes, inputs = _mm256_set1_epi32(x);
    if constexpr (BITS == 8) {
      // The instruction takes the first factor as unsigned: the weight's magnitude, its sign moved to the input.
      inputs = _mm256_sign_epi8(inputs, weights);
      weights = _mm256_abs_epi8(weights);
    }
    __m256i products = _mm256_maddubs_epi16(weights, inputs);
    if constexpr (BITS == 4) {
      pairs = _mm256_add_epi16(pairs, products);
    } else {
      sum += (vint)_mm256_madd_epi16(products, _mm256_set1_epi16(1));
    }
  }
  GPTFAST_INLINE vint finish() const {
    return BITS == 4 ? sum + (vint)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)) : sum;
  }

#else
  static constexpr int32_t OFFSET = 0;
  GPTFAST_INLINE void start(int32_t correction) { sum = broadcast(correction); }
  GPTFAST_INLINE void add(vuint codes, const int32_t& x) {
    for (int byte = 0; byte < 4; ++byte) {
      vint weights = (vint)(codes << (24 - 8 * byte)) >> 24;  // 4 and 6 bits have no sign to extend
      sum += weights * int32_t(int8_t(uint32_t(x) >> (8 * byte)));
    }
  }
  GPTFAST_INLINE vint finish() const { return sum; }
#endif
};

}  // namespace gptfast
