#!/bin/bash
# Signs packages as packaging/sign does, and verifies them by the commands of docs/packages.md: signed.sh REPOSITORY GW_GATEWAY
# In an empty folder.
set -eux -o pipefail
repository=$1
gateway=$2

# A release: a package, an image, and what packaging/build writes beside them.
mkdir -p release packed/DEBIAN packed/usr/share/gw-test image
printf '%s\n' "Package: gw-test" "Version: 1-1" "Architecture: all" "Maintainer: Test <test@example.com>" \
    "Description: test" >packed/DEBIAN/control
echo content >packed/usr/share/gw-test/file
dpkg-deb --root-owner-group --build packed release/gw-test_1-1_all.deb
SOURCE_DATE_EPOCH=1800000000 python3 "$repository/packaging/oci/image.py" --name gw-test --version 1 --architecture amd64 \
    --description test --entrypoint /gw-test --volume /var/lib/gw-test --out release/gw-test-1-amd64.oci.tar image
echo '{}' >release/gw-test-1-amd64.cdx.json

public=$("$gateway" agent-program new-key release.key)
sign=("$repository/packaging/sign" --key release.key --registry registry.example.com/gw release)
"${sign[@]}"

# The commands of the page, with the public half of the key as its only input.
sed -n '/^## Verify a download/,/^## /p' "$repository/docs/packages.md" |
    sed -n '/^GW_RELEASE_KEY=/,/^```/{/^GW_RELEASE_KEY=/d; /^```/d; p}' >verify.sh
grep "sha256sum --check" verify.sh
verify() {
    (cd release && GW_RELEASE_KEY=$public bash -e ../verify.sh)
}
said=$(verify)
for file in release/*; do
    [[ $file == release/SHA256SUMS* ]] || grep -Fx "${file#release/}: OK" <<<"$said"
done

# Every file, the checksums and the signature matter, and so does the key.
for file in release/*; do
    cp "$file" original
    echo changed >>"$file"
    if [[ $file != release/gw-release.pem ]]; then
        verify && exit 1
    fi
    cp original "$file"
done
other=$("$gateway" agent-program new-key other.key)
(public=$other && verify) && exit 1
verify
# The written public half is that of the page.
cp release/gw-release.pem of-page.pem
"${sign[@]}"
cmp of-page.pem release/gw-release.pem

# apt takes the folder as a repository, and no changed one. It runs on folders of its own.
mkdir -p apt/etc/apt apt/var/lib/apt/lists/partial apt/var/cache/apt/archives/partial
mkdir -p apt/etc/apt/{apt.conf.d,preferences.d,sources.list.d,trusted.gpg.d}
touch apt/status
echo "deb [signed-by=$PWD/release/gw-release.asc] file:$PWD/release ./" >apt/etc/apt/sources.list
apt=(apt-get -o "Dir=$PWD/apt" -o "Dir::State::status=$PWD/apt/status" -o APT::Sandbox::User= -o APT::Update::Error-Mode=any)
"${apt[@]}" update
(cd apt && "${apt[@]}" download gw-test)
cmp apt/gw-test_1-1_all.deb release/gw-test_1-1_all.deb
cp -r release original-release
sed -i 's/^Suite: .*/Suite: other/' release/InRelease
"${apt[@]}" update && exit 1
cp original-release/InRelease release/
sed -i 's/^Version: .*/Version: 2-1/' release/Packages
rm -r apt/var/lib/apt/lists
"${apt[@]}" update && exit 1
cp original-release/Packages release/
"${apt[@]}" update
# Another key than that of the repository.
"$repository/packaging/sign" --key other.key release
cp original-release/gw-release.asc release/
"${apt[@]}" update && exit 1

# The signature of the image is of its payload, and the payload names the manifest in the archive.
payload=original-release/gw-test-1-amd64.oci.tar.payload
base64 --decode original-release/gw-test-1-amd64.oci.tar.sig >signature
openssl pkeyutl -verify -pubin -inkey of-page.pem -rawin -in "$payload" -sigfile signature
python3 - "$payload" release/gw-test-1-amd64.oci.tar <<'PYTHON'
import hashlib, json, sys, tarfile
critical = json.load(open(sys.argv[1]))["critical"]
assert critical["type"] == "cosign container image signature", critical
assert critical["identity"] == {"docker-reference": "registry.example.com/gw/gw-test"}, critical
algorithm, digest = critical["image"]["docker-manifest-digest"].split(":")
manifest = tarfile.open(sys.argv[2]).extractfile(f"blobs/{algorithm}/{digest}").read()
assert hashlib.new(algorithm, manifest).hexdigest() == digest
assert json.loads(manifest)["annotations"]["org.opencontainers.image.title"] == "gw-test"
PYTHON
touch passed
