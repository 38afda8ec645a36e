# Part of packaging/build: the container images.
#
# The base has what the programs load and nothing that can be run: the C library, authorities for TLS, and the name of
# the release. It comes from the Debian release of this machine, whose C library the programs were linked with.

for program in python3 apt-get dpkg-deb; do
    command -v $program >/dev/null || fail "oci needs $program, and a Debian machine"
done
build_programs
base=$work/oci/base
install -d "$work/oci/debs" "$base"
(cd "$work/oci/debs" && apt-get -qq -o APT::Sandbox::User= download libc6 libgcc-s1 ca-certificates base-files) ||
    fail "oci needs Debian's servers for the base, and their lists: apt-get update"
for deb in "$work"/oci/debs/*.deb; do
    folder=$work/oci/unpacked/$(basename "$deb" .deb)
    install -d "$folder"
    dpkg-deb --extract "$deb" "$folder"
    install -d "$base/var/lib/dpkg/status.d"
    # Scanners of images find the packages here.
    dpkg-deb --field "$deb" >"$base/var/lib/dpkg/status.d/$(dpkg-deb --field "$deb" Package)"
done
triplet=$(gcc -print-multiarch)
install -d "$base/usr/bin" "$base/usr/lib/$triplet" "$base/etc/ssl/certs" "$base/etc/gw"
# Debian's base has /bin, /lib and /lib64 as links.
for folder in bin lib; do
    ln -s "usr/$folder" "$base/$folder"
done
cp -a "$work"/oci/unpacked/libc6_*/lib/"$triplet"/*.so* "$base/usr/lib/$triplet/"
cp -a "$work"/oci/unpacked/libgcc-s1_*/lib/"$triplet"/*.so* "$base/usr/lib/$triplet/"
if [[ -d $(echo "$work"/oci/unpacked/libc6_*/lib64) ]]; then
    ln -s usr/lib64 "$base/lib64"
    install -d "$base/usr/lib64"
    ln -s "../lib/$triplet/ld-linux-x86-64.so.2" "$base/usr/lib64/ld-linux-x86-64.so.2"
else
    ln -s "$triplet/ld-linux-aarch64.so.1" "$base/usr/lib/ld-linux-aarch64.so.1"
fi
cp "$work"/oci/unpacked/base-files_*/etc/debian_version "$base/etc/"
cp "$work"/oci/unpacked/base-files_*/usr/lib/os-release "$base/usr/lib/"
ln -s ../usr/lib/os-release "$base/etc/os-release"
find "$work"/oci/unpacked/ca-certificates_*/usr/share/ca-certificates -name '*.crt' -print0 | sort -z |
    xargs -0 cat >"$base/etc/ssl/certs/ca-certificates.crt"
printf '%s\n' 'root:x:0:0:root:/:/usr/sbin/nologin' 'gw:x:65532:65532:Gw:/:/usr/sbin/nologin' >"$base/etc/passwd"
printf '%s\n' 'root:x:0:' 'gw:x:65532:' >"$base/etc/group"
echo 'hosts: files dns' >"$base/etc/nsswitch.conf"
install -d -m 1777 "$base/tmp"

for program in "${only[@]}"; do
    top=$work/oci/$program
    split "$programs/$program" "$top/usr/bin/$program"
    rm "$top/usr/bin/$program.debug"
    describe_parts "$program" "$top/usr/bin/$program" "$(uname -m)-unknown-linux-gnu" \
        "$program-$version-$(dpkg --print-architecture)"
    install -D -m 644 -t "$top/usr/share/doc/$program" LICENSE-APACHE LICENSE-MIT
    install -d -m 700 "$top/var/lib/$program"
    case $program in
        gw-gateway)
            # Region and domain have to be set by variables, or the file replaced. Runtimes differ in whether they allow
            # ports below 1024.
            install -d "$top/etc/gw"
            sed 's/^#listen = .*/listen = "0.0.0.0:8443"/' packaging/examples/gateway.toml >"$top/etc/gw/gateway.toml"
            settings=(--command=serve --command=--config --command=/etc/gw/gateway.toml --port=8443 --port=9080)
            # For the commands of administration, run in the container.
            settings+=("--env=GW_ADMIN_TOKEN_FILE=/var/lib/$program/admin.token")
            ;;
        gw-agent)
            settings=(--command=run --env=GW_STATE_DIR=/var/lib/gw-agent)
            ;;
    esac
    file=$out/$program-$version-$(dpkg --print-architecture).oci.tar
    python3 packaging/oci/image.py --name "$program" --version "$version" \
        --architecture "$(dpkg --print-architecture)" --description "$(describe $program)" \
        --entrypoint "/usr/bin/$program" --volume "/var/lib/$program" "${settings[@]}" --out "$file" "$base" "$top"
    echo "$file"
done
