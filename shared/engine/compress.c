/* Blocks between the device pool (float32 or bfloat16) and the lower tiers (int8 or e4m3 with one bfloat16 scale a row).

   A row is one (layer, K or V, token, head): `dim` elements. A compressed block is all rows' elements, then all rows' scales.
   compress.py holds the torch reference; both give the same bytes. */

#include <math.h>
#include <stdint.h>
#include <string.h>

static inline float from_bits(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline uint32_t to_bits(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }

static inline float load_f32(const float *x, long i) { return x[i]; }
static inline float load_bf16(const uint16_t *x, long i) { return from_bits((uint32_t)x[i] << 16); }
static inline void store_f32(float *x, long i, float v) { x[i] = v; }
static inline void store_bf16(uint16_t *x, long i, float v) { /* to nearest, ties to even; values are finite */
    uint32_t bits = to_bits(v);
    x[i] = (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

/* The scale is rounded up to bfloat16, so that the largest element never leaves the range. */
static inline uint16_t scale_bits(float largest, float range) {
    return (uint16_t)((to_bits(largest / range) + 0xFFFF) >> 16);
}

static inline int8_t to_int8(float x) { return (int8_t)(int32_t)rintf(x); }

/* e4m3: 4 exponent bits (bias 7), 3 mantissa bits, no infinity; |x| <= 448 here. To nearest, ties to even. */
static inline uint8_t to_e4m3(float x) {
    uint32_t bits = to_bits(x), sign = (bits >> 24) & 0x80, magnitude = bits & 0x7FFFFFFF;
    uint32_t rounded = magnitude + 0x7FFFF + ((magnitude >> 20) & 1);
    uint32_t normal = (rounded >> 20) - (120 << 3);
    uint32_t subnormal = (uint32_t)(int32_t)rintf(from_bits(magnitude) * 512.0f);
    return (uint8_t)(sign | (magnitude < 0x3C800000 ? subnormal : normal)); /* 0x3C800000 = 2^-6 */
}

static inline float from_e4m3(uint8_t q) {
    uint32_t sign = (uint32_t)(q & 0x80) << 24, exponent = (q >> 3) & 15, mantissa = q & 7;
    float normal = from_bits(sign | ((exponent + 120) << 23) | (mantissa << 20));
    float subnormal = from_bits(sign | to_bits((float)mantissa * 0.001953125f));
    return exponent ? normal : subnormal;
}

#define CODEC(NAME, ELEMENT, LOAD, STORE, CODE, ENCODE, DECODE, RANGE)                                            \
    void encode_##NAME(const ELEMENT *x, CODE *q, uint16_t *scales, long rows, long dim) {                       \
        for (long r = 0; r < rows; r++, x += dim, q += dim) {                                                     \
            int32_t largest = 0; /* of magnitudes as integers: the same order, and a maximum that vectorises */   \
            for (long i = 0; i < dim; i++) {                                                                      \
                int32_t magnitude = (int32_t)(to_bits(LOAD(x, i)) & 0x7FFFFFFF);                                  \
                largest = magnitude > largest ? magnitude : largest;                                              \
            }                                                                                                     \
            scales[r] = scale_bits(from_bits((uint32_t)largest), RANGE);                                          \
            float scale = from_bits((uint32_t)scales[r] << 16), inverse = scale > 0.0f ? 1.0f / scale : 0.0f;     \
            for (long i = 0; i < dim; i++) q[i] = ENCODE(LOAD(x, i) * inverse);                                   \
        }                                                                                                         \
    }                                                                                                             \
    void decode_##NAME(const CODE *q, const uint16_t *scales, ELEMENT *x, long rows, long dim) {                 \
        for (long r = 0; r < rows; r++, x += dim, q += dim) {                                                     \
            float scale = from_bits((uint32_t)scales[r] << 16);                                                   \
            for (long i = 0; i < dim; i++) STORE(x, i, DECODE(q[i]) * scale);                                     \
        }                                                                                                         \
    }

#define FROM_INT8(q) ((float)(q))
CODEC(int8_float32, float, load_f32, store_f32, int8_t, to_int8, FROM_INT8, 127.0f)
CODEC(int8_bfloat16, uint16_t, load_bf16, store_bf16, int8_t, to_int8, FROM_INT8, 127.0f)
CODEC(fp8_float32, float, load_f32, store_f32, uint8_t, to_e4m3, from_e4m3, 448.0f)
CODEC(fp8_bfloat16, uint16_t, load_bf16, store_bf16, uint8_t, to_e4m3, from_e4m3, 448.0f)
