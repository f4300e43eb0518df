"""One start of an elastic job: a name that its processes agree on, and processes that wait as spares.

torchrun restarts some nodes because a process failed there, and others because the nodes have changed; it counts only the first kind, so
TORCHELASTIC_RESTART_COUNT differs between them. Its store is the same in every start, including entries of earlier starts. So rank 0 makes
a new name in each start and sends it to the processes that request it.
"""

import json
import secrets
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

ASKED, ANSWER, ENDED = "megarun/session/asked", "megarun/session/answer", "megarun/spares/ended"
POLL_SECONDS = 0.05
SLICE_SECONDS = 1.0
A_LONG_TIME = timedelta(days=3650)


def here_keys(world_size: int) -> list[str]:
    """Keys that the processes of a start set once they have joined it."""
    return [f"megarun/here/{index}" for index in range(world_size)]


def wait_for(store: Store, keys: list[str], limit: timedelta) -> None:
    """Wait until a store has all keys, in slices between which Python handles signals.

    Raises:
        RuntimeError: Rank 0 has not answered within the limit, or the session is closed.
    """
    end = time.monotonic() + limit.total_seconds()
    while True:
        began = time.monotonic()
        piece = max(0.001, min(SLICE_SECONDS, end - began))
        try:
            store.wait(keys, timedelta(seconds=piece))
        except RuntimeError:
            now = time.monotonic()
            if now >= end or now - began < piece / 2:  # a closed store fails at once
                raise
        else:
            return


def session_name(store: Store, rank: int, world_size: int, limit: timedelta) -> str:
    """The name of this start, equal on all its ranks and different from other starts. Rank 0 returns when all have joined, or at the limit.

    Raises:
        RuntimeError: Rank 0 gives no answer within the limit.
    """
    mine = secrets.token_hex(8)
    if rank > 0:
        number = store.add(ASKED, 1)
        store.set(f"{ASKED}/{number}", json.dumps([rank, world_size, mine]))
        wait_for(store, [f"{ANSWER}/{mine}"], limit)
        return str(store.get(f"{ANSWER}/{mine}").decode())
    end, answered = time.monotonic() + limit.total_seconds(), 0
    joined = PrefixStore(mine, store)
    while time.monotonic() < end:
        for number in range(answered + 1, store.add(ASKED, 0) + 1):
            asker, size, nonce = json.loads(store.get(f"{ASKED}/{number}"))
            if asker > 0 and size == world_size:  # a question of an earlier start is no longer answered
                store.set(f"{ANSWER}/{nonce}", mine)
            answered = number
        if joined.check(here_keys(world_size)[1:]):
            break
        time.sleep(POLL_SECONDS)
    return mine


def wait_as_spare(store: Any) -> None:
    """Wait until the job has ended; torchrun ends this process if a rank is lost, and starts it again, perhaps as a rank."""
    with suppress(RuntimeError):  # torchrun has exited, which ends the store
        store.wait([ENDED], A_LONG_TIME)


def release_spares(store: Any) -> None:
    """Let the spares end; called by rank 0 when the run is over."""
    with suppress(RuntimeError):
        store.set(ENDED, "1")
