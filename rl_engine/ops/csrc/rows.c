/* Row-wise operators: RMSNorm (and QK norm), rotary embedding, SwiGLU, and the gain's gradient. Contraction off. */
#include "rlk.h"

#define ROWS_PER_ITEM 16

typedef struct {
    i64 tokens, heads, width;
    i64 x_token, dy_token, dx_token; /* strides between tokens, elements; heads are contiguous */
    const bf16 *x, *gain, *dy;
    bf16 *out;
    float *terms; /* backward: fl(dy * x_hat) per element, or NULL */
    float eps;
} norm;

static i64 padded(i64 n) {
    i64 width = 1;
    while (width < n) width *= 2;
    return n > RLK_FOLD_AXIS ? n : width;
}

static float inverse_rms(const bf16 *x, i64 width, float eps, float *squares) {
    for (i64 i = 0; i < width; i++) {
        float value = rlk_from_bf16(x[i]);
        squares[i] = value * value;
    }
    return 1.0f / sqrtf(rlk_tree(squares, width) / (float)width + eps);
}

static void norm_forward_body(void *context, i64 item, int thread) {
    (void)thread;
    const norm *n = context;
    float *squares = rlk_scratch(0, (size_t)padded(n->width) * sizeof(float));
    i64 last = (item + 1) * ROWS_PER_ITEM < n->tokens * n->heads ? (item + 1) * ROWS_PER_ITEM : n->tokens * n->heads;
    for (i64 row = item * ROWS_PER_ITEM; row < last; row++) {
        const bf16 *x = n->x + row / n->heads * n->x_token + row % n->heads * n->width;
        float r = inverse_rms(x, n->width, n->eps, squares);
        bf16 *out = n->out + row * n->width;
        for (i64 i = 0; i < n->width; i++)
            out[i] = rlk_to_bf16((rlk_from_bf16(x[i]) * r) * rlk_from_bf16(n->gain[i]));
    }
}

/* y = bf16(fl(fl(x r) w)), r = 1 / sqrt(fl(fl(tree(fl(x x)) / width) + eps)); x [tokens][heads][width], y contiguous. */
void rlk_rms_norm(i64 tokens, i64 heads, i64 width, const bf16 *x, i64 x_token, const bf16 *gain, float eps, bf16 *out) {
    norm n = {.tokens = tokens, .heads = heads, .width = width, .x = x, .x_token = x_token, .gain = gain, .eps = eps,
              .out = out};
    rlk_parallel(norm_forward_body, &n, (tokens * heads + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM);
}

static void norm_backward_body(void *context, i64 item, int thread) {
    (void)thread;
    const norm *n = context;
    i64 width = n->width;
    float *squares = rlk_scratch(0, (size_t)padded(width) * sizeof(float));
    float *normed = rlk_scratch(1, (size_t)width * sizeof(float));
    float *scaled = rlk_scratch(2, (size_t)width * sizeof(float));
    i64 last = (item + 1) * ROWS_PER_ITEM < n->tokens * n->heads ? (item + 1) * ROWS_PER_ITEM : n->tokens * n->heads;
    for (i64 row = item * ROWS_PER_ITEM; row < last; row++) {
        const bf16 *x = n->x + row / n->heads * n->x_token + row % n->heads * width;
        const bf16 *dy = n->dy + row / n->heads * n->dy_token + row % n->heads * width;
        float r = inverse_rms(x, width, n->eps, squares);
        for (i64 i = 0; i < width; i++) {
            float gradient = rlk_from_bf16(dy[i]);
            normed[i] = rlk_from_bf16(x[i]) * r;
            scaled[i] = gradient * rlk_from_bf16(n->gain[i]);
            squares[i] = scaled[i] * normed[i];
            if (n->terms) n->terms[row * width + i] = gradient * normed[i];
        }
        float s = rlk_tree(squares, width) / (float)width;
        bf16 *out = n->out + row * width;
        for (i64 i = 0; i < width; i++) out[i] = rlk_to_bf16((scaled[i] - normed[i] * s) * r);
    }
}

/* dx of rlk_rms_norm, and the gain's terms fl(dy x_hat) [tokens][heads][width] fp32 where terms is not NULL. */
void rlk_rms_norm_backward(i64 tokens, i64 heads, i64 width, const bf16 *x, i64 x_token, const bf16 *gain, float eps,
                           const bf16 *dy, i64 dy_token, bf16 *dx, float *terms) {
    norm n = {.tokens = tokens, .heads = heads, .width = width, .x = x, .x_token = x_token, .gain = gain, .eps = eps,
              .dy = dy, .dy_token = dy_token, .out = dx, .terms = terms};
    rlk_parallel(norm_backward_body, &n, (tokens * heads + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM);
}

typedef struct {
    i64 width, heads, units;
    const i64 *unit_offsets;
    const float *terms;
    float *sums;
} unit_sums;

#define GAIN_COLUMNS 64

static void unit_sums_body(void *context, i64 item, int thread) {
    (void)thread;
    const unit_sums *g = context;
    i64 chunks = (g->width + GAIN_COLUMNS - 1) / GAIN_COLUMNS, row_step = g->heads * g->width;
    i64 head = item / chunks % g->heads, unit = item / chunks / g->heads, first = item % chunks * GAIN_COLUMNS;
    i64 count = g->width - first < GAIN_COLUMNS ? g->width - first : GAIN_COLUMNS, end = g->unit_offsets[unit + 1];
    float block[RLK_GAIN_BLOCK][GAIN_COLUMNS], total[GAIN_COLUMNS];
    for (i64 c = 0; c < count; c++) total[c] = 0.0f;
    for (i64 start = g->unit_offsets[unit]; start < end; start += RLK_GAIN_BLOCK) {
        for (i64 t = 0; t < RLK_GAIN_BLOCK; t++) {
            const float *from = g->terms + (start + t) * row_step + head * g->width + first;
            for (i64 c = 0; c < count; c++) block[t][c] = start + t < end ? from[c] : 0.0f;
        }
        for (i64 width = RLK_GAIN_BLOCK; width > 1; width /= 2)
            for (i64 t = 0; t < width / 2; t++)
                for (i64 c = 0; c < count; c++) block[t][c] = block[2 * t][c] + block[2 * t + 1][c];
        for (i64 c = 0; c < count; c++) total[c] = total[c] + block[0][c];
    }
    memcpy(g->sums + (unit * g->heads + head) * g->width + first, total, (size_t)count * sizeof(float));
}

/* sums[units][heads][width] of terms [tokens][heads][width]: blocks of 64 tokens, counted from the unit's first, by the
 * pair tree; blocks ascending from +0. */
void rlk_unit_sums(i64 heads, i64 width, i64 units, const i64 *unit_offsets, const float *terms, float *sums) {
    unit_sums g = {.width = width, .heads = heads, .units = units, .unit_offsets = unit_offsets, .terms = terms,
                   .sums = sums};
    rlk_parallel(unit_sums_body, &g, units * heads * ((width + GAIN_COLUMNS - 1) / GAIN_COLUMNS));
}

typedef struct {
    i64 tokens, heads, half, x_token;
    const bf16 *x;
    const i64 *positions;
    const float *cosine, *sine;
    float sign;
    bf16 *out;
} rope;

static void rope_body(void *context, i64 token, int thread) {
    (void)thread;
    const rope *g = context;
    const float *c = g->cosine + g->positions[token] * g->half, *s = g->sine + g->positions[token] * g->half;
    for (i64 head = 0; head < g->heads; head++) {
        const bf16 *x = g->x + token * g->x_token + head * 2 * g->half;
        bf16 *out = g->out + (token * g->heads + head) * 2 * g->half;
        for (i64 i = 0; i < g->half; i++) {
            float first = rlk_from_bf16(x[i]), second = rlk_from_bf16(x[i + g->half]), sine = g->sign * s[i];
            out[i] = rlk_to_bf16(first * c[i] - second * sine);
            out[i + g->half] = rlk_to_bf16(second * c[i] + first * sine);
        }
    }
}

/* Half-split rotary embedding of x [tokens][heads][2 half]; sign -1 is the backward. out is contiguous. */
void rlk_rope(i64 tokens, i64 heads, i64 half, const bf16 *x, i64 x_token, const i64 *positions, const float *cosine,
              const float *sine, float sign, bf16 *out) {
    rope g = {.tokens = tokens, .heads = heads, .half = half, .x_token = x_token, .x = x, .positions = positions,
              .cosine = cosine, .sine = sine, .sign = sign, .out = out};
    rlk_parallel(rope_body, &g, tokens);
}

typedef struct {
    i64 rows, width;
    const bf16 *x, *da;
    bf16 *out;
} swiglu;

static void swiglu_forward_body(void *context, i64 row, int thread) {
    (void)thread;
    const swiglu *g = context;
    const bf16 *gate = g->x + row * 2 * g->width, *up = gate + g->width;
    bf16 *out = g->out + row * g->width;
    for (i64 i = 0; i < g->width; i++) {
        float value = rlk_from_bf16(gate[i]);
        float sigma = 1.0f / (1.0f + rlk_exp(-value));
        out[i] = rlk_to_bf16((value * sigma) * rlk_from_bf16(up[i]));
    }
}

/* a = bf16(fl(fl(g sigma) u)), sigma = 1 / (1 + exp(-g)); x is [rows][gate | up]. */
void rlk_swiglu(i64 rows, i64 width, const bf16 *x, bf16 *out) {
    swiglu g = {.rows = rows, .width = width, .x = x, .out = out};
    rlk_parallel(swiglu_forward_body, &g, rows);
}

static void swiglu_backward_body(void *context, i64 row, int thread) {
    (void)thread;
    const swiglu *g = context;
    const bf16 *gate = g->x + row * 2 * g->width, *up = gate + g->width, *da = g->da + row * g->width;
    bf16 *d_gate = g->out + row * 2 * g->width, *d_up = d_gate + g->width;
    for (i64 i = 0; i < g->width; i++) {
        float value = rlk_from_bf16(gate[i]), gradient = rlk_from_bf16(da[i]);
        float sigma = 1.0f / (1.0f + rlk_exp(-value));
        d_up[i] = rlk_to_bf16(gradient * (value * sigma));
        d_gate[i] = rlk_to_bf16((gradient * rlk_from_bf16(up[i])) * (sigma * (1.0f + value * (1.0f - sigma))));
    }
}

void rlk_swiglu_backward(i64 rows, i64 width, const bf16 *x, const bf16 *da, bf16 *dx) {
    swiglu g = {.rows = rows, .width = width, .x = x, .da = da, .out = dx};
    rlk_parallel(swiglu_backward_body, &g, rows);
}

/* Elementwise exp and log, as the operators use them. */
void rlk_exp_array(i64 n, const float *x, float *y) {
    for (i64 i = 0; i < n; i++) y[i] = rlk_exp(x[i]);
}

void rlk_log_array(i64 n, const float *x, float *y) {
    for (i64 i = 0; i < n; i++) y[i] = rlk_log(x[i]);
}

void rlk_log1p_array(i64 n, const float *x, float *y) {
    for (i64 i = 0; i < n; i++) y[i] = rlk_log1p(x[i]);
}
