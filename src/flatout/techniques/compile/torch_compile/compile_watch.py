"""What the compiler did behind the scenes: silent falls back to eager, and compiling for ever.

Torch compiles a function again for each input that its last version does not fit. After a few times
it gives up, says so in a log that a trial hides, and runs the function eagerly from then on.
"""

import logging
from collections import Counter
from typing import Any

from flatout.records.errors import NotApplicable

LOGGER = "torch._dynamo.convert_frame"
SKIPS_LOGGER = "torch._inductor.cudagraph_utils.__cudagraphs"
SKIPPED = "skipping cudagraphs due to "
"""What torch says, and counts, where it runs a graph's kernels one by one after all."""
LIMIT_WORDS = ("recompile_limit", "cache_size_limit")
"""What torch's message names when it gives up; older releases used the second."""
STORM = 5
"""Versions of one function beyond its first from which on compiling is the training: one each
for evaluation, the last batch of an epoch and a dynamic shape are ordinary."""


class CompileWatch(logging.Handler):
    """Listens to the compiler from when it is begun; ask it at the end."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.storm = STORM
        """Versions beyond its first that one function may not have."""
        self.gave_up = ""
        """The compiler's own words, empty where it did not give up."""
        self.skipped = ""
        """Why the last CUDA graph was skipped, in torch's words; empty where none was."""
        self._known: int | None = None
        """What had been compiled when it began to listen."""

    def begin(self, versions: int = 1) -> "CompileWatch":
        """Start listening; what was compiled before does not count. Once is enough.

        So many `versions` of one function are ordinary.
        """
        from flatout.agent.recorder import keep_compilations

        self.storm = max(self.storm, versions)
        if self._known is None:
            for name in (LOGGER, SKIPS_LOGGER):
                logging.getLogger(name).addHandler(self)
            keep_compilations()
            self._known = len(_compilations())
        return self

    def end(self) -> None:
        """Listen no more."""
        for name in (LOGGER, SKIPS_LOGGER):
            logging.getLogger(name).removeHandler(self)

    def check(self) -> None:
        """Make sure that the compiler goes on."""
        reason, self.gave_up = self.gave_up, ""
        if reason:
            raise NotApplicable(f"torch gave up compiling, silently: {reason[:200]}")

    def emit(self, record: logging.LogRecord) -> None:
        """Note the message with which the compiler gives up, or leaves out a CUDA graph."""
        text = record.getMessage()
        if SKIPPED in text:
            self.skipped = text.partition(SKIPPED)[2].splitlines()[0]
        if not self.gave_up and any(words in text for words in LIMIT_WORDS):
            reason = next((line for line in text.splitlines() if "last reason" in line), "")
            self.gave_up = reason.partition("last reason:")[2].strip() or text.splitlines()[0]

    def report(self) -> str:
        """Return what was compiled since; empty where it never began to listen."""
        if self._known is None:
            return ""
        self.end()
        if self.gave_up:
            raise NotApplicable(
                f"torch gave up compiling and went on eagerly, silently: {self.gave_up[:200]}"
            )
        made = _compilations()[self._known :]
        if not made:
            raise NotApplicable("torch compiled nothing: no call reached the compiler")
        versions = Counter(_place(one) for one in made)
        (place, most), *_ = versions.most_common(1)
        if most - 1 >= self.storm:
            reasons = [getattr(m, "recompile_reason", "") for m in made if _place(m) == place]
            raise NotApplicable(
                f"recompile storm: {place[0]} was compiled {most} times, last since {reasons[-1]}"
            )
        again = sum(count - 1 for count in versions.values())
        return f"{len(versions)} regions compiled, {again} of them again"

    def graphs_report(self, recorded: int | None) -> str:
        """Return words on the CUDA graphs that torch recorded; None is where it began none."""
        if not recorded and (recorded is None or self.skipped):
            raise NotApplicable(
                "torch recorded no CUDA graph and launched kernel by kernel, silently: "
                + (self.skipped[:200] or "it gave no reason")
            )
        why = f", others skipped: {self.skipped[:200]}" if self.skipped else ""
        return f", {recorded} CUDA graphs recorded{why}"


def recorded_graphs() -> int | None:
    """Return how many first graphs of a step torch recorded; None where it did not begin to."""
    import torch
    from torch._inductor.cudagraph_trees import get_manager

    devices = range(torch.cuda.device_count())
    managers = [get_manager(number, create_if_none_exists=False) for number in devices]
    begun = [manager for manager in managers if manager is not None]
    # A step's further graphs hang below its first one; None are left of a manager that was ended.
    return sum(len(nodes) for m in begun for nodes in (m.roots or {}).values()) if begun else None


def _compilations() -> list[Any]:
    """Return the compiler's own record of forward compilations; backward ones name no code."""
    from torch._dynamo.utils import get_compilation_metrics

    return [one for one in get_compilation_metrics() if one.co_name]


def _place(one: Any) -> tuple[str, str, int]:
    return one.co_name, one.co_filename or "", one.co_firstlineno or 0


KOREAN = """
torch gave up compiling, silently: {reason}
    torch가 아무 말 없이 컴파일을 포기했습니다: {reason}
torch gave up compiling and went on eagerly, silently: {reason}
    torch가 아무 말 없이 컴파일을 포기하고 eager로 계속했습니다: {reason}
torch compiled nothing: no call reached the compiler
    torch가 컴파일한 것이 없습니다. 컴파일러에 이른 호출이 없습니다
recompile storm: {place} was compiled {n} times, last since {reason}
    재컴파일이 너무 잦습니다. {place}이(가) {n}번 컴파일되었고 마지막 이유는 다음과 같습니다:
    {reason}
{n} regions compiled, {again} of them again
    영역 {n}개를 컴파일했고 다시 컴파일한 것은 {again}번입니다
{n} regions compiled, {again} of them again, kept in {file}
    영역 {n}개를 컴파일했고 다시 컴파일한 것은 {again}번이며, {file}에 보관했습니다
{n} regions compiled, {again} of them again, {graphs} CUDA graphs recorded
    영역 {n}개를 컴파일했고 다시 컴파일한 것은 {again}번입니다. CUDA 그래프 {graphs}개를
    기록했습니다
{n} regions compiled, {again} of them again, {graphs} CUDA graphs recorded, others skipped: {why}
    영역 {n}개를 컴파일했고 다시 컴파일한 것은 {again}번입니다. CUDA 그래프 {graphs}개를 기록했고
    나머지는 건너뛰었습니다: {why}
{n} regions compiled, {again} of them again, {graphs} CUDA graphs recorded, kept in {file}
    영역 {n}개를 컴파일했고 다시 컴파일한 것은 {again}번입니다. CUDA 그래프 {graphs}개를 기록해
    {file}에 보관했습니다
{n} regions compiled, {again} of them again, {graphs} CUDA graphs recorded, others skipped: {why},
kept in {file}
    영역 {n}개를 컴파일했고 다시 컴파일한 것은 {again}번입니다. CUDA 그래프 {graphs}개를 기록해
    {file}에 보관했고 나머지는 건너뛰었습니다: {why}
torch recorded no CUDA graph and launched kernel by kernel, silently: {why}
    torch가 CUDA 그래프를 기록하지 못하고 아무 말 없이 커널을 하나씩 실행했습니다: {why}
it gave no reason
    이유를 알려 주지 않았습니다
"""
