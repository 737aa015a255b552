"""Tables are the same in a container as on a host: nothing has to be installed for them."""

from probes.shared.grid import markdown_table, text_table


def test_columns_of_a_text_table_are_as_wide_as_their_widest_cell() -> None:
    drawn = text_table(("a", "size"), [("bb", "1"), ("c", "")])
    assert drawn.splitlines() == ["a   size", "--  ----", "bb  1", "c"]


def test_a_table_without_rows_still_has_its_headers() -> None:
    assert text_table(("a", "b"), []).splitlines() == ["a  b", "-  -"]


def test_no_cell_of_a_table_becomes_another_cell_or_line_or_reaches_the_terminal_raw() -> None:
    lines = markdown_table(("a", "b"), [("x|y", "1\n2")]).splitlines()
    assert len(lines) == 3
    assert len({len(line) for line in lines}) == 1
    assert "x|y" not in lines[2]
    assert "\x1b" not in text_table(("a",), [("\x1b[2J",)])
