import subprocess
import sys

from flatout import rules
from flatout.core.units import GIB, MIB
from tests.rules.journey_facts import journey
from tests.rules.memory_facts import story, sync
from tests.rules.pipeline_facts import pipeline
from tests.rules.rank_facts import rank
from tests.techniques.facts import loader, machine, model, optimizer, profile

EVERYTHING = profile(
    phases_ms={"data_wait": 50.0, "optimizer": 30.0, "other": 20.0},
    loaders=(loader(),),
    models=(
        model(attention_backend="math"),
        model(parameters=1000, experts=8, expert_parameters=800),
    ),
    optimizers=(optimizer(),),
    memory=story(
        leak_bytes_per_step=10 * MIB,
        kept_graph_nodes_per_step=100.0,
        kept_graph_names=("total",),
        reserved_bytes=15 * GIB,
        fragmentation_share=0.5,
    ),
    syncs=(sync(),),
    journey=journey(growth=10.0 * MIB),
    pipeline=pipeline(),
    ranks=(rank(0, exposed_ms=60.0), rank(1, exposed_ms=30.0, is_straggler=True)),
)


def test_every_rule_names_itself_and_the_largest_share_comes_first():
    found = rules.findings(EVERYTHING, machine(cpu_features=frozenset({"amx_bf16"})))

    assert {finding.code for finding in found} == set(rules.codes())
    shares = [finding.share for finding in found]
    assert shares == sorted(shares, reverse=True)
    assert all(0 < share <= 1 for share in shares)
    assert all(finding.evidence and finding.next for finding in found)


def test_a_training_that_only_computes_has_no_findings():
    assert rules.findings(profile(models=(model(),)), machine()) == ()


def test_the_rules_do_not_import_torch():
    code = (
        "import sys; from flatout import rules; from flatout.core.catalog import module_names\n"
        "[__import__(module) for module in module_names(rules).values()]\n"
        "print(len(rules.codes()), 'torch' in sys.modules)"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.split()[1] == "False"
