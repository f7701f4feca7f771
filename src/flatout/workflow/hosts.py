"""A training on several hosts: how torchrun finds the others, and a batch script for SLURM.

flatout starts no cluster: each host starts `flatout run` with the same rendezvous, or SLURM does.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flatout.launch.rank_launcher import RENDEZVOUS
from flatout.records.errors import UserError

PORT = 29_500
"""torchrun's own default, of the first host's rendezvous."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """The hosts of one training."""

    count: int = 1
    rendezvous: str = ""
    """`host:port` of the first, which all reach."""

    def __post_init__(self) -> None:
        if self.count > 1 and not self.rendezvous:
            raise UserError(
                f"--hosts {self.count} needs --rendezvous HOST:PORT of the first host, which each "
                "of them reaches; --slurm PATH writes a batch script that fills it in"
            )
        name, _, port = self.rendezvous.rpartition(":")
        if self.rendezvous and not (name and port.isdigit()):
            raise UserError(f"--rendezvous {self.rendezvous}: give HOST:PORT, as node1:{PORT}")

    @property
    def environment(self) -> dict[str, str]:
        """What the launcher of the ranks finds them by; nothing for one host."""
        return {RENDEZVOUS: f"{self.count} {self.rendezvous}"} if self.count > 1 else {}


ONE_HOST = Hosts()


def slurm_script(name: str, hosts: int, gpus: int | None, command: Sequence[str]) -> str:
    """Return a batch script that starts one `flatout run` on each host.

    Without `gpus` they train on their CPUs. The command is `flatout run ...` up to the script's
    arguments, without `--hosts` and `--rendezvous`.
    """
    start, options = shlex.join(command[:2]), shlex.join(command[2:])
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={_plain(name)}",
        f"#SBATCH --nodes={hosts}",
        "#SBATCH --ntasks-per-node=1",
        *([f"#SBATCH --gpus-per-node={gpus}"] if gpus else []),
        "set -euo pipefail",
    ]
    if hosts > 1:
        lines += [
            "# The first host of the job; all others find it there.",
            # No `| head`: under pipefail, scontrol may end by its closed pipe.
            'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST")',
            "first=${first%%$'\\n'*}",
        ]
        start += f' --hosts {hosts} --rendezvous "$first:{PORT}"'
    return "\n".join([*lines, f"srun {start} {options}", ""])


def _plain(name: str) -> str:
    """Return a name that SLURM takes: letters, digits and a few signs."""
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in Path(name).stem) or "flatout"
