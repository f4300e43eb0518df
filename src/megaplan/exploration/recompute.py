"""Recompute policies of a search: a chain from none to the largest saving, out of many combinations of families."""

from collections.abc import Callable, Sequence

FamilyPolicies = tuple[tuple[str, str], ...]
FEW = 9
"""Largest number of combinations that are all kept: three policies of two families."""
STRENGTH = ("none", "selective", "full")


def chain(
    options: Sequence[FamilyPolicies], saved_bytes: Callable[[str, str], int], lost_ns: Callable[[str, str], int]
) -> list[FamilyPolicies]:
    """Policies with one more family recomputed at each step: the one whose layers save the most bytes per time.

    Args:
        options: All combinations; returned unchanged if they are few.
        saved_bytes: (letter, policy) to the bytes that the letter's layers save against no recompute, for one microbatch.
        lost_ns: (letter, policy) to the additional time.
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
