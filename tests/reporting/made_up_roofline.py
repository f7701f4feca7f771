"""A roofline made by hand: no machine measured it."""

from flatout.records.roofline import DeviceCeilings, Product, ProductAdvice, Roofline

CPU = DeviceCeilings(
    device_kind="cpu",
    device_name="Test CPU",
    threads=2,
    gemm_flops_per_s={"float32": 200e9, "bfloat16": 800e9},
    memory_bytes_per_s=20e9,
    copy_bytes_per_s=18e9,
    triad_bytes_per_s=20e9,
)
HEAD = Product(
    operator="mm",
    m=1024,
    n=5003,
    k=1000,
    batch=1,
    dtype="float32",
    layout="NT",
    role="forward",
    count=1.0,
    flops=10_246_144_000,
    bytes=227_692_089,
    aligned_bytes=4,
    ms=90.0,
    n_timed=9,
)
PAD = ProductAdvice(
    kind="pad",
    what="pad the size 5003 to 5056",
    products=(0,),
    predicted_ratio=1.7,
    measured_ratio=1.5,
    saved_ms=30.0,
)
FOUND = Roofline(ceilings=CPU, workload="train.py", step_ms=100.0, products=(HEAD,), advice=(PAD,))
