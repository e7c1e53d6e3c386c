/* Shared by every file of the CPU provider.
 *
 * All files but gemm.c are compiled with floating-point contraction off: an expression has exactly the roundings that
 * are written. gemm.c multiplies bf16 values only, whose products are exact in fp32, so a fused multiply-add there gives
 * the same bits as a product and a sum. */
#ifndef RLK_H
#define RLK_H

#include <math.h>
#include <stdint.h>
#include <stddef.h>
#include <string.h>

typedef uint16_t bf16; /* storage of a bfloat16 */
typedef int64_t i64;

#define RLK_PANEL 32   /* columns of one packed panel of B */
#define RLK_MAX_ROWS 12 /* rows of one register tile */
#define RLK_KV_BLOCK 64
#define RLK_KV_SPLIT 1024
#define RLK_LOGP_TILE 128
#define RLK_FOLD_AXIS 1024
#define RLK_GAIN_BLOCK 64

/* Runs body(context, item, thread) for every item in [0, items); no order is promised. */
typedef void (*rlk_body)(void *context, i64 item, int thread);
void rlk_parallel(rlk_body body, void *context, i64 items);
int rlk_get_threads(void);

/* Grow-only scratch memory of the calling thread, 64-byte aligned; slots are independent. */
void *rlk_scratch(int slot, size_t bytes);

/* tile[rows][32] = sum over k ascending, from +0, of a[k * a_step + row] * panel[k * 32 + column]. rows is 1..12. */
void rlk_tile_f32(int rows, i64 depth, const float *a, i64 a_step, const float *panel, float *tile);

static inline float rlk_from_bf16(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

/* Round to nearest, ties to even; a NaN stays a quiet NaN. */
static inline bf16 rlk_to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    uint32_t quiet = (bits >> 16) | 0x40u;
    return (bf16)((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

static inline float rlk_bits_float(uint32_t bits) {
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

static inline uint32_t rlk_float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

/* exp in fp32 with written roundings: Cody-Waite reduction, Taylor polynomial of degree 7. Below -87.25 it is +0. */
static inline float rlk_exp(float x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    float shifted = x * 1.44269504088896341f + magic;
    float n = shifted - magic;
    float r = (x - n * 0.693145751953125f) - n * 1.42860676533018e-06f;
    float p = 1.98412698e-4f;
    p = p * r + 1.38888889e-3f;
    p = p * r + 8.33333377e-3f;
    p = p * r + 4.16666679e-2f;
    p = p * r + 1.66666672e-1f;
    p = p * r + 0.5f;
    p = (p * (r * r) + r) + 1.0f;
    uint32_t scaled = rlk_float_bits(p) + ((rlk_float_bits(shifted) - rlk_float_bits(magic)) << 23);
    float y = rlk_bits_float(scaled);
    y = x < -87.25f ? 0.0f : y;
    y = x > 88.72f ? INFINITY : y;
    return x != x ? x : y;
}

/* Natural logarithm in fp32 with written roundings: 2 atanh((f - 1) / (f + 1)) with f in [sqrt(1/2), sqrt(2)). */
static inline float rlk_log(float x) {
    float scaled = x * (x < 1.17549435e-38f ? 16777216.0f : 1.0f);
    int32_t shifted = (int32_t)(rlk_float_bits(scaled) - 0x3f3504f3u);
    float e = (float)(shifted >> 23) - (x < 1.17549435e-38f ? 24.0f : 0.0f);
    float f = rlk_bits_float(((uint32_t)shifted & 0x7fffffu) + 0x3f3504f3u);
    float s = (f - 1.0f) / (f + 1.0f);
    float z = s * s;
    float p = 0.111111112f;
    p = p * z + 0.142857149f;
    p = p * z + 0.2f;
    p = p * z + 0.333333343f;
    p = (p * z) * (s + s) + (s + s);
    float y = e * 0.693145751953125f + (e * 1.42860676533018e-06f + p);
    y = x == 0.0f ? -INFINITY : y;
    y = x < 0.0f ? NAN : y;
    return ((x != x) | (x > 3.40282347e38f)) ? x : y; /* no branch: loops over it vectorise */
}

/* log(1 + x) for x in (-1, 0]: the rounding error of 1 + x is given back. */
static inline float rlk_log1p(float x) {
    float w = 1.0f + x;
    float lost = x - (w - 1.0f);
    return rlk_log(w) + lost / w;
}

/* The written tree: v must have room for the next power of two; it is overwritten. Axes over 1,024 are folded first. */
static inline float rlk_tree(float *v, i64 n) {
    if (n > RLK_FOLD_AXIS) {
        for (i64 start = RLK_FOLD_AXIS; start < n; start += RLK_FOLD_AXIS) {
            i64 count = n - start < RLK_FOLD_AXIS ? n - start : RLK_FOLD_AXIS;
            for (i64 i = 0; i < count; i++) v[i] = v[i] + v[start + i];
            for (i64 i = count; i < RLK_FOLD_AXIS; i++) v[i] = v[i] + 0.0f;
        }
        n = RLK_FOLD_AXIS;
    }
    i64 width = 1;
    while (width < n) width *= 2;
    if (n < width) memset(v + n, 0, (size_t)(width - n) * sizeof(float));
    float halves[2][RLK_FOLD_AXIS / 2];
    const float *from = v;
    for (int side = 0; width > 1; width /= 2, side ^= 1) {
        float *restrict to = halves[side];
        for (i64 i = 0; i < width / 2; i++) to[i] = from[2 * i] + from[2 * i + 1];
        from = to;
    }
    return from[0];
}

#endif
