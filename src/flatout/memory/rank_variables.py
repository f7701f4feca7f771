"""The environment of the first of several ranks that torchrun would start."""

from collections.abc import Mapping


def rank_variables(world_size: int) -> Mapping[str, str]:
    """Return the variables that torchrun sets for the first rank of so many on one machine."""
    return {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "plan",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }
