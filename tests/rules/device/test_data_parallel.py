from flatout.rules.device.data_parallel import check
from tests.techniques.facts import gpu, machine, model, profile

FOUR = machine(devices=(gpu(),) * 4)


def test_one_process_for_four_gpus_is_reported():
    finding = check(profile(models=(model(name="DataParallel"),)), FOUR)

    assert finding.share == 0.75
    assert "--nproc-per-node 4" in finding.next


def test_it_is_silent_about_one_gpu_and_other_wrappers():
    wrapped = profile(models=(model(name="DistributedDataParallel"),))

    assert check(profile(models=(model(name="DataParallel"),)), machine(devices=(gpu(),))) is None
    assert check(wrapped, FOUR) is None
