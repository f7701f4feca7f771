"""A variable keeps the autograd graphs of all steps so far."""

from flatout.records.finding import Finding
from flatout.records.machine import Machine
from flatout.records.messages import words
from flatout.records.profile import Profile
from flatout.records.units import format_bytes

STEPS = 1_000
"""Steps over which the growth is judged, as for other leaks."""
NODE_BYTES = 780
"""Host memory of one autograd node: the growth of the resident size over 249 steps of 50 linear
layers whose loss was kept, by nodes (torch 2.13 on Linux). Tensors that a node still holds come on
top; those are seen as a memory leak."""
IN_PROJECT = ("MEM01", "MEM10")


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report graphs that grow by the same number of nodes in every observed step."""
    story = profile.memory
    if story is None or not story.kept_graph_names or story.kept_graph_nodes_per_step < 1:
        return None
    nodes = story.kept_graph_nodes_per_step
    names = ", ".join(f"`{name}`" for name in story.kept_graph_names)
    share = STEPS * nodes * NODE_BYTES / max(machine.memory_bytes, 1)
    return Finding(
        code="kept_graph",
        share=min(share, 1.0),
        of="memory",
        because=words(
            "finding.kept_graph.because",
            names=names,
            nodes=f"{nodes:.0f}",
            size=format_bytes(nodes * NODE_BYTES),
            n=str(story.steps),
        ),
        next=words("finding.kept_graph.next", names=names),
        evidence={"nodes_per_step": nodes, "steps": float(story.steps)},
    )
