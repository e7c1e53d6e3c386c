/* The chain: every output is one fp32 accumulator, k ascending from +0. Rows, columns, threads and tiles are free.
 *
 * Operands are bf16, so each product is exact in fp32 and contraction cannot change a bit (this file is compiled with it
 * on). B is read in panels of 32 columns, k-major; a panel is packed per call, or once per weight update.
 *
 * Panels and packed rows hold k in pairs: (k + 1, k) in one 32-bit word. AVX512-BF16's dot product adds the odd half
 * first, then the even half, each as a fused multiply-add with one rounding, so a swapped pair is two steps of the chain.
 * The start-up proof compares it with plain fp32 steps; sums below 2^-126, which it flushes, are outside the contract. */
#include "rlk.h"
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#define ROW_LIMIT 12 /* 24 of 32 registers accumulate */
#elif defined(__AVX__)
#define LANES 8
#define ROW_LIMIT 3 /* 12 of 16 */
#else
#define LANES 4
#define ROW_LIMIT 2
#endif
#define VECTORS (RLK_PANEL / LANES)

typedef float vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* tile[ROWS][32] = chain over depth steps; a is [depth][a_step] fp32, panel [depth][32] fp32. */
#define TILE_F32(ROWS)                                                                                                 \
    static void tile_f32_##ROWS(i64 depth, const float *a, i64 a_step, const float *panel, float *tile) {              \
        vector sum[ROWS][VECTORS];                                                                                     \
        CLEAR_TILE(ROWS)                                                                                               \
        for (i64 k = 0; k < depth; k++) {                                                                              \
            vector b[VECTORS];                                                                                         \
            _Pragma("GCC unroll 8") for (int v = 0; v < VECTORS; v++)                                                  \
                b[v] = *(const vector *)(panel + k * RLK_PANEL + v * LANES);                                           \
            const float *row = a + k * a_step;                                                                         \
            _Pragma("GCC unroll 12") for (int r = 0; r < ROWS; r++)                                                    \
                _Pragma("GCC unroll 8") for (int v = 0; v < VECTORS; v++) sum[r][v] += row[r] * b[v];                  \
        }                                                                                                              \
        STORE_TILE(ROWS)                                                                                               \
    }
#define CLEAR_TILE(ROWS)                                                                                               \
    _Pragma("GCC unroll 12") for (int r = 0; r < ROWS; r++)                                                            \
        _Pragma("GCC unroll 8") for (int v = 0; v < VECTORS; v++) sum[r][v] = (vector){0};
#define STORE_TILE(ROWS)                                                                                               \
    _Pragma("GCC unroll 12") for (int r = 0; r < ROWS; r++)                                                            \
        _Pragma("GCC unroll 8") for (int v = 0; v < VECTORS; v++)                                                      \
            *(vector *)(tile + r * RLK_PANEL + v * LANES) = sum[r][v];

/* The same over pairs of k: a is [pairs][ROWS] words, panel [pairs][32] words. */
#if defined(__AVX512BF16__)
#define PAIR_STEP(SUM, WORD, B) SUM = (vector)_mm512_dpbf16_ps((__m512)SUM, (__m512bh)_mm512_set1_epi32((int)WORD), (__m512bh)B)
#else
#define PAIR_STEP(SUM, WORD, B)                                                                                        \
    SUM += rlk_bits_float(WORD & 0xffff0000u) * (vector)(B & 0xffff0000u);                                             \
    SUM += rlk_bits_float(WORD << 16) * (vector)(B << 16)
#endif
#define TILE_PAIR(ROWS)                                                                                                \
    static void tile_pair_##ROWS(i64 pairs, const uint32_t *a, const uint32_t *panel, float *tile) {                   \
        vector sum[ROWS][VECTORS];                                                                                     \
        CLEAR_TILE(ROWS)                                                                                               \
        for (i64 k = 0; k < pairs; k++) {                                                                              \
            words b[VECTORS];                                                                                          \
            _Pragma("GCC unroll 8") for (int v = 0; v < VECTORS; v++)                                                  \
                b[v] = *(const words *)(panel + k * RLK_PANEL + v * LANES);                                            \
            const uint32_t *row = a + k * ROWS;                                                                        \
            _Pragma("GCC unroll 12") for (int r = 0; r < ROWS; r++)                                                    \
                _Pragma("GCC unroll 8") for (int v = 0; v < VECTORS; v++) { PAIR_STEP(sum[r][v], row[r], b[v]); }      \
        }                                                                                                              \
        STORE_TILE(ROWS)                                                                                               \
    }
#define EACH_ROW_COUNT(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11) DO(12)
EACH_ROW_COUNT(TILE_F32)
EACH_ROW_COUNT(TILE_PAIR)
#define NAME_F32(ROWS) tile_f32_##ROWS,
#define NAME_PAIR(ROWS) tile_pair_##ROWS,
static void (*const tiles_f32[])(i64, const float *, i64, const float *, float *) = {0, EACH_ROW_COUNT(NAME_F32)};
static void (*const tiles_pair[])(i64, const uint32_t *, const uint32_t *, float *) = {0, EACH_ROW_COUNT(NAME_PAIR)};

void rlk_tile_f32(int rows, i64 depth, const float *a, i64 a_step, const float *panel, float *tile) {
    for (int r = 0; r < rows; r += ROW_LIMIT) {
        int count = rows - r < ROW_LIMIT ? rows - r : ROW_LIMIT;
        tiles_f32[count](depth, a + r, a_step, panel, tile + r * RLK_PANEL);
    }
}

enum { OUT_F32 = 0, OUT_BF16 = 1, OUT_BF16_RESIDUAL = 2, OUT_F32_ADD = 3 };

typedef struct {
    i64 rows, columns, depth;
    const bf16 *a, *b;
    i64 a_row, a_k, b_k, b_column;
    uint32_t *panels;
    int out_kind;
    void *out;
    i64 out_row;
    const bf16 *residual;
    i64 residual_row;
    i64 row_block, row_blocks, panel_chunk, panel_chunks;
} gemm;

/* One word of the chain's order: k in the upper half (added first), k + 1 in the lower. */
static inline uint32_t pair(bf16 first, bf16 second) { return ((uint32_t)first << 16) | second; }

static void pack_panel(const gemm *g, i64 panel) {
    i64 pairs = (g->depth + 1) / 2, first = panel * RLK_PANEL;
    uint32_t *to = g->panels + panel * pairs * RLK_PANEL;
    i64 count = g->columns - first < RLK_PANEL ? g->columns - first : RLK_PANEL;
    if (count < RLK_PANEL) memset(to, 0, (size_t)(pairs * RLK_PANEL) * sizeof(uint32_t));
    if (g->b_column == 1) {
        for (i64 k = 0; k < g->depth; k += 2) {
            const bf16 *even = g->b + k * g->b_k + first, *odd = even + g->b_k;
            if (k + 1 < g->depth)
                for (i64 c = 0; c < count; c++) to[k / 2 * RLK_PANEL + c] = pair(even[c], odd[c]);
            else
                for (i64 c = 0; c < count; c++) to[k / 2 * RLK_PANEL + c] = pair(even[c], 0);
        }
        return;
    }
    for (i64 k0 = 0; k0 < g->depth; k0 += 32) {
        i64 k1 = k0 + 32 < g->depth ? k0 + 32 : g->depth;
        for (i64 c = 0; c < count; c++) {
            const bf16 *from = g->b + (first + c) * g->b_column;
            i64 k = k0;
            for (; k + 1 < k1; k += 2) to[k / 2 * RLK_PANEL + c] = pair(from[k * g->b_k], from[(k + 1) * g->b_k]);
            if (k < k1) to[k / 2 * RLK_PANEL + c] = pair(from[k * g->b_k], 0);
        }
    }
}

static void pack_body(void *context, i64 item, int thread) {
    (void)thread;
    pack_panel(context, item);
}

/* Packs B[depth][columns] into ceil(columns / 32) panels of [ceil(depth / 2)][32] words, zero behind the last column. */
void rlk_pack(i64 columns, i64 depth, const bf16 *b, i64 b_k, i64 b_column, uint32_t *panels) {
    gemm g = {.columns = columns, .depth = depth, .b = b, .b_k = b_k, .b_column = b_column, .panels = panels};
    rlk_parallel(pack_body, &g, (columns + RLK_PANEL - 1) / RLK_PANEL);
}

static void store_row(const gemm *g, const float *from, i64 row, i64 column, i64 count) {
    switch (g->out_kind) {
    case OUT_F32:
        memcpy((float *)g->out + row * g->out_row + column, from, (size_t)count * sizeof(float));
        return;
    case OUT_F32_ADD: {
        float *to = (float *)g->out + row * g->out_row + column;
        for (i64 c = 0; c < count; c++) to[c] = to[c] + from[c];
        return;
    }
    case OUT_BF16: {
        bf16 *to = (bf16 *)g->out + row * g->out_row + column;
        for (i64 c = 0; c < count; c++) to[c] = rlk_to_bf16(from[c]);
        return;
    }
    default: {
        bf16 *to = (bf16 *)g->out + row * g->out_row + column;
        const bf16 *residual = g->residual + row * g->residual_row + column;
        for (i64 c = 0; c < count; c++) to[c] = rlk_to_bf16(rlk_from_bf16(residual[c]) + from[c]);
    }
    }
}

/* Packs count rows of A as [pairs][count] words. */
static void pack_rows(const gemm *g, i64 row, i64 count, uint32_t *to) {
    i64 whole = g->depth / 2 * 2;
    if (g->a_row == 1) {
        for (i64 k = 0; k < whole; k += 2) {
            const bf16 *even = g->a + row + k * g->a_k, *odd = even + g->a_k;
            for (i64 i = 0; i < count; i++) to[k / 2 * count + i] = pair(even[i], odd[i]);
        }
    } else {
        for (i64 i = 0; i < count; i++) {
            const bf16 *from = g->a + (row + i) * g->a_row;
            for (i64 k = 0; k < whole; k += 2) to[k / 2 * count + i] = pair(from[k * g->a_k], from[(k + 1) * g->a_k]);
        }
    }
    if (whole < g->depth)
        for (i64 i = 0; i < count; i++) to[whole / 2 * count + i] = pair(g->a[(row + i) * g->a_row + whole * g->a_k], 0);
}

static void gemm_body(void *context, i64 item, int thread) {
    (void)thread;
    const gemm *g = context;
    i64 first_row = (item / g->panel_chunks) * g->row_block;
    i64 last_row = first_row + g->row_block < g->rows ? first_row + g->row_block : g->rows;
    i64 all_panels = (g->columns + RLK_PANEL - 1) / RLK_PANEL;
    i64 first_panel = (item % g->panel_chunks) * g->panel_chunk;
    i64 last_panel = first_panel + g->panel_chunk < all_panels ? first_panel + g->panel_chunk : all_panels;
    i64 rows = last_row - first_row;
    if (rows <= 0 || first_panel >= last_panel) return;
    i64 tile_count = (rows + ROW_LIMIT - 1) / ROW_LIMIT;
    i64 tile_rows = (rows + tile_count - 1) / tile_count;
    i64 pairs = (g->depth + 1) / 2;
    uint32_t *packed = rlk_scratch(0, (size_t)(rows * pairs) * sizeof(uint32_t));
    for (i64 r = 0; r < rows; r += tile_rows)
        pack_rows(g, first_row + r, rows - r < tile_rows ? rows - r : tile_rows, packed + r * pairs);
    float tile[RLK_MAX_ROWS * RLK_PANEL] __attribute__((aligned(64)));
    for (i64 p = first_panel; p < last_panel; p++) {
        const uint32_t *panel = g->panels + p * pairs * RLK_PANEL;
        i64 columns = g->columns - p * RLK_PANEL < RLK_PANEL ? g->columns - p * RLK_PANEL : RLK_PANEL;
        for (i64 r = 0; r < rows; r += tile_rows) {
            i64 count = rows - r < tile_rows ? rows - r : tile_rows;
            tiles_pair[count](pairs, packed + r * pairs, panel, tile);
            for (i64 i = 0; i < count; i++)
                store_row(g, tile + i * RLK_PANEL, first_row + r + i, p * RLK_PANEL, columns);
        }
    }
}

/* out[rows][columns] (+)= A[rows][depth] B[depth][columns]; strides in elements. b_column 0: b holds packed panels. */
void rlk_gemm(i64 rows, i64 columns, i64 depth, const bf16 *a, i64 a_row, i64 a_k, const bf16 *b, i64 b_k, i64 b_column,
              int out_kind, void *out, i64 out_row, const bf16 *residual, i64 residual_row) {
    if (rows <= 0 || columns <= 0) return;
    gemm g = {.rows = rows, .columns = columns, .depth = depth, .a = a, .b = b, .a_row = a_row, .a_k = a_k, .b_k = b_k,
              .b_column = b_column, .panels = (uint32_t *)b, .out_kind = out_kind, .out = out, .out_row = out_row,
              .residual = residual, .residual_row = residual_row};
    i64 panels = (columns + RLK_PANEL - 1) / RLK_PANEL;
    if (b_column != 0) {
        g.panels = rlk_scratch(1, (size_t)(panels * ((depth + 1) / 2) * RLK_PANEL) * sizeof(uint32_t));
        rlk_parallel(pack_body, &g, panels);
    }
    i64 wanted = 4 * rlk_get_threads();
    g.row_block = 96;
    if (depth > 2048) g.row_block = 48;
    g.row_blocks = (rows + g.row_block - 1) / g.row_block;
    g.panel_chunks = g.row_blocks >= wanted ? 1 : (wanted + g.row_blocks - 1) / g.row_blocks;
    if (rows > 12 && panels / g.panel_chunks < 4) g.panel_chunks = panels >= 4 ? panels / 4 : 1;
    if (g.panel_chunks > panels) g.panel_chunks = panels;
    g.panel_chunk = (panels + g.panel_chunks - 1) / g.panel_chunks;
    rlk_parallel(gemm_body, &g, g.row_blocks * g.panel_chunks);
}
