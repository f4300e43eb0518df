"""Recompute policies of a search: of many combinations of families, a chain from none to the most that can be saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence

FamilyPolicies = tuple[tuple[str, str], ...]
FEW = 9
"""Combinations up to which all are kept: three policies of two families."""
STRENGTH = ("none", "selective", "full")


def chain(
    options: Sequence[FamilyPolicies], saved_bytes: Callable[[str, str], int], lost_ns: Callable[[str, str], int]
) -> list[FamilyPolicies]:
    """Policies that give way family by family: at each step, the family whose layers save the most bytes for the time it takes.

    Args:
        options: All combinations; kept as they are if they are few.
        saved_bytes: (letter, policy) to what the letter's layers keep less than without recompute, of one microbatch.
        lost_ns: (letter, policy) to the time that they take more.
    """
    if len(options) <= FEW:
        return list(options)
    allowed = {letter: {dict(option)[letter] for option in options} for letter, _ in options[0]}
    now = {letter: min(policies, key=STRENGTH.index) for letter, policies in allowed.items()}
    found = [tuple(now.items())]

    def step(letter: str, policy: str) -> tuple[float, str, str]:
        saved = saved_bytes(letter, policy) - saved_bytes(letter, now[letter])
        lost = lost_ns(letter, policy) - lost_ns(letter, now[letter])
        return (saved / max(lost, 1), letter, policy) if saved > 0 else (0.0, letter, policy)

    while True:
        steps = [
            step(letter, policy)
            for letter, policies in allowed.items()
            for policy in policies
            if STRENGTH.index(policy) > STRENGTH.index(now[letter])
        ]
        best = max(steps, default=(0.0, "", ""))
        if best[0] <= 0:
            return found
        now[best[1]] = best[2]
        found.append(tuple(now.items()))
