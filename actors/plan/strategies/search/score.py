"""What a schedule of a step is worth, and encodes of later steps in its gaps."""

from __future__ import annotations

from actors.plan.schedule.gaps import fill
from actors.plan.schedule.listing import ListSchedule


def step_end(schedule: ListSchedule) -> float:
    """End of the step: of its last dit, or of its last encode where it has no dit."""
    own = [i for i, job in enumerate(schedule.jobs) if not job.optional and i in schedule.where]
    dits = [i for i in own if schedule.jobs[i].module == "dit"] or own
    return max((schedule.end[i] for i in dits), default=schedule.context.barrier_s)


def score(schedule: ListSchedule) -> float:
    """End of the step plus what later steps pay: encodes left to them, and workers that are busy beyond it."""
    end = step_end(schedule)
    optional = [i for i, job in enumerate(schedule.jobs) if job.optional]
    if not optional:
        return end
    left = sum(schedule.jobs[i].worth_s for i in optional if i not in schedule.where)
    over = sum(max(time_s - end, 0.0) for time_s in schedule.free) / len(schedule.free)
    delay = max(
        (schedule.end[i] - end - schedule.jobs[i].slack_s for i in optional if i in schedule.where), default=0.0
    )
    return end + left + over + max(delay, 0.0)


def fill_gaps(schedule: ListSchedule, deadline: float) -> None:
    """Encodes of later steps into what is idle; the most urgent and largest first."""
    jobs = schedule.jobs
    optional = sorted(
        (i for i, job in enumerate(jobs) if job.optional and i not in schedule.where),
        key=lambda i: (jobs[i].step, -jobs[i].worth_s, i),
    )
    if optional:
        fill(schedule, optional, step_end(schedule), deadline)
