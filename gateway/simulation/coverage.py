"""Reads the summary of llvm-cov on standard input, and prints the coverage of each folder of the relay."""

import json
import sys
from collections import defaultdict

PARTS = [
    "gateway/data-plane/src",
    "agent/src/forward",
    "agent/src/tunnel",
    "agent/src/backend",
    "shared/src/tunnel",
    "shared/src/net",
    "shared/src/http",
]
KINDS = ["functions", "lines"]


def module(name, part):
    """The folder of a file within a part, or the file if it lies in the part itself."""
    rest = name.split(f"/{part}/", 1)[1].split("/")
    return part if part != PARTS[0] else f"{part}/{rest[0].removesuffix('.rs')}"


def main():
    sums = defaultdict(lambda: {kind: [0, 0] for kind in KINDS})
    unreached = []
    for file in json.load(sys.stdin)["data"][0]["files"]:
        name = file["filename"]
        part = next((part for part in PARTS if f"/{part}/" in name), None)
        if part is None or "/support/" in name or "/tests" in name:
            continue
        for key in (module(name, part), "all"):
            for kind in KINDS:
                summary = file["summary"][kind]
                sums[key][kind][0] += summary["covered"]
                sums[key][kind][1] += summary["count"]
        lines = file["summary"]["lines"]
        if lines["count"] >= 10 and lines["percent"] < 50:
            path = part + name.split(f"/{part}", 1)[1]
            unreached.append((lines["count"] - lines["covered"], path, lines["percent"]))
    print(f"{'':44} {'functions':>17} {'lines':>19}")
    for key in sorted(sums, key=lambda key: (key == "all", key)):
        cells = []
        for kind in KINDS:
            covered, count = sums[key][kind]
            cells.append(f"{covered:>6} of {count:<5} {100 * covered // max(count, 1):>3}%")
        print(f"{key:44} {cells[0]:>17} {cells[1]:>19}")
    print("\nFiles of which less than half is reached, with their unreached lines:")
    for missing, path, percent in sorted(unreached, reverse=True):
        print(f"{missing:>6}  {percent:>3.0f}%  {path}")


main()
