from flatout.hardware.limits import affinity
from flatout.hardware.machine import cpu_features, cpu_name, physical_cores

X86 = (
    "processor\t: 0\nmodel name\t: Some  CPU @ 2.0GHz\nflags\t\t: fpu AVX2 avx512f amx_bf16 sse\n\n"
)
ARM = "processor\t: 0\nFeatures\t: fp asimd fphp asimdhp bf16 sve\nCPU part\t: 0xd40\n"


def host(root, cpuinfo="", siblings=()):
    (root / "proc").mkdir()
    (root / "proc/cpuinfo").write_text(cpuinfo)
    for number, text in enumerate(siblings):
        folder = root / f"sys/devices/system/cpu/cpu{number}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(text + "\n")
    return root


def test_the_name_is_read_without_double_blanks(tmp_path):
    assert cpu_name(host(tmp_path, X86)) == "Some CPU @ 2.0GHz"


def test_only_features_that_matter_are_reported(tmp_path):
    assert cpu_features(host(tmp_path, X86)) == {"avx2", "avx512f", "amx_bf16"}


def test_the_features_of_arm_are_read(tmp_path):
    assert cpu_features(host(tmp_path, ARM)) == {"asimdhp", "bf16", "sve"}


def test_two_threads_of_one_core_count_once(tmp_path):
    root = host(tmp_path, siblings=("0,2", "1,3", "0,2", "1,3"))

    assert physical_cores(frozenset({0, 1, 2, 3}), root) == 2
    assert physical_cores(frozenset({0, 2}), root) == 1


def test_without_a_topology_each_logical_core_is_physical(tmp_path):
    assert physical_cores(frozenset({0, 1, 2}), host(tmp_path)) == 3


def test_this_host_has_between_one_and_all_physical_cores():
    assert 1 <= physical_cores() <= len(affinity())
