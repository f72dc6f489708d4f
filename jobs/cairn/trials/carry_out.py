"""Carry out `TryCode` and `PromoteTrial`."""

from __future__ import annotations

from typing import Any

from cairn.operations.coordinator_of import coordinator_of
from cairn.operations.place import Place
from cairn.operations.plan_range import boundaries_of, named_intervals
from cairn.trials.compare_trial import compare_trial, comparison_lines
from cairn.trials.promote_trial import plan_promotion, promote_past, restore_command
from cairn.trials.try_code import TrialPlan, try_code
from state_backend.inspection.compare_runs import describe_comparison
from state_backend.inspection.describe import describe_trial
from state_backend.values.requests import PromoteTrial, TryCode

_LISTED = 10


def carry_out_try(request: TryCode, place: Place) -> dict[str, Any]:
    """Run the trial. Return the trial, counts and, if asked, the comparison with production."""
    pipeline = place.load(request)
    rule = boundaries_of(pipeline, coordinator_of(pipeline, request.root).log(), request.every)
    intervals = named_intervals(request.first, request.last, rule)
    tried = try_code(
        place.connect(pipeline, "try"),
        pipeline,
        intervals,
        request.root,
        code=request.code,
        trial=request.trial,
        savepoint=request.savepoint,
        keep_for=request.keep_for,
        on_plan=lambda plan: _say_plan(plan, place),
        on_outcome=place.on_outcome,
    )
    said = describe_trial(tried.trial) | {
        "root": tried.root,
        "computed": sum(o.computed for o in tried.outcomes),
        "fork_seconds": round(tried.fork_s, 3),
        "other_input": [str(i) for i in tried.other_input],
    }
    if request.compare:
        trial, found = compare_trial(request.root, pipeline.name, tried.trial.name, request.match, 3)
        lines = comparison_lines(trial, describe_comparison(found))
        for line in lines:
            place.say(line)
        said |= {"same": found.same, "comparison": lines}
    return said


def _say_plan(plan: TrialPlan, place: Place) -> None:
    trial = plan.trial
    begins = "empty state" if trial.base is None else f"the state of checkpoint {trial.base.id}"
    place.say(
        f"trial {trial.name} of {trial.pipeline}: code {trial.code_version or trial.code_hash[:8]}, from {begins}"
    )
    for interval in plan.other_input[:_LISTED]:
        place.say(
            f"{interval}: the input has changed: the source's position differs from that in production's checkpoint"
        )
    if len(plan.other_input) > _LISTED:
        place.say(f"the input of {len(plan.other_input) - _LISTED} more intervals has changed too")


def carry_out_promotion(
    request: PromoteTrial, place: Place, *, agreed: bool = True, match: tuple[str, ...] | None = None
) -> dict[str, Any]:
    """Promote the trial if somebody has agreed, as an operator asks before. Otherwise only plan it, and write nothing.

    `match`: Columns by which the trial's rows are compared with production's, to show the comparison; None compares
    nothing.
    """
    pipeline = place.load(request)
    spark = place.connect(pipeline, "promote")
    plan = plan_promotion(spark, pipeline, request.root, trial=request.trial, past=request.past)
    said: dict[str, Any] = {
        "trial": plan.trial.name,
        "promoted": agreed,
        "again": len(plan.again),
        "behind": len(plan.behind),
    }
    if match is not None:
        trial, found = compare_trial(request.root, pipeline.name, plan.trial.name, match, 3)
        comparison = describe_comparison(found)
        said["comparison"] = comparison
        if not agreed:
            for line in comparison_lines(trial, comparison):
                place.say(line)
    if not agreed:
        place.say(
            f"would run again in production: {len(plan.again)} intervals of the trial, {plan.trial.span}"
            if request.past
            else "this code can continue from production's state: no interval is run again"
        )
        if plan.behind:
            place.say(f"and {len(plan.behind)} later intervals, which the trial did not run")
        return said
    outcomes = []
    if request.past:
        outcomes = promote_past(spark, pipeline, request.root, plan, on_outcome=place.on_outcome)
        place.say(f"{len(plan.again)} intervals have the results of the trial: their digests are equal")
    back = restore_command(coordinator_of(pipeline, request.root).log(), plan, request.root)
    place.say(f"Let the DAG run {request.code} from the next interval on")
    if back is not None:
        place.say(f"To go back, put the old code into the DAG, and restore its state:\n{back}")
    elif request.past:
        place.say(
            "To go back, put the old code into the DAG, and run these intervals again: no checkpoint is before them"
        )
    return said | {"checkpoint": outcomes[-1].checkpoint if outcomes else None, "back": back}
