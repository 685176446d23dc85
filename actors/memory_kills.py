"""What Ray says of a worker that it has ended because its node ran low on memory: the facts, in two sentences."""

from __future__ import annotations

import logging
import re

log = logging.getLogger(__name__)

_NODE = re.compile(r"running low on memory.*?\(IP: (\S+?),.*?was ([\d.]+)GB(?: used)? / ([\d.]+)GB", re.DOTALL)
_SHARE = re.compile(r"threshold of \S+ \(([\d.]+%)")
_KILLED = re.compile(r"name=([\w.:]+).*?pid=(\d+).*?memory used=([\d.]+)GB", re.DOTALL)


def in_short(text: str) -> str:
    """Ray's thousands of characters on a kill for memory as which process, where, of how much, and what to change; they
    go to the log at debug level. Other texts as they are."""
    node = _NODE.search(text)
    if node is None:
        return text
    log.debug("Ray on a kill for memory: %s", text)
    host, used, size = node.groups()
    share, killed = _SHARE.search(text), _KILLED.search(text)
    who = f"{killed[1]} (pid {killed[2]}, {killed[3]} GB)" if killed else "a process"
    over = f", more than {share[1]} of it" if share else ""
    return (
        f"Ray ended {who} because {used} of {size} GB of node {host} were in use{over}. Free memory there, lower "
        f"workers.max, or set RAY_memory_usage_threshold to a larger share before Ray starts."
    )
