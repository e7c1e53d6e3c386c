"""Exchanges between ranks on GPUs are of bytes: through host memory where they share one, by NCCL where each has its
own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_engine.parallel import NoTransport, PeerLost
from tests.helpers.gpu import needs_gpu
from tests.helpers.ranks import Rank, Ranks, run_ranks
from tests.parallel.test_groups import exchange_everything, gather_everything, pass_along

pytestmark = [pytest.mark.gpu, needs_gpu]

GPUS = torch.cuda.device_count()
needs_two = pytest.mark.skipif(GPUS < 2, reason="needs a GPU for each of two ranks")


@pytest.mark.parametrize("kind", ["shared", pytest.param("own", marks=needs_two)])
@pytest.mark.parametrize("function", [gather_everything, exchange_everything, pass_along])
def test_bytes_arrive(function: Any, kind: str, tmp_path: Path) -> None:
    size = 2 if function is pass_along or (kind == "own" and GPUS < 3) else 3
    assert [rank.result for rank in run_ranks(function, size, tmp_path, kind)] == [[]] * size


def meet_on_one_gpu(rank: Rank) -> str:
    try:
        rank.join(device=torch.device("cuda", 0))
    except NoTransport as error:
        return str(error)
    return ""


def test_nccl_on_one_gpu_is_refused(tmp_path: Path) -> None:
    """Before NCCL is asked, on every rank."""
    for rank in run_ranks(meet_on_one_gpu, 2, tmp_path):
        assert "ranks [0, 1] have one GPU, which NCCL refuses" in rank.result


def wait_for_nobody(rank: Rank) -> dict[str, Any]:
    """Rank 1 is alive and does not come to the exchange."""
    device = torch.device("cuda", rank.index)
    group = rank.join(seconds=5.0, device=device).world
    group.barrier()
    if rank.index == 1:
        time.sleep(9.0)
        return {}
    started = time.monotonic()
    try:
        group.all_gather(torch.arange(4, device=device), purpose="test")
    except PeerLost as error:
        return {"seconds": time.monotonic() - started, "message": str(error)}
    return {"message": ""}


@needs_two
def test_a_silent_rank_runs_into_the_time_limit(tmp_path: Path) -> None:
    with Ranks(wait_for_nobody, 2, tmp_path) as ranks:
        ended = ranks.wait(60.0)
    assert "an exchange among ranks [0, 1] failed: not over after 5 s" in ended[0].result["message"]
    assert 4.0 < ended[0].result["seconds"] < 9.0
