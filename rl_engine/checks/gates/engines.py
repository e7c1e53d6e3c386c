"""Gates about the processes: topology, routes, execution form, contract, qualification, threads."""

from __future__ import annotations

from collections import defaultdict

from rl_engine.checks.gates.evidence import Asks, Gate, RunEvidence
from rl_engine.config.engines import BUILTIN
from rl_engine.config.options import FUSED_OPERATORS
from rl_engine.records.types import EventValue, RouteFile, RouteRecord

Verdict = tuple[bool, str, str]

# A plan names a provider for every operator on both sides; these are the other side's work.
OTHER_SIDE = {"train": {"sample"}, "rollout": {"adamw", "grad_norm"}}
# Operators that some models do not have: every worker calls them, or none.
MODEL_OPERATORS = ("qk_norm",)


def _topology(evidence: RunEvidence) -> Verdict:
    plan = evidence.plan.topology
    train, rollout = evidence.engines("train"), evidence.engines("rollout")
    train_ranks = sorted(rank for _, rank in train)
    if not _complete(train_ranks, plan.train_tp * plan.train_cp):
        return False, f"trainer ranks {train_ranks}", "run it again"
    engines: dict[str, list[int]] = defaultdict(list)
    for engine, rank in rollout:
        engines[engine].append(rank)
    if len(engines) != plan.rollout_engines:
        return False, f"{len(engines)} rollout engines", "run it again"
    for engine, ranks in sorted(engines.items()):
        if not _complete(sorted(ranks), plan.rollout_tp * plan.rollout_cp):
            return False, f"engine {engine} with ranks {sorted(ranks)}", "run it again"
    for facts in evidence.facts:
        strangers = {sample.engine for sample in facts.samples} - set(engines)
        if strangers:
            return False, f"step {facts.step}: samples of engine {min(strangers)[:40]!r}", "run it again"
    return True, f"{len(train)} trainer ranks, {len(engines)} engines of {plan.rollout_tp * plan.rollout_cp} ranks", ""


def _complete(ranks: list[int], count: int) -> bool:
    return len(ranks) == count and ranks == list(range(len(ranks)))


def _route_files(evidence: RunEvidence) -> Verdict:
    workers = {(record.engine, record.rank) for record in evidence.recording("routes")}
    for attempt, steps in evidence.attempts:
        routed = {(route.engine, route.rank) for number, route in evidence.attempt_routes if number == attempt}
        # One that finished no step may have been killed before, or while, its first counts were written.
        odd = sorted((workers ^ routed) if steps else (routed - workers))
        if odd:
            found = f"worker {odd[0][0]}-{odd[0][1]} without route file or environment"
            return False, f"{found} in attempt {attempt}, which finished {steps} steps", "run it again"
    strangers = {number for number, _ in evidence.attempt_routes} - {number for number, _ in evidence.attempts}
    if strangers:
        return False, f"route files of attempt {min(strangers)}, which there was not", "run it again"
    return True, f"{len(workers)} workers, {len(evidence.attempts)} attempts", ""


def _routes(evidence: RunEvidence) -> Verdict:
    planned = {"train": dict(evidence.plan.providers.train), "rollout": dict(evidence.plan.providers.rollout)}
    sides = {worker: "train" for worker in evidence.engines("train")}
    sides |= {worker: "rollout" for worker in evidence.engines("rollout")}
    called = {part for file in evidence.routes for route in file.routes for part in _parts(route.operator)}
    optional = {operator for operator in MODEL_OPERATORS if operator not in called}
    total = 0
    for file in evidence.routes:
        side = sides[(file.engine, file.rank)]
        problem = _route_problem(file, side, planned[side], optional | OTHER_SIDE[side])
        if problem:
            return False, f"{file.engine}-{file.rank} {problem}", "no provider may be replaced; run `doctor`"
        total += sum(route.calls for route in file.routes)
    return True, f"{total} calls, all through the planned providers", ""


def _route_problem(file: RouteFile, side: str, planned: dict[str, str], optional: set[str]) -> str:
    called: dict[str, int] = defaultdict(int)
    for route in file.routes:
        problem = _record_problem(route, side, planned)
        if problem:
            return problem
        for part in _parts(route.operator):
            called[part] += route.calls
    missing = sorted(operator for operator in planned if called[operator] < 1 and operator not in optional)
    return f"{missing[0]}: never called" if missing else ""


def _parts(operator: str) -> tuple[str, ...]:
    """The plan's operators that a call of ``operator`` does."""
    return FUSED_OPERATORS.get(operator, (operator,))


def _record_problem(route: RouteRecord, side: str, planned: dict[str, str]) -> str:
    if route.side != side:
        return f"{route.operator}: counted on side {route.side}"
    for part in _parts(route.operator):
        if part not in planned:
            return f"{route.operator}: not an operator of the plan"
        if route.provider != planned[part]:
            return f"{route.operator}: through {route.provider}, planned {planned[part]}"
    counts = list(route.shapes.values())
    if route.calls < 1 or any(count < 1 for count in counts) or sum(counts) != route.calls:
        return f"{route.operator}: {route.calls} calls, {sum(counts)} by shape"
    return ""


def _refusals(evidence: RunEvidence) -> Verdict:
    refusals = [event for event in evidence.events if event.kind == "refusal"]
    if refusals and evidence.plan.mode == "consistency":
        return False, f"{len(refusals)} refusals, first {str(refusals[0].fields)[:120]}", "run `qualify`"
    return True, f"{len(refusals)} refusals", ""


def _execution(evidence: RunEvidence) -> Verdict:
    planned = sorted(evidence.plan.engine.graph_capture_sizes)
    graphs = [route for file in evidence.routes for route in file.routes if route.execution == "graph"]
    if not planned:
        if graphs:
            return False, f"{graphs[0].operator} captured in a graph, none planned", "run it again"
        return True, "eager everywhere", ""
    captured: dict[tuple[EventValue, EventValue], list[int]] = defaultdict(list)
    for event in evidence.events:
        size = event.fields.get("size")
        if event.kind == "graph_capture" and isinstance(size, int):
            captured[(event.fields.get("engine"), event.fields.get("rank"))].append(size)
    as_needed = evidence.plan.engines.rollout == BUILTIN  # there a planned size is captured when a pass first has it
    for engine, rank in sorted(evidence.engines("rollout")):
        sizes = sorted(captured[(engine, rank)])
        if not set(sizes) <= set(planned) if as_needed else sizes != planned:
            return False, f"{engine}-{rank} captured sizes {sizes[:40]}", "run it again"
    replayed, made = any(route.side == "rollout" for route in graphs), any(captured.values())
    if evidence.declares("rollout", "routes") and replayed != (made or not as_needed):
        found = "no call came from a graph" if made or not as_needed else "calls from graphs that nobody captured"
        return False, found, "run it again"
    sizes_words = f"{len({size for sizes in captured.values() for size in sizes})} of {len(planned)} sizes"
    return True, f"{sizes_words}, {sum(route.calls for route in graphs)} calls from graphs", ""


def _contract(evidence: RunEvidence) -> Verdict:
    wanted = (evidence.plan.contract_id, evidence.plan.contract_digest)
    workers = evidence.recording("contract")
    for record in workers:
        if (record.contract_id, record.contract_digest) != wanted:
            shown = f"{record.contract_id[:60]} {record.contract_digest[:16]}"
            return False, f"{record.engine}-{record.rank}: {shown}", "both sides must load one contract"
    return bool(workers), f"{wanted[0]} {wanted[1][:16]} in {len(workers)} records", "run it again"


def _qualification(evidence: RunEvidence) -> Verdict:
    digests = {record.qualification_digest for record in evidence.recording("contract")}
    if len(digests) != 1:
        return False, f"{len(digests)} different qualifications", "run `qualify` once, then both sides"
    digest = digests.pop()
    if digest is None and evidence.plan.mode == "consistency":
        return False, "no qualification", "run `qualify`"
    return True, "none (native)" if digest is None else digest[:16], ""


def _threads(evidence: RunEvidence) -> Verdict:
    settings = {record.threads for record in evidence.recording("threads")}
    if len(settings) != 1:
        return False, f"{len(settings)} different thread settings", "set one thread count for every process"
    common = settings.pop()
    if common is None or common.intra_op != evidence.plan.threads:
        return False, f"{common.intra_op if common else 'none'}", f"the plan has {evidence.plan.threads}"
    return True, f"{common.intra_op} threads everywhere", ""


_AFTER_WORKERS = ("records", "topology", "workers")
_ROUTES: Asks = (("train", "routes"), ("rollout", "routes"))
_CONTRACT: Asks = (("train", "contract"), ("rollout", "contract"))
_THREADS: Asks = (("train", "threads"), ("rollout", "threads"))

ENGINE_GATES: tuple[Gate, ...] = (
    Gate("topology", "ranks and engines of the plan", _topology),
    Gate(
        "workers",
        "a route file of every attempt and environment records of every worker",
        _route_files,
        ("records", "state", "topology"),
        asks=_ROUTES,
    ),
    Gate(
        "routes",
        "every operator through its planned provider, called, no fallback",
        _routes,
        _AFTER_WORKERS,
        asks=_ROUTES,
    ),
    Gate("refusals", "consistency: no provider declined", _refusals),
    Gate("execution", "eager or graph as planned", _execution, asks=(("rollout", "graphs"),)),
    Gate("contract", "the plan's numerical contract on both sides", _contract, asks=_CONTRACT),
    Gate("qualification", "one qualification on both sides", _qualification, asks=_CONTRACT),
    Gate("threads", "the plan's thread count in every process", _threads, asks=_THREADS),
)
