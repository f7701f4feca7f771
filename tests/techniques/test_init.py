import pytest

from flatout.records import catalogue
from flatout.records.errors import UserError
from flatout.records.recipe import Choice, Recipe
from flatout.techniques.compute.cpu_threads import CpuThreads
from flatout.techniques.data.loader_workers import LoaderWorkers
from tests.support.programs import python


def recipe(technique, **settings):
    return Recipe(choices=(Choice(technique=technique, settings=settings),))


def test_a_recipe_becomes_techniques_in_its_order():
    both = recipe("loader_workers", num_workers=3).plus(
        Choice(technique="cpu_threads", settings={"threads": 2})
    )

    assert catalogue.build(both) == (LoaderWorkers(num_workers=3), CpuThreads(threads=2))


def test_an_unknown_technique_is_met_with_the_nearest_one():
    with pytest.raises(UserError, match="did you mean 'loader_workers'"):
        catalogue.build(recipe("loader_worker"))


def test_an_unknown_setting_is_met_with_the_nearest_one():
    with pytest.raises(UserError, match="did you mean 'num_workers'"):
        catalogue.build(recipe("loader_workers", num_worker=2))


@pytest.mark.parametrize(
    ("technique", "settings", "allowed"),
    [
        ("loader_workers", {"num_workers": "2"}, "give a whole number"),
        ("loader_workers", {"num_workers": True}, "give a whole number"),
        ("loader_workers", {"num_workers": 0}, "must be at least 1"),
        ("cpu_threads", {"threads": -1}, "must be at least 1"),
        ("cpu_allocator", {"library": "jemalloc"}, "one of 'tcmalloc', 'glibc'"),
        ("scheduled_gc", {"every": 0}, "at least 1 step"),
        ("empty_cache_steps", {"every": 0}, "at least 1"),
        ("batch_size", {"samples": 0}, "at least 1"),
        ("microbatching", {"chunks": 1}, "at least 2"),
        ("fp16_autocast", {"initial_scale": 1000}, "power of two; try 8192"),
        ("dynamic_padding", {"multiple_of": 0}, "multiple_of=0"),
        ("read_ahead", {"batches_ahead": 0}, "batches_ahead=0"),
        ("length_buckets", {"window": 1}, "window=1"),
        ("device_cache", {"memory_share": 0}, "must"),
        ("device_cache", {"make_s": 0}, "must"),
        ("ram_cache", {"memory_share": 0}, "must"),
        ("ram_cache", {"memory_share": 1}, "must"),
        ("ram_cache", {"fill_s": -1}, "must"),
        ("scaled_decode", {"gap": 0.5}, "between 1 and 8"),
        ("scaled_decode", {"gap": 9.0}, "between 1 and 8"),
        ("activation_checkpointing", {"fraction": -0.1}, "at least 0 and below 1"),
        ("activation_checkpointing", {"fraction": 1.0}, "at least 0 and below 1"),
    ],
)
def test_a_value_that_is_not_allowed_is_told_with_what_is(technique, settings, allowed):
    with pytest.raises(UserError, match=allowed):
        catalogue.build(recipe(technique, **settings))


def test_neither_the_catalog_nor_the_techniques_import_torch():
    code = (
        "import sys; from flatout.records import catalogue; names = catalogue.names(); "
        "before = [m for m in sys.modules if m.startswith('flatout.techniques.')]; "
        "[catalogue.technique_class(name) for name in names]; "
        "print(len(names), before, 'torch' in sys.modules)"
    )

    done = python(["-c", code], check=True)

    assert done.stdout.split(maxsplit=1)[1].strip() == "[] False"
