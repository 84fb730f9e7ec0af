from xml.etree import ElementTree

from lightning_smp.schedule import draw, draw_svg, make_schedule, simulate

from .graphs import line


def timeline(ranks, num_microbatches):
    graphs = [line(ranks)] * num_microbatches
    return simulate(graphs, make_schedule(graphs, "interleaved"))


def test_text_drawing():
    head, *rows = draw(timeline([0, 1], 3)).splitlines()
    assert head == "1F1B, up to 2 1 alive, groups of 1: makespan 12, bubble 25.0%"
    assert rows == [
        "rank 0  |F0F1....B0<<F2B1<<..B2<<| idle 25%, live 2",
        "rank 1  |..F0B0<<F1B1<<F2B2<<....| idle 25%, live 1",
    ]


def test_segments_are_named_where_a_rank_has_several():
    picture = draw(timeline([0, 1, 0], 1))
    assert "F0.0" in picture
    assert "F0.2" in picture
    assert "F0>" in picture


def test_names_that_do_not_fit_are_not_cut_short():
    """`F1` must not stand for microbatch 12."""
    row = draw(timeline([0, 1], 14), max_width=60).splitlines()[2]
    assert "F9B9F>B<F>B<F>B<F>B<" in row


def test_empty_timeline():
    assert "rank 0" in draw(timeline([0], 1), max_width=0)


def test_svg_is_well_formed_and_complete():
    image = draw_svg(timeline([0, 1, 0], 4))
    root = ElementTree.fromstring(image)
    assert len(root.findall(".//{http://www.w3.org/2000/svg}rect")) == 3 * 2 * 4
