"""The numerical contract as data: every value here is part of what "the same bits" means.

Changing one value changes :meth:`Contract.digest`, which both sides of a run record and compare. The arithmetic that
the values parametrise is written down operator by operator in ``rl_engine/ops/<operator>/``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json

CONTRACT_VERSION = "rlk.v1"


@dataclasses.dataclass(frozen=True)
class Contract:
    """The values of one contract.

    Attributes:
        device_kind: ``cpu``, ``cuda-sm90`` or ``rocm-gfx942``; equality is never claimed between kinds.
        gemm: order of a matrix product. ``chain``: one fp32 accumulator, K ascending from +0. ``chain256``: the
            fallback without a C compiler, K blocks of 256 through the BLAS library (an id of its own).
        kv_block: keys per attention block (tokens, counted from the sample's first token).
        kv_split: keys per attention split (tokens).
        logp_tile: vocabulary columns per tile of ``selected_logp``.
        logp_groups: number of vocabulary groups the tiles are divided into.
        fold_axis: longest axis summed by one pair tree; longer axes are folded in chunks of it first.
        gain_block: tokens per block of a norm gain's gradient.
        fold_tokens: greedy cut of a fold unit (tokens); a longer sample is its own unit.
    """

    device_kind: str = "cpu"
    gemm: str = "chain"
    kv_block: int = 64
    kv_split: int = 1024
    logp_tile: int = 128
    logp_groups: int = 16
    fold_axis: int = 1024
    gain_block: int = 64
    fold_tokens: int = 4096

    @property
    def id(self) -> str:
        """``rlk.v1/<device kind>``, with the GEMM's name behind it where it is not the chain."""
        suffix = "" if self.gemm == "chain" else f"-{self.gemm}"
        return f"{CONTRACT_VERSION}/{self.device_kind}{suffix}"

    def digest(self) -> str:
        """SHA-256 (hex) over the id and every value, in canonical JSON."""
        body = {"version": CONTRACT_VERSION, **dataclasses.asdict(self)}
        return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
