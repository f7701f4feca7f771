from flatout.records import catalogue
from flatout.reporting.doctor import render_techniques


def test_every_technique_is_listed_with_its_promise():
    classes = {name: catalogue.technique_class(name) for name in catalogue.names()}

    text = render_techniques(classes)

    rows = {line.split()[0]: line.split()[1] for line in text.splitlines() if line[:1].isalpha()}
    assert {name: rows[name] for name in classes} == {
        name: kind.numerics.value for name, kind in classes.items()
    }
