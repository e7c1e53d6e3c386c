/* Attention backward over packed whole samples. Contraction off.
 *
 * P = exp(fl(fl(d c) - LSE)), delta = tree(fl(dO O)), dS = bf16(fl(P fl(dP - delta))). dQ carries over KV blocks
 * ascending; dK, dV over the group's query heads ascending (outer) and query blocks ascending (inner); a block is a chain
 * from +0 and the carry is fl(acc + block). dQ and dK are scaled once at the end. */
#include "rlk.h"

#define BLOCK RLK_KV_BLOCK

typedef struct {
    i64 heads, kv_heads, width, q_token, k_token, v_token, out_token, dout_token;
    const bf16 *q, *k, *v, *out, *dout;
    const float *lse;
    float *delta; /* [tokens][heads] */
    const i64 *offsets;
    const i64 *items; /* [items][3]: sequence, first position, count; a run of at most 64 inside one block */
    float c;
    bf16 *dq, *dk, *dv; /* contiguous */
} backward;

static i64 panels_of(i64 width) { return (width + RLK_PANEL - 1) / RLK_PANEL; }

/* rows of x (token step, from row 0) as [width][BLOCK]-transposed panels: panel p holds rows 32p ..., [width][32]. */
static void load_transposed(const bf16 *x, i64 step, i64 count, i64 width, float *to) {
    if (count < BLOCK) memset(to, 0, (size_t)(2 * width * RLK_PANEL) * sizeof(float));
    for (i64 row = 0; row < count; row++) {
        float *column = to + row / RLK_PANEL * width * RLK_PANEL + row % RLK_PANEL;
        for (i64 d = 0; d < width; d++) column[d * RLK_PANEL] = rlk_from_bf16(x[row * step + d]);
    }
}

/* rows of x as panels of 32 columns: [panels][BLOCK][32]. */
static void load_straight(const bf16 *x, i64 step, i64 count, i64 width, float *to) {
    i64 panels = panels_of(width);
    if (count < BLOCK || width % RLK_PANEL) memset(to, 0, (size_t)(panels * BLOCK * RLK_PANEL) * sizeof(float));
    for (i64 row = 0; row < count; row++)
        for (i64 d = 0; d < width; d++)
            to[(d / RLK_PANEL * BLOCK + row) * RLK_PANEL + d % RLK_PANEL] = rlk_from_bf16(x[row * step + d]);
}

/* rows of x as register tiles: tile t holds rows 12t ... as [width][tile rows]. */
static void load_tiles(const bf16 *x, i64 step, i64 count, i64 width, float *to) {
    for (i64 base = 0; base < count; base += RLK_MAX_ROWS) {
        i64 rows = count - base < RLK_MAX_ROWS ? count - base : RLK_MAX_ROWS;
        for (i64 r = 0; r < rows; r++)
            for (i64 d = 0; d < width; d++) to[base * width + d * rows + r] = rlk_from_bf16(x[(base + r) * step + d]);
    }
}

/* product[count][BLOCK] = rows (as tiles) times two transposed panels. */
static void score_block(const float *tiles, i64 count, i64 width, const float *panels, float *product) {
    float tile[RLK_MAX_ROWS * RLK_PANEL];
    for (i64 base = 0; base < count; base += RLK_MAX_ROWS) {
        i64 rows = count - base < RLK_MAX_ROWS ? count - base : RLK_MAX_ROWS;
        for (i64 half = 0; half < 2; half++) {
            rlk_tile_f32((int)rows, width, tiles + base * width, rows, panels + half * width * RLK_PANEL, tile);
            for (i64 r = 0; r < rows; r++)
                memcpy(product + (base + r) * BLOCK + half * RLK_PANEL, tile + r * RLK_PANEL, RLK_PANEL * sizeof(float));
        }
    }
}

/* d and dP of a block become bf16(P) and dS, both as fp32 [queries][BLOCK]; +0 where the key comes after the query. */
static void probabilities(const backward *g, i64 head, i64 token, i64 q_first, i64 queries, i64 k_first, i64 keys,
                          float *p, float *ds) {
    for (i64 r = 0; r < queries; r++) {
        float lse = g->lse[(token + r) * g->heads + head], delta = g->delta[(token + r) * g->heads + head];
        i64 count = q_first + r - k_first + 1 < keys ? q_first + r - k_first + 1 : keys;
        float *row = p + r * BLOCK, *gradient = ds + r * BLOCK;
        for (i64 i = 0; i < BLOCK; i++) {
            float weight = rlk_exp(row[i] * g->c - lse);
            gradient[i] = rlk_from_bf16(rlk_to_bf16(weight * (gradient[i] - delta)));
            row[i] = rlk_from_bf16(rlk_to_bf16(weight));
        }
        for (i64 i = count > 0 ? count : 0; i < BLOCK; i++) row[i] = gradient[i] = 0.0f;
    }
}

/* acc[rows][width] = fl(acc + block), block = chain over depth of a[k * a_step + row] b[k][...]; b in column panels. */
static void add_product(const float *a, i64 a_step, i64 rows, i64 depth, const float *b, i64 width, float *acc) {
    float tile[RLK_MAX_ROWS * RLK_PANEL];
    for (i64 base = 0; base < rows; base += RLK_MAX_ROWS) {
        i64 count = rows - base < RLK_MAX_ROWS ? rows - base : RLK_MAX_ROWS;
        for (i64 panel = 0; panel < panels_of(width); panel++) {
            i64 columns = width - panel * RLK_PANEL < RLK_PANEL ? width - panel * RLK_PANEL : RLK_PANEL;
            rlk_tile_f32((int)count, depth, a + base, a_step, b + panel * BLOCK * RLK_PANEL, tile);
            for (i64 r = 0; r < count; r++)
                for (i64 c = 0; c < columns; c++) {
                    float *to = acc + (base + r) * width + panel * RLK_PANEL + c;
                    *to = *to + tile[r * RLK_PANEL + c];
                }
        }
    }
}

static void store_scaled(const float *acc, i64 rows, i64 width, float scale, bf16 *to, i64 step) {
    for (i64 r = 0; r < rows; r++)
        for (i64 d = 0; d < width; d++) to[r * step + d] = rlk_to_bf16(acc[r * width + d] * scale);
}

static void delta_body(void *context, i64 token, int thread) {
    (void)thread;
    const backward *g = context;
    float *terms = rlk_scratch(0, (size_t)(2 * g->width) * sizeof(float));
    for (i64 head = 0; head < g->heads; head++) {
        const bf16 *out = g->out + token * g->out_token + head * g->width;
        const bf16 *dout = g->dout + token * g->dout_token + head * g->width;
        for (i64 d = 0; d < g->width; d++) terms[d] = rlk_from_bf16(dout[d]) * rlk_from_bf16(out[d]);
        g->delta[token * g->heads + head] = rlk_tree(terms, g->width);
    }
}

/* item: (run of queries, query head). */
static void dq_body(void *context, i64 item, int thread) {
    (void)thread;
    const backward *g = context;
    i64 block = item / g->heads, head = item % g->heads, kv_head = head / (g->heads / g->kv_heads), width = g->width;
    i64 sequence = g->items[3 * block], first = g->items[3 * block + 1], begin = g->offsets[sequence];
    i64 length = g->offsets[sequence + 1] - begin, queries = g->items[3 * block + 2];
    size_t transposed = (size_t)(2 * width * RLK_PANEL), straight = (size_t)(panels_of(width) * BLOCK * RLK_PANEL);
    float *k_t = rlk_scratch(0, transposed * sizeof(float)), *v_t = rlk_scratch(1, transposed * sizeof(float));
    float *k_s = rlk_scratch(2, straight * sizeof(float)), *q = rlk_scratch(3, (size_t)(2 * BLOCK * width) * sizeof(float));
    float *dout = q + BLOCK * width, *p = rlk_scratch(4, (size_t)(2 * BLOCK * BLOCK) * sizeof(float)), *ds = p + BLOCK * BLOCK;
    float *ds_t = rlk_scratch(6, (size_t)(BLOCK * BLOCK) * sizeof(float));
    float *acc = rlk_scratch(5, (size_t)(BLOCK * width) * sizeof(float));
    memset(acc, 0, (size_t)(BLOCK * width) * sizeof(float));
    load_tiles(g->q + (begin + first) * g->q_token + head * width, g->q_token, queries, width, q);
    load_tiles(g->dout + (begin + first) * g->dout_token + head * width, g->dout_token, queries, width, dout);
    for (i64 key = 0; key <= first; key += BLOCK) {
        i64 keys = length - key < BLOCK ? length - key : BLOCK;
        const bf16 *k = g->k + (begin + key) * g->k_token + kv_head * width;
        load_transposed(k, g->k_token, keys, width, k_t);
        load_transposed(g->v + (begin + key) * g->v_token + kv_head * width, g->v_token, keys, width, v_t);
        load_straight(k, g->k_token, keys, width, k_s);
        score_block(q, queries, width, k_t, p);
        score_block(dout, queries, width, v_t, ds);
        probabilities(g, head, begin + first, first, queries, key, keys, p, ds);
        for (i64 r = 0; r < queries; r++)
            for (i64 i = 0; i < BLOCK; i++) ds_t[i * BLOCK + r] = ds[r * BLOCK + i];
        add_product(ds_t, BLOCK, queries, BLOCK, k_s, width, acc);
    }
    store_scaled(acc, queries, width, g->c, g->dq + ((begin + first) * g->heads + head) * width, g->heads * width);
}

/* item: (run of keys, KV head); query blocks keep their places whatever the run. */
static void dkv_body(void *context, i64 item, int thread) {
    (void)thread;
    const backward *g = context;
    i64 block = item / g->kv_heads, kv_head = item % g->kv_heads, group = g->heads / g->kv_heads, width = g->width;
    i64 sequence = g->items[3 * block], key = g->items[3 * block + 1], begin = g->offsets[sequence];
    i64 length = g->offsets[sequence + 1] - begin, keys = g->items[3 * block + 2];
    size_t transposed = (size_t)(2 * width * RLK_PANEL), straight = (size_t)(panels_of(width) * BLOCK * RLK_PANEL);
    float *k_t = rlk_scratch(0, transposed * sizeof(float)), *v_t = rlk_scratch(1, transposed * sizeof(float));
    float *q_s = rlk_scratch(2, 2 * straight * sizeof(float)), *dout_s = q_s + straight;
    float *q = rlk_scratch(3, (size_t)(2 * BLOCK * width) * sizeof(float)), *dout = q + BLOCK * width;
    float *p = rlk_scratch(4, (size_t)(2 * BLOCK * BLOCK) * sizeof(float)), *ds = p + BLOCK * BLOCK;
    float *dk = rlk_scratch(5, (size_t)(2 * BLOCK * width) * sizeof(float)), *dv = dk + BLOCK * width;
    memset(dk, 0, (size_t)(2 * BLOCK * width) * sizeof(float));
    load_transposed(g->k + (begin + key) * g->k_token + kv_head * width, g->k_token, keys, width, k_t);
    load_transposed(g->v + (begin + key) * g->v_token + kv_head * width, g->v_token, keys, width, v_t);
    for (i64 head = kv_head * group; head < (kv_head + 1) * group; head++)
        for (i64 first = key / BLOCK * BLOCK; first < length; first += BLOCK) {
            i64 queries = length - first < BLOCK ? length - first : BLOCK;
            const bf16 *q_from = g->q + (begin + first) * g->q_token + head * width;
            const bf16 *dout_from = g->dout + (begin + first) * g->dout_token + head * width;
            load_tiles(q_from, g->q_token, queries, width, q);
            load_tiles(dout_from, g->dout_token, queries, width, dout);
            load_straight(q_from, g->q_token, queries, width, q_s);
            load_straight(dout_from, g->dout_token, queries, width, dout_s);
            score_block(q, queries, width, k_t, p);
            score_block(dout, queries, width, v_t, ds);
            probabilities(g, head, begin + first, first, queries, key, keys, p, ds);
            add_product(p, BLOCK, keys, queries, dout_s, width, dv);
            add_product(ds, BLOCK, keys, queries, q_s, width, dk);
        }
    store_scaled(dk, keys, width, g->c, g->dk + ((begin + key) * g->kv_heads + kv_head) * width, g->kv_heads * width);
    store_scaled(dv, keys, width, 1.0f, g->dv + ((begin + key) * g->kv_heads + kv_head) * width, g->kv_heads * width);
}

/* delta[tokens][heads] = tree(fl(dO O)). */
void rlk_attention_delta(i64 tokens, i64 heads, i64 width, const bf16 *out, i64 out_token, const bf16 *dout,
                         i64 dout_token, float *delta) {
    backward g = {.heads = heads, .width = width, .out_token = out_token, .dout_token = dout_token, .out = out,
                  .dout = dout, .delta = delta};
    rlk_parallel(delta_body, &g, tokens);
}

/* Rows of dq, dk, dv that the items name, of packed samples whose q, k, v, dO, LSE and delta are whole. */
void rlk_attention_backward(i64 heads, i64 kv_heads, i64 width, const bf16 *q, i64 q_token, const bf16 *k, i64 k_token,
                            const bf16 *v, i64 v_token, const bf16 *dout, i64 dout_token, const float *lse, float *delta,
                            const i64 *offsets, i64 items, const i64 *item_list, float c, bf16 *dq, bf16 *dk, bf16 *dv) {
    backward g = {.heads = heads, .kv_heads = kv_heads, .width = width, .q_token = q_token, .k_token = k_token,
                  .v_token = v_token, .dout_token = dout_token, .q = q, .k = k, .v = v, .dout = dout, .lse = lse,
                  .delta = delta, .offsets = offsets, .items = item_list, .c = c, .dq = dq, .dk = dk, .dv = dv};
    rlk_parallel(dq_body, &g, items * heads);
    rlk_parallel(dkv_body, &g, items * kv_heads);
}
