"""Debug information in programs and libraries: its bytes in all sums, and its finding."""

from elf_maker import BYTES, STRIPPED, program
from image_maker import file, tar
from report_maker import audited


def test_it_is_a_kind_of_its_own_in_all_sums_and_a_finding_with_its_remedy() -> None:
    big = program(sizes={**BYTES, ".debug_info": 3_000_000})
    report = audited(tar(file("usr/lib/x/libx.so", big), file("usr/bin/tool", program()), file("a", b"1")))
    stripped = 2 * STRIPPED + 2_800_000
    total = report.totals.unpacked_bytes
    assert report.kinds["debug information"] == stripped
    assert sum(report.kinds.values()) == sum(report.owners.values()) == total == report.totals.visible_bytes
    assert sum(row.unpacked_bytes for row in report.tree.rows) == total
    [finding] = report.findings
    assert (finding.id, finding.bytes) == ("debug-info-in-libraries", stripped)
    assert finding.predicted_unpacked_bytes == total - stripped
    assert finding.remedy.startswith("RUN find /usr/lib/x /usr/bin -maxdepth 1")
    assert "strip --strip-unneeded" in finding.remedy


def test_a_file_of_debug_information_is_not_counted_twice() -> None:
    report = audited(tar(file("usr/lib/debug/x.debug", program(sizes={**BYTES, ".debug_info": 3_000_000}))))
    assert [row.id for row in report.findings] == ["debug-info"]
    assert report.kinds == {"debug information": report.totals.unpacked_bytes}
