from dataclasses import replace

from flatout.records.live import LiveGpu, LiveHost, LiveJob, LiveTrainer, LiveView
from flatout.records.readings import GpuReadings
from flatout.reporting.watch import render_watch

GIB = 1024**3
HOST = LiveHost(
    cpu_share=0.59,
    cores=16,
    memory_used_bytes=12 * GIB,
    memory_total_bytes=128 * GIB,
    disk_read_bytes_per_s=2.5e8,
    disk_write_bytes_per_s=0.0,
)
TRAINER = LiveTrainer(
    pid=7,
    step=1200,
    age_s=0.2,
    step_ms=212.4,
    samples_per_s=151.0,
    shares={"data_wait": 0.62, "forward": 0.3, "other": 0.08},
    loss=1.361,
    loss_step=1198,
    device_kind="cuda",
    memory_bytes=9 * GIB,
)
JOB = LiveJob(
    folder="/home/me/.cache/flatout/run-x",
    kind="run",
    workload="train.py --epochs 3",
    pid=6,
    elapsed_s=340.0,
    state="training",
    trainers=(TRAINER,),
)
GPU = LiveGpu(
    index=0,
    name="NVIDIA H200",
    is_of_job=True,
    readings=GpuReadings(
        util_share=0.98,
        memory_used_bytes=10 * GIB,
        power_w=310.0,
        clock_mhz=1755.0,
        temperature_c=61.0,
        missing={"sm_active_share": "Insufficient Permissions"},
    ),
)
VIEW = LiveView(at="2026-01-02T03:04:05+00:00", host=HOST, job=JOB, gpus=(GPU,))


def test_the_view_of_a_job_on_a_gpu():
    assert render_watch(VIEW, width=80).splitlines() == [
        "flatout watch  2026-01-02T03:04:05+00:00",
        "",
        "job        train.py --epochs 3 (run, 5 min 40 s): training",
        "folder     /home/me/.cache/flatout/run-x",
        "speed      step 1200, 212 ms a step, 151 samples/s",
        "data wait  62 %   ############",
        "memory     9.00 GiB held by tensors",
        "loss       1.361 (of one backward, step 1198)",
        "",
        "                 GPU-",
        "GPU              Util   SM  tensor     memory  power     clock  temp  others",
        "----------------------------------------------------------------------------",
        "0 NVIDIA H200 *  98 %  n/a     n/a  10.00 GiB  310 W  1755 MHz  61 C       0",
        "",
        "n/a        Insufficient Permissions",
        "host       16 cores 59 % busy, memory 12.00 GiB of 128.00 GiB, disk read 238.4",
        "           MiB/s, write 0 bytes/s",
    ]


def test_several_ranks_have_a_row_each():
    second = replace(TRAINER, rank=1, samples_per_s=None, step_ms=None)

    text = render_watch(replace(VIEW, job=replace(JOB, trainers=(TRAINER, second))))

    assert "151 samples/s" in text
    assert "   1  1200        n/a        n/a       62 %" in text


def test_a_machine_that_tells_nothing_still_has_a_view():
    host = LiveHost(cores=2, missing={"cpu_share": "no access to /proc"})
    view = LiveView(at="now", host=host, notes=("no flatout job is running",))

    assert render_watch(view).splitlines() == [
        "flatout watch  now",
        "",
        "host       2 cores n/a busy, cpu_share n/a: no access to /proc",
        "note       no flatout job is running",
    ]


def test_a_hostile_name_cannot_move_the_cursor():
    job = replace(JOB, workload="train.py \x1b[2J\u202e")

    assert "\x1b" not in render_watch(replace(VIEW, job=job))


def test_a_quiet_job_says_since_when():
    late = replace(JOB, state="quiet", trainers=(replace(TRAINER, age_s=75.0),))

    assert "quiet, last step 1 min 15 s ago" in render_watch(replace(VIEW, job=late), width=200)
