"""Examinations in their own processes, forked from one server that has loaded torch once; one that takes too long is ended."""

import multiprocessing
import os
import sys
from multiprocessing.connection import Connection
from typing import Any

from random_plans.examine import FAILED, Failure, Verdict, examine


class Bench:
    """Folder in which plans are examined."""

    def __init__(self, seconds: float) -> None:
        """Prepare a server of processes.

        Args:
            seconds: Wall time after which an examination counts as failed.
        """
        self._seconds = seconds
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)  # Python 3.11 passes the server no path
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            [
                "__main__",
                "random_plans.alone",
                "random_plans.examine",
                "random_plans.owners",
                "megarun.trace.rank",
                "megaplan.budget.megarun",
            ]
        )

    def examine(self, document: dict[str, Any], wanted: str | None = None) -> Verdict:
        """`random_plans.examine.examine`, or a failure if the process crashed or took too long."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_send, args=(theirs, document, wanted), daemon=True)
        process.start()
        theirs.close()
        try:
            if not ours.poll(self._seconds):
                return Verdict(FAILED, (Failure("timeout", f"after {self._seconds:g} s", weight=1.0),))
            verdict: Verdict = ours.recv()
            return verdict
        except EOFError:
            return Verdict(FAILED, (Failure("crash", "the process crashed", weight=1.0),))
        finally:
            process.kill()
            process.join()
            ours.close()


def _send(pipe: Connection, document: dict[str, Any], wanted: str | None) -> None:
    pipe.send(examine(document, wanted))
