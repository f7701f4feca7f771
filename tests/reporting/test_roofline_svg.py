from dataclasses import replace
from xml.etree import ElementTree

from flatout.records.roofline import Roofline
from flatout.reporting.roofline import HEIGHT, WIDTH, roofline_markdown, roofline_svg
from tests.reporting.made_up_roofline import CPU, FOUND, HEAD

SVG = "{http://www.w3.org/2000/svg}"


def test_the_plot_has_a_roof_for_each_arithmetic_and_a_dot_for_each_product():
    drawn = ElementTree.fromstring(roofline_svg(FOUND))

    roofs, dots = drawn.findall(f"{SVG}polyline"), drawn.findall(f"{SVG}circle")
    assert len(roofs) == 2
    assert [dot.get("class") for dot in dots] == ["forward"]
    assert 0 < float(dots[0].get("cx")) < WIDTH
    assert 0 < float(dots[0].get("cy")) < HEIGHT


def test_a_dot_lies_below_its_roof_and_on_it_at_the_roof():
    def heights(product):
        drawn = ElementTree.fromstring(roofline_svg(replace(FOUND, products=(product,))))
        roof = drawn.find(f"{SVG}polyline").get("points").split()[-1].split(",")[1]
        return float(drawn.find(f"{SVG}circle").get("cy")), float(roof)

    below, roof = heights(HEAD)
    assert below > roof  # down is more
    there, roof = heights(replace(HEAD, ms=1e3 * HEAD.flops / 200e9))
    assert abs(there - roof) < 0.2


def test_a_device_alone_has_a_plot():
    drawn = ElementTree.fromstring(roofline_svg(Roofline(ceilings=CPU)))

    assert len(drawn.findall(f"{SVG}polyline")) == 2


def test_names_of_the_user_s_are_text_in_the_plot():
    drawn = roofline_svg(replace(FOUND, workload="<b>.py", products=()))

    assert "&lt;b&gt;.py" in drawn
    ElementTree.fromstring(drawn)


def test_markdown_has_the_table_and_the_advice():
    text = roofline_markdown(FOUND)

    assert "| product | role | as | n |" in text
    assert "| to gain | FLOP |" in text
    assert "| 1024x5003x1000 | fwd | fp32 NT | 1 |" in text
    assert "| 38.8 ms | 10.2 GFLOP |" in text
    assert "- advice: pad the size 5003 to 5056" in text
    assert "flatout tune train.py" in text
