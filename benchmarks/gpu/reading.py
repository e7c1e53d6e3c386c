"""Reading the pages of a decode and nothing else, through the same tables: what a kernel that needs them waits for."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BLOCK = gl.constexpr(64)  # keys of a page and of a slot of the ring
CHUNK = gl.constexpr(64)  # columns that the copy engine brings at a time
WIDTH = gl.constexpr(128)
RING = gl.constexpr(3)  # slots: four programs share a multiprocessor, so 192 KiB are on their way into it
WARPS = gl.constexpr(4)
EACH = (2, 4)  # programs a multiprocessor


@gluon.jit
def mixed(a, b):
    return a ^ b


@gluon.jit
def bring_blocks(k_d, v_d, ring, full, empty, items, tables, table_width, first, end, blocks, kv_heads,
                 WAITING: gl.constexpr):  # fmt: skip
    for i in range(first, end):
        block, of = i % blocks, i // blocks
        values, kv_head, sample = of % 2, of // 2 % kv_heads, of // (2 * kv_heads)
        at = gl.load(items + sample * 4 + 3).to(gl.int64)
        row = (gl.load(tables + at * table_width + block) * kv_heads + kv_head) * BLOCK
        slot, turn = (i - first) % RING, (i - first) // RING
        mbarrier.wait(empty.index(slot), (turn & 1) ^ 1)
        if WAITING and block == blocks - 1:
            gdc_wait()
        mbarrier.expect(full.index(slot), BLOCK * WIDTH * 2)
        for part in gl.static_range(WIDTH // CHUNK):
            place = ring.index(slot * (WIDTH // CHUNK) + part)
            if values == 0:
                tma.async_copy_global_to_shared(k_d, [row, part * CHUNK], full.index(slot), place)
            else:
                tma.async_copy_global_to_shared(v_d, [row, part * CHUNK], full.index(slot), place)


@gluon.jit
def mix_blocks(out, ring, full, empty, steps, WAITING: gl.constexpr):
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    FLAT: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    SIZE: gl.constexpr = BLOCK * WIDTH // 2
    words = ring._reinterpret(gl.int32, [RING, SIZE], PLAIN)
    total = gl.zeros((SIZE // 2,), gl.int32, layout=FLAT)
    if WAITING:
        gdc_wait()
    for i in range(0, steps):
        slot = i % RING
        mbarrier.wait(full.index(slot), i // RING & 1)
        for half in gl.static_range(2):
            total ^= words.index(slot).slice(half * (SIZE // 2), SIZE // 2).load(FLAT)
        mbarrier.arrive(empty.index(slot))
    if not WAITING:
        gdc_wait()
    gl.store(out + gl.program_id(0), gl.reduce(total, 0, mixed))


@gluon.jit(do_not_specialize=["table_width", "blocks", "kv_heads", "count"])
def read_pages_kernel(k_d, v_d, out, items, tables, table_width, blocks, kv_heads, count, CHUNKED: gl.constexpr,
                      WAITING: gl.constexpr):  # fmt: skip
    """A program's share of ``count`` blocks of pages, each brought to shared memory once; writes the xor of its words.

    WAITING: as a decode has to, nothing is used, and no block with a new key fetched, before the last kernel's end.
    """
    gdc_launch_dependents()
    program, programs = gl.program_id(0).to(gl.int64), gl.num_programs(0)
    first = (program * count // programs).to(gl.int32)
    end = ((program + 1) * count // programs).to(gl.int32)
    ring = gl.allocate_shared_memory(gl.bfloat16, [RING * (WIDTH // CHUNK), BLOCK, CHUNK], CHUNKED)
    full = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(RING):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (mix_blocks, (out, ring, full, empty, end - first, WAITING)),
            (bring_blocks, (k_d, v_d, ring, full, empty, items, tables, table_width, first, end, blocks, kv_heads,
                            WAITING)),
        ],
        [1],
        [40],
    )  # fmt: skip


def read_pages(keys: Tensor, values: Tensor, items: Tensor, table: Tensor, out: Tensor, waiting: bool) -> None:
    """Every word of the pages [pages, kv_heads, 64, 128] that ``table`` int32 [samples, blocks] and ``items`` int32
    [samples, 4] name, mixed into ``out`` int32 [programs]. On a Hopper."""
    kv_heads, blocks = keys.shape[1], table.shape[1]
    chunked = gl.NVMMASharedLayout.get_default_for([BLOCK.value, CHUNK.value], gl.bfloat16)
    k_d, v_d = (
        TensorDescriptor(x, [x.shape[:3].numel(), x.shape[3]], [x.shape[3], 1], [BLOCK.value, CHUNK.value], chunked)
        for x in (keys, values)
    )
    read_pages_kernel[(out.shape[0],)](
        *(k_d, v_d, out, items, table, table.stride(0), blocks, kv_heads, items.shape[0] * kv_heads * 2 * blocks),
        CHUNKED=chunked,
        WAITING=waiting,
        num_warps=WARPS.value,
        maxnreg=64,
        launch_pdl=True,
    )


def contestants(
    sets: list[tuple[Tensor, Tensor, Tensor]], items: Tensor, waiting: bool
) -> dict[str, list[Callable[[], object]]]:
    """Reads of all sets (keys, values, table), by how many programs a multiprocessor has."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    found: dict[str, list[Callable[[], object]]] = {}
    for each in EACH:
        out = torch.empty(each * processors, dtype=torch.int32, device="cuda")
        found[f"read, {each} programs, {'waiting' if waiting else 'free'}"] = [
            functools.partial(read_pages, keys, values, items, table, out, waiting) for keys, values, table in sets
        ]
    return found
