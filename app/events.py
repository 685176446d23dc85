"""events.jsonl in words: what joined, left, died, recovered. One line per event for the terminal and the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FATES = {
    "dead": "died",
    "replace": "is replaced",
    "drain": "finishes and leaves",
    "suspect": "is silent",
    "leaving": "announces that it leaves",
    "lost": "was lost",
}


def describe(event: Mapping[str, Any]) -> str:
    """One line for a person; empty for events that nobody needs to read (the end of a generation, a stack dump)."""
    why = f" ({event['why']})" if event.get("why") else ""
    match event["event"]:
        case "start":
            return f"data is ready; starting at step {event['from_step']} (state: {event['origin']})"
        case "changed":
            return f"settings changed since the last start: {', '.join(event['settings'])}"
        case "ready":
            return f"worker {event['worker']} is ready on {event['host']}"
        case "generation":
            return f"generation {event['generation']}: {len(event['workers'])} workers{why}"
        case "dead" | "replace" | "drain" | "suspect" | "leaving" | "lost":
            return f"worker {event['worker']} {FATES[event['event']]}{why}"
        case "recovered":
            return f"recovered: step {event['step']} finished {event['seconds']:.1f} s after the loss"
        case "wait" | "stall":
            return str(event["detail"])
        case "fallback":
            first, last = event["to_step"] + 1, event["to_step"] + event["lost_steps"]
            return f"no whole snapshot is left: steps {first} to {last} run again"
        case "skipped":
            return f"step {event['step']} skipped: loss {event['loss']}, gradient norm {event['grad_norm']}"
        case "snapshots":
            size = f"{event['mib_per_keeper']:.1f} MiB"
            return f"snapshots take {size} of host memory on each of {event['keepers']} nodes"
        case "speeds":
            return "plans now count on speeds " + ", ".join(f"{w} {s:.2f}" for w, s in event["speed"].items())
        case "checkpoint":
            return f"checkpoint after {event['step'] + 1} steps"
        case "resize":
            return f"asked for {event['target']} workers"
        case "keeper_lost":
            return "a snapshot keeper was lost and is replaced"
        case "keeper_slow":
            return f"{event['keeper']} has not answered for {event['seconds']:.0f} s; it lives and is waited for"
        case "keeper_silent":
            return f"{', '.join(event['silent'])} may hold the newest state and stayed silent; nothing is dropped"
        case "keepers_slow":
            return f"step {event['step']} has waited for {event['seconds']:.0f} s to be held by its keepers"
        case "keepers_repaired":
            return f"the keepers were repaired for the {event['repairs']}. time without a commit{why}"
        case "snapshots_failed":
            return f"the keepers cannot take the state{why}; the workers' own goes to disk"
        case "memory_short":
            return (
                f"warning: snapshots take {event['mib_needed']:,} MiB on {event['host']}, which can spare "
                f"{event['mib_room']:,} MiB"
            )
        case "checkpoint_damaged" | "checkpoint_passed_over":
            return f"checkpoint {event['folder']} is passed over{why}"
        case "feeder_lost":
            return f"the feeder was lost and is started again{why}"
        case "monitor_restarted":
            return "the monitor was lost and is started again"
        case "checkpoint_failed":
            return f"the checkpoint after {event['step'] + 1} steps was not written{why}"
        case "fail" | "stopping":
            return f"stopping{why}"
        case "finish":
            return f"finished after {event['step'] + 1} steps"
    return ""
