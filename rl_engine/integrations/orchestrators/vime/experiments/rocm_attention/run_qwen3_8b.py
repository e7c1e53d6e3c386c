"""Older name of ``rlk-repro run`` with the bundled ROCm profile; every run option is the same."""

from __future__ import annotations

import os
import sys


def main(argv: list[str] | None = None) -> int:
    """``run`` with the ROCm profile, unless ``--profile`` or RLK_REPRO_PROFILE names another one."""
    from rl_engine.config.paths import bundled
    from rl_engine.entrypoints.repro import main as repro

    rest = list(sys.argv[1:] if argv is None else argv)
    named = any(argument.split("=", 1)[0] == "--profile" for argument in rest) or os.environ.get("RLK_REPRO_PROFILE")
    profile = bundled("configs/integrations/orchestrators/vime/rocm_attention/mi300x-qwen3-8b.json")
    return repro(["run", *([] if named else ["--profile", str(profile)]), *rest])


if __name__ == "__main__":
    sys.exit(main())
