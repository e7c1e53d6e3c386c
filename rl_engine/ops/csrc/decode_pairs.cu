// Paged decode on a Hopper by two programs of a cluster for every split of a sample and KV head: each reads every other
// block of keys and half of the columns of V, so no byte is read twice, and each sends its scores to the other.
//
// The bits are the contract's, as in hopper_decode.py: a score is one chain over head_dim (m16n8k16 products, ascending,
// from +0); mu after a block is the running maximum times c; p = exp2(fma(d, c, -mu)); a row sum adds column bits
// 0, 3, 4, 5, 1, 2 in pairs; l = fl(fl(l alpha) + sum); O = fl(O alpha), then += V^T bf16(p) over the block's keys
// ascending. Contraction is off (-fmad=false): a fused multiply-add exists where it is written.
//
// Two groups of four warps compute scores, a block each in turns; the first then does the chain over V. A third group turns
// the scores of two blocks at a time into weights as they arrive. The last warp fetches units of 64 x 64 values into a
// ring. What is asked for before the kernel ahead has ended (`settled`) are old keys alone; queries, and blocks with a new
// key, wait for that end.
//
// Three rules for all barriers:
// 1. A thread waits for turn n of a barrier only if something that it has waited for implies the end of turn n - 1, and
//    while turn n + 1 cannot end. A wait knows a turn by its parity alone: where turn n - 1 still goes on, turn n reads as
//    over; where turn n + 1 is over, as going on for ever. Copies end in any order, so the end of one unit implies
//    nothing of another. A group that takes a slot after the other group had it first waits for the scores of that unit,
//    whose barrier has one turn alone (`wait_for_unit`).
// 2. What frees a buffer comes after the last read of it: after its values have come. `ldmatrix` only asks for them, and an
//    arrival, of the same warp and behind it in the program, does not wait for them: where another kernel keeps the
//    multiprocessor's loads busy, a copy into the freed slot can be faster. So an arrival that frees needs a result of what
//    was read (`behind`).
// 3. What the other program of the cluster sends arrives only while its receiver lives: nobody sends before both have
//    started, and a program ends after all bytes that it expects have come.
//
// Compiled at run time without headers; ROWS (4 or 8 query rows of a KV head have room), RING (units) and BYTES (of shared
// memory) are defined there. For a test of the rules: PAUSES, a bit for each kind of wait before which warps sleep for up
// to 16 us; SLEEPERS, a bit for each group of warps that does; HELD, a unit whose copy is asked for at the last moment, when
// its slot is wanted again.
// Letters: b block of 64 keys of the split, r query row of the KV head, u unit of the ring. A key's place in its block has
// six bits: j = bit 0, quad = bits 1 and 2, high = bit 3, step = bits 4 and 5, as a product spreads them over threads.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) Map { u64 words[16]; };

struct Arguments {
    const u16 *q;
    u16 *out;
    float *part_o, *part_l, *part_mu;
    const int *items, *tables;
    long long table_width, q_token, q_head, out_token, out_head;
    float c;
    int group, page, heads, splits, kv_heads, direct, settled, late;
    u32 zero;  // is 0, which the compiler does not know
};

constexpr int WIDTH = 128, BLOCK = 64, BLOCKS = 16, UNIT = BLOCK * 64 * 2, WARPS = 4, FETCHING = 3 * WARPS;
// Scores fp32 [b, r, step, quad, j, high]; in the same 256 bytes of b and r then p, bf16 [step / 2, quad, step % 2, high, j].
constexpr int ROW = BLOCK * 4, SCORES_AT = RING * UNIT;
constexpr int ALPHA_AT = SCORES_AT + BLOCKS * ROWS * ROW, L_AT = ALPHA_AT + BLOCKS * 8 * 4, MU_AT = L_AT + 8 * 4;
constexpr int BARRIERS_AT = MU_AT + 8 * 4;  // full and empty of every unit, scores and weights of every pair, ends
static_assert(BARRIERS_AT + (2 * RING + BLOCKS + 1) * 8 == BYTES, "shared memory is laid out otherwise than hopper_pairs.py says");
static_assert(RING % 2 == 0 && RING >= BLOCKS / 2, "a slot's turns would be those of other groups than `wait_for_unit` is told");
#ifndef PAUSES
#define PAUSES 0
#endif
#ifndef SLEEPERS
#define SLEEPERS 15
#endif
#ifndef HELD
#define HELD -1
#endif
enum Wait { FOR_ROOM, FOR_KEYS, FOR_SCORES, FOR_WEIGHTS, FOR_VALUES, FOR_OTHER };

#define INFINITE __int_as_float(0x7f800000)

__device__ __forceinline__ float exp2_contract(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

__device__ __forceinline__ void wait_for_kernel_ahead() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_kernel_behind_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

__device__ __forceinline__ void barrier_init(u32 at, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 at) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}

__device__ __forceinline__ void barrier_expect(u32 at, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}

__device__ __forceinline__ void sleep(u32 nanoseconds) { asm volatile("nanosleep.u32 %0;" ::"r"(nanoseconds)); }

__device__ __forceinline__ void pause(Wait kind) {
    if (PAUSES >> kind & SLEEPERS >> threadIdx.x / 32 / WARPS & 1) {
        u32 clock;
        asm volatile("mov.u32 %0, %%clock;" : "=r"(clock));
        sleep((clock ^ threadIdx.x / 32 * 0x9e3779b9u) * 0x85ebca6bu >> 18);
    }
}

__device__ __forceinline__ void barrier_wait(u32 at, u32 parity, Wait kind) {
    pause(kind);
    asm volatile(
        "{\n.reg .pred done;\n"
        "again: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(at),
        "r"(parity)
        : "memory");
}

// One thread of a warp, `leader`, asks for a unit; all take part, so that the address is seen to be one. The second-level
// cache keeps what is small and read again rather than these: a pass reads a key or value once.
__device__ __forceinline__ void bring(u32 leader, u32 into, const Map *map, int column, int row, u32 full, u64 policy) {
    asm volatile(
        "{\n.reg .pred leads;\nsetp.ne.b32 leads, %0, 0;\n"
        "@leads mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%5], %6;\n"
        "@leads cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%1], [%2, {%3, %4}], [%5], %7;\n}" ::"r"(leader),
        "r"(into), "l"(map), "r"(column), "r"(row), "r"(full), "n"(UNIT), "l"(policy)
        : "memory");
}

__device__ __forceinline__ u32 in_other(u32 at, u32 rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    return there;
}

// Two values into the other program's shared memory; its barrier counts their bytes.
__device__ __forceinline__ void send(u32 to, float x, float y, u32 barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to), "f"(x),
                 "f"(y), "r"(barrier)
                 : "memory");
}

// A fragment [16, 16] of a product's first operand, from eight bytes' rows of a unit; `load_across` takes them as columns.
__device__ __forceinline__ void load(u32 (&x)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at)
                 : "memory");
}

__device__ __forceinline__ void load_across(u32 (&x)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at)
                 : "memory");
}

// 0, known only when `result` is, a sum of products of all that was read.
__device__ __forceinline__ u32 behind(float result, u32 zero) { return __float_as_uint(result) & zero; }

__device__ __forceinline__ void product(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

struct Ring {
    u32 base, barriers;
    __device__ __forceinline__ u32 unit(int slot) const { return base + slot * UNIT; }
    __device__ __forceinline__ u32 full(int slot) const { return barriers + slot * 8; }
    __device__ __forceinline__ u32 empty(int slot) const { return barriers + (RING + slot) * 8; }
    __device__ __forceinline__ u32 scores(int pair) const { return barriers + (2 * RING + pair) * 8; }
    __device__ __forceinline__ u32 weights(int pair) const { return barriers + (2 * RING + BLOCKS / 2 + pair) * 8; }
    __device__ __forceinline__ u32 ends() const { return barriers + (2 * RING + BLOCKS) * 8; }
};

// Where a unit lies in the ring, and in which of its turns.
struct Slot {
    int at;
    u32 turn;
    __device__ __forceinline__ explicit Slot(int unit) : at(unit % RING), turn(unit / RING & 1) {}
    __device__ __forceinline__ void step(int units) {
        at += units;
        if (at >= RING) at -= RING, turn ^= 1;
    }
};

// For the unit in this turn of its slot; `unseen`: unit `before`, which had the slot, was the other group's keys.
__device__ __forceinline__ void wait_for_unit(const Ring &ring, const Slot &slot, int before, bool unseen, Wait kind) {
    if (unseen) barrier_wait(ring.scores(before / 2), 0, kind);
    barrier_wait(ring.full(slot.at), slot.turn, kind);
}

struct Work {
    int first, position, count;  // of the queries of the sample
    int start, blocks;           // of the split
    int kv_head, rank;
    // Blocks of keys that are this program's: rank, rank + 2, ...
    __device__ __forceinline__ int own() const { return (blocks + 1 - rank) / 2; }
    __device__ __forceinline__ int pairs() const { return (blocks + 1) / 2; }
};

// One warp: this program's keys in order, two units a block, then its columns of V, one unit a block.
__device__ __forceinline__ void fetch(const Map *k_map, const Map *v_map, const Arguments &a, const Ring &ring, const Work &w,
                                      const int *table) {
    const int lane = threadIdx.x % 32, of_keys = 2 * w.own(), units = of_keys + w.blocks;
    const int key = (w.start + min(lane, w.blocks - 1)) * BLOCK;
    const int rows = (table[key / a.page] * a.kv_heads + w.kv_head) * a.page + key % a.page;
    if (lane < w.pairs()) {  // what the other program sends of this pair
        const bool sent = 2 * lane + 1 - w.rank < w.blocks;
        barrier_expect(ring.scores(lane), sent ? ROWS * ROW : 0);
    }
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    Slot slot(0);
    const Map *held_map = nullptr;
    int held_column = 0, held_row = 0;
    auto bring_held = [&]() {
        if (held_map == nullptr) return;
        sleep(20000);
        bring(lane == 0, ring.unit(HELD % RING), held_map, held_column, held_row, ring.full(HELD % RING), policy);
        held_map = nullptr;
    };
    auto unit = [&](int left, const Map *map, int column, int b, int row) {
        if (a.late > 0 && left == max(min(units / 2, a.late), 1)) let_kernel_behind_start();
        if (HELD >= 0 && units - left == HELD / 2 * 2 + RING) bring_held();  // a block's two units are freed together
        barrier_wait(ring.empty(slot.at), slot.turn ^ 1, FOR_ROOM);
        if (a.settled && (w.start + b + 1) * BLOCK > w.position) wait_for_kernel_ahead();
        if (HELD >= 0 && units - left == HELD)
            held_map = map, held_column = column, held_row = row;
        else
            bring(lane == 0, ring.unit(slot.at), map, column, row, ring.full(slot.at), policy);
        slot.step(1);
    };
    for (int b = w.rank; b < w.blocks; b += 2) {
        const int row = __shfl_sync(0xffffffff, rows, b);
        unit(units - b + w.rank, k_map, 0, b, row);
        unit(units - b + w.rank - 1, k_map, 64, b, row);
    }
    for (int b = 0; b < w.blocks; b++) unit(w.blocks - b, v_map, w.rank * 64, b, __shfl_sync(0xffffffff, rows, b));
    if (HELD >= 0) bring_held();
}

// The most of a warp, as an integer that grows with the value.
__device__ __forceinline__ int ordered(float x) {
    const int bits = __float_as_int(x);
    return bits ^ (bits >> 31 & 0x7fffffff);
}

__device__ __forceinline__ float most(int mine) {
    int all;
    asm volatile("redux.sync.max.s32 %0, %1, 0xffffffff;" : "=r"(all) : "r"(mine));
    return __int_as_float(all ^ (all >> 31 & 0x7fffffff));
}

// Four warps, one row each at a time: from the scores of two blocks bf16 p and alpha, in the end l and mu. A thread has four
// keys of one of them: both j, both high.
__device__ __forceinline__ void weigh(u8 *shared, const Arguments &a, const Ring &ring, const Work &w) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % WARPS;
    const int odd = lane / 16, step = lane / 4 % 4, quad = lane % 4;
    float *alphas = (float *)(shared + ALPHA_AT), *ls = (float *)(shared + L_AT), *mus = (float *)(shared + MU_AT);
    float top[ROWS / WARPS], mu[ROWS / WARPS], sum[ROWS / WARPS][BLOCKS / 2], alpha[ROWS / WARPS][BLOCKS / 2];
    int last[ROWS / WARPS];
#pragma unroll
    for (int i = 0; i < ROWS / WARPS; i++) {
        top[i] = mu[i] = -INFINITE;
        last[i] = w.position + min((warp + i * WARPS) / a.group, w.count - 1) - (w.start + odd) * BLOCK - step * 16 - quad * 2;
    }
#pragma unroll
    for (int pair = 0; pair < BLOCKS / 2; pair++) {
        if (pair >= w.pairs()) break;
        barrier_wait(ring.scores(pair), 0, FOR_SCORES);
        const int b = 2 * pair + odd;
#pragma unroll
        for (int i = 0; i < ROWS / WARPS; i++) {
            const int r = warp + i * WARPS;
            u8 *row = shared + SCORES_AT + (b * ROWS + r) * ROW;
            const float4 four = *((const float4 *)row + lane % 16);
            float d[4] = {four.x, four.y, four.z, four.w};  // j 0 high 0, j 0 high 1, j 1 high 0, j 1 high 1
#pragma unroll
            for (int n = 0; n < 4; n++) d[n] = n / 2 + n % 2 * 8 + pair * 2 * BLOCK <= last[i] ? d[n] : -INFINITE;
            // A score that is not a number takes no part in the maximum; its weight is not a number either.
            const int mine = ordered(fmaxf(fmaxf(fmaxf(d[0], d[1]), fmaxf(d[2], d[3])), -INFINITE));
            const float top_even = fmaxf(top[i], most(odd ? ordered(-INFINITE) : mine)), top_odd = fmaxf(top[i], most(mine));
            const float mu_even = __fmul_rn(top_even, a.c), mu_odd = __fmul_rn(top_odd, a.c);
            const float before = odd ? mu_even : mu[i], now = odd ? mu_odd : mu_even;
            top[i] = top_odd, mu[i] = mu_odd;
#pragma unroll
            for (int n = 0; n < 4; n++) d[n] = d[n] == -INFINITE ? 0.0f : exp2_contract(__fmaf_rn(d[n], a.c, -now));
            *(uint2 *)(row + step / 2 * 64 + quad * 16 + step % 2 * 8) =
                make_uint2(pack_bf16(d[0], d[2]), pack_bf16(d[1], d[3]));  // all scores of the row have been read: `most`
            sum[i][pair] = __fadd_rn(__fadd_rn(d[0], d[2]), __fadd_rn(d[1], d[3]));
            alpha[i][pair] = before == -INFINITE ? 0.0f : exp2_contract(__fsub_rn(before, now));
            if (lane % 16 == 0) alphas[b * 8 + r] = alpha[i][pair];
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(ring.weights(pair));
    }
#pragma unroll
    for (int i = 0; i < ROWS / WARPS; i++) {
        float l = 0.0f;
#pragma unroll
        for (int n = 4; n != 0; n = n == 4 ? 8 : n == 8 ? 1 : n == 1 ? 2 : 0)
#pragma unroll
            for (int pair = 0; pair < BLOCKS / 2; pair++)
                sum[i][pair] = __fadd_rn(sum[i][pair], __shfl_xor_sync(0xffffffff, sum[i][pair], n));
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            const float factor = __shfl_sync(0xffffffff, alpha[i][b / 2], b % 2 * 16);
            const float more = __shfl_sync(0xffffffff, sum[i][b / 2], b % 2 * 16);
            if (b < w.blocks) l = __fadd_rn(__fmul_rn(l, factor), more);
        }
        if (lane == 0) ls[warp + i * WARPS] = l, mus[warp + i * WARPS] = mu[i];
    }
    if (lane == 0) barrier_arrive(ring.ends());
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__((FETCHING + 1) * 32, 2)
    decode_pairs(const __grid_constant__ Map k_map, const __grid_constant__ Map v_map, const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) u8 shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, split = blockIdx.y;
    if (!a.settled) wait_for_kernel_ahead();
    if (a.late == 0) let_kernel_behind_start();
    u32 base = (u32)__cvta_generic_to_shared(shared);
    asm volatile("" : "+r"(base));  // once, not for every use
    const Ring ring = {base, base + BARRIERS_AT};
    if (threadIdx.x == FETCHING * 32) {
        if (base % 1024) __trap();
        for (int u = 0; u < RING; u++) {
            barrier_init(ring.full(u), 1);
            barrier_init(ring.empty(u), WARPS);
        }
        for (int pair = 0; pair < BLOCKS / 2; pair++) {
            barrier_init(ring.scores(pair), WARPS + 1);
            barrier_init(ring.weights(pair), WARPS);
        }
        barrier_init(ring.ends(), WARPS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    const int *item = a.items + blockIdx.z * 4;
    const int first = item[0], position = item[1], count = item[2], start = split * BLOCKS;
    const int blocks = min((position + count - 1) / BLOCK + 1 - start, BLOCKS);
    const Work w = {first, position, count, start, blocks, (int)blockIdx.x / 2, (int)blockIdx.x % 2};
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");  // the fence above is all that it has to order
    if (warp == FETCHING) {
        if (blocks > 0) fetch(&k_map, &v_map, a, ring, w, a.tables + item[3] * a.table_width);
        __syncwarp();
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
        return;
    }
    if (warp >= 2 * WARPS) {
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
        if (blocks > 0) weigh(shared, a, ring, w);
        return;
    }
    wait_for_kernel_ahead();
    u32 q[WIDTH / 16][2] = {};  // of row r = lane / 4
    if (lane / 4 < ROWS && lane / 4 / a.group < count) {
        const int r = lane / 4;
        const u16 *from = a.q + (first + r / a.group) * a.q_token + (w.kv_head * a.group + r % a.group) * a.q_head + lane % 4 * 2;
#pragma unroll
        for (int step = 0; step < WIDTH / 16; step++)
            for (int high = 0; high < 2; high++) q[step][high] = *(const u32 *)(from + step * 16 + high * 8);
    }
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    if (blocks <= 0) return;
    const int r = lane % 4 * 2;  // and r + 1: rows of this thread's results
    const u32 there = in_other(base, w.rank ^ 1), tile = warp % WARPS;
    u32 shown = base + (tile * 16 + lane % 16) * 128 + (lane / 16 ^ lane % 8) * 16;  // the 16 bytes for `load`
    asm volatile("" : "+r"(shown));                                                   // once, not in every step
    Slot slot(2 * (warp / WARPS));
    for (int pair = warp / WARPS; pair < w.pairs(); pair += 2) {
        if (pair < w.own()) {
            float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            u32 k[2][4][4];
            Slot other = slot;
            other.step(1);
            const bool unseen = RING % 4 != 0 && 2 * pair >= RING;  // an odd number of blocks has room: groups take turns
            wait_for_unit(ring, slot, 2 * pair - RING, unseen, FOR_KEYS);
#pragma unroll
            for (int step = 0; step < 4; step++) load(k[0][step], shown + slot.at * UNIT ^ step * 32);
            wait_for_unit(ring, other, 2 * pair - RING, unseen, FOR_KEYS);
#pragma unroll
            for (int step = 0; step < 4; step++) load(k[1][step], shown + other.at * UNIT ^ step * 32);
#pragma unroll
            for (int step = 0; step < 8; step++) product(d, k[step / 4][step % 4], q[step][0], q[step][1]);
            __syncwarp();
            const u32 freed = behind(d[0], a.zero);
            if (lane == 0) {
                barrier_arrive(ring.empty(slot.at) + freed);
                barrier_arrive(ring.empty(other.at) + freed);
            }
            slot.step(4);
            pause(FOR_OTHER);
            if (r < ROWS) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const u32 at = SCORES_AT + ((2 * pair + w.rank) * ROWS + r + i) * ROW + tile * 64 + lane / 4 * 8;
                    send(there + at, d[i], d[i + 2], there + (ring.scores(pair) - base));
                    *(float2 *)(shared + at) = make_float2(d[i], d[i + 2]);
                }
            }
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(ring.scores(pair));
    }
    if (warp >= WARPS) return;
    const int beyond = (start + blocks) * BLOCK - position - count;  // keys of the last block that do not exist
    float o[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    const float2 *alphas = (const float2 *)(shared + ALPHA_AT + r * 4);
    const uint4 *weights = (const uint4 *)(shared + SCORES_AT + lane / 4 * ROW) + lane % 4;
    shown = base + (lane / 16 * 8 + lane % 8) * 128 + (warp * 2 + lane / 8 % 2 ^ lane % 8) * 16;
    asm volatile("" : "+r"(shown));
    slot = Slot(2 * w.own());
    int before = 2 * w.own() - RING;  // the unit that had the slot before
    auto add = [&](bool final) {
        u32 v[4][4];
        const uint4 early = weights[0], late = weights[4];  // of a row that does not exist anything: its column is not used
        const float2 alpha = alphas[0];
        weights += ROWS * ROW / 16, alphas += 4;
        wait_for_unit(ring, slot, before, before >= 0 && before < 2 * w.own() && before & 2, FOR_VALUES);
        before++;
        if (final) {  // behind the last key is nothing, or another's; a warp clears its own columns
            for (int n = BLOCK - min(beyond, BLOCK) + lane / 2; n < BLOCK; n += 16)
                *(uint4 *)(shared + slot.at * UNIT + n * 128 + (warp * 2 + lane % 2 ^ n % 8) * 16) = make_uint4(0, 0, 0, 0);
            __syncwarp();
        }
#pragma unroll
        for (int step = 0; step < 4; step++) load_across(v[step], shown + slot.at * UNIT + step * 2048);
        o[0] = __fmul_rn(o[0], alpha.x), o[1] = __fmul_rn(o[1], alpha.y);
        o[2] = __fmul_rn(o[2], alpha.x), o[3] = __fmul_rn(o[3], alpha.y);
        product(o, v[0], early.x, early.y);
        product(o, v[1], early.z, early.w);
        product(o, v[2], late.x, late.y);
        product(o, v[3], late.z, late.w);
        __syncwarp();
        if (lane == 0) barrier_arrive(ring.empty(slot.at) + behind(o[0], a.zero));
        slot.step(1);
    };
    for (int b = 0; b < blocks - 1; b++) {
        if (b % 2 == 0) barrier_wait(ring.weights(b / 2), 0, FOR_WEIGHTS);
        add(false);
    }
    barrier_wait(ring.weights((blocks - 1) / 2), 0, FOR_WEIGHTS);
    const int column = w.rank * 64 + warp * 16 + lane / 4;
    bool valid[2];
    long long place[2];
    int at[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int query = first + (r + i) / a.group, head = w.kv_head * a.group + (r + i) % a.group;
        valid[i] = r + i < ROWS && (r + i) / a.group < count;
        place[i] = query * a.out_token + head * a.out_head + column;
        at[i] = query * a.heads + head;
    }
    barrier_wait(ring.ends(), 0, FOR_WEIGHTS);
    const float2 l = *(const float2 *)(shared + L_AT + r * 4), mu = *(const float2 *)(shared + MU_AT + r * 4);
    add(true);
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (valid[i]) {
            if (a.direct) {
                a.out[place[i]] = (u16)pack_bf16(__fdiv_rn(o[i], i ? l.y : l.x), 0.0f);
                a.out[place[i] + 8] = (u16)pack_bf16(__fdiv_rn(o[i + 2], i ? l.y : l.x), 0.0f);
            } else {
                const long long state = (long long)at[i] * a.splits + split;
                a.part_o[state * WIDTH + column] = o[i];
                a.part_o[state * WIDTH + column + 8] = o[i + 2];
                if (column == 0) {
                    a.part_l[state] = i ? l.y : l.x;
                    a.part_mu[state] = i ? mu.y : mu.x;
                }
            }
        }
}
