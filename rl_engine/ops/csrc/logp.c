/* The vocabulary side: tile statistics and their merge, the logits' gradient, and sampling. Contraction off. */
#include "rlk.h"

typedef struct {
    i64 rows, first_column, columns, vocabulary, group_columns, z_row;
    const float *z;
    float inv_t;
    const uint8_t *mask; /* bit v of row r: column v exists; NULL: all below the vocabulary do */
    i64 mask_row;
    const i64 *target;
    float *m, *l, *w, *zs_target;
} logp;

static inline int exists(const uint8_t *mask, i64 column) { return !mask || (mask[column >> 3] >> (column & 7)) & 1; }

static void merge(float *m, float *l, float *w, float tile_m, float tile_l, float tile_w) {
    if (tile_m == -INFINITY && tile_l == 0.0f) return; /* the empty state is the identity */
    if (*m == -INFINITY && *l == 0.0f) {
        *m = tile_m;
        *l = tile_l;
        *w = tile_w;
        return;
    }
    float top = *m > tile_m ? *m : tile_m;
    float a = rlk_exp(*m - top), b = rlk_exp(tile_m - top);
    *l = *l * a + tile_l * b;
    *w = *w * a + tile_w * b;
    *m = top;
}

static void tile_state(const logp *g, const float *z, const uint8_t *mask, i64 column, i64 count, float *m, float *l,
                       float *w) {
    float zs[RLK_LOGP_TILE], e[RLK_LOGP_TILE], ez[RLK_LOGP_TILE];
    float top = -INFINITY;
    if (mask) {
        for (i64 i = 0; i < RLK_LOGP_TILE; i++)
            zs[i] = i < count && exists(mask, column + i) ? z[i] * g->inv_t : -INFINITY;
    } else {
        for (i64 i = 0; i < count; i++) zs[i] = z[i] * g->inv_t;
        for (i64 i = count; i < RLK_LOGP_TILE; i++) zs[i] = -INFINITY;
    }
    int any_nan = 0;
    float lane[16];
    for (int j = 0; j < 16; j++) lane[j] = -INFINITY;
    for (i64 i = 0; i < RLK_LOGP_TILE; i += 16)
        for (int j = 0; j < 16; j++) {
            lane[j] = zs[i + j] > lane[j] ? zs[i + j] : lane[j];
            any_nan |= zs[i + j] != zs[i + j];
        }
    for (int j = 0; j < 16; j++) top = lane[j] > top ? lane[j] : top;
    top = top + 0.0f; /* -0 as +0 */
    if (any_nan) top = NAN;
    if (top == -INFINITY) {
        *m = -INFINITY;
        *l = *w = 0.0f;
        return;
    }
    for (i64 i = 0; i < RLK_LOGP_TILE; i++) {
        e[i] = rlk_exp(zs[i] - top);
        ez[i] = zs[i] == -INFINITY ? 0.0f : e[i] * zs[i];
    }
    *m = top;
    *l = rlk_tree(e, RLK_LOGP_TILE);
    *w = rlk_tree(ez, RLK_LOGP_TILE);
}

static void logp_body(void *context, i64 row, int thread) {
    (void)thread;
    const logp *g = context;
    const float *z = g->z + row * g->z_row;
    const uint8_t *mask = g->mask ? g->mask + row * g->mask_row : NULL;
    i64 end = g->first_column + g->columns < g->vocabulary ? g->first_column + g->columns : g->vocabulary;
    for (i64 group = g->first_column; group < end; group += g->group_columns) {
        float m = -INFINITY, l = 0.0f, w = 0.0f;
        i64 group_end = group + g->group_columns < end ? group + g->group_columns : end;
        for (i64 column = group; column < group_end; column += RLK_LOGP_TILE) {
            float tile_m, tile_l, tile_w;
            i64 count = group_end - column < RLK_LOGP_TILE ? group_end - column : RLK_LOGP_TILE;
            tile_state(g, z + (column - g->first_column), mask, column, count, &tile_m, &tile_l, &tile_w);
            merge(&m, &l, &w, tile_m, tile_l, tile_w);
        }
        merge(g->m + row, g->l + row, g->w + row, m, l, w);
    }
    i64 y = g->target ? g->target[row] : -1;
    if (y >= g->first_column && y < end) g->zs_target[row] = z[y - g->first_column] * g->inv_t;
}

/* Merges the whole groups in columns [first_column, first_column + columns) into (m, l, w)[rows]; first_column is a
 * group's first. zs_target is written by the group that owns the target (int64 [rows]; NULL: none). */
void rlk_logp_groups(i64 rows, i64 first_column, i64 columns, i64 vocabulary, i64 group_columns, const float *z, i64 z_row,
                     float inv_t, const uint8_t *mask, i64 mask_row, const i64 *target, float *m, float *l, float *w,
                     float *zs_target) {
    logp g = {.rows = rows, .first_column = first_column, .columns = columns, .vocabulary = vocabulary,
              .group_columns = group_columns, .z = z, .z_row = z_row, .inv_t = inv_t, .mask = mask,
              .mask_row = mask_row, .target = target, .m = m, .l = l, .w = w, .zs_target = zs_target};
    rlk_parallel(logp_body, &g, rows);
}

/* Merges the states [groups][rows] of whole groups into (m, l, w)[rows], groups ascending. */
void rlk_logp_merge(i64 rows, i64 groups, const float *group_m, const float *group_l, const float *group_w, float *m,
                    float *l, float *w) {
    for (i64 group = 0; group < groups; group++)
        for (i64 row = 0; row < rows; row++) {
            i64 at = group * rows + row;
            merge(m + row, l + row, w + row, group_m[at], group_l[at], group_w[at]);
        }
}

/* logp = fl(fl(zs_y - m) - log l); entropy = fl(fl(m + log l) - fl(w / l)). */
void rlk_logp_finish(i64 rows, const float *m, const float *l, const float *w, const float *zs_target, float *logp_out,
                     float *entropy) {
    for (i64 row = 0; row < rows; row++) {
        float log_l = rlk_log(l[row]);
        logp_out[row] = (zs_target[row] - m[row]) - log_l;
        entropy[row] = (m[row] + log_l) - w[row] / l[row];
    }
}

typedef struct {
    i64 rows, first_column, columns, z_row, mask_row;
    const float *z, *m, *l, *coefficient;
    float inv_t;
    const uint8_t *mask;
    const i64 *target;
    bf16 *dz;
} logits_gradient;

static void logits_gradient_body(void *context, i64 row, int thread) {
    (void)thread;
    const logits_gradient *g = context;
    const float *z = g->z + row * g->z_row;
    const uint8_t *mask = g->mask ? g->mask + row * g->mask_row : NULL;
    float log_l = rlk_log(g->l[row]), m = g->m[row], seed = g->coefficient[row] * g->inv_t;
    bf16 *dz = g->dz + row * g->columns;
    for (i64 i = 0; i < g->columns; i++) dz[i] = rlk_to_bf16(seed * rlk_exp((z[i] * g->inv_t - m) - log_l));
    i64 y = g->target[row] - g->first_column;
    if (y >= 0 && y < g->columns) dz[y] = rlk_to_bf16(seed * (rlk_exp((z[y] * g->inv_t - m) - log_l) - 1.0f));
    if (mask)
        for (i64 i = 0; i < g->columns; i++) dz[i] = exists(mask, g->first_column + i) ? dz[i] : 0;
}

/* dz[rows][columns] bf16 = fl(fl(c inv_t) fl(p - [v = y])), p = exp(fl(fl(zs - m) - log l)); +0 outside the set. */
void rlk_logits_gradient(i64 rows, i64 first_column, i64 columns, const float *z, i64 z_row, float inv_t,
                         const uint8_t *mask, i64 mask_row, const i64 *target, const float *m, const float *l,
                         const float *coefficient, bf16 *dz) {
    logits_gradient g = {.rows = rows, .first_column = first_column, .columns = columns, .z_row = z_row,
                         .mask_row = mask_row, .z = z, .m = m, .l = l, .coefficient = coefficient, .inv_t = inv_t,
                         .mask = mask, .target = target, .dz = dz};
    rlk_parallel(logits_gradient_body, &g, rows);
}

/* First word of Philox4x32-10. */
static inline uint32_t philox(uint32_t k0, uint32_t k1, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
#pragma GCC unroll 10
    for (int round = 0; round < 10; round++) {
        uint64_t first = (uint64_t)0xD2511F53u * c0, second = (uint64_t)0xCD9E8D57u * c2;
        uint32_t next0 = (uint32_t)(second >> 32) ^ c1 ^ k0, next2 = (uint32_t)(first >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)second;
        c3 = (uint32_t)first;
        c0 = next0;
        c2 = next2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c0;
}

typedef struct {
    i64 first_column, columns, z_row, mask_row;
    const float *z;
    float inv_t;
    const uint8_t *mask;
    uint32_t seed, step;
    const uint32_t *counters; /* [rows][3]: position, sample, prompt */
    i64 *token;
    float *score;
} sample;

#define SAMPLE_CHUNK 1024

static void sample_body(void *context, i64 row, int thread) {
    (void)thread;
    const sample *g = context;
    const float *z = g->z + row * g->z_row;
    const uint8_t *mask = g->mask ? g->mask + row * g->mask_row : NULL;
    uint32_t position = g->counters[3 * row], number = g->counters[3 * row + 1], prompt = g->counters[3 * row + 2];
    uint32_t seed = g->seed, step = g->step;
    float best = -INFINITY, inv_t = g->inv_t, score[SAMPLE_CHUNK], uniform[SAMPLE_CHUNK];
    uint32_t noise[SAMPLE_CHUNK];
    i64 chosen = -1;
    int any_nan = 0;
    for (i64 start = 0; start < g->columns; start += SAMPLE_CHUNK) {
        int count = (int)(g->columns - start < SAMPLE_CHUNK ? g->columns - start : SAMPLE_CHUNK);
        i64 column = g->first_column + start;
        for (int i = 0; i < count; i++) noise[i] = philox(seed, step, (uint32_t)column + (uint32_t)i, position, number, prompt);
        for (int i = 0; i < count; i++) uniform[i] = (float)(((double)noise[i] + 0.5) * 2.3283064365386963e-10);
        for (int i = 0; i < count; i++) {
            float u = uniform[i] > 0.99999994f ? 0.99999994f : uniform[i];
            score[i] = z[start + i] * inv_t - rlk_log(-rlk_log1p(-u));
        }
        for (int i = 0; i < count; i++)
            if (exists(mask, column + i)) {
                any_nan |= score[i] != score[i];
                if (score[i] > best || chosen < 0) {
                    best = score[i];
                    chosen = column + i;
                }
            }
    }
    g->token[row] = any_nan ? -1 : chosen;
    g->score[row] = any_nan ? NAN : chosen < 0 ? -INFINITY : best;
}

/* Exact draw: argmax over existing columns of fl(zs - log E), E = -log1p(-u), u from Philox keyed by (seed, step) and
 * (token, position, sample, prompt); ties to the lowest id. z holds columns from first_column on; the token is -1 where
 * none of them exists or one is NaN. */
void rlk_sample(i64 rows, i64 first_column, i64 columns, const float *z, i64 z_row, float inv_t, const uint8_t *mask,
                i64 mask_row, uint32_t seed, uint32_t step, const uint32_t *counters, i64 *token, float *score) {
    sample g = {.first_column = first_column, .columns = columns, .z_row = z_row, .mask_row = mask_row, .z = z,
                .inv_t = inv_t, .mask = mask, .seed = seed, .step = step, .counters = counters, .token = token,
                .score = score};
    rlk_parallel(sample_body, &g, rows);
}
