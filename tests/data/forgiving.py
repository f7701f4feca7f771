"""A module of a script's with a function that goes on after any error."""


def read(index):
    try:
        return 1 / index
    except Exception:  # noqa: BLE001  as people write it
        return 0
