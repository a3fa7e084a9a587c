"""The process that runs a verifier: requests as JSON lines on stdin, one reply for each on stdout.

Request: {"completion": str, "answer": str}. Reply: {"reward": float} or {"error": str}. The first line written is
{"ready": true}, or {"error": str} where the verifier cannot be loaded. The verifier runs in the main thread, and
whoever started this process kills it where a reply takes too long.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import sys
from typing import Any, BinaryIO

from services.common.lifecycle import die_with_parent
from services.rollout.verifiers import BUILT_IN, Verifier, resolve

# Address space of a built-in verifier; sympy needs a fifth of it. A user's function may load what it likes.
MEMORY_LIMIT_BYTES = 4 * 2**30


def main(arguments: list[str]) -> int:
    """arguments: the verifier's name and the process id of the pool."""
    name, pool_pid = arguments
    die_with_parent(signal.SIGKILL, parent_pid=int(pool_pid))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of the terminal; the pool decides
    # What a verifier prints must not end up between the replies.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        verifier = resolve(name)
    except ValueError as error:
        _send(replies, {"error": str(error)})
        return 2
    if name in BUILT_IN:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    _send(replies, {"ready": True})
    for line in sys.stdin.buffer:
        request = json.loads(line)
        _send(replies, judge(verifier, request["completion"], request["answer"]))
    return 0


def judge(verifier: Verifier, completion: str, answer: str) -> dict[str, Any]:
    """One reply. What is not a finite number is an error and never a reward."""
    try:
        reward = float(verifier(completion, answer))
    except Exception as error:  # noqa: BLE001 - the edge of the process: the pool counts it
        return {"error": f"{type(error).__name__}: {error!s:.300}"}
    if not math.isfinite(reward):
        return {"error": f"the verifier returned {reward}, which is not finite"}
    return {"reward": reward}


def _send(replies: BinaryIO, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message).encode() + b"\n")
    replies.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
