#!/usr/bin/env python3
"""Adds up test reports: summary.py FOLDER... A folder has ctest.xml and one GoogleTest report a shard, where a test
without a report of its own counts as one; or pytest's reports. Ends with the line 'N passed, N failed, N skipped'.
Sanitized tests say how many cases of their sweeps they ran and left out; one that ran none counts as skipped."""

import pathlib
import sys
import xml.etree.ElementTree as ElementTree


def count(element):
    """passed, failed, skipped of one <testcase>."""
    if element.find("failure") is not None or element.find("error") is not None or element.get("status") == "fail":
        return 0, 1, 0
    skipped = element.find("skipped") is not None or element.get("status") in ("notrun", "disabled")
    skipped = skipped or swept(element)[0] == 0
    return (0, 0, 1) if skipped else (1, 0, 0)


def swept(element):
    """Cases run and left out of the sweeps of one <testcase>; None, None where it has no such properties."""
    values = {p.get("name"): int(p.get("value")) for p in element.iter("property")}
    return values.get("cases"), values.get("left_out")


def total(counts):
    return tuple(map(sum, zip((0, 0, 0), *counts)))


def folder_total(folder):
    if not (folder / "ctest.xml").exists():
        reports = map(ElementTree.parse, folder.glob("*.xml"))
        return total(count(case) for report in reports for case in report.iter("testcase"))
    counts = []
    for test in ElementTree.parse(folder / "ctest.xml").iter("testcase"):
        report = folder / (test.get("name") + ".xml")
        whole = count(test)
        if report.exists():
            cases = total(count(case) for case in ElementTree.parse(report).iter("testcase"))
            # A shard that failed outside its cases (a crash, a leak) is one more failure.
            counts.append((cases[0], max(cases[1], whole[1]), cases[2]))
        else:
            counts.append(whole)
    return total(counts)


def cases_of(folder):
    reports = (ElementTree.parse(path) for path in folder.glob("*.xml"))
    pairs = (swept(case) for report in reports for case in report.iter("testcase"))
    return tuple(map(sum, zip((0, 0), *(pair for pair in pairs if pair[0] is not None))))


def main(folders):
    sums = []
    for folder in map(pathlib.Path, folders):
        if any(folder.glob("*.xml")):
            sums.append(folder_total(folder))
            cases, left_out = cases_of(folder)
            thinned = f"; of their sweeps {cases} cases, {left_out} left out" if left_out else ""
            passed, failed, skipped = sums[-1]
            print(f"{folder.parent.name:<22} {passed} passed, {failed} failed, {skipped} skipped{thinned}")
    passed, failed, skipped = total(sums)
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
