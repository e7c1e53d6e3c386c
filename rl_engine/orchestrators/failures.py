"""What became of a run's workers: Ray's errors as ours."""

from __future__ import annotations

from typing import Any

from rl_engine.orchestrators import causes
from rl_engine.orchestrators.causes import RunFailed
from rl_engine.orchestrators.ray_head import Head
from rl_engine.records.errors import UserError
from rl_engine.records.writer import RunWriter


class Failures:
    """Ray's errors as ours. What a worker wrote goes to the log, its death to the events.

    Attributes:
        members: every worker, as soon as it is started.
        pids: process ids by the workers' names, as soon as they are known.
        memory_kills: how many processes the kernel had killed for want of memory before the workers were started.
    """

    def __init__(self, head: Head, writer: RunWriter) -> None:
        self.head, self.writer = head, writer
        self.members: list[Any] = []
        self.pids: dict[str, int] = {}
        self.memory_kills = causes.memory_kills()

    def explained(self, error: Exception) -> Exception:
        """A worker's failure as one of ours."""
        if not isinstance(error, self.head.ray.exceptions.RayTaskError):
            self.writer.log(str(error))
            return self._death(error)
        cause = error.cause if isinstance(error.cause, BaseException) else error
        if isinstance(cause, UserError):
            return cause
        if type(cause).__name__ == "QualificationFailed":
            self.writer.event("refusal", operator="qualify", reason=str(cause)[:400])
            return UserError(
                f"operators that fail their proof ({cause})", "bits equal to the contract", "rlk-repro qualify"
            )
        self.writer.log(str(error))
        return causes.of_error(cause)

    def _death(self, error: Any) -> RunFailed:
        """Who died."""
        for member in self.members:
            if getattr(error, "actor_id", None) == member.actor._actor_id.hex():
                if member.name not in self.pids:
                    return RunFailed(f"{member.name} did not start: {' '.join(str(error).split())[-300:]}")
                pid = self.pids[member.name]
                said = self.head.last_words(pid)
                self.writer.log(said or f"{member.name} wrote nothing")
                self.writer.event("worker_died", engine=member.engine, rank=member.rank, pid=pid)
                return causes.of_death(member.name, pid, said, causes.memory_kills() - self.memory_kills)
        return causes.of_error(error)
