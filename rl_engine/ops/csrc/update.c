/* The update: embedding gradient, exact gradient norm, AdamW. Contraction off. */
#include "rlk.h"

typedef struct {
    i64 tokens, width;
    const i64 *ids;
    const bf16 *rows;
    float *gradient;
} lookup;

#define LOOKUP_COLUMNS 64

static void lookup_body(void *context, i64 item, int thread) {
    (void)thread;
    const lookup *g = context;
    i64 first = item * LOOKUP_COLUMNS;
    i64 count = g->width - first < LOOKUP_COLUMNS ? g->width - first : LOOKUP_COLUMNS;
    for (i64 t = 0; t < g->tokens; t++) {
        float *to = g->gradient + g->ids[t] * g->width + first;
        const bf16 *from = g->rows + t * g->width + first;
        for (i64 c = 0; c < count; c++) to[c] = to[c] + rlk_from_bf16(from[c]);
    }
}

/* gradient[id][width] += rows in token order (one chain per row of the table). */
void rlk_lookup_gradient(i64 tokens, i64 width, const i64 *ids, const bf16 *rows, float *gradient) {
    lookup g = {.tokens = tokens, .width = width, .ids = ids, .rows = rows, .gradient = gradient};
    rlk_parallel(lookup_body, &g, (width + LOOKUP_COLUMNS - 1) / LOOKUP_COLUMNS);
}

typedef struct {
    i64 n;
    const float *g;
    i64 *bins; /* [items][256][2]: lower and upper 24 bits of the squared significand, summed by exponent field */
    i64 chunk;
} square_bins;

static void square_bins_body(void *context, i64 item, int thread) {
    (void)thread;
    const square_bins *s = context;
    i64 *bins = s->bins + item * 512;
    i64 last = (item + 1) * s->chunk < s->n ? (item + 1) * s->chunk : s->n;
    for (i64 i = item * s->chunk; i < last; i++) {
        uint32_t bits = rlk_float_bits(s->g[i]);
        uint32_t exponent = (bits >> 23) & 255u;
        uint64_t significand = (bits & 0x7fffffu) | (exponent ? 0x800000u : 0u);
        uint64_t square = significand * significand;
        bins[2 * exponent] += (i64)(square & 0xffffffu);
        bins[2 * exponent + 1] += (i64)(square >> 24);
    }
}

/* Exponent bins of the squares of g[n], one set per chunk; bins is zeroed int64 [ceil(n / chunk)][256][2]. */
void rlk_square_bins(i64 n, i64 chunk, const float *g, i64 *bins) {
    square_bins s = {.n = n, .g = g, .bins = bins, .chunk = chunk};
    rlk_parallel(square_bins_body, &s, (n + chunk - 1) / chunk);
}

typedef struct {
    i64 n;
    float *p, *m, *v;
    const float *g;
    bf16 *weight;
    i64 chunk, *changed; /* [items]: elements whose bf16(p) is another one now */
    float clip, beta1, one_minus_beta1, beta2, one_minus_beta2, decay, step_size, root_bc2, eps;
} adamw;

static void adamw_body(void *context, i64 item, int thread) {
    (void)thread;
    const adamw *a = context;
    adamw s = *a;
    i64 last = (item + 1) * s.chunk < s.n ? (item + 1) * s.chunk : s.n;
    i64 changed = 0;
    for (i64 i = item * s.chunk; i < last; i++) {
        float g = s.g[i] * s.clip;
        float m = s.beta1 * s.m[i] + s.one_minus_beta1 * g;
        float v = s.beta2 * s.v[i] + (s.one_minus_beta2 * g) * g;
        float p = s.p[i] * s.decay - s.step_size * (m / (sqrtf(v) / s.root_bc2 + s.eps));
        s.m[i] = m;
        s.v[i] = v;
        changed += rlk_to_bf16(s.p[i]) != rlk_to_bf16(p);
        s.p[i] = p;
        if (s.weight) s.weight[i] = rlk_to_bf16(p);
    }
    s.changed[item] = changed;
}

/* One AdamW step on fp32 p, m, v [n] with gradient fl(g clip); weight = bf16(p), where there is one. Scalars are cast once by the caller.
   changed is int64 [ceil(n / chunk)]: how many elements of bf16(p) changed. */
void rlk_adamw(i64 n, i64 chunk, float *p, float *m, float *v, const float *g, bf16 *weight, i64 *changed, float clip,
               float beta1, float one_minus_beta1, float beta2, float one_minus_beta2, float decay, float step_size,
               float root_bc2, float eps) {
    adamw a = {.n = n, .p = p, .m = m, .v = v, .g = g, .weight = weight, .chunk = chunk, .changed = changed,
               .clip = clip, .beta1 = beta1, .one_minus_beta1 = one_minus_beta1, .beta2 = beta2, .one_minus_beta2 = one_minus_beta2, .decay = decay,
               .step_size = step_size, .root_bc2 = root_bc2, .eps = eps};
    rlk_parallel(adamw_body, &a, (n + chunk - 1) / chunk);
}
