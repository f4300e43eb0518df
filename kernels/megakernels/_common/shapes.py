"""One way to refuse inputs that do not fit together."""


def require(condition: bool, operation: str, expected: str, **values: object) -> None:
    """Refuses inputs that do not fit together.

    Args:
        condition: what must hold.
        operation: name of the operation, the first word of the message.
        expected: the rule in words.
        **values: the sizes or dtypes that decide it, all printed.

    Raises:
        ValueError: the condition does not hold; the message names the operation, the rule and every value.
    """
    if not condition:
        found = ", ".join(f"{name} = {tuple(value) if isinstance(value, (list, tuple)) else value}" for name, value in values.items())
        raise ValueError(f"{operation}: {expected}; got {found}")
