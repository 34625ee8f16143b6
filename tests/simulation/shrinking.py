"""Finds the fewest faults with which a run still fails (delta debugging, Zeller and Hildebrandt 2002)."""


def fewest(faults, fails):
    """Returns a part of ``faults`` with which ``fails(part)`` is true, and of which no item can be left out.

    >>> fewest(list(range(20)), lambda part: {3, 11} <= set(part))
    [3, 11]
    """
    faults = list(faults)
    if fails([]):
        return []
    num_parts = 2
    while len(faults) >= 2:
        size = -(-len(faults) // num_parts)
        parts = [faults[start : start + size] for start in range(0, len(faults), size)]
        others = [[fault for part in parts if part is not left_out for fault in part] for left_out in parts]
        smaller = next((part for part in (*parts, *others) if len(part) < len(faults) and fails(part)), None)
        if smaller is not None:
            faults, num_parts = smaller, 2
        elif size == 1:
            break
        else:
            num_parts = min(len(faults), 2 * num_parts)
    return faults
