"""Process groups and exchanges that move bytes. No collective here adds: what a rank receives is what another
computed."""

from rl_engine.parallel.groups import (
    Group,
    Mesh,
    NoTransport,
    PeerLost,
    StreamTransport,
    Transport,
    group_over,
    join_mesh,
    mesh_over,
    nccl_available,
    single_mesh,
)
from rl_engine.parallel.ownership import ContextLayout, bounds, join_columns, zigzag_runs

__all__ = [
    "ContextLayout",
    "Group",
    "Mesh",
    "NoTransport",
    "PeerLost",
    "StreamTransport",
    "Transport",
    "bounds",
    "group_over",
    "join_columns",
    "join_mesh",
    "mesh_over",
    "nccl_available",
    "single_mesh",
    "zigzag_runs",
]
