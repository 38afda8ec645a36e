#!/bin/bash
# Checks the installed packages, in a root of their own: manual, completions, units.
set -eux -o pipefail
export LC_ALL=C.UTF-8

for program in gw-gateway gw-agent; do
    $program --version
    getent passwd $program
    test "$(stat --format '%a %U' /var/lib/$program)" = "700 $program"
    test -z "$(dpkg --verify $program)"

    pages=$(dpkg --listfiles $program | grep '/man[15]/.*\.gz$')
    for page in $pages; do
        said=$(man --warnings=w --local-file "$page" 2>&1 >/dev/null)
        test -z "$said"
        # NAME is one sentence, which whatis prints.
        lexgrog "$page" >/root/name
        sed 's/^[^"]*//' /root/name | grep -v -F '. '
    done
    man --local-file "/usr/share/man/man5/${program#gw-}.toml.5.gz" | grep -F log_format

    # The documentation, whose pages link to pages that are there.
    test -s "/usr/share/doc/$program/packages.md"
    (cd "/usr/share/doc/$program/html" && test -s index.html &&
        grep --only-matching --no-filename '\(href\|src\)="[^"#:]\+["#]' ./*.html | cut --delimiter='"' --fields=2 | tr --delete '#' |
        sort -u | xargs ls >/dev/null)
    # The command that writes the pages is hidden from them.
    man --local-file "/usr/share/man/man1/$program-doctor.1.gz" | grep -e --json >/dev/null
    man --local-file "/usr/share/man/man1/$program-doctor.1.gz" | grep -F "$program doctor [OPTIONS]"
    test ! -e /usr/share/man/man1/$program-manual.1.gz

    # Each shell finds the completions by itself, and completes "doc".
    bash -c '. /usr/share/bash-completion/bash_completion
        _completion_loader $1 || test $? = 124
        function=$(complete -p $1 | sed "s/.*-F \([^ ]*\).*/\1/")
        COMP_WORDS=($1 doc) COMP_CWORD=1
        $function $1 doc $1
        test "${COMPREPLY[*]}" = doctor' bash $program
    zsh -fc 'autoload -U compinit && compinit -u -D && [[ $_comps[$1] == _$1 ]] && autoload +X -U _$1' zsh $program
    fish -c "complete --do-complete '$program doc'" | grep ^doctor
done

units=(gw-gateway.service gw-gateway.socket gw-gateway-admin.socket gw-agent.service gw-agent-enroll.service)
said=$(systemd-analyze verify --man=yes "${units[@]}" 2>&1)
test -z "$said"
for unit in gw-gateway gw-agent gw-agent-enroll; do
    # Tenths: 0 is safe, 100 is not.
    systemd-analyze security --offline=yes --threshold=20 $unit.service >/dev/null
done
gw-gateway serve --config /etc/gw/gateway.toml --check
# Messages name pages where they are installed.
echo nonsense = 1 >/root/wrong.toml
said=$(gw-gateway doctor --config /root/wrong.toml || true)
grep -F "/usr/share/doc/gw-gateway/configuration.md lists the keys" <<<"$said"

# An upgrade to a package with other examples keeps an edited configuration file, and asks nothing. It replaces one that is as
# installed, and the package that is installed then is the first one again.
for program in gw-gateway gw-agent; do
    example=/usr/share/$program/${program#gw-}.toml
    config=/etc/gw/${program#gw-}.toml
    cmp "$example" "$config"
    dpkg-deb --raw-extract /root/${program}_*.deb /root/changed
    sed -i 's/^Version: .*/Version: 99-1/' /root/changed/DEBIAN/control
    echo "# of the new version" >>"/root/changed$example"
    dpkg-deb --build /root/changed /root/changed.deb
    echo "# edited" >>"$config"
    dpkg --install /root/changed.deb </dev/null
    test "$(tail -n 1 "$config")" = "# edited"
    cp "$example" "$config"
    dpkg --install /root/${program}_*.deb </dev/null
    cmp "$example" "$config"
    test "$(grep --count "# of the new version" "$config")" = 0
    test ! -e "$config.unedited"
    rm -r /root/changed /root/changed.deb
done
test "$(stat --format '%a %U' /etc/gw/gateway.toml)" = "644 root"
cmp /usr/share/gw-agent/gw-agent /etc/default/gw-agent
touch /root/passed
