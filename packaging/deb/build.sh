# Part of packaging/build: the Debian packages.

for program in dpkg-deb dpkg-shlibdeps objcopy; do
    command -v $program >/dev/null || fail "deb needs $program: apt-get install dpkg-dev binutils"
done
build_programs
arch=$(dpkg --print-architecture)
revision=1
# A package of a development build is thrown away after its test.
compression=-Zxz
[[ $profile != dev ]] || compression="-Zgzip -z1"
codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-unstable}")

# install_units ROOT PROGRAM: the units of the program.
install_units() {
    install -D -m 644 -t "$1/lib/systemd/system" packaging/systemd/"$2"*.service
    if [[ $2 == gw-gateway ]]; then
        install -m 644 -t "$1/lib/systemd/system" packaging/systemd/*.socket
    fi
}

# install_manual ROOT PROGRAM: man pages and completions, which the program writes.
install_manual() {
    local pages=$work/manual/$2 page
    "$programs/$2" manual "$pages"
    documentation man "$pages"
    install -d "$1/usr/share/man/man1" "$1/usr/share/man/man5"
    for page in "$pages"/*.1 "$pages/${2#gw-}.toml.5"; do
        gzip -9 --no-name <"$page" >"$1/usr/share/man/man${page##*.}/$(basename "$page").gz"
    done
    install -D -m 644 "$pages/$2.bash" "$1/usr/share/bash-completion/completions/$2"
    install -D -m 644 "$pages/_$2" "$1/usr/share/zsh/vendor-completions/_$2"
    install -D -m 644 "$pages/$2.fish" "$1/usr/share/fish/vendor_completions.d/$2.fish"
}

# install_documentation ROOT PROGRAM: the pages of docs/, for terminals and for browsers.
install_documentation() {
    local folder=$1/usr/share/doc/$2
    install -d "$folder"
    documentation html "$folder/html"
    install -m 644 docs/*.md "$folder"
    rm "$folder/SUMMARY.md"
    # In the unit, pages have the names that they have here.
    sed -i "s|docs/\([a-z-]*\.md\)|/usr/share/doc/$2/\1|" "$1"/lib/systemd/system/*.service
}

# install_about ROOT PACKAGE PROGRAM: copyright and changelogs.
install_about() {
    local folder=$1/usr/share/doc/$2
    install -d "$folder"
    {
        sed 's/^  *$//' packaging/deb/copyright
        sed -e 's/^ *$/./' -e 's/^/ /' LICENSE-MIT
    } >"$folder/copyright"
    gzip -9 --no-name <CHANGELOG.md >"$folder/changelog.gz"
    gzip -9 --no-name >"$folder/changelog.Debian.gz" <<END
$3 ($version-$revision) $codename; urgency=medium

  * Package version $version.

 -- The Gw authors <maintainers@gw.invalid>  $(date --utc --rfc-email --date="@$SOURCE_DATE_EPOCH")
END
}

# Prints the size of a folder in KiB as Debian's tools count it, on any file system.
installed_size() {
    find "$1" -mindepth 1 -printf '%y %s\n' | awk '{ size += $1 == "f" ? int(($2 + 1023) / 1024) : 1 } END { print size }'
}

# pack ROOT PACKAGE LINE...: the package of what is in the folder, with these lines in its control file.
pack() {
    local root=$1 name=$2
    shift 2
    install -d "$root/DEBIAN"
    {
        printf '%s\n' "Package: $name" "Version: $version-$revision" "Architecture: $arch" \
            "Maintainer: The Gw authors <maintainers@gw.invalid>" \
            "Installed-Size: $(installed_size "$root")" "$@"
    } >"$root/DEBIAN/control"
    (cd "$root" && find . -path ./DEBIAN -prune -o -type f -printf '%P\0' | sort -z | xargs -0 md5sum) >"$root/DEBIAN/md5sums"
    find "$root" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
    dpkg-deb --root-owner-group --uniform-compression $compression --build "$root" "$out" >/dev/null
    echo "$out/${name}_$version-${revision}_$arch.deb"
}

for program in "${only[@]}"; do
    root=$work/deb/$program
    split "$programs/$program" "$root/usr/bin/$program"
    describe_parts "$program" "$root/usr/bin/$program" "$(uname -m)-unknown-linux-gnu" "$program-$version-$arch"
    id=$(build_id "$programs/$program")
    symbols=$work/deb/$program-dbgsym
    install -d "$symbols/usr/lib/debug/.build-id/${id:0:2}" "$symbols/usr/share/doc"
    mv "$root/usr/bin/$program.debug" "$symbols/usr/lib/debug/.build-id/${id:0:2}/${id:2}.debug"
    ln -s "$program" "$symbols/usr/share/doc/$program-dbgsym"

    if [[ $program == gw-gateway && $agent_programs ]]; then
        install -D -m 644 -t "$root/usr/lib/gw-gateway/agent-programs" "$agent_programs"/gw-agent-*
    fi
    install_units "$root" "$program"
    install_manual "$root" "$program"
    install_documentation "$root" "$program"
    install_about "$root" "$program" "$program"
    # Not conffiles of dpkg: they have to be edited, so that each change of an example would stop an upgrade with a question.
    configs=/etc/gw/${program#gw-}.toml
    install -D -m 644 -t "$root/usr/share/$program" "packaging/examples/${program#gw-}.toml"
    if [[ $program == gw-agent ]]; then
        configs+=" /etc/default/gw-agent"
        install -m 644 packaging/deb/gw-agent.default "$root/usr/share/gw-agent/gw-agent"
    fi
    install -d "$root/DEBIAN"
    install -D -m 644 "packaging/deb/lintian-overrides" "$root/usr/share/lintian/overrides/$program"
    units=$(cd "$root/lib/systemd/system" && echo -- * | cut -d ' ' -f 2-)
    for script in preinst postinst prerm postrm; do
        sed -e "s/PROGRAM/$program/g" -e "s/UNITS/$units/" -e "s|CONFIGS|$configs|" -e "s/DESCRIPTION/Gw ${program#gw-}/" \
            "packaging/deb/$script" >"$root/DEBIAN/$script"
        chmod 755 "$root/DEBIAN/$script"
    done

    # dpkg-shlibdeps reads the name of the source from this file and needs nothing else of it.
    install -d "$work/shlibs/debian"
    echo "Source: gw" >"$work/shlibs/debian/control"
    depends=$(cd "$work/shlibs" && dpkg-shlibdeps -O "$root/usr/bin/$program" 2>/dev/null)
    pack "$root" "$program" "Depends: ${depends#shlibs:Depends=}, adduser" \
        "Recommends: ca-certificates" \
        "Section: net" "Priority: optional" \
        "Description: $(describe "$program")" \
        " Gw relays HTTP to backends that have no public address: an agent beside the" \
        " backend keeps one outbound tunnel, and the gateway authenticates, limits," \
        " records and relays the requests of callers." \
        " ." \
        " This package contains the ${program#gw-}, its systemd units, documentation and" \
        " completions."
    pack "$symbols" "$program-dbgsym" "Depends: $program (= $version-$revision)" \
        "Section: debug" "Priority: optional" "Auto-Built-Package: debug-symbols" "Build-Ids: $id" \
        "Description: debug symbols for $program"
done
