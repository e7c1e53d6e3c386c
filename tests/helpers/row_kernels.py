"""Entries of the compile test: attention and the row operators."""

from __future__ import annotations

import dataclasses
import importlib.util

from tests.helpers.kernels import TARGETS, Kernel

OPS = "rl_engine.ops"


def kinds(names: str, kind: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), kind)


def attention() -> list[Kernel]:
    tensors = kinds("q k v out", "*bf16") | {"lse": "*fp32", "items": "*i32", "tables": "*i32", "c": "fp32"}
    strides = kinds("q_token q_head k_slot k_head k_page v_slot v_head v_page out_token out_head lse_head", "i32")
    small = kinds("table_width heads", "i32")
    parts = kinds("part_o part_l part_mu", "*fp32")
    unaligned = ("table_width", "heads", "splits")
    forward = [
        Kernel(
            *(f"{OPS}.attention.triton_forward", "attention_fwd_kernel", {**tensors, **strides, **small}),
            {"GROUP": 4, "D": width, "M": rows, "PAGE": page, "WITH_LSE": page == 0, "STAGES": 2},
            *(warps, 2, unaligned),
            fma=True,
        )
        for width, rows, page, warps in ((128, 128, 0, 8), (64, 64, 16, 4))
    ]
    decode = [
        Kernel(
            *(f"{OPS}.attention.triton_decode", "attention_decode_kernel"),
            {**tensors, **parts, **strides, **small, "splits": "i32"},
            {"GROUP": 4, "D": width, "DV": width, "M": 16, "PAGE": page, "DIRECT": direct}
            | {"WITH_LSE": not direct, "STAGES": 3},
            *(4, 3, unaligned),
            fma=True,
        )
        for width, page, direct in ((128, 64, False), (64, 16, True))
    ]
    merge = [
        Kernel(
            *(f"{OPS}.attention.triton_decode", "attention_merge_kernel"),
            {**parts, "out": "*bf16", "lse": "*fp32", "items": "*i32"}
            | kinds("out_token out_head lse_head heads splits", "i32"),
            {"D": 128, "WITH_LSE": True, "STAGES": 4, "EARLY": early},
            *(1, 4, unaligned),
            targets=("cuda:90",) if early else tuple(TARGETS),
        )
        for early in (False, True)
    ]
    store = [
        Kernel(
            *(f"{OPS}.attention.triton_decode", "kv_store_kernel"),
            kinds("k v k_pages v_pages", "*bf16")
            | {"slots": "*i64", **kinds("tokens k_token k_head v_token v_head", "i32")}
            | kinds("kp_page kp_head kp_slot vp_page vp_head vp_slot page", "i32"),
            {"R": 16, "D": 128, "EARLY": early},
            unaligned=("tokens",),
            targets=("cuda:90",) if early else tuple(TARGETS),
        )
        for early in (False, True)
    ]
    return [*forward, *decode, *merge, *store]


def hopper() -> list[Kernel]:
    return [
        Kernel(
            *(f"{OPS}.attention.hopper_forward", "attention_hopper_kernel"),
            {**kinds("q_d k_d v_d", "tensordesc<bf16[64,128],{ROWS}>"), "out": "*bf16", "lse": "*fp32"}
            | {"items": "*i32", "c": "fp32", **kinds("out_token out_head lse_head heads total", "i32")},
            {"GROUP": 4, "D": 128, "STAGES": 3, "WITH_LSE": True, "REGISTERS": 240},
            unaligned=("heads", "total"),
            layouts={"ROWS": (64, 128)},
            targets=("cuda:90",),
            fma=True,
        )
    ]


def hopper_backward() -> list[Kernel]:
    module = f"{OPS}.attention.hopper_backward"
    rows = "tensordesc<bf16[64,128],{ROWS}>"
    numbers = {
        **kinds("lse delta", "*fp32"),
        "items": "*i32",
        **kinds("c scale", "fp32"),
        **kinds("lse_head delta_head", "i32"),
    }
    dq = Kernel(
        *(module, "attention_hopper_dq_kernel"),
        {**kinds("q_d do_d", rows), **kinds("k_d v_d", "tensordesc<bf16[64,128],{BLOCK_ROWS}>")}
        | {"dq": "*bf16", **numbers, **kinds("dq_token dq_head heads", "i32")},
        {"GROUP": 4, "D": 128, "N": 64, "STAGES": 3, "TOGETHER": 4, "REGISTERS": 240},
        unaligned=("heads",),
        layouts={"ROWS": (64, 128), "BLOCK_ROWS": (64, 128)},
        targets=("cuda:90",),
        fma=True,
    )
    dkv = Kernel(
        *(module, "attention_hopper_dkv_kernel"),
        {**kinds("q_d k_d v_d do_d", rows), **kinds("dk dv", "*bf16"), **numbers}
        | kinds("dk_token dk_head dv_token dv_head kv_heads", "i32"),
        {"GROUP": 4, "D": 128, "STAGES": 2, "TOGETHER": 8, "REGISTERS": 240},
        unaligned=("kv_heads",),
        layouts={"ROWS": (64, 128)},
        targets=("cuda:90",),
        fma=True,
    )
    return [dq, dkv]


def paged() -> list[Kernel]:
    """Decode for Hopper; the layout of the scores is what the launch makes it."""
    if importlib.util.find_spec("triton") is None:
        return []
    from rl_engine.ops.attention.hopper_paged import scores_layout

    tensors = kinds("k_d v_d", "tensordesc<bf16[64,64],{CHUNKED}>") | kinds("q out", "*bf16") | {"c": "fp32"}
    tensors |= kinds("lse part_o part_l part_mu", "*fp32") | kinds("items tables", "*i32")
    small = kinds("q_token q_head out_token out_head lse_head table_width heads splits kv_heads", "i32")
    return [
        Kernel(
            *(f"{OPS}.attention.hopper_decode", "attention_units_kernel", {**tensors, **small}),
            {"GROUP": 4, "D": width, "DV": columns, "R": rows, "PAGE": page, "ALL": whole, "DIRECT": whole}
            | {"WITH_LSE": whole, "RING": ring, "WARPS": warps, "SETTLED": settled, "LATE": late}
            | {"SCORES": scores_layout(rows, warps)},
            *(warps, 1, ("table_width", "heads", "splits", "kv_heads")),
            layouts={"CHUNKED": (64, 64), "PAIR": (128, width), "ROWS": (64, width)}
            | {"QUERIES": (8, width), "WEIGHTS": (8, 64)},
            targets=("cuda:90",),
            fma=True,
        )
        for width, columns, rows, page, whole, ring, warps, settled, late in (
            (128, 128, 4, 64, False, 2, 4, True, 0),
            (128, 128, 8, 256, True, 4, 8, False, 4),
            (128, 64, 4, 64, True, 5, 4, False, 3),
            (64, 64, 8, 64, True, 2, 4, True, 0),
        )
    ]


def readers() -> list[Kernel]:
    """The benchmark's read of the pages."""
    names = kinds("k_d v_d", "tensordesc<bf16[64,64],{CHUNKED}>") | kinds("out items tables", "*i32")
    numbers = kinds("table_width blocks kv_heads count", "i32")
    return [
        Kernel(
            *("benchmarks.gpu.reading", "read_pages_kernel", {**names, **numbers}, {"WAITING": waiting}),
            unaligned=tuple(numbers),
            layouts={"CHUNKED": (64, 64)},
            targets=("cuda:90",),
        )
        for waiting in (False, True)
    ]


def attention_backward() -> list[Kernel]:
    module = f"{OPS}.attention.triton_backward"
    tensors = kinds("q k v dout", "*bf16") | {"lse": "*fp32", "delta": "*fp32", "items": "*i32"}
    tensors |= {"c": "fp32", "scale": "fp32"}
    strides = kinds("q_token q_head k_token k_head v_token v_head do_token do_head lse_head delta_head", "i32")
    delta = Kernel(
        *(module, "attention_delta_kernel"),
        {"dout": "*bf16", "out": "*bf16", "delta": "*fp32", "rows": "i32"}
        | kinds("dout_token dout_head out_token out_head delta_head", "i32"),
        {"R": 32, "D": 128},
        unaligned=("rows",),
    )
    dq = Kernel(
        *(module, "attention_dq_kernel"),
        {**tensors, "dq": "*bf16", **strides, **kinds("dq_token dq_head heads", "i32")},
        {"GROUP": 4, "D": 128, "M": 128, "N": 64, "STAGES": 2},
        *(8, 2, ("heads",)),
        fma=True,
    )
    dkv = Kernel(
        *(module, "attention_dkv_kernel"),
        {**tensors, "dk": "*bf16", "dv": "*bf16", **strides}
        | kinds("dk_token dk_head dv_token dv_head kv_heads", "i32"),
        {"GROUP": 4, "D": 64, "M": 64, "N": 64, "STAGES": 2},
        *(4, 2, ("kv_heads",)),
        fma=True,
    )
    return [delta, dq, dkv]


def norms() -> list[Kernel]:
    module = f"{OPS}.rms_norm.triton"
    sizes = {"R": 1, "W": 1024, "CHUNKS": 4}
    forward = Kernel(
        *(module, "rms_norm_fwd_kernel"),
        {**kinds("x w y stream", "*bf16"), "branch": "*fp32", "eps": "fp32"}
        | kinds("rows heads x_token branch_token H", "i32"),
        {**sizes, "BRANCH": True},
        unaligned=("rows", "heads"),
    )
    inputs = {**kinds("x dy w dx added", "*bf16"), "eps": "fp32", **kinds("x_token dy_token H", "i32")}
    backward = Kernel(
        *(module, "rms_norm_bwd_kernel", {**inputs, "terms": "*fp32", "rows": "i32", "heads": "i32"}),
        {"R": 32, "W": 128, "CHUNKS": 1, "TERMS": True, "ADD": True},
        unaligned=("rows", "heads"),
    )
    gain = Kernel(
        *(module, "rms_norm_bwd_gain_kernel", {**inputs, "partial": "*fp32", "pieces": "*i32"}),
        {**sizes, "TOKENS": 2, "ADD": False},
    )
    sums = Kernel(
        *(module, "unit_sums_kernel"),
        {"terms": "*fp32", "bounds": "*i32", "sums": "*fp32", **kinds("token_stride width heads", "i32")},
        {"TOKENS": 64, "C": 64, "STAGES": 4},
        unaligned=("heads",),
    )
    add = Kernel(
        *(module, "add_gain_kernel"),
        {"sums": "*fp32", "grad": "*fp32", **kinds("units heads width", "i32")},
        {"C": 64, "STAGES": 10},
        warps=2,
        unaligned=("units", "heads"),
    )
    return [forward, backward, gain, sums, add]


def rotations() -> list[Kernel]:
    module = f"{OPS}.rope.triton"
    table = {"positions": "*i64", "cosine": "*fp32", "sine": "*fp32"}
    rope = Kernel(
        *(module, "rope_kernel"),
        {"x": "*bf16", "y": "*bf16", **table, "sign": "fp32", **kinds("tokens x_token heads", "i32")},
        {"R": 16, "HALF": 64, "WIDTH": 64},
        unaligned=("tokens", "heads"),
    )
    forward = Kernel(
        *(module, "qk_norm_rope_kernel"),
        {**kinds("q k wq wk yq yk", "*bf16"), **table, "eps": "fp32"}
        | kinds("tokens q_token k_token heads kv_heads", "i32"),
        {"R": 1, "EACH": 8, "STEPS": 4, "HALF": 64},
        unaligned=("tokens", "heads", "kv_heads"),
    )
    backward = Kernel(
        *(module, "qk_norm_rope_bwd_kernel"),
        {**kinds("dq dk q k wq wk xq xk", "*bf16"), **kinds("part_q part_k", "*fp32"), **table, "pieces": "*i32"}
        | {"eps": "fp32", **kinds("tokens dq_token dk_token q_token k_token heads kv_heads", "i32")},
        {"R": 1, "EACH": 8, "STEPS": 8, "HALF": 64, "GAIN": True},
        warps=2,
        unaligned=("tokens", "heads", "kv_heads"),
    )
    few = dataclasses.replace(forward, constants={"R": 1, "EACH": 8, "STEPS": 1, "HALF": 64}, warps=4)
    return [rope, forward, few, backward]


def elementwise() -> list[Kernel]:
    width = {"width": "i32"}
    return [
        Kernel(
            f"{OPS}.swiglu.triton",
            "swiglu_fwd_kernel",
            {"x": "*bf16", "y": "*bf16", "x_row": "i32", **width},
            {"C": 1024},
        ),
        Kernel(
            *(f"{OPS}.swiglu.triton", "swiglu_bwd_kernel"),
            {**kinds("da x dx", "*bf16"), "da_row": "i32", "x_row": "i32", **width},
            {"C": 1024},
        ),
        Kernel(
            *("rl_engine.qualify.gpu_rows", "sigmoid_kernel"),
            {"x": "*fp32", "y": "*fp32", "n": "i32"},
            {"C": 1024},
        ),
        Kernel(
            *(f"{OPS}.embedding.triton", "lookup_gradient_kernel"),
            {**kinds("ids order ends", "*i64"), "rows": "*bf16", "grad": "*fp32", **width, "row_stride": "i32"},
            {"FRESH": True, "C": 512},
        ),
        *(
            Kernel(
                *(f"{OPS}.adamw.triton", "adamw_kernel"),
                {**kinds("master m v grad", "*fp32"), "weight": "*bf16" if write else "*fp32"}
                | {"changed": "*i32", "n": "i32"}
                | kinds("clip beta1 rest1 beta2 rest2 decay step_size root_bc2 eps", "fp32"),
                {"WRITE": write, "C": 1024},
                unaligned=("n",),
            )
            for write in (True, False)
        ),
        Kernel(
            *(f"{OPS}.grad_norm.triton", "square_bins_kernel"),
            {"grad": "*fp32", "out": "*i64", **kinds("n steps programs", "i32")},
            {"C": 512, "U": 8, "EVEN": True},
            unaligned=("n", "steps", "programs"),
        ),
    ]


def sampling() -> list[Kernel]:
    module = f"{OPS}.sample.triton"
    return [
        Kernel(
            *(module, "sample_kernel"),
            {"z": "*fp32", "mask": "*u8", "words": "*i32", "scores": "*fp32", "tokens": "*i64", "inv_t": "fp32"}
            | kinds("z_row mask_row first columns chunks", "i32"),
            {"MASK": True, "C": 2048},
            unaligned=("mask_row", "first", "columns", "chunks"),
        ),
        Kernel(
            *(module, "best_chunk_kernel"),
            {"scores": "*fp32", "tokens": "*i64", "score": "*fp32", "token": "*i64", "chunks": "i32"},
            {"C": 128},
            unaligned=("chunks",),
        ),
        Kernel(
            *(module, "mass_kernel"),
            {"values": "*fp32", "mass": "*i64", "columns": "i32"},
            {"C": 2048},
            unaligned=("columns",),
        ),
    ]


ROW_KERNELS = [
    *attention(),
    *hopper(),
    *hopper_backward(),
    *paged(),
    *readers(),
    *attention_backward(),
    *norms(),
    *rotations(),
    *elementwise(),
    *sampling(),
]
