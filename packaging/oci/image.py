#!/usr/bin/env python3
"""Writes a container image as an OCI archive, without a daemon: image.py --help

The archive depends on nothing but the content of the folders and SOURCE_DATE_EPOCH.
"""

import argparse
import datetime
import gzip
import hashlib
import io
import json
import os
import tarfile

# The user of the image. The folders that --owned names are this user's; everything else is root's.
USER = 65532


def layer(folder: str, owned: list[str], when: int) -> bytes:
    """The tar archive of a folder."""

    def normal(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = USER if "/" + member.name in owned else 0
        member.uname = member.gname = ""
        member.mtime = when
        return member

    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in sorted(os.listdir(folder)):
            tar.add(os.path.join(folder, name), arcname=name, filter=normal)
    return out.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name", required=True, help="name of the image")
    parser.add_argument("--version", required=True)
    parser.add_argument("--architecture", required=True, help="as Go names it, such as amd64")
    parser.add_argument("--entrypoint", required=True)
    parser.add_argument("--command", action="append", default=[], help="an argument of the program; may be repeated")
    parser.add_argument("--env", action="append", default=[], help="NAME=VALUE; may be repeated")
    parser.add_argument("--volume", required=True, help="folder for data, of the image's user")
    parser.add_argument("--port", action="append", default=[], help="a TCP port; may be repeated")
    parser.add_argument("--description", required=True)
    parser.add_argument("--out", required=True, help="the archive")
    parser.add_argument("layers", nargs="+", help="folders, the lowest first")
    options = parser.parse_args()

    when = int(os.environ["SOURCE_DATE_EPOCH"])
    created = datetime.datetime.fromtimestamp(when, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    blobs: dict[str, bytes] = {}

    def blob(media_type: str, content: bytes) -> dict:
        digest = hashlib.sha256(content).hexdigest()
        blobs[digest] = content
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(content)}

    layers, contents = [], []
    for folder in options.layers:
        content = layer(folder, [options.volume], when)
        contents.append("sha256:" + hashlib.sha256(content).hexdigest())
        layers.append(blob("application/vnd.oci.image.layer.v1.tar+gzip", gzip.compress(content, 6, mtime=0)))
    labels = {
        "org.opencontainers.image.title": options.name,
        "org.opencontainers.image.description": options.description,
        "org.opencontainers.image.version": options.version,
        "org.opencontainers.image.licenses": "MIT OR Apache-2.0",
    }
    config = {
        "created": created,
        "architecture": options.architecture,
        "os": "linux",
        "config": {
            "User": f"{USER}:{USER}",
            "Env": ["PATH=/usr/bin:/bin", *options.env],
            "Entrypoint": [options.entrypoint],
            "Cmd": options.command,
            "WorkingDir": "/",
            "Volumes": {options.volume: {}},
            "ExposedPorts": {f"{port}/tcp": {} for port in options.port},
            "Labels": labels,
        },
        "rootfs": {"type": "layers", "diff_ids": contents},
        "history": [{"created": created, "created_by": "packaging/build oci"} for _ in layers],
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": blob("application/vnd.oci.image.config.v1+json", json.dumps(config, sort_keys=True).encode()),
        "layers": layers,
        "annotations": labels,
    }
    described = blob(manifest["mediaType"], json.dumps(manifest, sort_keys=True).encode())
    described["platform"] = {"architecture": options.architecture, "os": "linux"}
    described["annotations"] = {
        "org.opencontainers.image.ref.name": options.version,
        # The name under which `docker load` and `ctr images import` store it.
        "io.containerd.image.name": f"localhost/{options.name}:{options.version}",
    }
    index = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": [described]}

    files = {"oci-layout": b'{"imageLayoutVersion":"1.0.0"}', "index.json": json.dumps(index, sort_keys=True).encode()}
    files |= {f"blobs/sha256/{digest}": content for digest, content in sorted(blobs.items())}
    with tarfile.open(options.out, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            member.mtime = when
            tar.addfile(member, io.BytesIO(content))


main()
