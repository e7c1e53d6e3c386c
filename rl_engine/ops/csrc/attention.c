/* Attention, one arithmetic for training, prefill, chunked prefill and decode. Contraction off.
 *
 * Keys are taken in blocks of 64 and splits of 1,024, both counted from the sample's first token. Per block and query row:
 * m the running maximum of the raw dot d, mu = fl(m c), p = exp(fl(fl(d c) - mu)), alpha = exp(fl(mu_old - mu)),
 * l = fl(fl(l alpha) + tree(p)), O = fl(fl(O alpha) + bf16(p) V), the block's product a chain from +0. A split starts from
 * the empty state; splits merge ascending. */
#include "rlk.h"

#define ITEM_ROWS 48 /* query rows of one work item */

typedef struct {
    i64 heads, kv_heads, width, page, table_row, sequences;
    const bf16 *q, *k_pages, *v_pages; /* q [tokens][heads][width]; K pages [page][kv head][width][slot], V [slot][width] */
    i64 q_token;
    const int32_t *table;  /* [sequences][table_row] page numbers */
    const i64 *q_offsets;  /* [sequences + 1] rows of q */
    const i64 *q_position; /* logical position of a sequence's first query */
    const i64 *items;      /* [items][2]: sequence, first query of the tile */
    float c;
    bf16 *out;  /* [tokens][heads][width] */
    float *lse; /* [tokens][heads] or NULL */
} attention;

typedef struct {
    float m, l, mu;
} state;

static i64 panels_of(i64 width) { return (width + RLK_PANEL - 1) / RLK_PANEL; }

/* K block as [2][width][32] and V block as [panels][64][32], fp32, +0 where a key does not exist. */
static void load_block(const attention *g, i64 sequence, i64 head, i64 first, i64 length, float *k, float *v) {
    i64 width = g->width, count = length - first < RLK_KV_BLOCK ? length - first : RLK_KV_BLOCK;
    const int32_t *table = g->table + sequence * g->table_row;
    i64 column_panels = panels_of(width);
    if (count < RLK_KV_BLOCK || width % RLK_PANEL) {
        memset(k, 0, (size_t)(2 * width * RLK_PANEL) * sizeof(float));
        memset(v, 0, (size_t)(column_panels * RLK_KV_BLOCK * RLK_PANEL) * sizeof(float));
    }
    for (i64 key = 0; key < count;) {
        i64 slot = (first + key) % g->page, run = g->page - slot;
        i64 number = table[(first + key) / g->page];
        if (run > count - key) run = count - key;
        if (key < RLK_PANEL && key + run > RLK_PANEL) run = RLK_PANEL - key; /* stay inside one panel of keys */
        const bf16 *k_page = g->k_pages + (number * g->kv_heads + head) * width * g->page + slot;
        const bf16 *v_page = g->v_pages + ((number * g->kv_heads + head) * g->page + slot) * width;
        float *k_to = k + key / RLK_PANEL * width * RLK_PANEL + key % RLK_PANEL;
        for (i64 d = 0; d < width; d++)
            for (i64 i = 0; i < run; i++) k_to[d * RLK_PANEL + i] = rlk_from_bf16(k_page[d * g->page + i]);
        for (i64 i = 0; i < run; i++)
            for (i64 p = 0; p < column_panels; p++) {
                i64 columns = width - p * RLK_PANEL < RLK_PANEL ? width - p * RLK_PANEL : RLK_PANEL;
                float *v_to = v + (p * RLK_KV_BLOCK + key + i) * RLK_PANEL;
                for (i64 c = 0; c < columns; c++) v_to[c] = rlk_from_bf16(v_page[i * width + p * RLK_PANEL + c]);
            }
        key += run;
    }
}

/* One row of scores [64] in two 32-column tiles: updates the state, writes bf16(p) to p[64] with step rows; alpha is
 * returned for O. Only the first count keys exist. */
static float softmax_row(const float *left, const float *right, i64 count, float c, state *s, float *p, i64 p_step) {
    float scores[RLK_KV_BLOCK], weights[RLK_KV_BLOCK];
    memcpy(scores, left, RLK_PANEL * sizeof(float));
    memcpy(scores + RLK_PANEL, right, RLK_PANEL * sizeof(float));
    float top = s->m;
    for (i64 i = 0; i < count; i++) top = scores[i] > top ? scores[i] : top;
    top = top + 0.0f;
    float mu = top * c;
    for (i64 i = 0; i < RLK_KV_BLOCK; i++) weights[i] = rlk_exp(scores[i] * c - mu);
    for (i64 i = count; i < RLK_KV_BLOCK; i++) weights[i] = 0.0f;
    for (i64 i = 0; i < RLK_KV_BLOCK; i++) p[i * p_step] = rlk_from_bf16(rlk_to_bf16(weights[i]));
    float alpha = s->m == -INFINITY ? 0.0f : rlk_exp(s->mu - mu);
    s->l = s->l * alpha + rlk_tree(weights, RLK_KV_BLOCK);
    s->m = top;
    s->mu = mu;
    return alpha;
}

static void merge_split(state *total, float *o_total, const state *split, const float *o_split, i64 width) {
    if (split->m == -INFINITY) return;
    if (total->m == -INFINITY) {
        *total = *split;
        memcpy(o_total, o_split, (size_t)width * sizeof(float));
        return;
    }
    float mu = total->mu > split->mu ? total->mu : split->mu;
    float a = rlk_exp(total->mu - mu), b = rlk_exp(split->mu - mu);
    total->l = total->l * a + split->l * b;
    for (i64 d = 0; d < width; d++) o_total[d] = o_total[d] * a + o_split[d] * b;
    total->m = total->m > split->m ? total->m : split->m;
    total->mu = mu;
}

/* Attends a register tile's rows to one block. q is [width][rows]; row r is query position positions[r]. */
static void tile_block(const attention *g, const float *k, const float *v, const float *q, i64 rows, i64 first,
                       const i64 *positions, state *states, float *o) {
    float scores[2][RLK_MAX_ROWS * RLK_PANEL], p[RLK_KV_BLOCK * RLK_MAX_ROWS], product[RLK_MAX_ROWS * RLK_PANEL];
    float alpha[RLK_MAX_ROWS];
    i64 width = g->width;
    rlk_tile_f32((int)rows, width, q, rows, k, scores[0]);
    rlk_tile_f32((int)rows, width, q, rows, k + width * RLK_PANEL, scores[1]);
    for (i64 r = 0; r < rows; r++) {
        i64 count = positions[r] - first + 1 < RLK_KV_BLOCK ? positions[r] - first + 1 : RLK_KV_BLOCK;
        if (count > 0) {
            alpha[r] = softmax_row(scores[0] + r * RLK_PANEL, scores[1] + r * RLK_PANEL, count, g->c, states + r, p + r, rows);
        } else {
            for (i64 i = 0; i < RLK_KV_BLOCK; i++) p[i * rows + r] = 0.0f;
        }
    }
    for (i64 panel = 0; panel < panels_of(width); panel++) {
        i64 columns = width - panel * RLK_PANEL < RLK_PANEL ? width - panel * RLK_PANEL : RLK_PANEL;
        rlk_tile_f32((int)rows, RLK_KV_BLOCK, p, rows, v + panel * RLK_KV_BLOCK * RLK_PANEL, product);
        for (i64 r = 0; r < rows; r++) {
            if (positions[r] < first) continue; /* no key of this block exists for the row */
            float *to = o + r * width + panel * RLK_PANEL;
            for (i64 i = 0; i < columns; i++) to[i] = to[i] * alpha[r] + product[r * RLK_PANEL + i];
        }
    }
}

static void attention_body(void *context, i64 item, int thread) {
    (void)thread;
    const attention *g = context;
    i64 tile = item / g->kv_heads, head = item % g->kv_heads, group = g->heads / g->kv_heads, width = g->width;
    i64 sequence = g->items[2 * tile], start = g->items[2 * tile + 1];
    i64 tile_queries = ITEM_ROWS / group > 0 ? ITEM_ROWS / group : 1;
    i64 queries = g->q_offsets[sequence + 1] - g->q_offsets[sequence];
    i64 length = g->q_position[sequence] + queries; /* keys that exist */
    i64 count = queries - start < tile_queries ? queries - start : tile_queries, rows = count * group;
    float *k = rlk_scratch(0, (size_t)(2 * width * RLK_PANEL) * sizeof(float));
    float *v = rlk_scratch(1, (size_t)(panels_of(width) * RLK_KV_BLOCK * RLK_PANEL) * sizeof(float));
    float *q = rlk_scratch(2, (size_t)(rows * width) * sizeof(float));
    float *o = rlk_scratch(3, (size_t)(2 * rows * width) * sizeof(float)), *o_total = o + rows * width;
    state *split = rlk_scratch(4, (size_t)(2 * rows) * sizeof(state)), *total = split + rows;
    i64 *positions = rlk_scratch(5, (size_t)rows * sizeof(i64));
    for (i64 r = 0; r < rows; r++) {
        i64 query = start + r / group;
        positions[r] = g->q_position[sequence] + query;
        const bf16 *from = g->q + (g->q_offsets[sequence] + query) * g->q_token + (head * group + r % group) * width;
        i64 base = r / RLK_MAX_ROWS * RLK_MAX_ROWS, tile_rows = rows - base < RLK_MAX_ROWS ? rows - base : RLK_MAX_ROWS;
        for (i64 d = 0; d < width; d++) q[base * width + d * tile_rows + r - base] = rlk_from_bf16(from[d]);
        total[r] = (state){-INFINITY, 0.0f, -INFINITY};
    }
    for (i64 first = 0; first <= positions[rows - 1]; first += RLK_KV_BLOCK) {
        if (first % RLK_KV_SPLIT == 0) {
            for (i64 r = 0; r < rows && first; r++) merge_split(total + r, o_total + r * width, split + r, o + r * width, width);
            for (i64 r = 0; r < rows; r++) split[r] = (state){-INFINITY, 0.0f, -INFINITY};
            memset(o, 0, (size_t)(rows * width) * sizeof(float));
        }
        load_block(g, sequence, head, first, length, k, v);
        for (i64 base = 0; base < rows; base += RLK_MAX_ROWS) {
            i64 tile_rows = rows - base < RLK_MAX_ROWS ? rows - base : RLK_MAX_ROWS;
            if (positions[base + tile_rows - 1] >= first)
                tile_block(g, k, v, q + base * width, tile_rows, first, positions + base, split + base, o + base * width);
        }
    }
    for (i64 r = 0; r < rows; r++) {
        merge_split(total + r, o_total + r * width, split + r, o + r * width, width);
        i64 row = (g->q_offsets[sequence] + start + r / group) * g->heads + head * group + r % group;
        for (i64 d = 0; d < width; d++) g->out[row * width + d] = rlk_to_bf16(o_total[r * width + d] / total[r].l);
        if (g->lse) g->lse[row] = total[r].mu + rlk_log(total[r].l);
    }
}

/* Query positions that one work item takes; callers cut a sequence's queries at multiples of it. */
i64 rlk_attention_tile(i64 heads, i64 kv_heads) {
    i64 tile = ITEM_ROWS / (heads / kv_heads);
    return tile > 0 ? tile : 1;
}

void rlk_attention(i64 heads, i64 kv_heads, i64 width, i64 page, const bf16 *q, i64 q_token, const bf16 *k_pages,
                   const bf16 *v_pages, const int32_t *table, i64 table_row, const i64 *q_offsets, const i64 *q_position,
                   i64 items, const i64 *item_list, float c, bf16 *out, float *lse) {
    attention g = {.heads = heads, .kv_heads = kv_heads, .width = width, .page = page, .table_row = table_row, .q = q,
                   .q_token = q_token, .k_pages = k_pages, .v_pages = v_pages, .table = table, .q_offsets = q_offsets,
                   .q_position = q_position, .items = item_list, .c = c, .out = out, .lse = lse};
    rlk_parallel(attention_body, &g, items * kv_heads);
}

typedef struct {
    i64 tokens, kv_heads, width, page, k_token, v_token;
    const bf16 *k, *v;
    const i64 *slots;
    bf16 *k_pages, *v_pages;
} kv_store;

static void kv_store_body(void *context, i64 token, int thread) {
    (void)thread;
    const kv_store *g = context;
    if (g->slots[token] < 0) return;
    i64 number = g->slots[token] / g->page, slot = g->slots[token] % g->page;
    for (i64 head = 0; head < g->kv_heads; head++) {
        bf16 *k_to = g->k_pages + (number * g->kv_heads + head) * g->width * g->page + slot;
        bf16 *v_to = g->v_pages + ((number * g->kv_heads + head) * g->page + slot) * g->width;
        const bf16 *k = g->k + token * g->k_token + head * g->width, *v = g->v + token * g->v_token + head * g->width;
        for (i64 d = 0; d < g->width; d++) k_to[d * g->page] = k[d];
        memcpy(v_to, v, (size_t)g->width * sizeof(bf16));
    }
}

/* Writes k, v [tokens][kv heads][width] into their pages; slots[t] = page number * page size + slot, negative: nowhere. */
void rlk_kv_store(i64 tokens, i64 kv_heads, i64 width, i64 page, const bf16 *k, i64 k_token, const bf16 *v, i64 v_token,
                  const i64 *slots, bf16 *k_pages, bf16 *v_pages) {
    kv_store g = {.tokens = tokens, .kv_heads = kv_heads, .width = width, .page = page, .k_token = k_token,
                  .v_token = v_token, .k = k, .v = v, .slots = slots, .k_pages = k_pages, .v_pages = v_pages};
    rlk_parallel(kv_store_body, &g, tokens);
}
