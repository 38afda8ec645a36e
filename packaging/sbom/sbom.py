"""Says of which crates a program is made: sbom.py --help

Writes them into the program, as `cargo auditable` does (a section .dep-v0 that scanners read), and into a CycloneDX document.
Both depend on nothing but the source, the compilers and SOURCE_DATE_EPOCH. Needs cargo, rustc and objcopy.
"""

import argparse
import base64
import datetime
import hashlib
import json
import os
import pathlib
import re
import subprocess
import tempfile
import tomllib
import uuid
import zlib
from dataclasses import dataclass, field

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
VENDORED = REPOSITORY / "shared/vendor"
REGISTRY = "registry+https://github.com/rust-lang/crates.io-index"
LINE = re.compile(r"(?P<depth>\d+)(?P<name>\S+) v(?P<version>\S+)(?P<notes>( \([^)]*\))*)\|(?P<license>[^|]*)\|(?P<url>\S*)")


@dataclass
class Crate:
    name: str
    version: str
    license: str
    url: str
    # Folder below the repository; None if the crate is from the registry.
    folder: str | None
    runs_in_compiler: bool
    # Of the program at run time, and of build scripts.
    linked: set = field(default_factory=set)
    for_build: set = field(default_factory=set)

    def is_vendored(self) -> bool:
        return self.folder is not None and self.folder.startswith("shared/vendor/")


def run(*command: str, **options) -> str:
    return subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.PIPE, text=True, **options).stdout


def read_tree(target: str, edges: str, crates: dict) -> dict:
    """Adds the crates that `cargo tree` prints for both programs to `crates`; the dependencies of each."""
    packages = ["--package", "gw-gateway", "--package", "gw-agent"]
    command = [os.environ.get("CARGO", "cargo"), "tree", "--locked", *packages, "--target", target, "--edges", edges]
    found, path = {}, []
    for line in run(*command, "--prefix", "depth", "--format", "{p}|{l}|{r}").splitlines():
        if not line:
            continue
        part = LINE.match(line)
        assert part, f"cargo tree: unknown line {line}"
        notes = re.findall(r"\(([^)]*)\)", part["notes"])
        key = (part["name"], part["version"])
        folders = [os.path.relpath(note, REPOSITORY) for note in notes if note.startswith("/")]
        crate = Crate(*key, part["license"].replace("/", " OR "), part["url"], *(folders or [None]), "proc-macro" in notes)
        crates.setdefault(key, crate)
        found.setdefault(key, set())
        depth = int(part["depth"])
        path[depth:] = [key]
        if depth:
            found[path[depth - 1]].add(key)
    return found


def read_crates(target: str) -> dict:
    """All crates of both programs, by name and version."""
    crates = {}
    linked = read_tree(target, "normal", crates)
    all_kinds = read_tree(target, "normal,build", crates)
    for key, crate in crates.items():
        crate.linked = linked.get(key, set())
        crate.for_build = all_kinds[key] - crate.linked
    return crates


def reach(crates: dict, root: tuple) -> tuple[list, set]:
    """Returns all crates that the program needs, in order, and those of them that are in it."""

    def follow(start: set, edges) -> set:
        seen, waiting = set(), list(start)
        while waiting:
            key = waiting.pop()
            if key not in seen:
                seen.add(key)
                waiting += edges(crates[key])
        return seen

    # A macro's crate, and what it links, runs in the compiler.
    inside = follow({root}, lambda it: [key for key in it.linked if not crates[key].runs_in_compiler])
    return sorted(follow({root}, lambda it: it.linked | it.for_build)), inside


def audit_data(crates: dict, keys: list, inside: set, root: tuple) -> bytes:
    """The section .dep-v0, as https://github.com/rust-secure-code/cargo-auditable describes it."""
    packages = []
    for key in keys:
        crate = crates[key]
        # An advisory about a published crate is one about its patched copy, too.
        published = crate.folder is None or crate.is_vendored()
        package = {"name": crate.name, "version": crate.version, "source": "crates.io" if published else "local"}
        if key not in inside:
            package["kind"] = "build"
        needed = crate.linked | crate.for_build
        if needed:
            package["dependencies"] = [number for number, other in enumerate(keys) if other in needed]
        if key == root:
            package["root"] = True
        packages.append(package)
    return zlib.compress(json.dumps({"packages": packages}, separators=(",", ":")).encode(), 9)


def add_section(program: pathlib.Path, data: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        objcopy = os.environ.get("OBJCOPY", "objcopy")
        run(objcopy, "--remove-section=.dep-v0", f"--add-section=.dep-v0={file.name}", str(program))


def sha256(content: str) -> list:
    return [{"alg": "SHA-256", "content": content}]


def component(crate: Crate, checksums: dict, required: bool) -> dict:
    purl = f"pkg:cargo/{crate.name}@{crate.version}"
    described = {
        "type": "library",
        "bom-ref": f"{crate.name}@{crate.version}",
        "name": crate.name,
        "version": crate.version,
        "scope": "required" if required else "excluded",
        "licenses": [{"expression": crate.license}],
    }
    if crate.folder is None:
        described |= {"purl": purl, "hashes": sha256(checksums[crate.name, crate.version])}
    if crate.url:
        described["externalReferences"] = [{"type": "vcs", "url": crate.url}]
    if crate.is_vendored():
        checksum, release = (VENDORED / f"{crate.name}.sha256").read_text().split()
        assert release == f"{crate.name}-{crate.version}.crate", f"shared/vendor/{crate.name}.sha256 is of {release}"
        patch = base64.b64encode((VENDORED / f"{crate.name}.patch").read_bytes()).decode()
        ancestor = {"type": "library", "name": crate.name, "version": crate.version, "purl": purl}
        diff = {"text": {"contentType": "text/x-diff", "encoding": "base64", "content": patch}}
        described |= {
            "purl": purl,
            "pedigree": {
                "ancestors": [ancestor | {"hashes": sha256(checksum)}],
                "patches": [{"type": "unofficial", "diff": diff}],
            },
        }
    return described


def document(crates: dict, keys: list, inside: set, root: tuple, program: pathlib.Path) -> dict:
    """The CycloneDX document of a program."""
    lock = tomllib.loads((REPOSITORY / "Cargo.lock").read_text())["package"]
    checksums = {(it["name"], it["version"]): it["checksum"] for it in lock if it.get("source") == REGISTRY}
    when = datetime.datetime.fromtimestamp(int(os.environ["SOURCE_DATE_EPOCH"]), datetime.timezone.utc)
    version = run(os.environ.get("RUSTC", "rustc"), "--version").split()[1]
    main = component(crates[root], checksums, True)
    del main["scope"]
    main |= {"type": "application", "hashes": sha256(hashlib.sha256(program.read_bytes()).hexdigest())}
    others = [component(crates[key], checksums, key in inside) for key in keys if key != root]

    def needs(key: tuple) -> list:
        needed = crates[key].linked | crates[key].for_build
        return sorted(f"{name}@{version}" for name, version in needed)

    written = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "timestamp": when.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "tools": {"components": [{"type": "application", "name": "rustc", "version": version}]},
            "component": main,
        },
        "components": others,
        "dependencies": [{"ref": f"{key[0]}@{key[1]}", "dependsOn": needs(key)} for key in keys],
    }
    content = json.dumps(written, sort_keys=True)
    return written | {"serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, content)}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True, help="target of the compiler, such as x86_64-unknown-linux-gnu")
    parser.add_argument("--out", required=True, type=pathlib.Path, help="the CycloneDX document")
    parser.add_argument("package", choices=["gw-gateway", "gw-agent"])
    parser.add_argument("program", type=pathlib.Path, help="gets the section; stripped already")
    options = parser.parse_args()

    crates = read_crates(options.target)
    (root,) = [key for key in crates if key[0] == options.package]
    keys, inside = reach(crates, root)
    add_section(options.program, audit_data(crates, keys, inside, root))
    found = document(crates, keys, inside, root, options.program)
    options.out.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


main()
